"""What led to a result: the way back from one element, and events with the cell of a case that each element belongs to.

A cell is a row and column of the case. An operation that leads one to one to elements of the result has an element for
each of their cells. One that leads there through a reduction only has the cells of the elements of an input that came
to it one to one.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from lastbit.interpret.numpy_formats import Array
from lastbit.numerics.residues import Residues
from lastbit.tracing.events import Event, Log, Made, Operand, Write

# 32 MiB of int64 for the lookup.
_MOST = 1 << 22  # elements of an operand that are looked up at once


@dataclass(frozen=True, eq=False)
class Visit:
    """An event on the way, and the elements of its result that matter.

    Attributes:
        direct: those that lead to the element one to one, as flat indices.
        all: these first, then those of which a reduction or dot took many.
    """

    event: Event
    direct: Array
    all: Array


@dataclass
class Path:
    """The path that led to an element.

    Attributes:
        visits: in the order in which it happened.
        untraced: writes on the way of programs that were not wanted, the last first.
        unknown: elements that were read from memory into which nothing that can be seen wrote.
    """

    visits: list[Visit] = field(default_factory=list)
    untraced: list[Write] = field(default_factory=list)
    unknown: int = 0


def follow(log: Log, event: Event, lanes: Iterable[int]) -> Path:
    """Follow elements of an event's result back to the inputs.

    Computations of addresses are left out, and values that follow from constants alone or, in integers, from arguments.
    """
    path, events, ahead = Path(), dict[int, Event](), list[int]()
    reached: dict[int, tuple[list[Array], list[Array]]] = defaultdict(lambda: ([], []))  # one to one, and one of many

    def reach(event: Event, lanes: Array, many: bool) -> None:
        if len(lanes):
            if event.number not in events:
                events[event.number] = event
                heapq.heappush(ahead, -event.number)
            reached[event.number][many].append(lanes)

    def read(addresses: Array, before: int, many: bool) -> int:
        """Follow addresses to the last writes there, and count those to which nothing wrote."""
        left = len(addresses)
        for write, positions, elements in log.last(addresses, before):
            left -= len(positions)
            if write.event is not None:
                reach(write.event, unique(elements), many)
            else:
                path.untraced.append(write)
                if write.adds:
                    left += read(addresses[positions], write.number, many)
        return left

    reach(event, np.asarray(list(lanes), np.int64), False)
    while ahead:
        event = events.pop(-heapq.heappop(ahead))
        own = [unique(np.concatenate([np.zeros(0, np.int64), *parts])) for parts in reached.pop(event.number)]
        path.visits.append(Visit(event, own[False], unique(np.concatenate(own))))
        operands = [operand for operand in event.operands if operand.matters]
        for operand, several in ((operand, several) for operand in operands for several in (False, True)):
            for found in came_from(operand, own[several]):
                many, elements = several or found.shape[1] > 1, unique(found.reshape(-1))
                elements = elements[elements >= 0]
                if operand.event is not None:
                    reach(operand.event, elements, many)
                elif operand.memory is not None:
                    path.unknown += read(operand.memory(elements), event.number, many)
    path.visits.reverse()
    return path


def came_from(operand: Operand, lanes: Array) -> Iterator[Array]:
    """Yield an operand's flat indices for elements of the result, [n, k] for n elements at a time, -1 for none."""
    step = max(1, _MOST // max(1, operand.source(lanes[:1]).shape[1])) if len(lanes) else 1
    for start in range(0, len(lanes), step):
        yield operand.source(lanes[start : start + step])


def unique(lanes: Array) -> Array:
    """Remove repetitions and keep the order."""
    if (lanes[1:] > lanes[:-1]).all():
        return lanes
    _, first = np.unique(lanes, return_index=True)
    return np.asarray(lanes[np.sort(first)])


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
            if event.input:
                found[number] = {event.input: np.arange(event.values.size)}
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
            own = np.full(size, -1)
            for name in origins.get(number, {}).keys() & starts.keys():
                cells = _through(starts[name], origins[number][name])
                lanes, of_input = np.nonzero(cells >= 0)[0], np.full(size, -1)
                of_input[cells[lanes]] = lanes
                own = merged(own, of_input)
            if (own < 0).all():
                own = others.get(number, own)
            own = found[number] = ends[number] if number in ends else merged(direct.get(number), own)
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


def _edges(log: Log, event: Event, operand: Operand) -> Iterator[Edge]:
    size = event.values.size
    if not operand.matters or not size:
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
            placed = None
            if width == 1:
                placed = np.full(size, -1)
                placed[positions] = elements
            yield Edge(before, placed)


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
    def line(self) -> tuple[str, int]:
        """File and line in which it stands."""
        return self.events[0].place.file, self.events[0].place.line

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
    found = list[Expression]()
    for group in groups.values():
        lanes = {event.number: cells[event.number] for event in group}
        values = np.full(len(next(iter(lanes.values()))), np.nan)
        known = np.zeros(len(values), np.bool_)
        for event in group:
            here = lanes[event.number] >= 0
            if event.values.dtype.kind != "c":
                values[here] = event.at(lanes[event.number][here]).astype(np.float64)
                known |= here
        residues = residues_of_cells({event.number: event.made for event in group}, lanes, len(values))
        found.append(Expression(tuple(group), lanes, values, known, residues))
    return found


def residues_of_cells(made: Mapping[int, Made], lanes: Mapping[int, Array], size: int) -> Residues | None:
    """Gather the residues of events by cell; open where no event has the cell, None if an event has no residues."""
    numbers = Residues.of(torch.zeros(size)).opened.numbers
    for number, own in made.items():
        if own.residues is None:
            return None
        here = np.nonzero(lanes[number] >= 0)[0]
        numbers[:, here] = own.residues.numbers.reshape(4, -1)[:, lanes[number][here]]
    return Residues(numbers)
