"""Rounding in other directions than to nearest: what an enclosure becomes, and what residues do."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastbit.numerics import Enclosure
from lastbit.numerics.formats import (
    BF16,
    CODES,
    DIRECTIONS,
    E4M3,
    FP16,
    Direction,
    Format,
    around,
    format_of,
    round_to,
    split_target,
)
from lastbit.numerics.residues import Residues
from tests.directed import rounded

OTHERS: tuple[Direction, ...] = ("zero", "ties_away", "either")
other_directions = pytest.mark.parametrize("direction", OTHERS)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def interval(lo: float, hi: float) -> Enclosure:
    middle = lo + (hi - lo) / 2
    return Enclosure(torch.tensor([[middle], [middle], [lo], [hi]], dtype=torch.float64))


def ends(x: Enclosure) -> tuple[float, float]:
    return float(x.lo), float(x.hi)


def test_a_direction_is_part_of_the_format() -> None:
    cut = BF16.toward("zero")
    assert (cut.name, cut.told, BF16.told) == ("bf16", "bf16 toward zero", "bf16")
    assert cut != BF16 and cut.nearest == BF16 and BF16.nearest is BF16
    assert (BF16.roundoff, cut.roundoff, BF16.toward("ties_away").roundoff) == (2.0**-8, 2.0**-7, 2.0**-8)
    assert split_target("x") == ("x", "nearest") and split_target("bf16:either") == ("bf16", "either")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_kernels_do_to_bits_lies_within(dtype: torch.dtype, direction: Direction) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 4
    x = torch.cat([x.clamp(min=2.0**-10), (x * 16).round() * (1 + 2.0**-8), -x.clamp(min=1e-3)])  # many are ties
    fmt = format_of(dtype).toward(direction)
    found = Enclosure.point(x).rounded(fmt)
    actual = rounded(x, dtype, direction).double()
    assert bool(((found.lo <= actual) & (actual <= found.hi)).all())
    assert bool((found.lo == found.hi).all()) == (direction != "either")
    if direction == "nearest":
        assert not torch.equal(actual, rounded(x, dtype, "ties_away").double())


@other_directions
@given(data=st.data(), fmt=st.sampled_from([BF16, FP16]))
def test_what_lies_within_an_enclosure_is_rounded_into_its_ends(
    direction: Direction, data: st.DataObject, fmt: Format
) -> None:
    drawn = st.floats(-2e-38, 2e-38) | st.floats(-9e4, 9e4, width=32)
    lo, inside, hi = sorted(data.draw(st.tuples(drawn, drawn, drawn)))
    found = interval(lo, hi).rounded(fmt.toward(direction))
    below, above = (float(end) for end in around(numbers(inside), fmt))
    result = float(round_to(numbers(inside), fmt.toward(direction)))
    assert float(found.lo) <= result <= float(found.hi)
    assert below <= result <= above
    if direction == "either":
        assert float(found.lo) <= below and above <= float(found.hi)
    if direction == "zero":
        assert abs(result) <= abs(Fraction(inside)) and result == (below if inside > 0 else above)


def test_either_neighbour_of_a_number_of_the_format_is_itself() -> None:
    assert ends(Enclosure.point(numbers(1.5)).rounded(BF16.toward("either"))) == (1.5, 1.5)
    x = Enclosure.point(numbers(1 + 2.0**-9)).rounded(BF16.toward("either"))
    assert ends(x) == (1.0, 1 + 2.0**-7) and float(x.value) == 1.0 and float(x.exact) == 1 + 2.0**-9


@pytest.mark.parametrize(
    ("fmt", "direction", "x", "expected"),
    [
        (FP16, "zero", 70000.0, (65504.0, 65504.0)),
        (FP16, "zero", math.inf, (math.inf, math.inf)),
        (FP16, "ties_away", 65520.0, (math.inf, math.inf)),
        (FP16, "either", 70000.0, (65504.0, math.inf)),
        (FP16, "either", -70000.0, (-math.inf, -65504.0)),
        (FP16, "zero", -1e-8, (0.0, 0.0)),
        (FP16, "either", -1e-8, (-(2.0**-24), 0.0)),
        (FP16, "ties_away", 2.0**-25, (2.0**-24, 2.0**-24)),
        (E4M3, "zero", 1000.0, (448.0, 448.0)),
        (E4M3, "either", 460.0, (-math.inf, math.inf)),
        (CODES["int8"], "zero", -3.9, (-3.0, -3.0)),
        (CODES["int8"], "ties_away", 2.5, (3.0, 3.0)),
        (CODES["int8"], "either", -3.9, (-4.0, -3.0)),
        (CODES["int8"], "either", 127.5, (-math.inf, math.inf)),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_overflow_and_small_numbers(fmt: Format, direction: Direction, x: float, expected: tuple[float, float]) -> None:
    assert ends(Enclosure.point(numbers(x)).rounded(fmt.toward(direction))) == expected


def test_nan_stays_nan_and_what_is_unknown_unknown() -> None:
    for direction in DIRECTIONS:
        assert all(map(math.isnan, ends(Enclosure.point(numbers(math.nan)).rounded(BF16.toward(direction)))))
        assert ends(interval(-math.inf, math.inf).rounded(E4M3.toward(direction))) == (-math.inf, math.inf)


# Residues


def test_directions_are_other_functions_that_know_each_others_numbers() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(2)).double()
    x = Residues.of(values)
    made = {way: x.rounded(BF16.toward(way), values) for way in DIRECTIONS}
    assert made["nearest"].differs(made["zero"]).float().mean() > 0.9
    assert made["either"].open.all()
    for way, once in made.items():
        stored = round_to(values, BF16.toward(way))
        assert all(once.rounded(BF16.toward(other), stored).equal(once).all() for other in DIRECTIONS)


@other_directions
def test_numbers_of_the_format_are_rounded_to_themselves(direction: Direction) -> None:
    held = torch.tensor([1.5, -0.375, 0.0, 3e-39], dtype=torch.bfloat16).double()
    same = Residues.of(held).rounded(BF16.toward(direction), held, (held, held))
    assert same.equal(Residues.of(held)).all() and not same.open.any()


def test_a_difference_says_nothing_where_to_nearest_gives_the_same() -> None:
    """A kernel may round to nearest, and go back by one where that went too far."""
    values = numbers(1 + 2.0**-10, 1 + 2.0**-7 - 2.0**-10, 1 + 2.0**-8)
    cut = Residues.of(values).rounded(BF16.toward("zero"), values, (values, values))
    assert cut.open.tolist() == [True, False, True]  # the last one is a tie, which goes to the even number
    away = Residues.of(values).rounded(BF16.toward("ties_away"), values, (values, values))
    assert away.open.tolist() == [True, True, False]
