"""The path to an element, followed back through operations and memory."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from lastbit.interpret.numpy_formats import Array
from lastbit.tracing.events import Event, Operand, Origin
from lastbit.tracing.log import Log, Write

# As in cells.py.
_MOST = 1 << 22  # lanes looked at in one step


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
    walk = _Walk(log)
    walk.reach(event, np.asarray(list(lanes), np.int64), many=False)
    return walk.run()


class _Walk:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._path = Path()
        self._events: dict[int, Event] = {}
        self._lanes: dict[bool, dict[int, list[Array]]] = {False: defaultdict(list), True: defaultdict(list)}
        self._ahead: list[int] = []

    def reach(self, event: Event, lanes: Array, *, many: bool) -> None:
        if not len(lanes):
            return
        if event.number not in self._events:
            self._events[event.number] = event
            heapq.heappush(self._ahead, -event.number)
        self._lanes[many][event.number].append(lanes)

    def run(self) -> Path:
        while self._ahead:
            number = -heapq.heappop(self._ahead)
            event, (direct, many) = self._events.pop(number), (self._taken(number, kind) for kind in (False, True))
            self._path.visits.append(Visit(event, direct, unique(np.concatenate([direct, many]))))
            for operand in event.operands:
                if not operand.address:
                    self._back(event, operand, direct, many=False)
                    self._back(event, operand, many, many=True)
        self._path.visits.reverse()
        return self._path

    def _taken(self, number: int, many: bool) -> Array:
        return unique(np.concatenate([np.zeros(0, np.int64), *self._lanes[many].pop(number, [])]))

    def _back(self, event: Event, operand: Operand, lanes: Array, *, many: bool) -> None:
        if not len(lanes) or not matters(operand):
            return
        for found in came_from(operand, lanes):
            own = many or found.shape[1] > 1
            elements = unique(found.reshape(-1))
            elements = elements[elements >= 0]
            if operand.event is not None:
                self.reach(operand.event, elements, many=own)
            elif operand.memory is not None:
                self._path.unknown += self._read(operand.memory.at(elements), event.number, own)

    def _read(self, addresses: Array, before: int, many: bool) -> int:
        """Follow addresses to the last writes there, and count those to which nothing wrote."""
        left = len(addresses)
        for write, positions, elements in self._log.last(addresses, before):
            left -= len(positions)
            if write.event is not None:
                self.reach(write.event, unique(elements), many=many)
            else:
                self._path.untraced.append(write)
                if write.adds:
                    left += self._read(addresses[positions], write.number, many)
        return left


def came_from(operand: Operand, lanes: Array) -> Iterator[Array]:
    """Yield an operand's flat indices for elements of the result, [n, k] for n elements at a time, -1 for none."""
    width = max(1, operand.source(lanes[:1]).shape[1])
    step = max(1, _MOST // width)
    for start in range(0, len(lanes), step):
        yield operand.source(lanes[start : start + step])


def unique(lanes: Array) -> Array:
    """Remove repetitions and keep the order."""
    if (lanes[1:] > lanes[:-1]).all():
        return lanes
    _, first = np.unique(lanes, return_index=True)
    return np.asarray(lanes[np.sort(first)])


def matters(operand: Operand) -> bool:
    """Return whether an operand is more than a constant, or than an integer that follows from arguments."""
    event = operand.event
    return event is None or event.origin is Origin.MEMORY or (event.origin is Origin.ARGUMENTS and event.is_float)
