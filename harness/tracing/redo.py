"""Replay of a kernel's recorded operations, some of them changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from lastbit.interpret.numpy_formats import Array
from lastbit.numerics.residues import Residues
from lastbit.tracing.ancestry import Ancestry
from lastbit.tracing.events import Event, Made

Values = Sequence[Made | None]
Change = Callable[["Redo", Event, Values], Made]
"""An event and what its operands are, None for those that are as they were → what it gives instead."""


Writer = tuple[Array, Event, Array]
"""Positions that were written, the event that wrote there, and which of its elements."""


class Unrepeatable(Exception):
    """An operation cannot be repeated from what was recorded."""


@dataclass(frozen=True, eq=False)
class Redo:
    """Recorded events that can be replayed.

    Attributes:
        ancestry: the events, and what wrote where.
        follows: the residues are wanted, too.
    """

    ancestry: Ancestry
    follows: bool = False
    _read: dict[tuple[int, int], list[Writer]] = field(default_factory=dict)

    def run(self, changes: Mapping[int, Change]) -> dict[int, Made]:
        """Change the events with these numbers, repeat all that follow from them, and return changed results by number.

        Raises:
            Unrepeatable: an operation on the way cannot be done again.
        """
        changed: dict[int, Made] = {}
        with np.errstate(all="ignore"):
            for number, sources in self._order:
                event, change = self.ancestry.events[number], changes.get(number)
                if change is None and not sources & changed.keys():
                    continue
                try:
                    given = [self._given(event, place, changed) for place in range(len(event.operands))]
                    made = self.again(event, given) if change is None else change(self, event, given)
                except Unrepeatable:
                    raise
                except Exception as error:  # whatever an operation makes of values that it never had
                    raise Unrepeatable(str(error)) from error
                if not _is_same(made, self.made(event)):
                    changed[number] = made
        return changed

    def made(self, event: Event) -> Made:
        """Return the recorded result of an event."""
        return Made(event.values, event.residues if self.follows else None)

    def again(self, event: Event, given: Values) -> Made:
        """Repeat one event.

        Raises:
            Unrepeatable: an address or mask of the event has changed, and it is no load from recorded memory; or
                something wrote a tensor that was not recorded.
        """
        if all(own is None for own in given):
            return self.made(event)
        pairs = list(zip(event.operands, given, strict=True))
        if event.again is not None:  # of PyTorch's operations all tensors are wanted, whole
            tensors = (n for n, (operand, own) in enumerate(pairs) if operand.size and own is None)
            known = {place: self._memory(event, place, {}) for place in tensors}
            return event.again([known.get(place, own) for place, own in enumerate(given)])
        if any(own is not None for operand, own in pairs if operand.address):
            return self._elsewhere(event, given)
        wide = np.result_type(event.values, *(own.values for own in given if own is not None))
        made, lanes = self.made(event).cast(wide), np.arange(event.values.size)
        for operand, own in pairs:
            if own is not None:
                source = operand.source(lanes)[:, 0]
                there = np.nonzero(source >= 0)[0]
                made = made.put(there, own.taken(there if operand.memory else source[there]))
        return made

    def operand(self, event: Event, place: int, own: Made | None = None) -> Made | None:
        """Return what an operand is: `own`, if that is given, or what was recorded; None where it is unknown."""
        operand = event.operands[place]
        if own is not None:
            return own
        if operand.event is not None:
            return self.made(operand.event)
        if operand.size:
            try:
                return self._memory(event, place, {})
            except Unrepeatable:
                return None
        if operand.values is None:
            return None
        if operand.values.dtype.kind not in "iub" and operand.values.size == 1:
            return Made.full(float(operand.values.reshape(-1)[0]), operand.values.shape)
        return Made(operand.values, Residues.of(torch.from_numpy(operand.values.astype(np.float64))))

    def spread(self, event: Event, place: int, own: Made | None) -> Made:
        """Return the element of an operand for each element of the result, whether that took it or not.

        Raises:
            Unrepeatable: it is unknown.
        """
        operand, made = event.operands[place], self.operand(event, place, own)
        if made is None:
            raise Unrepeatable("an operand is not known")
        if not operand.size and made.values.size == event.values.size:
            return made.shaped(event.shape)
        if not operand.size and made.values.size != 1:
            raise Unrepeatable("an operand has neither one element nor those of the result")
        return made.taken(np.maximum(operand.source(np.arange(event.values.size))[:, 0], 0)).shaped(event.shape)

    def _elsewhere(self, event: Event, given: Values) -> Made:
        """Repeat a load from other addresses, or under another mask."""
        memory = next((operand.memory for operand in event.operands if operand.memory), None)
        if event.name != "load" or memory is None:
            raise Unrepeatable("an address depends on it")

        def numbers(place: int) -> Array:
            return self.spread(event, place, given[place]).values.reshape(-1)

        where = [numbers(place) for place, operand in enumerate(event.operands) if operand.address]
        inside = np.ones(event.values.size, np.bool_) if len(where) == 1 else where[1].astype(np.bool_)
        lanes, made = np.nonzero(inside)[0], np.zeros(event.values.size)
        if (other := len(where) + 1) < len(event.operands):
            made = numbers(other).astype(np.float64)
        written = self.ancestry.log.last(where[0][lanes], event.number)
        writers = [(lanes[at], w.event, own) for w, at, own in written if w.event is not None]
        if sum(len(at) for at, _, _ in writers) < len(lanes):
            raise Unrepeatable("nothing that was recorded wrote there")
        found = self._filled(self._followed(made), writers, {}).cast(event.values.dtype).shaped(event.shape)
        return found if event.is_float else Made(found.values)

    def _given(self, event: Event, place: int, changed: Mapping[int, Made]) -> Made | None:
        """Return the new value of an operand; None if it has not changed."""
        operand = event.operands[place]
        if operand.event is not None:
            return changed.get(operand.event.number)
        follows = operand.memory is not None and any(w.number in changed for _, w, _ in self._writers(event, place))
        return self._memory(event, place, changed) if follows else None

    def _memory(self, event: Event, place: int, changed: Mapping[int, Made]) -> Made:
        """Return the values that an operand read from memory: for each element of a tensor, or of a load's result.

        Raises:
            Unrepeatable: of a tensor something is not known.
        """
        operand, writers = event.operands[place], self._writers(event, place)
        if not operand.size:
            made = self._filled(self.made(event).shaped((event.values.size,)).cast(np.float64), writers, changed)
            own = event.values.dtype  # of a load; or fp32 if that is narrower and does not hold the values
            stored = made.cast(own)
            holds = np.array_equal(stored.values.astype(np.float64), made.values, equal_nan=True)
            return stored if own.itemsize >= 4 or holds else made.cast(np.float32)
        if operand.values is None and sum(len(at) for at, _, _ in writers) < operand.size:
            raise Unrepeatable("nothing that was recorded wrote there")
        known = np.zeros(operand.size) if operand.values is None else operand.values.reshape(-1).astype(np.float64)
        return self._filled(self._followed(known), writers, changed)

    def _followed(self, values: Array) -> Made:
        """Return numbers with their residues, if these are wanted."""
        return Made(values, Residues.of(torch.from_numpy(values)) if self.follows else None)

    def _filled(self, made: Made, writers: Iterable[Writer], changed: Mapping[int, Made]) -> Made:
        """Return fp64 numbers with what events wrote."""
        for at, writer, elements in writers:
            source = changed.get(writer.number, self.made(writer))
            made = made.put(at, source.taken(elements).cast(np.float64))
        return made

    def _writers(self, event: Event, place: int) -> list[Writer]:
        """Return the writes that an operand read: positions in it, the event's number, and the event's elements."""
        key = event.number, place
        if key not in self._read:
            operand = event.operands[place]
            assert operand.memory is not None
            positions = np.arange(operand.size or event.values.size)
            lanes = positions if operand.size else operand.source(positions)[:, 0]
            found = self.ancestry.log.sources(operand.memory, lanes, event.number)
            self._read[key] = [(at, writer, own) for writer, at, own in found]
        return self._read[key]

    @cached_property
    def _order(self) -> list[tuple[int, set[int]]]:
        """Numbers of events, in order, with those that each was computed from, of addresses and masks as well."""
        found = []
        for number, event in sorted(self.ancestry.events.items()):
            sources = {operand.event.number for operand in event.operands if operand.event is not None}
            found.append((number, sources | {edge.event.number for edge in self.ancestry.edges[number]}))
        return found


def _is_same(a: Made, b: Made) -> bool:
    """Return whether two results have the same bits and the same residues."""
    if a.values.shape != b.values.shape or a.values.tobytes() != b.values.tobytes():
        return False
    return a.residues is None or b.residues is None or torch.equal(a.residues.p, b.residues.p)
