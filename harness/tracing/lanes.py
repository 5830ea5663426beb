"""Elements: those of an operand from which the elements of a result came, and their addresses.

A `Source` takes flat indices of elements of the result, [L], and gives flat indices of the operand, [L, k]; -1 stands
for none. An operation that only moves elements is applied to an array of their indices to find its source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from lastbit.interpret.numpy_formats import Array

Source = Callable[[Array], Array]
Addresses = Callable[[Array], Array]
"""Of a block or tensor: flat indices of elements → their addresses."""
Shape = tuple[int, ...]


def numbered(shape: Shape) -> Array:
    """Return an array of a shape that holds the flat index of each element."""
    return np.arange(int(np.prod(shape, dtype=np.int64))).reshape(shape)


def moved(index: Callable[[], Array]) -> Source:
    """Make a source from an array of the result's shape with flat indices of the operand, computed on first use."""
    made = cache(lambda: np.ascontiguousarray(index()).reshape(-1))
    return lambda lanes: made()[lanes][:, None]


def pointwise(operand: Shape, result: Shape) -> Source:
    """Make the source of an elementwise operation with broadcasting; `everything` where the shapes do not broadcast."""
    if operand == result:
        return lambda lanes: lanes[:, None]
    if not broadcasts(operand, result):
        return everything(operand)
    return moved(lambda: np.broadcast_to(numbered(operand), result))


def broadcasts(operand: Shape, result: Shape) -> bool:
    """Return whether the operand's shape broadcasts to the result's."""
    pairs = zip(reversed(operand), reversed(result), strict=False)
    return len(operand) <= len(result) and all(a in (1, b) for a, b in pairs)


def where(source: Source, chosen: Array) -> Source:
    """Restrict a source to the elements of the result that are `chosen`, a mask of its shape; others have none."""
    flat = np.ascontiguousarray(chosen).reshape(-1)
    return lambda lanes: np.where(flat[lanes][:, None], source(lanes), -1)


def everything(operand: Shape) -> Source:
    """Make the source of an operation in which every element of the result depends on the whole operand."""
    size = int(np.prod(operand, dtype=np.int64))
    return lambda lanes: np.broadcast_to(np.arange(size), (len(lanes), size))


def along(operand: Shape, axes: tuple[int, ...]) -> Source:
    """Make the source of a reduction along some axes; along all if no axis is given."""
    if not operand:
        return lambda lanes: lanes[:, None]
    axes = axes or tuple(range(len(operand)))
    last = tuple(range(-len(axes), 0))
    count = int(np.prod([operand[axis] for axis in axes], dtype=np.int64))
    rows = cache(lambda: np.moveaxis(numbered(operand), axes, last).reshape(-1, count))
    return lambda lanes: rows()[lanes]


def within(operand: Shape, axes: tuple[int, ...]) -> Source:
    """Make the source of a softmax or normalisation: each element depends on its row along `axes`; shapes are equal."""
    kept = tuple(1 if axis in axes else side for axis, side in enumerate(operand))
    reduced, spread = along(operand, axes), pointwise(kept, operand)
    return lambda lanes: reduced(spread(lanes)[:, 0])


def upto(operand: Shape, axis: int, reverse: bool) -> Source:
    """Make the source of a scan: each element depends on those before it along an axis, or after it if `reverse`."""
    whole = within(operand, (axis,))

    def source(lanes: Array) -> Array:
        position, row = np.unravel_index(lanes, operand)[axis], whole(lanes)
        steps = np.arange(row.shape[1])
        seen = steps >= position[:, None] if reverse else steps <= position[:, None]
        return np.where(seen, row, -1)

    return source


def of_dot(a: Shape, b: Shape) -> tuple[Source, Source]:
    """Make the sources of `a @ b`: each element depends on a row of a [..., M, K] and on a column of b [..., K, N]."""
    (m, k), n = a[-2:], b[-1]
    return (
        lambda lanes: lanes[:, None] // n * k + np.arange(k),
        lambda lanes: (lanes // (m * n) * (k * n) + lanes % n)[:, None] + np.arange(k) * n,
    )


def of_array(addresses: Array) -> Addresses:
    """Return addresses that are given as an array."""
    flat = addresses.reshape(-1).astype(np.int64)
    return lambda lanes: flat[lanes]


def swapped(value: Any, by: Mapping[int, Any]) -> Any:
    """Return the value with objects in it replaced; `by` maps the id of an object to its replacement."""
    if id(value) in by:
        return by[id(value)]
    if type(value) is dict:
        return {key: swapped(x, by) for key, x in value.items()}
    if isinstance(value, tuple | list):  # pytree takes longer than the operation that is repeated
        parts = [swapped(x, by) for x in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return value
