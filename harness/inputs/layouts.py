"""Memory layouts by name: strides and storage offset (elements) for a shape, as real models pass them to kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lastbit.case import TensorSpec, contiguous_strides
from lastbit.dtypes import DTYPES

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Strides and storage offset of a tensor, in elements; the fields of a `TensorSpec` of the same names."""

    name: str
    strides: Shape
    offset: int = 0


LayoutRule = Callable[[Shape, str], Layout | None]


def contiguous(shape: Shape, dtype: str) -> Layout:
    """Place elements in row-major order."""
    return Layout("contiguous", contiguous_strides(shape))


def packed_qkv(shape: Shape, dtype: str) -> Layout | None:
    """Take the middle third of rows that hold q, k and v; a row is the last two dimensions, of a matrix the last."""
    inner = shape[-2:] if len(shape) > 2 else shape[-1:]
    if len(shape) < 2 or 0 in shape:
        return None
    size = math.prod(inner)
    outer = contiguous_strides((*shape[: len(shape) - len(inner)], 3 * size))[:-1]
    return Layout("packed_qkv", outer + contiguous_strides(inner), size)


def half(shape: Shape, dtype: str) -> Layout | None:
    """Take the second half of rows twice as long."""
    if len(shape) < 2 or 0 in shape:
        return None
    return Layout("half", contiguous_strides((*shape[:-1], 2 * shape[-1])), shape[-1])


def transposed(shape: Shape, dtype: str) -> Layout | None:
    """Exchange the first two of at least three dimensions in memory; the last one stays contiguous."""
    if len(shape) < 3 or min(shape[:2]) < 2 or 0 in shape:
        return None
    first, second, *rest = contiguous_strides((shape[1], shape[0], *shape[2:]))
    return Layout("transposed", (second, first, *rest))


def expanded(shape: Shape, dtype: str) -> Layout | None:
    """Repeat one slice along the first dimension with stride 0: of a vector, one element."""
    if not shape or shape[0] < 2 or 0 in shape:
        return None
    return Layout("expanded", (0, *contiguous_strides(shape)[1:]))


def columns_first(shape: Shape, dtype: str) -> Layout | None:
    """Exchange the last two dimensions in memory, as `transpose(-2, -1)` does: columns have a stride."""
    if len(shape) < 2 or min(shape[-2:]) < 2 or 0 in shape:
        return None
    *outer, rows, columns = shape
    *steps, column, row = contiguous_strides((*outer, columns, rows))
    return Layout("columns_first", (*steps, row, column))


def every_second(shape: Shape, dtype: str) -> Layout | None:
    """Take every second element of rows twice as long: columns have a stride."""
    if not shape or shape[-1] < 2 or 0 in shape:
        return None
    return Layout("every_second", tuple(2 * stride for stride in contiguous_strides(shape)))


def unaligned(shape: Shape, dtype: str) -> Layout | None:
    """Begin one element after an aligned address, in row-major order: no vector load of 16 bytes is aligned."""
    return None if 0 in shape else Layout("unaligned", contiguous_strides(shape), 1)


def padded(shape: Shape, dtype: str) -> Layout | None:
    """Leave 16 unused bytes after each row."""
    if len(shape) < 2 or math.prod(shape[:-1]) < 2 or 0 in shape:
        return None
    spare = max(16 // DTYPES[dtype].itemsize, 1)
    return Layout("padded", contiguous_strides((*shape[:-1], shape[-1] + spare)))


def non_flattenable(shape: Shape, dtype: str) -> Layout | None:
    """Leave an unused row after every index of the first of three or more dimensions: no view merges the outer ones."""
    if len(shape) < 3 or shape[0] < 2 or math.prod(shape[1:-1]) < 2 or 0 in shape:
        return None
    inner = contiguous_strides(shape[1:])
    return Layout("non_flattenable", (math.prod(shape[1:]) + shape[-1], *inner))


LAYOUTS: Mapping[str, LayoutRule] = {
    rule.__name__: rule
    for rule in (
        *(contiguous, packed_qkv, half, transposed, expanded, columns_first, every_second),
        *(unaligned, padded, non_flattenable),
    )
}
"""Name → rule; a rule returns None for a shape on which it would change nothing, or means nothing."""


def applicable_layouts(shape: Shape, dtype: str) -> tuple[Layout, ...]:
    """Return every layout that applies to `shape`, the contiguous one first."""
    layouts = (rule(shape, dtype) for rule in LAYOUTS.values())
    return tuple(layout for layout in layouts if layout is not None)


@functools.lru_cache(maxsize=4096)
def layout_of(tensor: TensorSpec) -> str:
    """Return the name of the layout that a tensor has, `other` if it has none of them."""
    placed = tensor.element_strides, tensor.offset
    layouts = applicable_layouts(tensor.shape, tensor.dtype)
    return next((layout.name for layout in layouts if (layout.strides, layout.offset) == placed), "other")
