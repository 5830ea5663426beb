"""Sums of exponentials that are rescaled while they grow: what fp32 gives lies within, and the ends are near."""

from __future__ import annotations

import math

import pytest
import torch

from lastbit.numerics import Enclosure, Premises, dot, total, using
from lastbit.numerics.formats import BF16, FP16, FP32
from lastbit.numerics.premises import U
from lastbit.numerics.rescaled import rescaled, rescaled_dot, shifted_exponential
from lastbit.numerics.tensor_cores import LOOSEST

ROUNDED = Premises(tensor_cores=None)


def points(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def within(x: torch.Tensor, enclosure: Enclosure) -> bool:
    return bool(((x.double() >= enclosure.lo) & (x.double() <= enclosure.hi)).all())


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("base", ["e", "2, rounded", "2, fused"])
def test_shifted_exponentials_of_either_base_lie_within(base: str, scale: float) -> None:
    x = points(4000, 8, seed=1, scale=scale)
    shift = x.amax(-1, keepdim=True)
    log2e = torch.tensor(math.log2(math.e))
    if base == "e":
        power = torch.exp(x - shift)
    elif base == "2, rounded":
        power = torch.exp2(x * log2e - shift * log2e)
    else:
        power = torch.exp2((x.double() * log2e.double() - (shift * log2e).double()).float())
    enclosure = shifted_exponential(Enclosure.point(x), Enclosure.point(shift))
    assert within(power, enclosure)
    reach = (enclosure.hi - enclosure.lo) / enclosure.exact
    most = (2 * (8 * U * (shift - x).abs() + 4 * U * shift.abs()) + 14 * U).double()
    assert bool((reach[enclosure.exact > 1e-30] <= most[enclosure.exact > 1e-30]).all())


def test_a_shifted_exponential_may_be_larger_than_1_only_where_the_shift_is_not_the_largest() -> None:
    x, shift = Enclosure.point(torch.tensor([5.0, -math.inf])), Enclosure.point(torch.tensor([2.0]))
    above = shifted_exponential(x, shift, below=False)
    assert above.lo[0] < math.exp(3.0) < above.hi[0] and above.hi[1] == 0
    assert shifted_exponential(x, shift).hi[0] < 1.00001


@pytest.mark.parametrize("seed", range(6))
def test_rescaled_sums_and_dots_lie_within(seed: int) -> None:
    tiles = [points(20, 16, seed=10 * seed + n, scale=4.0).exp() for n in range(5)]
    factors = [torch.rand(20, 1, generator=torch.Generator().manual_seed(seed + n)) for n in range(4)]
    values = points(80, 8, seed=99 + seed)
    summed, product = torch.zeros(20, 1), torch.zeros(20, 8)
    for number, tile in enumerate(tiles):
        factor = factors[number - 1] if number else torch.ones(20, 1)
        summed = summed * factor + tile.sum(-1, keepdim=True)
        product = product * factor + tile @ values[16 * number : 16 * number + 16]
    with using(ROUNDED):
        counted = rescaled([*map(Enclosure.point, tiles)], [*map(Enclosure.point, factors)])
        terms = Enclosure(torch.cat([part.full for part in counted], -1))
        assert within(summed, total(terms))
        assert within(product, rescaled_dot(terms, Enclosure.point(values), 5, FP32))
    assert bool(((terms.hi - terms.lo) <= 12 * U * terms.hi + 1e-40).all())


def test_one_tile_is_not_rescaled() -> None:
    tile = Enclosure.point(torch.tensor([[1.0, 2.0]]))
    assert rescaled([tile], []) == [tile]
    values = Enclosure.point(torch.tensor([[3.0], [4.0]]))
    assert torch.equal(rescaled_dot(tile, values, 1, BF16).lo, dot(tile, values).lo)


def test_tensor_cores_cut_more_off_operands_of_fp16() -> None:
    tiles = [Enclosure.point(torch.full((1, 4), 2.0**-20)) for _ in range(2)]
    terms = Enclosure(torch.cat([part.full for part in rescaled(tiles, [Enclosure.point(torch.tensor([[0.3]]))])], -1))
    values = Enclosure.point(torch.ones(8, 1))
    with using(Premises(tensor_cores=LOOSEST)):
        reach = [rescaled_dot(terms, values, 2, fmt) for fmt in (FP16, BF16)]
    assert (reach[0].hi - reach[0].lo) > 2 * (reach[1].hi - reach[1].lo)
