"""Cumulative sums and what follows from sums over rows, in every order of additions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.errors import OpError
from lastbit.numerics import Enclosure, Premises, cumsum, divide_rn, sum_of_rows, total, using


def forwards(x: Tensor) -> Tensor:
    """From the first to the last."""
    sums, so_far = [], torch.zeros_like(x[..., 0])
    for term in x.unbind(-1):
        so_far = so_far + term
        sums.append(so_far)
    return torch.stack(sums, -1)


def backwards(x: Tensor) -> Tensor:
    """Each prefix from its last term to its first."""
    return torch.stack([forwards(x[..., : n + 1].flip(-1))[..., -1] for n in range(x.shape[-1])], -1)


def in_a_tree(x: Tensor) -> Tensor:
    """Hillis and Steele's scan, as `tl.cumsum` may add."""
    sums, step = x, 1
    while step < x.shape[-1]:
        sums = torch.cat([sums[..., :step], sums[..., step:] + sums[..., :-step]], -1)
        step *= 2
    return sums


def in_blocks(x: Tensor) -> Tensor:
    """Scan blocks of 16, to which the sum of what is before them is added."""
    before, blocks = torch.zeros_like(x[..., :1]), []
    for block in x.split(16, -1):
        own = in_a_tree(block)
        blocks.append(own + before)
        before = before + own[..., -1:]
    return torch.cat(blocks, -1)


def inside(found: Tensor, e: Enclosure) -> Tensor:
    return (found.double() >= e.lo) & (found.double() <= e.hi)


def terms(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-9, 9, shape, generator=generator)


@pytest.mark.parametrize("order", [forwards, backwards, in_a_tree, in_blocks, lambda x: x.cumsum(-1)])
def test_every_order_lies_inside(order: Callable[[Tensor], Tensor]) -> None:
    for seed in range(8):
        x = terms(16, 100, seed=seed)
        assert inside(order(x), cumsum(Enclosure.point(x))).all()


def test_a_term_that_is_missing_or_counts_twice_is_found() -> None:
    x = torch.rand(16, 100, generator=torch.Generator().manual_seed(0)) + 0.5
    e = cumsum(Enclosure.point(x))
    exclusive = torch.cat([torch.zeros(16, 1), forwards(x)[:, :-1]], -1)
    assert not inside(exclusive, e).any()
    assert not inside(forwards(x) + x[:, :1], e).any()


def test_the_last_prefix_is_the_sum() -> None:
    for x in (Enclosure.point(terms(4, 65)), Enclosure(torch.stack([terms(4, 65).double()] * 4).sort(0).values)):
        last, whole = cumsum(x)[..., -1:], total(x)
        torch.testing.assert_close(last.full, whole.full, rtol=0, atol=float(whole.full.abs().max()) * 2.0**-23)


def test_on_a_lattice_every_prefix_is_exact() -> None:
    x = torch.randint(-50, 50, (8, 300)).float()
    e = cumsum(Enclosure.point(x))
    assert e.lo.equal(e.hi) and e.value.equal(x.double().cumsum(-1))


def test_the_first_prefix_is_the_first_term_and_later_ones_are_wider() -> None:
    x = terms(4, 512).abs()
    e = cumsum(Enclosure.point(x))
    assert e.lo[:, 0].equal(x[:, 0].double()) and e.hi[:, 0].equal(x[:, 0].double())
    relative = (e.hi - e.lo) / e.value
    assert (relative[:, 500] > 10 * relative[:, 8]).all()


def test_a_known_height_of_the_tree_makes_prefixes_sharper() -> None:
    x = Enclosure.point(terms(4, 512).abs())
    with using(Premises(depth=lambda n: math.ceil(math.log2(max(n, 2))))):
        sharp = cumsum(x)
    wide = cumsum(x)
    assert (sharp.hi - sharp.lo < (wide.hi - wide.lo) / 8)[:, 300:].all()


def test_what_comes_after_infinity_or_nan_is_infinite_or_nan() -> None:
    x = torch.tensor([[1.0, math.inf, 2.0, -math.inf, 1.0], [1.0, math.nan, 2.0, 3.0, 4.0]])
    e = cumsum(Enclosure.point(x))
    assert e.lo[0, 1] == e.hi[0, 2] == math.inf and e.lo[0, 3:].isnan().all() and e.hi[0, 3:].isnan().all()
    assert e.lo[1, 0] == 1.0 and e.lo[1, 1:].isnan().all()


def test_prefixes_that_may_overflow_in_some_order_are_unknown() -> None:
    e = cumsum(Enclosure.point(torch.tensor([2e38, 2e38, -3e38, 1.0])))
    assert e.lo.isneginf().tolist() == [False, False, True, True]
    assert e.hi.isposinf().tolist() == [False, True, True, True]
    assert e.lo[1] == math.inf  # of one sign: it overflows in every order


def mean_of(x: Tensor, kept: Tensor) -> object:
    count = sum_of_rows(Enclosure.point(kept))
    return sum_of_rows(Enclosure.point(x * kept)).then(divide_rn, count)


def test_what_follows_from_parts_of_the_rows_is_what_follows_from_all() -> None:
    x, kept = terms(96, 8), (terms(96, 8, seed=1) > 0).float()
    whole = mean_of(x, kept)
    parts = [mean_of(x[i], kept[i]) for i in (slice(0, 17), slice(17, 64), slice(64, 96))]
    joined = parts[0] + parts[1] + parts[2]  # type: ignore[operator]
    mean = (x * kept).double().sum(0) / kept.double().sum(0)
    for following in (whole, joined):
        e = following.enclosure  # type: ignore[attr-defined]
        assert ((e.lo <= mean) & (mean <= e.hi)).all() and following.shape == (8,)  # type: ignore[attr-defined]
    torch.testing.assert_close(joined.enclosure.full, whole.enclosure.full, rtol=2.0**-22, atol=0)  # type: ignore[attr-defined]


def test_a_function_of_a_function_follows() -> None:
    x = torch.randint(-8, 8, (32, 4)).float()
    sums = sum_of_rows(Enclosure.point(x))
    e = sums.then(lambda s: s * 2.0).then(lambda s: 1.0 - s).enclosure
    assert e.value.equal(1.0 - 2.0 * x.double().sum(0)) and e.lo.equal(e.hi)


def test_a_number_of_the_rows_that_were_seen_is_refused() -> None:
    x = terms(32, 4)

    def mean(rows: Tensor) -> object:
        count = float(len(rows))
        return sum_of_rows(Enclosure.point(rows)).then(lambda s: s / count)

    with pytest.raises(OpError, match=r"count=16\.0 in some rows and 8.0 in others"):
        mean(x[:16]) + mean(x[16:24])  # type: ignore[operator]
    assert mean(x[:16]) + mean(x[16:])  # type: ignore[operator]
