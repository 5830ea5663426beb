"""The check that programs run together gave what they give one after the other: a record of who touched which memory.

In a batch every operation runs for all programs before the next one does. That gives what the sequential run gives
unless two programs touch the same bytes in different operations, and one of them writes. Then a `Conflict` is raised,
and the batch is taken back. Within one operation the programs keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lastbit.interpret.address_ranges import Given
from lastbit.interpret.numpy_formats import Array

NOBODY, SEVERAL = 0, -1


class Conflict(Exception):
    """An error: programs that ran together may have given another result than one after the other."""


@dataclass
class _Region:
    """A range of memory that overlapping tensors share.

    Attributes:
        start, stop: its first address, and the first one behind it.
        low, high: of every program, the lowest and highest byte that it touched; low > high for none.
        stored: something was stored there.
        operations: how many touched it.
        users: of every unit, the program that read it, and the one that wrote it, counted from 1; for an exact answer.
    """

    start: int
    stop: int
    low: Array
    high: Array
    stored: bool = False
    operations: int = 0
    users: tuple[Array, Array] | None = None


@dataclass
class Speculation:
    """The work of a batch of programs so far.

    Attributes:
        programs: how many there are.
        exact: who touched what is known unit by unit; otherwise from the lowest to the highest byte.
        now: the programs whose operation is run.
    """

    programs: int
    exact: bool
    now: Array
    _regions: dict[int, _Region] = field(default_factory=dict)
    _before: list[tuple[Array, Array, Array]] = field(default_factory=list)

    def touch(self, tensor: Given, low: Array, high: Array, units: Units, writes: bool) -> None:
        """Record that an operation of the programs `now` is about to touch `tensor`.

        `low` and `high` are the lowest and highest byte of each program, from the tensor's first on (low > high for
        none); `units` gives all of them. Raises `Conflict`.
        """
        region = self._regions.get(tensor.region)
        if region is None:
            nothing = np.full(self.programs, tensor.shared[1] - tensor.shared[0]), np.full(self.programs, -1)
            region = self._regions[tensor.region] = _Region(*tensor.shared, *nothing)
        region.stored |= writes
        offset, touched = tensor.start - region.start, low <= high
        before_low, before_high = region.low[self.now], region.high[self.now]
        after_low = np.where(touched, np.minimum(before_low, low + offset), before_low)
        after_high = np.where(touched, np.maximum(before_high, high + offset), before_high)
        region.low[self.now], region.high[self.now] = after_low, after_high
        region.operations += 1
        if self.exact:
            if region.users is None:
                size = region.stop - region.start
                region.users = np.zeros(size, np.int32), np.zeros(size, np.int32)
            readers, writers = region.users
            where, who = units()
            where, who = where + (offset // tensor.unit), who + 1
            written = writers[where]
            clash = (written != NOBODY) & (written != who)
            if writes:
                read = readers[where]
                clash |= (read != NOBODY) & (read != who)
                writers[where] = who
            else:
                readers[where] = np.where(readers[where] == NOBODY, who, readers[where])
                readers[where[readers[where] != who]] = SEVERAL
            if clash.any():
                raise Conflict
        elif region.stored and region.operations > 1:
            order = np.argsort(region.low)
            reached = np.maximum.accumulate(region.high[order])
            if not (reached[:-1] < region.low[order][1:]).all():  # one program's range overlaps another one's
                raise Conflict

    def save(self, memory: Array, index: Array) -> None:
        """Save the memory at these indices, which is about to be overwritten."""
        self._before.append((memory, index, memory[index]))

    def undo(self) -> None:
        """Restore the memory that was saved before it was overwritten."""
        for memory, index, before in reversed(self._before):
            memory[index] = before


Units = Callable[[], tuple[Array, Array]]
"""Offsets in units from the first one of a tensor, and the program that touches each."""
