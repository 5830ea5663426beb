"""Distribution of items to workers: items that share work go to one worker in sequence, the costliest first.

Kernels of an op get the same cases from a group, so that they share inputs and the values that a contract
allows. The items of one group are a unit. A unit that would keep one worker busy while the others have ended is cut:
by contract, then by kernel. Of a function that torch compiles, all items go to one worker, since each process compiles
it anew.

This module imports neither torch nor pytest-xdist: the process that hands out items needs no more than their names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_CUTS: Sequence[tuple[str, ...]] = (
    ("op", "device", "group"),
    ("op", "device", "group", "contract"),
    ("op", "device", "group", "contract", "kernel"),
)
"""What the items of a unit have in common, from large units to small ones."""

# Arbitrary: larger units leave workers idle at the end, smaller ones evaluate references again.
_PARTS = 4
"""A unit is at most this part of what a worker has to do, so that at the end none works alone for long."""

_AHEAD = 2
"""Items that a worker must know: pytest asks for the next one before it runs the one at hand."""


def units(items: Sequence[Mapping[str, Any]], workers: int) -> list[list[int]]:
    """Divide planned items (`Planned` as data) into units for so many workers, as positions, the costliest first.

    Within a unit, items of one contract follow each other. A function that torch compiles is a unit for itself, and
    among the first.
    """
    by_contract = sorted(range(len(items)), key=lambda place: items[place]["contract"])
    most = _cost(by_contract, items) / (_PARTS * workers) if workers > 1 else math.inf
    compiled = [place for place in by_contract if items[place].get("compiles") and workers > 1]
    found = _cut([place for place in by_contract if place not in compiled], items, most)
    by_cost = sorted(found, key=lambda unit: _cost(unit, items), reverse=True)
    return [*_cut(compiled, items, math.inf, (("device", "source"),)), *by_cost]


def _cost(unit: Sequence[int], items: Sequence[Mapping[str, Any]]) -> int:
    return sum(items[place]["cost"] for place in unit)


def _cut(
    places: Sequence[int], items: Sequence[Mapping[str, Any]], most: float, cuts: Sequence[tuple[str, ...]] = _CUTS
) -> Iterator[list[int]]:
    """Yield units that cost no more than `most`, as far as the cuts go."""
    first, *finer = cuts
    together: dict[tuple[str, ...], list[int]] = {}
    for place in places:
        together.setdefault(tuple(items[place][name] for name in first), []).append(place)
    for unit in together.values():
        if finer and _cost(unit, items) > most:
            yield from _cut(unit, items, most, finer)
        else:
            yield unit


class UnitQueue:
    """The items that are left, in units, for workers of this machine or of a cluster.

    A worker that has begun a unit keeps the rest of it. Who is gone gives it back: it is the next unit to be begun.
    """

    def __init__(self, units: Iterable[Sequence[int]] = ()) -> None:
        self._left = deque(units)
        self._rest: dict[Hashable, deque[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._left) or any(self._rest.values())

    def next(self, worker: Hashable) -> int | None:
        """Take the next item of a worker's unit, or the first one of the next unit; None if there is neither."""
        rest = self._rest.setdefault(worker, deque())
        if not rest and self._left:
            rest.extend(self._left.popleft())
        return rest.popleft() if rest else None

    def last_of_another(self) -> int | None:
        """Take the last item of the longest rest that a worker has; None if none has any."""
        longest = max(self._rest.values(), key=len, default=None)
        return longest.pop() if longest else None

    def put_back(self, items: Sequence[int]) -> None:
        """Let items be the next unit."""
        if items:
            self._left.appendleft(items)

    def leave(self, worker: Hashable, begun: Sequence[int] = ()) -> None:
        """Put back the rest of a worker that is gone, after items that it knew but had not begun."""
        self.put_back([*begun, *self._rest.pop(worker, ())])


class Schedule:
    """Hands the units to workers, as pytest-xdist asks of a scheduler (`xdist.scheduler.protocol.Scheduling`).

    A worker is told no more items than it must know, so that -x stops all of them soon. The item that a worker ended in
    does not run again; the rest of its unit goes to the next one.
    """

    def __init__(self, workers: int, units: Callable[[], Iterable[Sequence[int]]]) -> None:
        self._workers, self._units = workers, units
        self._collected: dict[Any, list[str]] = {}
        self._told: dict[Any, list[int]] = {}
        self._queue: UnitQueue | None = None

    @property
    def nodes(self) -> list[Any]:
        return list(self._told)

    @property
    def collection_is_completed(self) -> bool:
        return len(self._collected) >= self._workers

    @property
    def tests_finished(self) -> bool:
        """Return whether no item is left to hand out; a worker runs the last item it knows when it is shut down."""
        nothing_left = self._queue is not None and not self._queue
        return nothing_left and all(len(told) < _AHEAD for told in self._told.values())

    @property
    def has_pending(self) -> bool:
        return bool(self._queue) or any(self._told.values())

    def add_node(self, node: Any) -> None:
        self._told[node] = []

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if any(known != list(collection) for known in self._collected.values()):
            raise RuntimeError(f"worker {node.gateway.id} has collected other items than the workers before it")
        self._collected[node] = list(collection)

    def schedule(self) -> None:
        """Begin, or go on with a worker that replaces another."""
        if self._queue is None:
            self._queue = UnitQueue(self._units())
        self._feed(*self.nodes)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        self._told[node].remove(item_index)
        self._feed(node)

    def mark_test_pending(self, item: str) -> None:
        """Let an item run once more."""
        if self._queue is not None:
            self._queue.put_back([next(iter(self._collected.values())).index(item)])
        self._feed(*self.nodes)

    def remove_pending_tests_from_node(self, node: Any, indices: Sequence[int]) -> None:
        raise NotImplementedError("nothing is taken away from a worker")

    def remove_node(self, node: Any) -> str | None:
        """Forget a worker; return the item during which it ended, None if there is none."""
        told = self._told.pop(node)
        if self._queue is not None:
            self._queue.leave(node, told[1:])
        self._feed(*self.nodes)
        return self._collected[node][told[0]] if told else None

    def _feed(self, *nodes: Any) -> None:
        """Hand workers as many items as they must know; shut down those for which none are left."""
        for node in nodes:
            if self._queue is None or node not in self._collected or node.shutting_down:
                continue
            told = self._told[node]
            while len(told) < _AHEAD and (place := self._queue.next(node)) is not None:
                told.append(place)
                node.send_runtest_some(told[-1:])
            if len(told) < _AHEAD:
                node.shutdown()
