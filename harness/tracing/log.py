"""The log of a recorded kernel: its events, launches and writes, in order; which write an address was last part of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lastbit.errors import LastbitError
from lastbit.interpret.numpy_formats import Array
from lastbit.numerics.residues import Residues
from lastbit.tracing.events import Again, Event, Operand, Origin, Places, Program, TracedLaunch, dtype_name
from lastbit.tracing.lanes import Addresses

# 2 GB beside the tensors: what a laptop has to spare. A kernel on the smallest case that fails takes some MB.
LIMIT = 2 << 30
"""Bytes of values beyond which no more are kept, and `Log.check` raises."""


class TraceLimit(LastbitError):
    """The values of a trace would fill the memory."""


@dataclass(frozen=True, eq=False)
class Write:
    """A write of one or more elements to memory.

    Attributes:
        number: when; see `Event.number`.
        first, last: the lowest and the highest address of an element.
        find: addresses → flat indices of the elements there, -1 for none.
        event: what wrote it, if that was recorded.
        program, places: who wrote it and where; the program is None for PyTorch.
        adds: it changed what was there before, atomically.
    """

    number: int
    first: int
    last: int
    width: int
    find: Callable[[Array], Array]
    event: Event | None = None
    program: Program | None = None
    places: Places = ()
    adds: bool = False


def _finder(addresses: Array, lanes: Array | None, width: int) -> Callable[[Array], Array]:
    """Make `Write.find` of elements at `addresses` [n] with flat indices `lanes`, None for 0 to n-1.

    Addresses that are evenly spaced, as nearly always, are not kept.
    """
    start, count, steps = int(addresses[0]), len(addresses), np.diff(addresses)
    step, numbers, ordered = int(steps[0]) if len(steps) else 0, lanes, None
    if step <= 0 or (steps != step).any():
        numbers = np.argsort(addresses, kind="stable")
        ordered, numbers = addresses[numbers], numbers if lanes is None else lanes[numbers]

    def find(wanted: Array) -> Array:
        if ordered is None:
            place, rest = np.divmod(wanted - start, step)
        else:
            place = np.searchsorted(ordered, wanted, side="right") - 1
            rest = wanted - ordered[place]
        inside = (place >= 0) & (place < count) & (rest < width)
        return np.where(inside, place if numbers is None else numbers[np.clip(place, 0, count - 1)], -1)

    return find


@dataclass
class Log:
    """The record of a call of a kernel.

    Attributes:
        wanted: programs of launches all of whose operations are kept; of others only where they write.
        only: the others do not run.
        events, launches: what happened.
        writes: who wrote where, wanted or not.
        handed: number of an event → the function that was handed its value and handed it on, and where that was called.
        interpreting: a program of Triton runs, so that what torch does meanwhile is not the kernel's.
    """

    wanted: Collection[Program] = ()
    only: bool = False
    events: list[Event] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    launches: list[TracedLaunch] = field(default_factory=list)
    handed: dict[int, Places] = field(default_factory=dict)
    interpreting: bool = False
    bytes: int = 0
    _number: int = 0
    _occurrence: int = 0
    _last: Places = ()
    _bounds: Array = field(default_factory=lambda: np.zeros((3, 0), np.int64))

    def next(self) -> int:
        """Return the next number in time."""
        self._number += 1
        return self._number

    def turn(self) -> None:
        """Begin the next round of a loop, so that the same expression counts as another occurrence."""
        self._last = ()

    def begin(self, name: str, numbers: frozenset[float]) -> TracedLaunch:
        """Record the launch of a Triton kernel with these numbers among its arguments."""
        self.launches.append(TracedLaunch(len(self.launches), name, numbers))
        return self.launches[-1]

    def add(
        self,
        name: str,
        at: Places,
        values: Array,
        dtype: Any,
        operands: tuple[Operand, ...] = (),
        *,
        program: Program | None = None,
        origin: Origin = Origin.MEMORY,
        again: Again | None = None,
        residues: Residues | None = None,
    ) -> Event:
        """Record an operation that computed or stored `values`."""
        if at != self._last:
            self._occurrence, self._last = self._occurrence + 1, at
        launch = None if program is None else self.launches[program[0]]
        if 0 not in values.strides:  # broadcast, and no memory of its own
            self.bytes += values.nbytes
        kept = values if self.bytes <= LIMIT else np.zeros((), values.dtype)
        own = self.next(), name, at, self._occurrence, dtype_name(dtype), kept
        self.events.append(Event(*own, operands, program, launch, origin, again, residues))
        return self.events[-1]

    def check(self) -> None:
        """Raise `TraceLimit` if the values exceeded the limit; only after the kernel's end, since it could catch it."""
        if self.bytes > LIMIT:
            raise TraceLimit(
                f"the values of this trace take {self.bytes >> 20:,} MiB, and {LIMIT >> 20:,} MiB are the limit; "
                "trace a case with fewer rows or columns"
            )

    def written(
        self,
        event: Event | None,
        addresses: Array,
        lanes: Array | None,
        width: int,
        *,
        program: Program | None = None,
        at: Places = (),
        adds: bool = False,
    ) -> None:
        """Record a write to `addresses` [n] of the elements with flat indices `lanes`, None for 0 to n-1."""
        if not addresses.size:
            return
        number = self.next() if event is None else event.number
        where = np.asarray(addresses, np.int64)
        self.bytes += where.nbytes
        bounds, found = (int(where.min()), int(where.max())), _finder(where, lanes, width)
        self.writes.append(Write(number, *bounds, width, found, event, program, at, adds))

    def last(self, addresses: Array, before: int) -> Iterator[tuple[Write, Array, Array]]:
        """Yield the last writes to these addresses before a time.

        Each comes with the positions in `addresses` that it wrote to, and the flat indices of its elements there.
        """
        left = np.arange(len(addresses))
        if not len(left):
            return
        if self._bounds.shape[1] != len(self.writes):
            rows = [(w.number, w.first, w.last + w.width - 1) for w in self.writes]
            self._bounds = np.array(rows, np.int64).reshape(-1, 3).T
        number, first, last = self._bounds
        near = (number < before) & (first <= addresses.max()) & (last >= addresses.min())
        for i in np.nonzero(near)[0][::-1]:
            found = self.writes[i].find(addresses[left])
            if (hit := found >= 0).any():
                yield self.writes[i], left[hit], found[hit]
                left = left[~hit]
            if not len(left):
                return

    def sources(self, memory: Addresses, lanes: Array, before: int) -> Iterator[tuple[Event, Array, Array]]:
        """Yield the events that last wrote the elements at `lanes`, -1 for none: each with positions and elements."""
        known = np.nonzero(lanes >= 0)[0]
        for write, positions, elements in self.last(memory.at(lanes[known]), before):
            if write.event is not None:
                yield write.event, known[positions], elements
