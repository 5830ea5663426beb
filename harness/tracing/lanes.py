"""From which elements of an operand the elements of a result came, whatever the operation did.

A `Source` takes flat indices of elements of the result, [L], and gives flat indices of the operand, [L, k]; -1 stands
for none. What an operation that only moves elements does to them, it does to an array of their indices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from lastbit.interpret.formats import Array

Source = Callable[[Array], Array]
Shape = tuple[int, ...]


def numbered(shape: Shape) -> Array:
    """The flat index of every element, in an array of that shape."""
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


def moved(index: Callable[[], Array]) -> Source:
    """From an array of the shape of the result that holds flat indices of the operand; made when first asked for."""
    made = cache(lambda: np.ascontiguousarray(index()).reshape(-1))
    return lambda lanes: made()[lanes][:, None]


def pointwise(operand: Shape, result: Shape) -> Source:
    """Element by element, after broadcasting; `everything` where the shapes do not allow that."""
    if operand == result:
        return lambda lanes: lanes[:, None]
    if not broadcasts(operand, result):
        return everything(operand)
    return moved(lambda: np.broadcast_to(numbered(operand), result))


def broadcasts(operand: Shape, result: Shape) -> bool:
    """Whether an operand of that shape can be broadcast to the result's."""
    pairs = zip(reversed(operand), reversed(result), strict=False)
    return len(operand) <= len(result) and all(a in (1, b) for a, b in pairs)


def where(source: Source, chosen: Array) -> Source:
    """`source`, for those elements of the result that are `chosen`, a mask of its shape."""
    flat = np.ascontiguousarray(chosen).reshape(-1)
    return lambda lanes: np.where(flat[lanes][:, None], source(lanes), -1)


def everything(operand: Shape) -> Source:
    """Every element of the result from all of the operand's."""
    size = int(np.prod(operand, dtype=np.int64))
    return lambda lanes: np.broadcast_to(np.arange(size), (len(lanes), size))


def along(operand: Shape, axes: tuple[int, ...]) -> Source:
    """Every element of the result from the operand's along some axes, those of a reduction; no axis stands for all."""
    if not operand:
        return lambda lanes: lanes[:, None]
    axes = axes or tuple(range(len(operand)))
    last = tuple(range(-len(axes), 0))
    count = int(np.prod([operand[axis] for axis in axes], dtype=np.int64))
    rows = cache(lambda: np.moveaxis(numbered(operand), axes, last).reshape(-1, count))
    return lambda lanes: rows()[lanes]


def within(operand: Shape, axes: tuple[int, ...]) -> Source:
    """As `along`, where the result has the shape of the operand: a softmax, or the statistics of a row and the row."""
    kept = tuple(1 if axis in axes else side for axis, side in enumerate(operand))
    reduced, spread = along(operand, axes), pointwise(kept, operand)
    return lambda lanes: reduced(spread(lanes)[:, 0])


def upto(operand: Shape, axis: int, reverse: bool) -> Source:
    """Every element of the result from those before it along an axis and itself, or after it if `reverse`."""
    whole = within(operand, (axis,))

    def source(lanes: Array) -> Array:
        position, row = np.unravel_index(lanes, operand)[axis], whole(lanes)
        steps = np.arange(row.shape[1])
        seen = steps >= position[:, None] if reverse else steps <= position[:, None]
        return np.where(seen, row, -1)

    return source


def left_of_dot(a: Shape, b: Shape) -> Source:
    """The row of `a` [..., M, K] for an element of `a @ b`, b [..., K, N]."""
    return lambda lanes: (lanes // b[-1])[:, None] * a[-1] + np.arange(a[-1])


def right_of_dot(a: Shape, b: Shape) -> Source:
    """The column of `b` for an element of `a @ b`."""
    size = a[-2] * b[-1]

    def source(lanes: Array) -> Array:
        start = lanes // size * (b[-2] * b[-1]) + lanes % b[-1]
        return np.asarray(start[:, None] + np.arange(b[-2]) * b[-1])

    return source
