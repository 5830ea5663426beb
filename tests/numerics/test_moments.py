"""Mean and variance in one pass: what fp32 updates give, in any order, lies within."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.numerics import Enclosure, Premises, hull, mean, mean_and_variance, rsqrt, using, variance_about
from lastbit.numerics.moments import difference_of_products

Part = tuple[int, Tensor, Tensor]
"""How many elements; their mean and M2, one of each per row."""


def weighted(a: Part, b: Part) -> Part:
    """As a block of a GPU merges what its threads found: the means weighted by rounded shares."""
    (n_a, mean_a, m2_a), (n_b, mean_b, m2_b) = a, b
    whole = torch.tensor(1.0) / max(n_a + n_b, 1)
    share_a, share_b = n_a * whole, n_b * whole
    delta = mean_b - mean_a
    return n_a + n_b, share_a * mean_a + share_b * mean_b, m2_a + m2_b + delta * delta * float(n_a) * share_b


def moved(a: Part, b: Part) -> Part:
    """Chan's update of a by b."""
    (n_a, mean_a, m2_a), (n_b, mean_b, m2_b) = a, b
    share = torch.tensor(float(n_b)) / (n_a + n_b)
    delta = mean_b - mean_a
    return n_a + n_b, mean_a + delta * share, m2_a + (m2_b + delta * delta * share * float(n_a))


def added(a: Part, b: Part) -> Part:
    """Welford's update by one element."""
    (n_a, mean_a, m2_a), (n_b, x, _) = a, b
    if n_b != 1:
        return moved(a, b) if n_a >= n_b else moved(b, a)
    delta = x - mean_a
    new = mean_a + delta / (n_a + 1)
    return n_a + 1, new, m2_a + delta * (x - new)


def leaves(x: Tensor) -> list[Part]:
    return [(1, column, torch.zeros_like(column)) for column in x.unbind(-1)]


def one_by_one(x: Tensor) -> Part:
    first, *rest = leaves(x)
    for leaf in rest:
        first = added(first, leaf)
    return first


def halves(x: Tensor, merge: Callable[[Part, Part], Part] = added) -> Part:
    parts = leaves(x)
    while len(parts) > 1:
        pairs = [merge(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def at_random(x: Tensor) -> Part:
    parts, chance = leaves(x), random.Random(x.shape[-1])
    while len(parts) > 1:
        a, b = (parts.pop(chance.randrange(len(parts))) for _ in range(2))
        parts.append(added(a, b))
    return parts[0]


def by_threads(x: Tensor, threads: int = 32) -> Part:
    """Each thread takes every `threads`-th element; some may have none."""
    nothing = (0, torch.zeros(len(x)), torch.zeros(len(x)))
    parts = [one_by_one(x[:, t::threads]) if t < x.shape[-1] else nothing for t in range(threads)]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [weighted(a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def in_chunks(x: Tensor) -> Part:
    """As torch on a CPU: 16 lanes of chunks of 16, merged pairwise, then into the columns that are left."""
    lanes = x.shape[-1] // 16
    if not lanes:
        return one_by_one(x)
    chunks = x[:, : 16 * lanes].unflatten(-1, (lanes, 16)).split(16, dim=1)
    by_lane = [[one_by_one(chunk[:, :, lane]) for chunk in chunks] for lane in range(16)]
    whole = None if x.shape[-1] % 16 == 0 else one_by_one(x[:, 16 * lanes :])
    for parts in by_lane:
        while len(parts) > 1:
            parts = [*[moved(b, a) for a, b in zip(parts[::2], parts[1::2], strict=False)], *parts[len(parts) & ~1 :]]
        whole = parts[0] if whole is None else moved(whole, parts[0])
    assert whole is not None
    return whole


ORDERS = (one_by_one, halves, at_random, by_threads, in_chunks, lambda x: one_by_one(x.flip(-1)))


def rows(kind: str, count: int, size: int) -> Tensor:
    x = torch.randn(count, size, generator=torch.Generator().manual_seed(size))
    match kind:
        case "far":
            return x + 1000.0
        case "outlier":
            x[:, 0] = 3e4
        case "sorted":
            return x.sort(-1).values
        case "tiny":
            return x * 1e-22
        case "constant":
            return x[:, :1].expand(count, size).contiguous()
        case "bf16":
            return (x + 3.0).bfloat16().float()
    return x


def outside(actual: Tensor, allowed: Enclosure) -> int:
    actual = actual.double().reshape(-1, 1)
    return int(((actual < allowed.lo) | (actual > allowed.hi)).sum())


KINDS = ("normal", "far", "outlier", "sorted", "tiny", "constant", "bf16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 77, 600])
def test_updates_in_every_order_lie_within(kind: str, size: int) -> None:
    x = rows(kind, 24, size)
    center, variance = mean_and_variance(Enclosure.point(x))
    for order in ORDERS:
        count, own_mean, m2 = order(x)
        assert count == size
        assert outside(own_mean, center) == outside(m2 / count, variance) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 15, 300, 5000])
def test_the_exact_moments_and_those_of_torch_lie_within(kind: str, size: int) -> None:
    x = rows(kind, 24, size)
    center, variance = mean_and_variance(Enclosure.point(x))
    assert outside(x.double().mean(-1).float(), center) == 0
    assert outside(x.double().var(-1, correction=0).float(), variance) == 0
    _, own_mean, rstd = torch.native_layer_norm(x, (size,), None, None, 1e-6)
    assert outside(own_mean, center) == outside(rstd, rsqrt(variance + 1e-6)) == 0


def test_a_known_height_narrows_both() -> None:
    x = Enclosure.point(rows("normal", 8, 600))
    with using(Premises(depth=lambda n: 12)):
        known = mean_and_variance(x)
        assert outside(halves(rows("normal", 8, 600))[2] / 600, known[1]) == 0
    for narrow, wide in zip(known, mean_and_variance(x), strict=True):
        assert ((narrow.hi - narrow.lo) < 0.9 * (wide.hi - wide.lo)).all()


def test_elements_within_intervals_are_counted() -> None:
    x = rows("bf16", 16, 64)
    low, high = x * (1 - 1e-4), x * (1 + 1e-4)
    center, variance = mean_and_variance(hull(Enclosure.point(low), Enclosure.point(high)))
    turns = torch.where(torch.arange(64) % 2 == 0, low, high)
    for member in (low, high, turns):
        _, own_mean, m2 = halves(member)
        assert outside(own_mean, center) == outside(m2 / 64, variance) == 0


@pytest.mark.parametrize("wrong", [lambda v: v * 64 / 63, lambda v: v + 1e-2, lambda v: v * 0.999])
def test_other_variances_are_outside(wrong: Callable[[Tensor], Tensor]) -> None:
    x = rows("normal", 16, 64)
    variance = mean_and_variance(Enclosure.point(x))[1]
    assert outside(wrong(x.double().var(-1, correction=0)), variance) == 16


def test_two_passes_know_more_far_from_zero() -> None:
    x = Enclosure.point(rows("far", 8, 600))
    two, one = variance_about(x, mean(x)), mean_and_variance(x)[1]
    assert ((two.hi - two.lo) < 0.2 * (one.hi - one.lo)).all()


def test_flushing_takes_two_numbers_from_a_variance_about_an_interval() -> None:
    """The smallest normal number for the terms of the sum, which are averaged, and once more for the quotient."""
    x = rows("normal", 8, 64) * 2.0**-57
    center = Enclosure(torch.tensor([[0.0], [0.0], [-(2.0**-64)], [2.0**-64]], dtype=torch.float64)[:, None])
    plain = variance_about(Enclosure.point(x), center)
    with using(Premises(flushes_subnormals=True)):
        flushed = variance_about(Enclosure.point(x), center)
    for more in (flushed.hi - plain.hi, plain.lo - flushed.lo):
        assert torch.allclose(more, torch.full_like(more, 2 * 2.0**-126), rtol=1e-3, atol=0.0)


def test_nothing_is_known_where_an_update_may_overflow() -> None:
    large = torch.tensor([[1e19, -1e19, 1e19], [1.0, torch.inf, 2.0], [3e38, -3e38, 0.0]])
    for enclosure in mean_and_variance(Enclosure.point(large)):
        assert enclosure.unknown is not None and enclosure.unknown.all()
    nan = mean_and_variance(Enclosure.point(torch.tensor([[1.0, torch.nan], [1.0, 2.0]])))
    for enclosure in nan:
        assert torch.isnan(enclosure.lo).tolist() == torch.isnan(enclosure.hi).tolist() == [[True], [False]]


def test_nothing_is_known_where_a_merge_with_an_empty_part_overflows() -> None:
    column = torch.tensor([[1.9e19], [3e38], [1e18]])
    assert torch.isnan(torch.native_layer_norm(column[:2], [1], None, None, 1e-3)[2]).all()
    for enclosure in mean_and_variance(Enclosure.point(column)):
        assert enclosure.unknown is not None and enclosure.unknown[:, 0].tolist() == [True, True, False]


# a · factor - b · factor


def test_both_products_may_be_rounded_or_fused() -> None:
    x = rows("far", 32, 64)
    center, factor = x.mean(-1, keepdim=True), torch.rand(32, 1) * 300 + 1
    allowed = difference_of_products(*map(Enclosure.point, (x, center, factor)))
    wide, shift = (x.double() * factor.double()), center * factor
    for made in (
        x * factor - shift,
        (wide - shift.double()).float(),
        (x * factor).double() - center.double() * factor.double(),
    ):
        assert not ((made.double() < allowed.lo) | (made.double() > allowed.hi)).any()
    assert ((allowed.hi - allowed.lo) < 1e-6 * wide.abs()).all()


def test_its_ends_grow_with_the_factor() -> None:
    x, center = Enclosure.point(torch.tensor([1000.1, 999.9, 1000.0])), Enclosure.point(torch.tensor([1000.0]))
    factors = torch.arange(1.0, 2.0, 2.0**-14)
    ends = [difference_of_products(x, center, Enclosure.point(f)) for f in factors]
    low, high = torch.stack([e.lo for e in ends]).diff(dim=0), torch.stack([e.hi for e in ends]).diff(dim=0)
    assert (low[:, 0] >= 0).all() and (high[:, 0] >= 0).all()
    assert (low[:, 1:] <= 0).all() and (high[:, 2] >= 0).all() and (high[:, 1] <= 0).all()
