"""The addresses of an access, grouped into runs of neighbours where its lanes are neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from lastbit.interpret.numpy_formats import Array


def core(x: Array) -> Array:
    """Return `x` without the repetitions of broadcasting: one element along each axis on which all are the same."""
    if 0 not in x.strides:
        return x
    first: Array = x[tuple([slice(1) if stride == 0 else slice(None) for stride in x.strides])]
    return first


def broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast as `np.broadcast_to`: the same view, without checks of arguments that take most of its time."""
    if x.shape == shape:
        return x
    view: Array = _nditer((x,), _ANY_ARRAY, ("readonly",), None, "C", "no", None, shape).itviews[0]
    return view


_nditer: Any = np.nditer
_ANY_ARRAY = ("multi_index", "refs_ok", "zerosize_ok")


def advanced(addresses: Array, count: Array, width: int) -> Array:
    """Return addresses plus `count` elements of `width` bytes."""
    moved: Array = addresses + np.uint64(width) * core(count).astype(np.uint64)
    return moved


@dataclass(frozen=True)
class OffsetAddresses:
    """The addresses `base` + `count` · `width` bytes, not yet added up; a `count` of None stands for 0."""

    base: Array
    count: Array | None
    width: int

    @property
    def all(self) -> Array:
        """The address of every lane."""
        return self.base if self.count is None else advanced(self.base, self.count, self.width)

    @property
    def turned(self) -> OffsetAddresses | None:
        """These addresses with the last two axes swapped, if lanes are neighbours along the last but one alone."""
        if self.count is None or self.base.ndim < 2 or self.count.ndim < 2 or self.starts is not None:
            return None
        swapped = OffsetAddresses(self.base.swapaxes(-1, -2), self.count.swapaxes(-1, -2), self.width)
        return None if swapped.starts is None else swapped

    @cached_property
    def starts(self) -> Array | None:
        """The address of the first lane along the last axis, if all others follow it without a gap."""
        if self.count is None:
            return None
        base, count = core(self.base), core(self.count)
        moving, still, step = (count, base, 1) if base.shape[-1] == 1 else (base, count, self.width)
        if still.shape[-1] != 1 or moving.shape[-1] < 2 or not (moving[..., 1:] - moving[..., :-1] == step).all():
            return None
        shape = np.broadcast_shapes(self.base.shape[:-1], self.count.shape[:-1])
        return broadcast(advanced(base[..., 0], count[..., 0], self.width), shape)


@dataclass(frozen=True)
class Lanes:
    """The unmasked lanes of an access, as runs of `run` neighbours along the last axis.

    Attributes:
        starts: address of the first lane of every run; without the last axis unless the runs are single lanes.
        run: lanes in each.
        live: the runs that are not masked; None for all of them.
    """

    starts: Array
    run: int
    live: Array | None

    @property
    def axes(self) -> int:
        """Axes of the lanes that `starts` does not have."""
        return int(self.run > 1)


def lanes_of(addresses: OffsetAddresses, mask: Array | None) -> Lanes:
    """Return the lanes of an access that `mask` leaves, as runs of neighbours where that is possible."""
    if (starts := addresses.starts) is not None:
        length = max(addresses.base.shape[-1], addresses.count.shape[-1])  # type: ignore[union-attr]
        if mask is None:
            return Lanes(starts, length, None)
        # Every row begins with as many unmasked lanes, more than one, or has none.
        lengths = np.count_nonzero(mask, axis=-1)
        run = int(lengths.max())
        live = lengths == run
        if run > 1 and (live | (lengths == 0)).all() and np.count_nonzero(mask[..., :run]) == lengths.sum():
            return Lanes(starts, run, None if live.all() else live)
    return Lanes(addresses.all, 1, mask)


def windows(view: Array, run: int) -> Array:
    """Return every `run` neighbours of a one-dimensional array as a row of a writable view."""
    shape, strides = (len(view) - run + 1, run), view.strides * 2
    return np.ndarray(shape, view.dtype, view, 0, strides)


def first_of(lanes: Lanes) -> int | None:
    """Return the address of the first unmasked lane; None if there is none."""
    if lanes.live is None:
        return int(lanes.starts.item(0))
    index = np.unravel_index(int(lanes.live.argmax()), lanes.live.shape)
    if not lanes.live[index]:
        return None
    behind = lanes.live.ndim - lanes.starts.ndim
    position = ((0,) * -behind + tuple(map(int, index)))[max(behind, 0) :]
    return int(lanes.starts[position])


def ranges_of(index: Array, lanes: Lanes, rank: int | None) -> tuple[Any, Any]:
    """Return the lowest and highest index of the runs' first lanes, for every program, or for all if `rank` is None."""
    low = index if lanes.live is None else np.where(lanes.live, index, 1 << 58)
    high = index if lanes.live is None else np.where(lanes.live, index, -1)
    axes = None if rank is None else tuple(range(lanes.axes - rank, 0))
    return low.min(axes), high.max(axes)


def taken(view: Array, index: Array, lanes: Lanes, mask: Array | None, other: Array) -> Array:
    """Return the elements of `view` at the lanes, and `other` where they are masked."""
    if lanes.run == 1:
        values = view.take(index, mode="clip")
        return values if mask is None else np.where(mask, values, other)
    rows = windows(view, lanes.run)
    if mask is None:
        return rows[index]
    index, live = np.broadcast_arrays(index, True if lanes.live is None else lanes.live)
    length = mask.shape[-1]
    found = np.empty((*index.shape, length), view.dtype)
    found[...] = other
    if lanes.live is None:
        found[..., : lanes.run] = rows[index]
    else:
        found[live, : lanes.run] = rows[index[live]]
    return found


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
