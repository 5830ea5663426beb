"""Cells of operations: which element of a result belongs to which cell, a row and column of the case.

An operation that leads one to one to elements of the result has an element for each of their cells. One that leads
there through a reduction only has the cells of the elements of an input that came to it one to one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from lastbit.interpret.numpy_formats import Array
from lastbit.numerics.residues import Residues
from lastbit.tracing.events import Event, Made, Operand
from lastbit.tracing.follow import matters
from lastbit.tracing.log import Log

INPUT = "input "
"""What the name of an event begins with that stands for a tensor of the case."""
# 32 MiB of int64 for the lookup.
_MOST = 1 << 22  # elements of an operand that are looked up at once


@dataclass(frozen=True, eq=False)
class Edge:
    """An event and one of the events that it was computed from.

    Attributes:
        event: the one computed from.
        lanes: for each element of the result which of its elements, -1 for none, [size]; None where that is many.
    """

    event: Event
    lanes: Array | None


@dataclass(frozen=True, eq=False)
class Ancestry:
    """All events that led to some, by number, with edges to those that each was computed from."""

    log: Log
    events: dict[int, Event] = field(default_factory=dict)
    edges: dict[int, list[Edge]] = field(default_factory=dict)

    @classmethod
    def of(cls, log: Log, last: Iterable[Event], *, addresses: bool = False) -> Ancestry:
        """Collect everything that led to these events; with `addresses`, also what computed addresses and masks."""
        found = cls(log)
        ahead = list(last)
        while ahead:
            event = ahead.pop()
            if event.number not in found.events:
                found.events[event.number] = event
                found.edges[event.number] = [edge for operand in event.operands for edge in _edges(log, event, operand)]
                ahead += (edge.event for edge in found.edges[event.number])
                ahead += (o.event for o in event.operands if addresses and o.event is not None)
        return found

    def before(self, numbers: Iterable[int]) -> set[int]:
        """Return the numbers of these events and of all that led to them."""
        found: set[int] = set()
        ahead = list(numbers)
        while ahead:
            number = ahead.pop()
            if number not in found:
                found.add(number)
                ahead += (edge.event.number for edge in self.edges[number])
        return found

    def origins(self) -> dict[int, dict[str, Array]]:
        """Map events, by number, to inputs and the input's element for each of the event's, -1 if not one to one."""
        found: dict[int, dict[str, Array]] = {}
        for number in sorted(self.events):
            event = self.events[number]
            if event.name.startswith(INPUT):
                found[number] = {event.name.removeprefix(INPUT): np.arange(event.values.size)}
                continue
            own = found[number] = {}
            for edge in self.edges[number]:
                if edge.lanes is not None:
                    for name, elements in found[edge.event.number].items():
                        own[name] = merged(own.get(name), _through(elements, edge.lanes))
        return found

    def cells(self, ends: Mapping[int, Array], starts: Mapping[str, Array]) -> dict[int, Array]:
        """Map event numbers to the event's element for each cell, [C], -1 for none.

        `ends` maps some events, to which the others led, to their element for each cell; `starts` maps inputs to the
        cell of each of their elements. An element that led one to one to an end has its cell; any other one has the
        cell of the input element it came from, or else of the element it led to.
        """
        size = len(next(iter(ends.values())))
        direct, others, found = dict(ends), dict[int, Array](), dict[int, Array]()
        origins = self.origins() if starts else {}
        for number in sorted(self.events, reverse=True):
            own = _by_origin(origins.get(number, {}), starts, size)
            if (own < 0).all():
                own = others.get(number, own)
            own = ends[number] if number in ends else merged(direct.get(number), own)
            found[number] = own
            for edge in self.edges[number]:
                before = edge.event.number
                if edge.lanes is not None:
                    others[before] = merged(others.get(before), _through(edge.lanes, own))
                    if number in direct:
                        direct[before] = merged(direct.get(before), _through(edge.lanes, direct[number]))
        return found


def _through(elements: Array, lanes: Array) -> Array:
    """Compose two maps of elements: the elements at `lanes`, -1 where these are -1."""
    return np.where(lanes >= 0, elements[lanes], -1)


def merged(first: Array | None, second: Array) -> Array:
    """Take the first of two arrays where it is not -1, else the second."""
    return second if first is None else np.where(first >= 0, first, second)


def _by_origin(origins: Mapping[str, Array], starts: Mapping[str, Array], size: int) -> Array:
    found = np.full(size, -1)
    for name in origins.keys() & starts.keys():
        cells = _through(starts[name], origins[name])
        lanes = np.nonzero(cells >= 0)[0]
        own = np.full(size, -1)
        own[cells[lanes]] = lanes
        found = merged(found, own)
    return found


def _edges(log: Log, event: Event, operand: Operand) -> Iterator[Edge]:
    size = event.values.size
    if operand.address or not matters(operand) or not size:
        return
    width = operand.source(np.zeros(1, np.int64)).shape[1]
    if operand.event is not None:
        lanes = operand.source(np.arange(size))[:, 0] if width == 1 else None
        if lanes is None or (lanes >= 0).any():
            yield Edge(operand.event, lanes)
    elif operand.memory is not None:
        some = np.arange(0, size, 1 if width == 1 else max(1, -(-size * width // _MOST)))
        lanes = operand.source(some)
        for before, positions, elements in log.sources(operand.memory, lanes.reshape(-1), event.number):
            yield Edge(before, _placed(size, positions, elements) if width == 1 else None)


def _placed(size: int, at: Array, elements: Array) -> Array:
    lanes = np.full(size, -1)
    lanes[at] = elements
    return lanes


@dataclass(frozen=True, eq=False)
class Expression:
    """One operation of the kernel's text with all events that performed it, in rounds of a loop and in programs.

    Attributes:
        events: in order.
        lanes: number of an event → its element for each cell, -1 for none.
        values: of each cell, as fp64; of the event that had it last.
        known: cells that it has a value for.
        residues: of the values; None where the kernel is not followed on residues.
    """

    events: tuple[Event, ...]
    lanes: Mapping[int, Array]
    values: Array
    known: Array
    residues: Residues | None = None

    @property
    def number(self) -> int:
        """Number of the first event."""
        return self.events[0].number

    @property
    def dtype(self) -> str:
        """Dtype of the values."""
        return self.events[0].dtype

    def event_of(self, cell: int) -> Event:
        """Return the last event that has an element for a cell; the last of all if none has."""
        return next((e for e in reversed(self.events) if self.lanes[e.number][cell] >= 0), self.events[-1])


def expressions(events: Mapping[int, Event], cells: Mapping[int, Array]) -> list[Expression]:
    """Group events by the expression they perform, in order; each input is an expression without a place."""
    groups: dict[object, list[Event]] = defaultdict(list)
    counts: dict[object, int] = defaultdict(int)
    for number in sorted(events):
        event = events[number]
        nth = counts[event.occurrence, event.name] = counts[event.occurrence, event.name] + 1
        groups[event.places, event.name, nth].append(event)
    return [_expression(tuple(group), cells) for group in groups.values()]


def _expression(events: tuple[Event, ...], cells: Mapping[int, Array]) -> Expression:
    lanes = {event.number: cells[event.number] for event in events}
    values = np.full(len(next(iter(lanes.values()))), np.nan)
    known = np.zeros(len(values), np.bool_)
    for event in events:
        here = lanes[event.number] >= 0
        if event.values.dtype.kind != "c":
            values[here] = event.at(lanes[event.number][here]).astype(np.float64)
            known |= here
    made = {event.number: event.made for event in events}
    return Expression(events, lanes, values, known, residues_of_cells(made, lanes, len(values)))


def residues_of_cells(made: Mapping[int, Made], lanes: Mapping[int, Array], size: int) -> Residues | None:
    """Gather the residues of events by cell; open where no event has the cell, None if an event has no residues."""
    numbers = Residues.of(torch.zeros(size)).opened.numbers
    for number, own in made.items():
        if own.residues is None:
            return None
        here = np.nonzero(lanes[number] >= 0)[0]
        numbers[:, here] = own.residues.numbers.reshape(4, -1)[:, lanes[number][here]]
    return Residues(numbers)
