"""Addresses of elements, and the writes that put them into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lastbit.interpret.numpy_formats import Array
from lastbit.tracing.kernel_frames import Places
from lastbit.tracing.lanes import Shape

if TYPE_CHECKING:
    from lastbit.tracing.events import Event, Program, TracedLaunch

Find = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Addresses:
    """Addresses of the elements of a block or tensor.

    Attributes:
        at: flat indices of elements → their addresses.
        width: bytes of an element.
    """

    at: Callable[[Array], Array]
    width: int


def of_layout(start: int, shape: Shape, strides: Sequence[int], width: int) -> Addresses:
    """Return the addresses of a strided tensor; strides in elements, `width` in bytes."""

    def at(lanes: Array) -> Array:
        index = np.unravel_index(lanes, shape) if shape else ()
        steps = (i * stride for i, stride in zip(index, strides, strict=True))
        return np.asarray(sum(steps, np.zeros(len(lanes), np.int64)) * width + start, np.int64)

    return Addresses(at, width)


def of_array(addresses: Array, width: int) -> Addresses:
    """Return addresses that are given as an array."""
    flat = addresses.reshape(-1).astype(np.int64)
    return Addresses(lambda lanes: flat[lanes], width)


@dataclass(frozen=True, eq=False)
class Write:
    """A write of one or more elements to memory.

    Attributes:
        number: when; see `Event.number`.
        first, last: the lowest and the highest address of an element.
        find: addresses → flat indices of the elements there, -1 for none.
        event: what wrote it, if that was recorded.
        program, launch, places: who wrote it and where; the program is None for PyTorch.
        adds: it changed what was there before, atomically.
    """

    number: int
    first: int
    last: int
    width: int
    find: Find
    event: Event | None = None
    program: Program | None = None
    launch: TracedLaunch | None = None
    places: Places = ()
    adds: bool = False


def finder(addresses: Array, lanes: Array | None, width: int) -> Find:
    """Make a function that finds addresses in elements at `addresses` [n], of flat indices `lanes`, None for 0 to n-1.

    Addresses that are evenly spaced, as nearly always, are not kept.
    """
    steps = np.diff(addresses)
    if len(steps) and steps[0] > 0 and (steps == steps[0]).all():
        return _evenly(int(addresses[0]), int(steps[0]), len(addresses), lanes, width)
    order = np.argsort(addresses, kind="stable")
    ordered = addresses[order]
    numbers = order if lanes is None else lanes[order]

    def find(wanted: Array) -> Array:
        place = np.searchsorted(ordered, wanted, side="right") - 1
        inside = (place >= 0) & (wanted < ordered[place] + width)
        return np.where(inside, numbers[place], -1)

    return find


def _evenly(start: int, step: int, count: int, lanes: Array | None, width: int) -> Find:
    def find(wanted: Array) -> Array:
        place, rest = np.divmod(wanted - start, step)
        inside = (place >= 0) & (place < count) & (rest < width)
        number = place if lanes is None else lanes[np.clip(place, 0, count - 1)]
        return np.where(inside, number, -1)

    return find


@dataclass
class Writes:
    """All writes to memory, in order."""

    all: list[Write] = field(default_factory=list)
    _bounds: Array | None = None

    def add(self, write: Write) -> None:
        self.all.append(write)
        self._bounds = None

    def last(self, addresses: Array, before: int) -> Iterator[tuple[Write, Array, Array]]:
        """Yield the last writes to these addresses before a time.

        Each comes with the positions in `addresses` that it wrote to, and the flat indices of its elements there.
        """
        left = np.arange(len(addresses))
        if not len(left):
            return
        number, first, last = self._table
        near = (number < before) & (first <= addresses.max()) & (last >= addresses.min())
        for i in np.nonzero(near)[0][::-1]:
            found = self.all[i].find(addresses[left])
            if (hit := found >= 0).any():
                yield self.all[i], left[hit], found[hit]
                left = left[~hit]
            if not len(left):
                return

    @property
    def _table(self) -> Array:
        if self._bounds is None or self._bounds.shape[1] != len(self.all):
            rows = [(w.number, w.first, w.last + w.width - 1) for w in self.all]
            self._bounds = np.array(rows, np.int64).reshape(-1, 3).T
        return self._bounds
