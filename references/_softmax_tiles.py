"""Softmax of scores in tiles of columns, each relative to the largest score so far: what flash attention rounds.

Milakov & Gimelshein 2018, arXiv 1805.02867, and Dao et al. 2022, arXiv 2205.14135. The tile decides about bits: a
weight exp(x - m) is rounded relative to the m of its tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from lastbit.numerics import Enclosure, Tensor, amax, concatenate, maximum, rescaled, shifted_exponential, where


@dataclass(frozen=True)
class Tiles:
    """Columns of rows of scores, cut into tiles, in the order in which a kernel takes them.

    Attributes:
        parts: slices of the columns.
        maxima: the largest score of each row so far, [..., 1], after each tile; 0 where none was seen.
        seen: whether any was, [..., 1].
    """

    parts: tuple[slice, ...]
    maxima: tuple[Enclosure, ...]
    seen: tuple[Tensor, ...]

    @classmethod
    def of(cls, scores: Enclosure, visible: Tensor, parts: Sequence[slice]) -> Tiles:
        """Cut scores [..., N] into tiles; scores are -inf where not `visible` [..., N]."""
        maxima: list[Enclosure] = []
        seen: list[Tensor] = []
        for part in parts:
            own = amax(scores[..., part])
            largest = maximum(maxima[-1], own) if maxima else own
            some = visible[..., part].any(-1, keepdim=True)
            maxima.append(largest)
            seen.append(seen[-1] | some if seen else some)
        known = tuple(where(s, m, 0.0) for s, m in zip(seen, maxima, strict=True))
        return cls(tuple(parts), known, tuple(seen))

    @property
    def largest(self) -> Enclosure:
        """The largest score of the whole row; 0 where nothing is visible."""
        return self.maxima[-1]

    @property
    def hollow(self) -> Tensor:
        """Return whether all scores that were seen after some tile may be -inf, [..., 1]: 0 or NaN may follow."""
        infinite = (seen & largest.lo.isneginf() for seen, largest in zip(self.seen, self.maxima, strict=True))
        return reduce(or_, infinite)

    def weights(self, scores: Enclosure) -> Enclosure:
        """Compute exp(x - m) of every column, relative to the maximum after its tile, in the order of the columns."""
        pairs = zip(self.parts, self.maxima, strict=True)
        return self._in_order([shifted_exponential(scores[..., part], largest) for part, largest in pairs])

    def counted(self, weights: Enclosure) -> Enclosure:
        """Rescale the weights to the largest score of the row, by as many products as there are later tiles."""
        if len(self.parts) == 1:
            return weights
        before = zip(self.seen, self.maxima, self.maxima[1:], strict=False)
        factors = [where(seen, shifted_exponential(old, new), 1.0) for seen, old, new in before]
        return self._in_order(rescaled([weights[..., part] for part in self.parts], factors))

    def _in_order(self, tiles: Sequence[Enclosure]) -> Enclosure:
        """Put tiles side by side, in the order of their columns."""
        if len(tiles) == 1:
            return tiles[0]
        order = sorted(range(len(tiles)), key=lambda number: self.parts[number].start)
        return concatenate(*(tiles[number] for number in order))


def tiles_of(first: int, count: int, size: int, *, backwards: bool) -> list[slice]:
    """Cut the columns from `first` to `count` into tiles; columns before `first` are a tile that comes first."""
    starts = range(first, count, size)
    parts = [slice(start, min(start + size, count)) for start in starts]
    head = [slice(0, first)] if first else []
    return head + (parts[::-1] if backwards else parts)
