"""Tensors as lines along one dimension, and tiles of these: how a kernel finds its elements, whatever their strides."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lastbit.case import contiguous_strides

# Kernels are compiled for so many; tensors of more dimensions are joined, or left to torch.
_LEADING = 3
_TILE, _NARROW_TILE = (1, 2048), (64, 32)
# As LARGE of numerics/fused: a kernel of its own is worth its compilation from there on.
_LARGE = 1 << 21  # elements
_NARROW, _MANY = 128, 256  # columns and lines from which on most of a tile of one line would be idle

Dimension = tuple[int, int, int]
"""Size, logical step and stride in memory."""


@dataclass(frozen=True)
class Lines:
    """Lines along one dimension, numbered by three others.

    Attributes:
        leading: these, the outermost first: their sizes, and how far an index moves the logical number of a line, and
            its place in memory.
        size, stride: of the line itself.
    """

    leading: tuple[Dimension, ...]
    size: int
    stride: int

    @property
    def count(self) -> int:
        """The number of lines."""
        return math.prod(size for size, _, _ in self.leading)

    @functools.cached_property
    def large(self) -> bool:
        """Return whether a kernel of their own is compiled for such lines; one serves all that are smaller."""
        return self.count * self.size >= _LARGE

    @functools.cached_property
    def tile(self) -> tuple[int, int, bool]:
        """Lines and columns that are handled at a time, and whether neighbours in a line are so in memory."""
        if not self.large:
            return (*_NARROW_TILE, False)
        narrow = self.size <= _NARROW and self.count >= _MANY
        return (*(_NARROW_TILE if narrow else _TILE), self.stride == 1)

    @functools.cached_property
    def tiles(self) -> int:
        """The number of tiles."""
        return -(-self.count // self.tile[0]) * self._across

    @property
    def _across(self) -> int:
        return -(-self.size // self.tile[1])

    @functools.cached_property
    def arguments(self) -> tuple[int, ...]:
        """The arguments of `device_code.placed` after the number of the tile."""
        sizes, steps, strides = zip(*self.leading, strict=True)
        return (self._across, *sizes, *steps, *strides, self.size, self.stride)


def row_lines(target: Tensor, shape: tuple[int, ...]) -> Lines | None:
    """Return the rows of a tensor of that logical `shape`, of which `target` has size 1 where its stride is 0.

    None if they are numbered by more than three dimensions.
    """
    return _rows(tuple(target.shape), target.stride(), shape)


def flat_lines(tensor: Tensor) -> Lines | None:
    """Return the elements of a tensor in logical order, in lines as long as strides allow; None as in `row_lines`."""
    return _elements(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=1024)
def _rows(sizes: tuple[int, ...], strides: tuple[int, ...], shape: tuple[int, ...]) -> Lines | None:
    leading = zip(sizes[:-1], contiguous_strides(shape[:-1]), strides[:-1], strict=True)
    return _lines(_merged(leading), sizes[-1], strides[-1])


@functools.lru_cache(maxsize=1024)
def _elements(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Lines | None:
    merged = _merged(zip(sizes, contiguous_strides(sizes), strides, strict=True)) or [(1, 1, 1)]
    *leading, (size, _, stride) = merged
    return _lines(leading, size, stride)


def _lines(leading: Sequence[Dimension], size: int, stride: int) -> Lines | None:
    missing = _LEADING - len(leading)
    return Lines((*[(1, 0, 0)] * missing, *leading), size, stride) if missing >= 0 else None


def _merged(dimensions: Iterable[Dimension]) -> list[Dimension]:
    """Merge dimensions into as few as possible that give the same logical numbers and places."""
    merged: list[Dimension] = []
    for size, step, stride in dimensions:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * step, size * stride):
            size *= merged.pop()[0]
        merged.append((size, step, stride))
    return merged
