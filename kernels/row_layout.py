"""The places of rows of strided tensors: leading dimensions as the fewest (size, stride) pairs, and pointers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from described import VECTOR_BYTES, Described
from torch import Tensor

VECTOR_LANES = 16


@dataclass(frozen=True)
class RowLayout:
    """Leading dimensions shared by tensors whose last dimension is contiguous.

    Attributes:
        rows: number of rows, the product of `sizes`.
        sizes: one size per dimension, outermost first, padded with 1 in front.
        strides: for each tensor, one stride per dimension, in elements.
        copied: whether these are the strides of contiguous copies, which are to be made.
    """

    rows: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    copied: bool = False


def merged_dims(sizes: tuple[int, ...], *strides: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return (size, stride of each tensor) per dimension, without those of size 1 and with neighbours merged.

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


def layout_of(tensors: Sequence[Described], *, dims: int) -> RowLayout:
    """Return where the rows of tensors of one shape lie, in exactly `dims` leading dimensions.

    All must be copied to contiguous memory if the last dimension of one is not contiguous, or if more than `dims`
    leading dimensions remain after merging.
    """
    *sizes, columns = tensors[0].shape
    outer = merged_dims(tuple(sizes), *(t.strides[:-1] for t in tensors))
    copied = len(outer) > dims or any(t.strides[-1] != 1 and columns > 1 for t in tensors)
    if copied:
        outer = merged_dims((math.prod(sizes),), *((columns,) for _ in tensors))
    padded = [(1,) + (0,) * len(tensors)] * (dims - len(outer)) + outer
    size, *strides = zip(*padded, strict=True)
    return RowLayout(math.prod(sizes), size, tuple(strides), copied)


def whole_vectors(
    columns: int, strided: Sequence[Described], layout: RowLayout, flat: Sequence[Described] = ()
) -> bool:
    """Check whether every row of `columns` elements of every tensor can be read or written in whole 16-byte vectors.

    `strided` are the tensors of `layout`, or what its copies were made of: a contiguous one is its own copy, so all
    must be aligned. The rows of `flat` follow each other without a gap.
    """
    if columns % VECTOR_LANES or not all(t.aligned for t in (*strided, *flat)):
        return False
    steps = zip(strided, layout.strides, strict=True)
    return all(stride * t.dtype.itemsize % VECTOR_BYTES == 0 for t, strides in steps for stride in strides)


def contiguous_like(x: Tensor, *, columns: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate an uninitialised contiguous tensor like `x`, with `columns` in place of its last dimension."""
    if columns is None:
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return x.new_empty((*x.shape[:-1], columns), dtype=dtype)


@triton.jit
def row_start(row, size_1, size_2, stride_0, stride_1, stride_2, FLAT: tl.constexpr):
    """Return where each row starts, in elements, from the sizes of the two inner leading dimensions and all strides.

    FLAT promises that the two outer sizes are 1, so that nothing is divided.
    """
    if FLAT:
        start = row * stride_2
    else:
        start = row // size_2 // size_1 * stride_0 + row // size_2 % size_1 * stride_1 + row % size_2 * stride_2
    return start


@triton.jit
def address(ptr, row_offset, columns, ALIGNED: tl.constexpr):
    """Return pointers to `columns` of each row; ALIGNED promises that every row starts on a 16-byte boundary."""
    pointers = ptr + row_offset + columns
    if ALIGNED:
        pointers = tl.multiple_of(pointers, (1, 16))
    return pointers
