"""Where the rows of strided tensors lie: the leading dimensions as the fewest (size, stride) pairs, and pointers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

VECTOR_BYTES = 16
VECTOR_LANES = 16


@dataclass(frozen=True)
class RowLayout:
    """Leading dimensions shared by tensors whose last dimension is contiguous.

    Attributes:
        rows: number of rows, the product of `sizes`.
        sizes: one size per dimension, outermost first, padded with 1 in front.
        strides: for each tensor, one stride per dimension, in elements.
    """

    rows: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def merged_dims(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """(size, stride of each tensor) per dimension, without those of size 1 and with neighbours merged.

    Two neighbours are one dimension where in every tensor the outer stride is the inner size times the inner stride.
    """
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(sizes, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged


def row_layout(tensors: list[Tensor], *, dims: int) -> tuple[list[Tensor], RowLayout]:
    """The tensors, all of one shape, and where their rows lie, in exactly `dims` leading dimensions.

    The tensors are returned as they are where their strides allow. All are copied to contiguous memory if the last
    dimension of one is not contiguous, or if more than `dims` leading dimensions remain after merging.
    """
    *sizes, columns = tensors[0].shape
    outer = merged_dims(tuple(sizes), *(t.stride()[:-1] for t in tensors))
    if len(outer) > dims or any(t.stride(-1) != 1 and columns > 1 for t in tensors):
        tensors = [t.contiguous() for t in tensors]
        outer = merged_dims(tuple(sizes), *(t.stride()[:-1] for t in tensors))
    padded = [(1,) + (0,) * len(tensors)] * (dims - len(outer)) + outer
    size, *strides = zip(*padded, strict=True)
    return tensors, RowLayout(math.prod(sizes), size, tuple(strides))


def vectors_allowed(columns: int, strided: list[Tensor], layout: RowLayout, flat: list[Tensor]) -> bool:
    """Whether every row of `columns` elements of every tensor can be read or written in whole 16-byte vectors.

    `strided` are the tensors of `layout`; the rows of `flat` follow each other without a gap.
    """
    if columns % VECTOR_LANES or any(t.data_ptr() % VECTOR_BYTES for t in (*strided, *flat)):
        return False
    steps = zip(strided, layout.strides, strict=True)
    return all(stride * t.element_size() % VECTOR_BYTES == 0 for t, strides in steps for stride in strides)


def contiguous_like(x: Tensor, *, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised contiguous tensor of the shape of `x`, with `columns` in place of its last dimension."""
    shape = x.shape if columns is None else (*x.shape[:-1], columns)
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device, memory_format=torch.contiguous_format)


@triton.jit
def address(ptr, row_offset, columns, ALIGNED: tl.constexpr):
    """Pointers to `columns` of each row; ALIGNED promises that every row of them starts on a 16-byte boundary."""
    pointers = ptr + row_offset + columns
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers
