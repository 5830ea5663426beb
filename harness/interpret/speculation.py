"""Whether programs that ran together did what they do one after the other: a memory of who touched what.

In a batch every operation runs for all programs before the next one does. That gives what the sequential run gives
unless two programs touch the same bytes in different operations, and one of them writes. Then a `Conflict` is raised,
and the batch is taken back. Within one operation the programs keep their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from harness.interpret.formats import Array
from harness.interpret.given import BYTE, Given, view

NOBODY, SEVERAL = -1, -2


class Conflict(Exception):
    """Programs that run together may have given something else than one after the other."""


@dataclass
class _Region:
    """A range of memory that overlapping tensors share.

    Attributes:
        start, saved: its first address, and the bytes that it held before the first store; None without one.
        operations: how many touched it.
        low, high: of every program, the lowest and highest byte that it touched; low > high for none.
        readers, writers: of every byte, the program that read it, and wrote it; kept for an exact answer only.
    """

    start: int
    stop: int
    low: Array
    high: Array
    saved: Array | None = None
    operations: int = 0
    readers: Array | None = None
    writers: Array | None = None


@dataclass
class Speculation:
    """What a batch of programs has done so far.

    Attributes:
        programs: how many there are.
        exact: who touched what is known byte by byte; otherwise from the lowest to the highest byte.
        now: the programs whose operation is run.
    """

    programs: int
    exact: bool
    now: Array
    _regions: dict[int, _Region] = field(default_factory=dict)

    def touch(self, tensor: Given, low: Array, high: Array, bytes_of: Bytes, writes: bool) -> None:
        """An operation of the programs `now` is about to touch `tensor`.

        `low` and `high` are the lowest and highest byte of each program, from the tensor's first on (low > high for
        none); `bytes_of` gives all of them. Raises `Conflict`.
        """
        region = self._region(tensor)
        if writes and region.saved is None:
            region.saved = view(region.start, region.stop - region.start, BYTE).copy()
        offset, touched = tensor.start - region.start, low <= high
        before_low, before_high = region.low[self.now], region.high[self.now]
        after_low = np.where(touched, np.minimum(before_low, low + offset), before_low)
        after_high = np.where(touched, np.maximum(before_high, high + offset), before_high)
        region.low[self.now], region.high[self.now] = after_low, after_high
        region.operations += 1
        if self.exact:
            _claim(region, bytes_of, offset, writes)
        elif region.saved is not None and region.operations > 1 and not _disjoint(region.low, region.high):
            raise Conflict

    def undo(self) -> None:
        """Give memory the bytes that it had before."""
        for region in self._regions.values():
            if region.saved is not None:
                view(region.start, region.stop - region.start, BYTE)[:] = region.saved

    def _region(self, tensor: Given) -> _Region:
        if tensor.region not in self._regions:
            start, stop = tensor.shared
            low, high = np.full(self.programs, stop - start), np.full(self.programs, -1)
            self._regions[tensor.region] = _Region(start, stop, low, high)
        return self._regions[tensor.region]


Bytes = Callable[[], tuple[Array, Array]]
"""Offsets of bytes from the first one of a tensor, and the program that touches each."""


def _disjoint(low: Array, high: Array) -> bool:
    """No program's range overlaps another one's."""
    order = np.argsort(low)
    return bool((np.maximum.accumulate(high[order])[:-1] < low[order][1:]).all())


def _claim(region: _Region, bytes_of: Bytes, offset: int, writes: bool) -> None:
    if region.readers is None or region.writers is None:
        region.readers = np.full(region.stop - region.start, NOBODY, np.int32)
        region.writers = region.readers.copy()
    where, who = bytes_of()
    where = where + offset
    written = region.writers[where]
    clash = (written != NOBODY) & (written != who)
    if writes:
        read = region.readers[where]
        clash |= (read != NOBODY) & (read != who)
        region.writers[where] = who
    else:
        region.readers[where] = np.where(region.readers[where] == NOBODY, who, region.readers[where])
        region.readers[where[region.readers[where] != who]] = SEVERAL
    if clash.any():
        raise Conflict
