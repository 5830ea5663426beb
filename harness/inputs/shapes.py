"""Hypothesis strategies for the shapes and memory of the tensors of a case."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from harness.case import TensorSpec
from harness.inputs.layouts import tensor_layouts


def widths_with(residue: int, narrow: int, wide: int, modulus: int = 64) -> st.SearchStrategy[int]:
    """Sizes from `narrow` to `wide` that leave `residue` when divided by `modulus`; there is one."""
    least, most = -(-(narrow - residue) // modulus), (wide - residue) // modulus
    return st.integers(least, most).map(lambda k: modulus * k + residue)


def widths(narrow: int, wide: int) -> st.SearchStrategy[int]:
    """Sizes from `narrow` to `wide`, half of which are multiples of 16, which vector loads need: chance is too rare."""
    multiples = st.integers(-(-narrow // 16), wide // 16).map(lambda k: 16 * k)
    return st.one_of(multiples, st.integers(narrow, wide)) if wide >= 16 else st.integers(narrow, wide)


@st.composite
def leading_dims(draw: st.DrawFn, most: int, least: tuple[int, ...] = (1,)) -> tuple[int, ...]:
    """One to three leading dimensions with at most `most` rows in all, none of which takes all of them.

    They are as many and as large as `least`, if so many rows are allowed.
    """
    least = least if math.prod(least) <= most else (1,)
    sizes: list[int] = []
    for left in range(draw(st.integers(len(least), 3)), 0, -1):
        needed = math.prod(least[len(sizes) + 1 :])
        share = (most / math.prod(sizes) / needed) ** (1 / left)
        low = least[len(sizes)] if len(sizes) < len(least) else 1
        sizes.append(draw(st.integers(low, max(low, math.floor(share)))))
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
