"""Powers of two next to a number: by Python's frexp, at both ends of fp32, and of intervals."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from lastbit.numerics import Enclosure, ceil, divide, log2, power_of_two_from, power_of_two_to, round_to, two_to_the
from lastbit.numerics.formats import FP32

INF, NAN = math.inf, math.nan


def numbers() -> torch.Tensor:
    """Numbers of fp32 of every exponent, powers of two and their neighbours."""
    powers = torch.exp2(torch.arange(-126, 128, dtype=torch.float64))
    near = torch.cat([powers, powers * (1 + 2.0**-23), powers * (1 - 2.0**-24), powers * 1.6])
    return round_to(near, FP32)


def above(x: float) -> float:
    fraction, exponent = math.frexp(x)
    return math.ldexp(1.0, max(exponent - 1 if fraction == 0.5 else exponent, -126))


def test_the_power_from_a_number_on_and_the_one_up_to_it() -> None:
    x = numbers()
    up, down = power_of_two_from(Enclosure.point(x)).value, power_of_two_to(Enclosure.point(x)).value
    wanted = [above(v) for v in x.tolist()]
    assert up.tolist() == [p if p < 2.0**128 else INF for p in wanted]
    assert down.tolist() == [math.ldexp(1.0, math.frexp(v)[1] - 1) if v >= 2.0**-126 else 0.0 for v in x.tolist()]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (power_of_two_from, [0.0, 2.0**-126, INF, INF]),
        (power_of_two_to, [0.0, 0.0, 2.0**127, INF]),
    ],
)
def test_ends_of_the_range(function: Callable[[Enclosure], Enclosure], wanted: list[float]) -> None:
    x = torch.tensor([0.0, 2.0**-149, FP32.max, INF, NAN, -1.0], dtype=torch.float64)
    found = function(Enclosure.point(x)).value
    assert found[:4].tolist() == wanted and bool(found[4:].isnan().all())


def test_whole_exponents() -> None:
    exponents = torch.tensor([-INF, -200.0, -126.0, -1.0, 0.0, 127.0, 128.0, INF, NAN], dtype=torch.float64)
    found = two_to_the(Enclosure.point(exponents)).value
    assert found[:8].tolist() == [0.0, 2.0**-126, 2.0**-126, 0.5, 1.0, 2.0**127, INF, INF] and bool(found[8].isnan())


def test_intervals_keep_both_ends_and_unknown_stays_unknown() -> None:
    found = power_of_two_from(divide(Enclosure.point(torch.tensor([4.0])), 2.0))
    assert (float(found.lo), float(found.hi)) == (2.0, 4.0)  # an approximate 4 / 2 may be a bit more than 2
    lost = divide(Enclosure.point(torch.tensor([1.0])), Enclosure.point(torch.tensor([2.0**-140])))
    for function in (power_of_two_from, power_of_two_to, two_to_the):
        ends = function(lost)
        assert (float(ends.lo), float(ends.hi)) == (-INF, INF)


def test_a_logarithm_of_a_power_of_two_may_be_a_bit_more() -> None:
    found = two_to_the(ceil(log2(Enclosure.point(torch.tensor([2.0**-9, 3 * 2.0**-9])))))
    assert (found.lo.tolist(), found.hi.tolist()) == ([2.0**-9, 2.0**-7], [2.0**-8, 2.0**-7])
