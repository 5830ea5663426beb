"""Sizes and leading dimensions that are drawn for cases: which there are, and no others."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lastbit.inputs import residues
from lastbit.inputs.choices import Residue
from lastbit.inputs.shapes import cut_rows, leading_dims, widths, widths_with


def drawn(strategy: st.SearchStrategy[Any], examples: int = 60) -> Counter[Any]:
    """Count what a strategy gives; Hypothesis stops early where it has given everything."""
    seen: Counter[Any] = Counter()

    @settings(max_examples=examples, database=None)
    @given(strategy)
    def note(value: Any) -> None:
        seen[value] += 1

    note()
    return seen


@given(st.integers(1, 500), st.integers(0, 300), st.data())
def test_widths_leave_a_residue(narrow: int, more: int, data: st.DataObject) -> None:
    residue = data.draw(st.sampled_from(residues(narrow, narrow + more)))
    width = data.draw(widths_with(residue, narrow, narrow + more))
    assert narrow <= width <= narrow + more and width % 64 == residue


@pytest.mark.parametrize(
    ("residue", "narrow", "wide", "modulus", "sizes"),
    [
        (3, 10, 140, 64, {67, 131}),
        (0, 64, 128, 64, {64, 128}),
        (1, 65, 65, 64, {65}),
        (5, 5, 40, 16, {5, 21, 37}),
        (Residue(3, (3, 67, 131, 195)), 67, 131, 64, {67, 131}),
        (Residue(3, range(300)), 67, 131, 64, {67, 131}),
    ],
)
def test_the_widths_of_a_residue(residue: int, narrow: int, wide: int, modulus: int, sizes: set[int]) -> None:
    assert set(drawn(widths_with(residue, narrow, wide, modulus))) == sizes


def test_widths_of_a_residue_are_of_64_unless_told() -> None:
    assert set(drawn(widths_with(1, 1, 130))) == {1, 65, 129}


@pytest.mark.parametrize(("narrow", "wide"), [(1, 3), (14, 15), (15, 16), (16, 16), (16, 17), (17, 20), (31, 33)])
def test_every_width_is_drawn(narrow: int, wide: int) -> None:
    """Also where there is no multiple of 16 between both, which was an error."""
    assert set(drawn(widths(narrow, wide))) == set(range(narrow, wide + 1))


def test_half_of_the_widths_are_multiples_of_16() -> None:
    seen = drawn(widths(10, 5000), 100)
    assert all(10 <= size <= 5000 for size in seen)
    assert 30 <= sum(count for size, count in seen.items() if size % 16 == 0) <= 80


@given(st.integers(1, 300), st.sampled_from([(1,), (2,), (2, 2)]), st.data())
def test_leading_dimensions_are_as_many_as_a_layout_needs(most: int, least: tuple[int, ...], data: st.DataObject):
    dims = data.draw(leading_dims(most, least))
    assert 1 <= len(dims) <= 3
    assert math.prod(dims) <= most
    if math.prod(least) <= most:
        assert len(dims) >= len(least) and all(size >= low for size, low in zip(dims, least, strict=False))
        assert dims[-1] >= least[-1]


@pytest.mark.parametrize(
    ("most", "least", "dims"),
    [
        (1, (1,), {(1,), (1, 1), (1, 1, 1)}),
        (2, (1,), {(1,), (2,), (1, 1), (1, 2), (1, 1, 1), (1, 1, 2)}),
        (1, (2,), {(1,), (1, 1), (1, 1, 1)}),  # so many rows are not allowed
        (3, (2,), {(2,), (3,)}),
        (4, (2,), {(2,), (3,), (4,), (2, 2), (2, 1, 2)}),
        (4, (2, 2), {(2, 2)}),
        (7, (2, 2), {(2, 2), (2, 3)}),
        (3, (2, 2), {(1,), (2,), (3,), (1, 1), (1, 2), (1, 3), (1, 1, 1), (1, 1, 2), (1, 1, 3)}),
    ],
)
def test_all_leading_dimensions(most: int, least: tuple[int, ...], dims: set[tuple[int, ...]]) -> None:
    assert set(drawn(leading_dims(most, least), 200)) == dims


def test_no_leading_dimension_takes_all_rows() -> None:
    seen = drawn(leading_dims(64), 200)
    assert max(dims[0] for dims in seen if len(dims) == 2) <= 8
    assert max(dims[0] for dims in seen if len(dims) == 3) <= 4
    assert max(dims[0] for dims in seen if len(dims) == 1) > 8
    assert max(dims[0] for dims in drawn(leading_dims(18, (2,)), 200) if len(dims) == 2) == 3  # the last may have 6


@pytest.mark.parametrize(
    ("rows", "width", "most", "cut"),
    [
        ((8, 16), 128, 4096, (2, 16)),
        ((8, 16), 128, 2048, (1, 16)),
        ((8, 16), 128, 2047, (1, 15)),
        ((8, 16), 128, 1, (1, 1)),
        ((8, 16), 1, 128, (8, 16)),
        ((8, 16), 1, 127, (7, 16)),
        ((4,), 10, 39, (3,)),
        ((4,), 0, 3, (3,)),
        ((0, 4), 2, 16, (1, 4)),
        ((), 5, 3, ()),
    ],
)
def test_rows_are_cut_outermost_first(rows: tuple[int, ...], width: int, most: int, cut: tuple[int, ...]) -> None:
    assert cut_rows(rows, width, most) == cut
