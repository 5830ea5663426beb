"""Hypothesis strategies for the shapes and memory of the tensors of a case."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from harness.case import TensorSpec
from harness.inputs.layouts import tensor_layouts

TAILS = 64
"""How many tails there are, from 0 on."""


def widths(narrow: int, wide: int) -> st.SearchStrategy[int]:
    """Sizes from `narrow` to `wide`, half of which are multiples of 16, which vector loads need: chance is too rare."""
    multiples = st.integers(-(-narrow // 16), wide // 16).map(lambda k: 16 * k)
    return st.one_of(multiples, st.integers(narrow, wide)) if wide >= 16 else st.integers(narrow, wide)


def widths_with_tail(narrow: int, wide: int, tail: int) -> st.SearchStrategy[int]:
    """Sizes from `narrow` to `wide` of which `tail` columns are left after whole vectors of 64; there must be one."""
    first = narrow + (tail - narrow) % TAILS
    return st.integers(0, (wide - first) // TAILS).map(lambda k: first + TAILS * k)


@st.composite
def leading_dims(draw: st.DrawFn, most: int) -> tuple[int, ...]:
    """One to three leading dimensions with at most `most` rows in all, none of which takes all of them."""
    sizes: list[int] = []
    for left in range(draw(st.integers(1, 3)), 0, -1):
        share = (most / math.prod(sizes)) ** (1 / left)
        sizes.append(draw(st.integers(1, max(1, math.floor(share)))))
    return tuple(sizes)


@st.composite
def strided(draw: st.DrawFn, name: str, dtype: str, shape: tuple[int, ...], regimes: Sequence[str]) -> TensorSpec:
    """A tensor of that shape with one of the regimes, in one of the layouts that apply."""
    regime = draw(st.sampled_from(regimes))
    layout = draw(tensor_layouts(shape, dtype))
    return TensorSpec(name, dtype, shape, layout.strides, layout.offset, regime)


def cut_rows(rows: Sequence[int], width: int, most: int) -> tuple[int, ...]:
    """Leading dimensions cut, the outermost first, until there are at most `most` elements."""
    cut = list(rows)
    for dim, size in enumerate(cut):
        others = math.prod(cut) // max(size, 1)
        cut[dim] = max(1, min(size, most // max(others * width, 1)))
    return tuple(cut)
