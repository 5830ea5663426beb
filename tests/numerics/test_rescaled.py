"""Sums of exponentials that are rescaled while they grow: what fp32 gives lies within, and the ends are near."""

from __future__ import annotations

import math

import pytest
import torch

from lastbit.numerics import Enclosure, Premises, dot, total, using
from lastbit.numerics.formats import BF16, FP16, FP32, Format
from lastbit.numerics.premises import U
from lastbit.numerics.softmax import of_base_two, rescaled, rescaled_dot, shifted_exponential
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


def as_fp32(*ends: float) -> list[float]:
    return torch.tensor(ends, dtype=torch.float64).float().double().tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize(
    ("x", "shift"),
    [((-3.0, -3.0), (2.0, 2.0)), ((-3.0, -2.5), (1.5, 2.0)), ((0.5, 2.5), (-2.0, 2.0)), ((1.0, 1.0), (1.0, 1.0))],
)
def test_the_ends_of_a_shifted_exponential(x: tuple[float, float], shift: tuple[float, float], below: bool) -> None:
    """5u of the difference and 4u of the shift in the argument; then exp errs by 4u, and 2u of its argument."""
    lo, hi = x[0] - shift[1], x[1] - shift[0]
    hi = min(hi, 0.0) if below else hi
    largest = max(map(abs, shift))
    least, most = lo - U * (5 * abs(lo) + 4 * largest), hi + U * (5 * abs(hi) + 4 * largest)
    ends = [math.exp(end) * (1 + sign * U * (4 + 2 * abs(end))) for end, sign in ((least, -1), (most, 1))]
    parts = [torch.tensor([[pair[0]], [pair[0]], [pair[0]], [pair[1]]]).double() for pair in (x, shift)]
    found = shifted_exponential(Enclosure(parts[0]), Enclosure(parts[1]), below=below)
    assert [found.lo.item(), found.hi.item()] == as_fp32(*ends)
    assert found.exact.item() == pytest.approx(math.exp(x[0] - shift[0]), rel=1e-14)


@pytest.mark.parametrize("flushes", [False, True])
def test_a_term_errs_by_u_for_each_factor_that_comes_after_it(flushes: bool) -> None:
    tiles = [Enclosure.point(torch.tensor([[number]])) for number in (3.0, 5.0, 7.0)]
    factors = [Enclosure.point(torch.tensor([[number]])) for number in (0.5, 0.25)]
    smallest = 2.0**-149 + flushes * 2.0**-126
    with using(Premises(flushes_subnormals=flushes)):
        first, second, third = rescaled(tiles, factors)
        tiny = rescaled([Enclosure.point(torch.tensor([[2.0**-120]]))] * 2, factors[:1])[0]
    for found, number, count in ((first, 3 / 8, 2), (second, 5 / 4, 1), (third, 7.0, 0)):
        error = number * count * U / (1 - count * U)
        assert (found.exact.item(), found.value.item()) == (number, number)
        assert found.lo.item() == pytest.approx(number - error, rel=1e-13)
        assert found.hi.item() == pytest.approx(number + error, rel=1e-13)
    assert tiny.hi.item() - 2.0**-121 == pytest.approx(2.0**-121 * U + smallest, rel=1e-9)


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("operand", [BF16, FP16])
def test_a_rescaled_dot_errs_by_u_and_by_what_underflows(operand: Format, flushes: bool) -> None:
    terms, values = (
        Enclosure.point(torch.tensor([[0.25, 0.5, 1.0]])),
        Enclosure.point(torch.tensor([[4.0], [-3.0], [2.0]])),
    )
    with using(Premises(tensor_cores=LOOSEST, flushes_subnormals=flushes)):
        plain, found = dot(terms, values), rescaled_dot(terms, values, 2, operand)
        nothing = Enclosure.point(torch.zeros(3, 1))
        none = rescaled_dot(terms, nothing, 3, operand)
    lost = 2 * (2.0**-149 + flushes * 2.0**-126)
    cut = 2 * 3 * LOOSEST.cut * 2.0**-14 * (operand is FP16)
    ends = [plain.lo.item(), plain.hi.item()]
    expected = ends[0] - abs(ends[0]) * U - lost - cut * 4.0, ends[1] + abs(ends[1]) * U + lost + cut * 4.0
    assert [found.lo.item(), found.hi.item()] == as_fp32(*expected)
    only = 3 * (2.0**-149 + flushes * 2.0**-126) + cut  # beside what the dot itself may lose
    assert none.hi.item() >= only and (flushes or none.hi.item() <= only + 2.0**-145)


def test_without_tensor_cores_nothing_is_cut_off() -> None:
    terms, values = Enclosure.point(torch.tensor([[0.25, 0.5]])), Enclosure.point(torch.tensor([[4.0], [2.0]]))
    with using(ROUNDED):
        found = [rescaled_dot(terms, values, 2, fmt).full for fmt in (FP16, BF16)]
    assert torch.equal(*found)


def test_a_power_of_two_is_one_of_e_by_ln_2() -> None:
    found = of_base_two(Enclosure.point(torch.tensor([3.0])))
    assert found.lo.item() == found.hi.item() == 3 * math.log(2)
