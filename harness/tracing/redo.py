"""The recorded operations of a kernel done once more, from where some of them give other values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lastbit.interpret.formats import Array
from lastbit.tracing.cells import Ancestry
from lastbit.tracing.events import Event, Operand

Values = Sequence[Array | None]
Change = Callable[[Event, Values], Array]
"""An event and the values of its operands, None for those that are as they were → what it gives instead."""


class Unrepeatable(Exception):
    """An operation cannot be done again from what was recorded."""


@dataclass(frozen=True, eq=False)
class Redo:
    """Recorded events that led to some, to be done again.

    Attributes:
        ancestry: the events, and what wrote where.
        ends: numbers of those whose values are wanted.
    """

    ancestry: Ancestry
    ends: Collection[int]
    _read: dict[tuple[int, int], list[tuple[Array, int, Array]]] = field(default_factory=dict)

    def run(self, changes: Mapping[int, Change]) -> dict[int, Array]:
        """Do the events with these numbers otherwise, and all that follows from them; give what changed, by number.

        Raises:
            Unrepeatable: an operation on the way cannot be done again.
        """
        changed: dict[int, Array] = {}
        with np.errstate(all="ignore"):
            for number in self._following(changes):
                event, change = self.ancestry.events[number], changes.get(number)
                if change is None and not self._sources[number] & changed.keys():
                    continue
                try:
                    values = [self._given(event, place, changed) for place in range(len(event.operands))]
                    made = self.again(event, values) if change is None else change(event, values)
                except Unrepeatable:
                    raise
                except Exception as error:  # whatever an operation makes of values that it never had
                    raise Unrepeatable(str(error)) from error
                if made.shape != event.values.shape or made.tobytes() != event.values.tobytes():
                    changed[number] = made
        return changed

    def again(self, event: Event, values: Values) -> Array:
        """Do one event again.

        Raises:
            Unrepeatable: it was told where to read by what has changed.
        """
        if all(own is None for own in values):
            return event.values
        if event.again is not None:
            of_torch = any(operand.size for operand in event.operands)
            pairs = zip(event.operands, values, strict=True)
            return event.again([self.whole(event, o) if of_torch and own is None else own for o, own in pairs])
        if any(own is not None for operand, own in zip(event.operands, values, strict=True) if operand.address):
            raise Unrepeatable("an address depends on it")
        made = event.values.astype(np.result_type(event.values, *(own for own in values if own is not None)))
        flat, lanes = made.reshape(-1), np.arange(made.size)
        for operand, own in zip(event.operands, values, strict=True):
            if own is not None:
                source = operand.source(lanes)[:, 0]
                flat[source >= 0] = own.reshape(-1)[lanes if operand.memory else source][source >= 0]
        return made

    def whole(self, event: Event, operand: Operand) -> Array | None:
        """What all elements of an operand of PyTorch's were; None for a number.

        Raises:
            Unrepeatable: something wrote there that was not recorded.
        """
        if not operand.size:
            return None
        return self._memory(event, event.operands.index(operand), {}, np.arange(operand.size))

    def _given(self, event: Event, place: int, changed: Mapping[int, Array]) -> Array | None:
        """The values of an operand if they have changed."""
        operand = event.operands[place]
        if operand.event is not None:
            return changed.get(operand.event.number)
        if operand.memory is None or not {n for _, n, _ in self._writers(event, place)} & changed.keys():
            return None
        size = operand.size or event.values.size
        return self._memory(event, place, changed, np.arange(size))

    def _memory(self, event: Event, place: int, changed: Mapping[int, Array], lanes: Array) -> Array:
        """What an operand read from memory: for each element of a tensor, or of a load's result."""
        operand = event.operands[place]
        before = np.zeros(len(lanes)) if operand.size else event.values.reshape(-1)
        made, left = before.astype(np.float64), np.ones(len(lanes), np.bool_)
        for positions, number, elements in self._writers(event, place):
            source = self._events[number]
            made[positions] = changed.get(number, source.values).reshape(-1)[elements].astype(np.float64)
            left[positions] = False
        if left.any() and operand.size:
            if operand.values is None:
                raise Unrepeatable("nothing that was recorded wrote there")
            made[left] = operand.values.reshape(-1)[left].astype(np.float64)
        return made if operand.size else made.astype(_wide_enough(made, event.values.dtype))

    def _writers(self, event: Event, place: int) -> list[tuple[Array, int, Array]]:
        """For an operand in memory: which of its elements which event wrote, and which of the event's they are."""
        key = event.number, place
        if key not in self._read:
            operand = event.operands[place]
            assert operand.memory is not None
            positions = np.arange(operand.size or event.values.size)
            lanes = positions if operand.size else operand.source(positions)[:, 0]
            taken = np.nonzero(lanes >= 0)[0]
            found = self.ancestry.log.writes.last(operand.memory.at(lanes[taken]), event.number)
            self._read[key] = [(taken[at], w.event.number, own) for w, at, own in found if w.event is not None]
        return self._read[key]

    @cached_property
    def _events(self) -> dict[int, Event]:
        return {event.number: event for event in self.ancestry.log.events}

    @cached_property
    def _sources(self) -> dict[int, set[int]]:
        """Number of an event → those of the events that it computed from, or was told where to read by."""
        found: dict[int, set[int]] = {}
        for number, event in self.ancestry.events.items():
            found[number] = {operand.event.number for operand in event.operands if operand.event is not None}
            found[number] |= {edge.event.number for edge in self.ancestry.edges[number]}
        return found

    def _following(self, changes: Collection[int]) -> list[int]:
        """The events from the first of these on, in order."""
        first = min(changes)
        return [number for number in self._order if number >= first]

    @cached_property
    def _order(self) -> list[int]:
        return sorted(self.ancestry.events)


def _wide_enough(values: Array, dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The format of a load, or fp32 where it was narrower and the values are none of its numbers."""
    if dtype.itemsize >= 4 or np.array_equal(values.astype(dtype).astype(np.float64), values, equal_nan=True):
        return dtype
    return np.dtype(np.float32)
