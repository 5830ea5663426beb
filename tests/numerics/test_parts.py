"""Arithmetic on stacked parts beside that of fractions."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lastbit.numerics import parts
from lastbit.numerics.formats import BF16, FP32, PRECISE, Format

FLOATS = st.floats(-64, 64, width=32)
WIDE = st.floats(-64, 64)
NARROW = st.integers(-3, 3).map(float)


@st.composite
def operands(draw: Callable[..., float], numbers: st.SearchStrategy[float]) -> list[float]:
    """Draw a point, or exact, value, lo and hi."""
    if draw(st.booleans()):
        return [draw(numbers)]
    low, *between, high = sorted(draw(numbers) for _ in range(4))
    return [*between, low, high]


def stacked(operand: list[float]) -> Tensor:
    return torch.tensor(operand, dtype=torch.float64)[:, None]


def ends(operand: list[float]) -> tuple[Fraction, Fraction]:
    return Fraction(operand[-2] if len(operand) == 4 else operand[0]), Fraction(operand[-1])


OPERATIONS: dict[str, tuple[Callable[..., Tensor], Callable[[Fraction, Fraction], Fraction]]] = {
    "added": (parts.added, lambda x, y: x + y),
    "subtracted": (parts.subtracted, lambda x, y: x - y),
    "multiplied": (parts.multiplied, lambda x, y: x * y),
}


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=40)
@given(data=st.data(), numbers=st.sampled_from([FLOATS, WIDE, NARROW]))
def test_precise_ends_hold_the_exact_results_and_nothing_else(
    name: str, data: st.DataObject, numbers: st.SearchStrategy[float]
) -> None:
    made, exact = OPERATIONS[name]
    x, y = data.draw(operands(numbers)), data.draw(operands(numbers))
    found = parts.full(made(stacked(x), stacked(y), PRECISE))
    corners = [exact(a, b) for a in ends(x) for b in ends(y)]
    lo, hi = (Fraction(float(end)) for end in found[2:, 0])
    assert lo <= min(corners) and max(corners) <= hi
    room = Fraction(2) ** -49 * max(map(abs, corners)) + Fraction(2) ** -1000
    assert min(corners) - lo <= room and hi - max(corners) <= room
    points = len(x) == len(y) == 1
    if numbers is NARROW and (points or name != "multiplied"):
        assert lo == min(corners) and hi == max(corners)
    if points and numbers is FLOATS and name == "multiplied":  # 48 bits
        assert lo == hi == corners[0]
    if points and float(corners[0]) != corners[0]:
        assert lo < corners[0] < hi


@pytest.mark.parametrize("fmt", [FP32, BF16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=15)
@given(x=operands(FLOATS), y=operands(FLOATS))
def test_rounded_ends_hold_the_rounded_results(name: str, fmt: Format, x: list[float], y: list[float]) -> None:
    made, exact = OPERATIONS[name]
    found = parts.full(made(stacked(x), stacked(y), fmt))
    corners = [exact(a, b) for a in ends(x) for b in ends(y)]
    lo, hi = (Fraction(float(end)) for end in found[2:, 0])
    room = Fraction(2) ** -fmt.precision * max(map(abs, corners)) + Fraction(fmt.quantum)
    assert min(corners) - room <= lo <= min(corners) + room and max(corners) - room <= hi <= max(corners) + room
    assert (found[1:].to(fmt.dtype).to(torch.float64) == found[1:]).all()


def test_parts_of_a_point_are_one_and_the_same() -> None:
    assert parts.full(stacked([3])).flatten().tolist() == [3, 3, 3, 3]
    assert parts.full(stacked([1, 2])).flatten().tolist() == [1, 2, 2, 2]
    assert parts.full(stacked([1, 2, 3, 4])).flatten().tolist() == [1, 2, 3, 4]
    assert parts.negated(stacked([1, 2])).flatten().tolist() == [-1, -2]
    assert parts.negated(stacked([1, 2, -3, 4])).flatten().tolist() == [-1, -2, -4, 3]


@pytest.mark.parametrize(
    ("operand", "magnitude"),
    [([1, 2, -3, 4], [1, 2, 0, 4]), ([-1, -2, -4, -1], [1, 2, 1, 4]), ([-5, -5, -9, 2], [5, 5, 0, 9]), ([-2], [2])],
)
def test_magnitudes(operand: list[float], magnitude: list[float]) -> None:
    assert parts.magnitudes(stacked(operand)).flatten().tolist() == magnitude


def test_a_hull_has_the_first_values_and_the_farthest_ends() -> None:
    found = parts.hull(stacked([1, 2, 0, 3]), stacked([4, 5, -1, 2]), stacked([7]))
    assert found.flatten().tolist() == [1, 2, -1, 7]


def test_clamped_parts() -> None:
    assert parts.clamped(stacked([-9, 9, -9, 9]), -1, 2).flatten().tolist() == [-1, 2, -1, 2]
    assert parts.clamped(stacked([1.5]), -1, 2).flatten().tolist() == [1.5]
