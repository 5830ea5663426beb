"""Functions of arrays that may have a leading axis of programs before the axes of one program."""

from __future__ import annotations

import numpy as np

from lastbit.interpret.formats import Array
from lastbit.interpret.lanes import broadcast


def programs_of(x: Array, rank: int) -> tuple[int, ...]:
    """Return the sizes of the axes of programs of `x`, which precede the `rank` axes of one program."""
    return x.shape[: x.ndim - rank]


def filled(x: Array, shape: tuple[int, ...]) -> Array:
    """Fill a block of `shape` with the value of a scalar."""
    programs = x.shape[:-1]
    return broadcast(x.reshape(programs + (1,) * len(shape)), programs + shape)


def alike(rank: int, *arrays: Array) -> list[Array]:
    """Broadcast all arrays to the axes of programs that any of them has."""
    programs = max((programs_of(x, rank) for x in arrays), key=len)
    return [broadcast(x, programs + x.shape[x.ndim - rank :]) for x in arrays]


def histogram(bins: int, data: Array, mask: Array | None = None) -> Array:
    """Count how often 0, 1, … `bins` - 1 occur along the last axis; values outside count for nothing."""
    data, counted = np.broadcast_arrays(data, True if mask is None else mask)
    counted = counted & (data >= 0) & (data < bins)
    programs = data.shape[:-1]
    offset = np.arange(np.prod(programs, dtype=int)).reshape(*programs, 1) * bins
    found = np.bincount((data.astype(np.int64) + offset)[counted], minlength=offset.size * bins)
    return found.reshape(*programs, bins).astype(np.int32)
