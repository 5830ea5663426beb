"""Mean and variance in one pass: what fp32 updates give, in any order, lies within."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.numerics import (
    Enclosure,
    Premises,
    hull,
    mean,
    mean_and_variance,
    mean_of_products,
    mean_of_squares,
    rsqrt,
    sum_of_row_products,
    sum_of_rows,
    total,
    total_of_products,
    using,
    variance_about,
)
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


U = 2.0**-24
ROWS = [
    ([1.0, 2.0, 3.0, 5.0, 7.25], [1.0, 2.0, 3.0, 5.0, 7.25]),
    ([100.0, 101.0], [100.0, 101.0]),
    ([4.0], [4.0]),
    ([1.0, 2.0, 3.0, -6.0], [1.125, 2.0, 3.5, -5.0]),
    ([-9.0, 0.5, -3.0], [-8.5, 0.5, 1.0]),
    ([2.0**-70, 3 * 2.0**-70], [2.0**-70, 3 * 2.0**-70]),
]
PREMISES = [Premises(), Premises(depth=lambda n: 2), Premises(flushes_subnormals=True)]


def row(low: list[float], high: list[float]) -> Enclosure:
    ends = Enclosure.point(torch.tensor([low])), Enclosure.point(torch.tensor([high]))
    return ends[0] if low == high else hull(*ends)


def as_fp32(*ends: float) -> Tensor:
    return torch.tensor(ends, dtype=torch.float64).float().double()


@pytest.mark.parametrize("premises", PREMISES, ids=["any order", "a height", "flushes"])
@pytest.mark.parametrize(("low", "high"), ROWS)
def test_the_ends_are_those_of_the_derived_bounds(low: list[float], high: list[float], premises: Premises) -> None:
    """To the bit, worked out from docs/numerics.md: a looser bound would hold every kernel as well, and see less."""
    n, middles = len(low), [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    radii = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    sizes = [abs(m) + r for m, r in zip(middles, radii, strict=True)]
    largest, average, center = max(sizes), sum(sizes) / n, sum(middles) / n
    height = n if premises.depth is None else min(n, 3)
    order = height * U / (1 - height * U)
    levels, lost = math.log2(n), 2.0**-149 + 2.0**-126 * premises.flushes_subnormals
    updates = 7 * U * (3 * levels + 20)  # 4u of a quotient and 3u; thrice per level, and twice per doubling of threads
    rest = updates / (1 - order - updates) * largest + n * (2.0**-51 * average + lost)
    weights = math.sqrt(n * max(levels, 1) / 2)
    of_mean, of_root = order * average + rest, order * math.sqrt(average * largest * (n + 1)) + 2 * rest * weights
    if premises.depth is not None:
        of_mean, of_root = order * largest + rest, 2 * (order * largest + rest) * weights
    root = math.sqrt(sum((m - center) ** 2 for m in middles))
    moved, relative = math.sqrt(sum(r * r for r in radii)) + of_root, 2 * order + 12 * U
    ends = max(0.0, root - moved) ** 2 * (1 - relative) / n, (root + moved) ** 2 * (1 + relative) / n
    spread = [4 * U * end + n * n * lost for end in ends]
    far = sum(radii) / n + of_mean
    with using(premises):
        mean_, variance = mean_and_variance(row(low, high))
    assert torch.equal(torch.cat([mean_.lo, mean_.hi])[:, 0], as_fp32(center - far, center + far))
    expected = as_fp32(max(0.0, ends[0] - spread[0]), ends[1] + spread[1])
    assert torch.equal(torch.cat([variance.lo, variance.hi])[:, 0], expected)
    for part, numbers in ((mean_, center), (variance, sum((m - center) ** 2 for m in middles) / n)):
        exact = part.exact.item() if low == high else numbers
        assert exact == pytest.approx(numbers, rel=1e-12) and (low != high or part.value.item() == as_fp32(exact))


@pytest.mark.parametrize("premises", PREMISES, ids=["any order", "a height", "flushes"])
@pytest.mark.parametrize(("about", "until"), [(3.0, 3.5), (3.65, 3.65), (-1.0, 20.0), (4.0, 4.0)])
@pytest.mark.parametrize(("low", "high"), ROWS[:1] + ROWS[3:5])
def test_a_variance_about_a_number_within_an_interval(
    low: list[float], high: list[float], about: float, until: float, premises: Premises
) -> None:
    """mean((x - c)²) = var(x) + (mean(x) - c)², with 2u + u² of each difference; or what (x - c)² gives by itself."""
    n, middles = len(low), [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    radii = [(b - a) / 2 for a, b in zip(low, high, strict=True)]
    c = row([about], [until])
    least, most = c.lo.item(), c.hi.item()
    average = sum(middles) / n
    variance = sum((m - average) ** 2 for m in middles) / n
    nearest, farthest = (average - min(max(average, least), most)) ** 2, max(abs(average - least), abs(average - most))
    reach = [max(abs(m - least), abs(m - most)) for m in middles]
    error = sum((2 * d + r) * r for d, r in zip(reach, radii, strict=True)) / n
    height = n if premises.depth is None else min(n, 3)
    relative = height * U / (1 - height * U) + 4 * U + 4 * U
    absolute = 2.0**-147 + 2 * 2.0**-126 * premises.flushes_subnormals
    ends = as_fp32(
        max(0.0, (variance + nearest - error) * (1 - relative) - absolute),
        (variance + farthest**2 + error) * (1 + relative) + absolute,
    )
    with using(premises):
        x = row(low, high)
        found, naive = variance_about(x, c), mean_of_squares(x - c)
    assert torch.equal(found.lo[0], torch.maximum(ends[:1], naive.lo[0]))
    assert torch.equal(found.hi[0], torch.minimum(ends[1:], naive.hi[0]))


@pytest.mark.parametrize(
    ("function", "exact", "error"),
    [
        (mean, 3.0, 4 * U),
        (mean_of_squares, 17.0, 4 * U),
        (lambda x: mean_of_squares(x - 1.0), 12.0, 4 * U),
        (lambda x: mean_of_products(x, x - 1.0), 14.0, 4 * U),
        (total, 15.0, 0.0),
        (lambda x: total_of_products(x, x), 85.0, 0.0),
    ],
)
def test_sums_on_a_lattice_are_exact_and_a_mean_of_five_errs_by_its_quotient(
    function: Callable[[Enclosure], Enclosure], exact: float, error: float
) -> None:
    found = function(Enclosure.point(torch.tensor([[0.0, 1.0, 2.0, 4.0, 8.0]])))
    assert found.exact.item() == found.value.item() == exact
    assert torch.equal(torch.cat([found.lo, found.hi])[:, 0], as_fp32(exact * (1 - error), exact * (1 + error)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6, 8])
def test_a_mean_of_a_power_of_two_of_numbers_is_exact(count: int) -> None:
    for function in (mean, mean_of_squares):
        found = function(Enclosure.point(torch.ones(1, count)))
        assert (found.lo == found.hi).item() == (count & (count - 1) == 0)


def test_sums_of_rows_have_one_element_per_column() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert torch.equal(sum_of_rows(Enclosure.point(x)).enclosure.exact, x.sum((0, 1)).double())
    products = sum_of_row_products(Enclosure.point(x), Enclosure.point(x + 1))
    assert torch.equal(products.enclosure.exact, (x * (x + 1)).sum((0, 1)).double())
    assert products.enclosure.shape == (4,) and products.count == 6


@pytest.mark.parametrize(("largest", "known"), [(0.99, True), (1.01, False)])
def test_how_large_the_numbers_of_an_update_may_be(largest: float, known: bool) -> None:
    """Twice the square of the largest number or distance, times the count, and four times a mean, fit in fp32."""
    top = torch.finfo(torch.float32).max
    for numbers in ([largest * math.sqrt(top / 4)] * 2, [0.0, largest * math.sqrt(top / 4)]):
        for enclosure in mean_and_variance(Enclosure.point(torch.tensor([numbers]))):
            assert enclosure.unknown is not None and enclosure.unknown.item() is not known


def test_a_difference_of_products_may_err_by_u_of_both() -> None:
    x, center, factor = (Enclosure.point(torch.tensor([[v]])) for v in (3.5, -1.25, 7.0))
    found = difference_of_products(x, center, factor)
    lost = U * (3.5 + 1.25)
    assert (found.exact.item(), found.value.item()) == (33.25, 33.25)
    ends = as_fp32((4.75 - lost) * 7 - 2.0**-147, (4.75 + lost) * 7 + 2.0**-147)
    assert torch.equal(torch.cat([found.lo, found.hi])[:, 0], ends)
    wide = difference_of_products(row([3.0], [4.0]), row([-2.0], [1.0]), row([0.0], [2.0]))
    lost = U * (4.0 + 2.0)
    assert torch.equal(torch.cat([wide.lo, wide.hi])[:, 0], as_fp32(0.0 - 2.0**-147, (6.0 + lost) * 2 + 2.0**-147))
    small = difference_of_products(*(Enclosure.point(torch.tensor([[v]])) for v in (2.0**-80, 2.0**-80, 2.0**-80)))
    assert (small.lo.item(), small.hi.item()) == (-(2.0**-147), 2.0**-147)


@pytest.mark.parametrize(("factor", "known"), [(3e38 / 2, True), (3e38, False), (math.nan, True)])
def test_nothing_is_known_of_a_difference_of_products_that_overflow(factor: float, known: bool) -> None:
    one = Enclosure.point(torch.tensor([1.0]))
    found = difference_of_products(one, one, Enclosure.point(torch.tensor([factor])))
    assert found.unknown is not None and found.unknown.item() is not known
    lost = difference_of_products(Enclosure.point(torch.tensor([math.nan])), one, one)
    assert torch.isnan(lost.lo).all() and torch.isnan(lost.hi).all()


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
    factors = torch.arange(1.0, 2.0, 2.0**-14)[:, None]
    ends = difference_of_products(x, center, Enclosure.point(factors))
    low, high = ends.lo.diff(dim=0), ends.hi.diff(dim=0)
    assert low.shape == high.shape == (len(factors) - 1, 3)
    assert (low[:, 0] >= 0).all() and (high[:, 0] >= 0).all()
    assert (low[:, 1:] <= 0).all() and (high[:, 2] >= 0).all() and (high[:, 1] <= 0).all()
