"""Hypothesis strategies for the shapes and memory of the tensors of a case."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st

from lastbit.inputs.choices import Residue


def widths_with(residue: int, narrow: int, wide: int, modulus: int = 64) -> st.SearchStrategy[int]:
    """Return a strategy of sizes from `narrow` to `wide` that leave `residue` when divided by `modulus`; there is one.

    Of a residue of which a kernel takes some sizes, these.
    """
    if isinstance(residue, Residue) and isinstance(residue.sizes, tuple):
        return st.sampled_from([size for size in residue.sizes if narrow <= size <= wide])
    least, most = -(-(narrow - residue) // modulus), (wide - residue) // modulus
    return st.integers(least, most).map(lambda k: modulus * k + residue)


def widths(narrow: int, wide: int) -> st.SearchStrategy[int]:
    """Return a strategy of sizes from `narrow` to `wide`, half of them multiples of 16, which vector loads need.

    Where there are no such multiples, these are all sizes alike.
    """
    every, least, most = st.integers(narrow, wide), -(-narrow // 16), wide // 16
    return st.one_of(st.integers(least, most).map(lambda k: 16 * k), every) if least <= most else every


@st.composite
def leading_dims(draw: st.DrawFn, most: int, least: tuple[int, ...] = (1,)) -> tuple[int, ...]:
    """Draw one to three leading dimensions with at most `most` rows in all, none of which takes all of them.

    They are as many and as large as `least`, the last one as large as its last, if so many rows are allowed.
    """
    least = least if math.prod(least) <= most else (1,)
    count = draw(st.integers(len(least), 3)) if math.prod(least) * least[-1] <= most else len(least)
    lows = [*least, *[1] * (count - len(least) - 1), least[-1]][:count]
    sizes: list[int] = []
    for place, low in enumerate(lows):
        room = most / math.prod(sizes) / math.prod(lows[place + 1 :])
        sizes.append(draw(st.integers(low, max(low, math.floor(room ** (1 / (count - place)))))))
    return tuple(sizes)


def cut_rows(rows: Sequence[int], width: int, most: int) -> tuple[int, ...]:
    """Cut leading dimensions, the outermost first, until there are at most `most` elements.

    >>> cut_rows((8, 16), width=128, most=4096)
    (2, 16)
    """
    cut = list(rows)
    for dim, size in enumerate(cut):
        others = math.prod(cut) // max(size, 1)
        cut[dim] = max(1, min(size, most // max(others * width, 1)))
    return tuple(cut)
