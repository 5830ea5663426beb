"""Races: a place in memory that two programs of a launch use in an order which a GPU does not promise.

Two programs store different bytes there, without atomics; or one loads what another one stores. Programs run one after
the other, and every byte knows who loaded and who stored it last. A program that has done an atomic operation on a word
after another one did counts as later than that one: what it uses then is no race. (Whether the other one's store came
before its atomic operation is not looked at.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from lastbit.interpret.address_ranges import BYTE, Given, view
from lastbit.interpret.faults import Fault
from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.places import Place

NOBODY = -1


_Use = tuple[tuple[int, ...], Place | None]
"""A program, and the place of one of its operations."""


@dataclass
class _Bytes:
    """For every byte from `start` on, the uses that loaded it first and last, stored it last, and changed it last."""

    start: int
    loaded_first: Array
    loaded_last: Array
    stored: Array
    changed: Array


@dataclass
class Races:
    """The uses of memory of one launch.

    Attributes:
        note: takes every race found.
    """

    note: Callable[[Fault], None]
    _uses: list[_Use] = field(default_factory=list)
    _programs: list[int] = field(default_factory=list)
    _numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    _regions: dict[int, _Bytes] = field(default_factory=dict)
    _atomic: dict[int, set[int]] = field(default_factory=dict)
    _before: dict[int, set[int]] = field(default_factory=dict)

    def loads(self, program: tuple[int, ...], place: Place | None, tensor: Given, offset: Array) -> None:
        """Record that a program loads the bytes at these offsets in a tensor, and report races."""
        memory, where, number = self._used(program, place, tensor, offset)
        self._check(memory.changed[where], number, where, tensor, "stores what", "loads")
        new = where[memory.loaded_first[where] == NOBODY]
        memory.loaded_first[new] = memory.loaded_last[where] = number

    def stores(
        self, program: tuple[int, ...], place: Place | None, tensor: Given, offset: Array, new: Array, atomic: bool
    ) -> None:
        """Record that a program is about to store the bytes `new`, or to update memory if `atomic`; report races."""
        memory, where, number = self._used(program, place, tensor, offset)
        if atomic:  # programs that did one at these addresses before count as earlier
            before = self._before.setdefault(self._programs[number], set())
            for address in np.unique((memory.start + where) & ~3).tolist():
                others = self._atomic.setdefault(address, set())
                before |= others.union(*(self._before.get(other, set()) for other in others))
                others.add(self._programs[number])
            return
        changed = where[view(memory.start, len(memory.stored), BYTE)[where] != new]
        for loaded in (memory.loaded_first, memory.loaded_last):
            self._check(loaded[changed], number, changed, tensor, "loads what", "stores")
        self._check(memory.stored[changed], number, changed, tensor, "stores something else where", "stores")
        memory.stored[where] = number
        memory.changed[changed] = number

    def _used(
        self, program: tuple[int, ...], place: Place | None, tensor: Given, offset: Array
    ) -> tuple[_Bytes, Array, int]:
        self._uses.append((program, place))
        self._programs.append(self._numbers.setdefault(program, len(self._numbers)))
        memory = self._regions.get(tensor.region)
        if memory is None:
            start, stop = tensor.shared
            memory = _Bytes(start, *(np.full(stop - start, NOBODY, np.int32) for _ in range(4)))
            self._regions[tensor.region] = memory
        return memory, offset + (tensor.start - memory.start), len(self._uses) - 1

    def _check(self, earlier: Array, number: int, where: Array, tensor: Given, did: str, does: str) -> None:
        me = self._programs[number]
        known = self._before.get(me, set()) | {me}
        used = earlier != NOBODY
        numbers, first = np.unique(earlier[used], return_index=True)
        for other, at in zip(numbers.tolist(), first.tolist(), strict=True):
            if self._programs[other] not in known:
                (theirs, there), (mine, here) = self._uses[other], self._uses[number]
                address = tensor.shared[0] + int(where[used][at])
                sentence = (
                    f"program {list(theirs)} {did} program {list(mine)} {does}, in no promised order: element "
                    f"{(address - tensor.start) // tensor.itemsize:,} of {tensor}; {there} and {here}"
                )
                self.note(Fault("race", tensor.name, here, sentence, address, tensor.start))
                return
