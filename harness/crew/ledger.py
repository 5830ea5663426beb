"""The account of the items of a plan: which actor runs which, what came of it, and what has to run again.

Items that share work go to one actor in sequence, the costliest first. Kernels of an op get the same cases from a
group, so that they share inputs and the values that a contract allows: the items of one group are a unit. A unit that
would keep one actor busy while the others have ended is cut: by contract, then by kernel. Of a function that torch
compiles, all items go to one actor, since each process compiles it anew.

The results of an item are those of one run of it from beginning to end. A run that loses its actor counts for nothing,
unless that has happened often enough in the same case: then the kernel is what ends it, and the item has the results of
that run, as if it had been the only one. On a cluster, actors without work run at the end what others are slow with,
and the first to be done counts.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from lastbit.reports.records import parse
from lastbit.result import BAD, CaseResult
from lastbit.verify.notes import Key, Planned, UnderWay

_CUTS: Sequence[tuple[str, ...]] = (
    ("op", "device", "group"),
    ("op", "device", "group", "contract"),
    ("op", "device", "group", "contract", "kernel"),
)
"""What the items of a unit have in common, from large units to small ones."""

# Arbitrary: larger units leave workers idle at the end, smaller ones evaluate references again.
_PARTS = 4
"""A unit is at most this part of what a worker has to do, so that at the end none works alone for long."""


def units(items: Sequence[Planned], workers: int) -> list[list[int]]:
    """Divide items into units for so many workers, as positions, the costliest first.

    Within a unit, items of one contract follow each other. A function that torch compiles is a unit for itself, and
    among the first.
    """
    by_contract = sorted(range(len(items)), key=lambda place: items[place].contract)
    most = _cost(by_contract, items) / (_PARTS * workers) if workers > 1 else math.inf
    compiled = [place for place in by_contract if items[place].compiles and workers > 1]
    found = _cut([place for place in by_contract if place not in compiled], items, most)
    by_cost = sorted(found, key=lambda unit: _cost(unit, items), reverse=True)
    return [*_cut(compiled, items, math.inf, (("device", "source"),)), *by_cost]


def _cost(unit: Sequence[int], items: Sequence[Planned]) -> int:
    return sum(items[place].cost for place in unit)


def _cut(
    places: Sequence[int], items: Sequence[Planned], most: float, cuts: Sequence[tuple[str, ...]] = _CUTS
) -> Iterator[list[int]]:
    """Yield units that cost no more than `most`, as far as the cuts go."""
    first, *finer = cuts
    together: dict[object, list[int]] = {}
    for place in places:
        together.setdefault(attrgetter(*first)(items[place]), []).append(place)
    for unit in together.values():
        if finer and _cost(unit, items) > most:
            yield from _cut(unit, items, most, finer)
        else:
            yield unit


class UnitQueue:
    """The items that are left, in units.

    A worker that has begun a unit keeps the rest of it. Who is gone gives it back: it is the next unit to be begun.
    """

    def __init__(self, units: Iterable[Sequence[int]] = ()) -> None:
        self._left = deque(units)
        self._rest: dict[Hashable, deque[int]] = {}

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

    def leave(self, worker: Hashable) -> None:
        """Put back the rest of a worker that is gone."""
        self.put_back([*self._rest.pop(worker, ())])


@dataclass(frozen=True)
class Patience:
    """The way of a place with actors that are lost or slow.

    Attributes:
        losses: runs of an item that end in the same case before the kernel is what ends them.
        slow: seconds that an item runs before an actor without work runs it, too.
    """

    losses: int
    slow: float


HERE = Patience(losses=1, slow=math.inf)
"""Of this machine: what ends a process is the kernel, and two that run the same share its cores."""

# Arbitrary: sooner, most items are run twice for nothing; later, the end of a run waits for its slowest node.
ELSEWHERE = Patience(losses=2, slow=5.0)
"""Of a cluster, of which nodes are lost, too."""

# Arbitrary: each loss costs the start of an actor, and a node that goes away takes one run of an item at a time.
MOST_LOST = 5
"""Runs of an item that lose their actors, in whatever cases, before it is given up."""

# Arbitrary: a worker that still answers tells of its limit itself; this is time for that on a busy node.
GRACE = 10.0
"""Seconds beyond its limit that a case has to be told of, before its actor is ended from outside."""

# Arbitrary: longer than drawing the cases of a group may take; what hangs is found that much later.
SILENCE = 600.0
"""Seconds beyond the limit of a case that an actor may say nothing between two cases: it draws, or waits for others."""


RUNS_AGAIN = "it runs again"
"""The fate of an item whose actor was lost where no case is why."""


@dataclass
class ItemAttempt:
    """A run of an item by an actor.

    Attributes:
        began, heard: when it began, and when something was last heard of it.
        under_way: the note of the case that it is in.
        trace: the lines that were under way when a case took too long.
        fatal: the last result left the accelerator unusable.
        judged: all of its cases have run, and stages are looked for.
    """

    place: int
    began: float
    heard: float
    results: list[CaseResult] = field(default_factory=list)
    left: int = 0
    under_way: Mapping[str, Any] | None = None
    trace: str = ""
    fatal: bool = False
    judged: bool = False

    @property
    def bad(self) -> bool:
        """Return whether a case of the item failed."""
        return any(result.verdict in BAD for result in self.results)

    @property
    def case(self) -> str:
        """The case in which it ends if it ends now; empty if it is in none."""
        if self.fatal and self.results:
            return self.results[-1].case
        return str(self.under_way["case"]) if self.under_way else ""


@dataclass(frozen=True)
class ItemOutcome:
    """The outcome of an item.

    Attributes:
        left: how many of its cases were not run because its kernel had failed.
        died: the case in which it ended its process.
        given_up: why it was not finished; empty if it was.
    """

    results: tuple[CaseResult, ...]
    left: int = 0
    died: UnderWay | None = None
    given_up: str = ""

    @property
    def bad(self) -> bool:
        return self.died is not None or any(result.verdict in BAD for result in self.results)


class Ledger:
    """The items of one kind of device, for so many actors; a case may take `limit` seconds.

    Of the items, those whose ids are `selected` run, or all of them, but none whose outcome is `known`. `keep` puts the
    lines of a case that took too long where a reader finds them, and says where that is. `tell` is told each result
    that is new to the item.
    """

    def __init__(
        self,
        items: Sequence[Planned],
        actors: int,
        limit: float,
        *,
        keep: Callable[[str], str],
        tell: Callable[[CaseResult], None],
        patience: Patience = ELSEWHERE,
        selected: Collection[str] | None = None,
        known: Mapping[int, ItemOutcome] = MappingProxyType({}),
    ) -> None:
        self.items = tuple(items)
        self.settled = dict(known)
        self.attempts: dict[Hashable, ItemAttempt] = {}
        self._limit, self._keep, self._tell, self._patience = limit, keep, tell, patience
        places = [place for place, item in enumerate(items) if selected is None or item.id in selected]
        self._count = len(places)
        places = [place for place in places if place not in known]
        found = units([items[place] for place in places], actors)
        self._queue = UnitQueue([places[number] for number in unit] for unit in found)
        self._lost: dict[int, Counter[str]] = {}
        self._longest: dict[int, ItemAttempt] = {}  # of those that were lost, the one with most results
        self._told: Counter[int] = Counter()
        self._looked = 0.0
        self.news = False  # whether an item has begun to fail since somebody looked

    @property
    def done(self) -> bool:
        """Return whether every item that runs has its outcome."""
        return len(self.settled) == self._count

    def next(self, actor: Hashable, now: float) -> int | None:
        """Assign an idle actor the place of its next item; None if there is none for it now."""
        if (place := self._queue.next(actor)) is None and (place := self._queue.last_of_another()) is None:
            running = Counter(attempt.place for attempt in self.attempts.values())
            known = self.settled.keys() | self._lost.keys()  # what was lost may be without end
            alone = [a for a in self.attempts.values() if running[a.place] == 1 and a.place not in known]
            slow = [a for a in alone if now - a.began >= self._patience.slow]
            place = min(slow, key=lambda a: a.began).place if slow else None
        if place is not None:
            self.attempts[actor] = ItemAttempt(place, now, now)
        return place

    def failed(self, place: int) -> set[tuple[str, str]]:
        """Return kernel and device of each failure in items other than this one."""
        found = {other for other, outcome in self.settled.items() if outcome.bad}
        found |= {attempt.place for attempt in self.attempts.values() if attempt.bad}
        return {(self.items[other].kernel, self.items[other].device) for other in found - {place}}

    def hear(self, actor: Hashable, event: Sequence[Any], now: float) -> bool:
        """Take note of an event of `lastbit.verify.result_recorder`; return whether the actor is without work now."""
        attempt = self.attempts[actor]
        attempt.heard = now
        match event:
            case ["begins", note]:
                attempt.under_way = note
            case ["waits"]:
                attempt.under_way = None
            case ["result", line]:
                attempt.under_way = None
                result = parse(line.encode(), f"what came from actor {actor}")
                self.news |= result.verdict in BAD and not attempt.bad
                attempt.results.append(result)
                if attempt.place not in self.settled and len(attempt.results) > self._told[attempt.place]:
                    self._told[attempt.place] += 1
                    self._tell(result)
            case ["left", cases]:
                attempt.left = cases
            case ["looks"]:
                attempt.judged = True
            case ["lost"]:
                attempt.fatal = True
            case ["hung", trace]:
                attempt.trace = trace
            case ["done"]:
                del self.attempts[actor]
                self._settle(attempt)
                return True
        return False

    def _settle(self, attempt: ItemAttempt, died: UnderWay | None = None) -> None:
        self.settled.setdefault(attempt.place, ItemOutcome(tuple(attempt.results), attempt.left, died))

    def overdue(self, now: float) -> list[Hashable]:
        """Return the actors that have been silent for too long; time in which nobody listened does not count."""
        if (absent := now - self._looked) > GRACE / 2:
            for attempt in self.attempts.values():
                attempt.heard += absent
        self._looked = now
        patience = {True: self._limit + GRACE, False: self._limit + SILENCE}
        return [actor for actor, a in self.attempts.items() if now - a.heard > patience[a.under_way is not None]]

    def lose(self, actor: Hashable, now: float, *, by_kernel: bool = True) -> str:
        """Take note that an actor is gone; say what becomes of its item, or return an empty text if nothing has to.

        `by_kernel` is False where something else is known to have ended it.
        """
        self._queue.leave(actor)
        attempt = self.attempts.pop(actor, None)
        if attempt is None or attempt.place in self.settled:
            return ""
        place = attempt.place
        lost = self._lost.setdefault(place, Counter())
        lost[attempt.case if by_kernel else ""] += 1
        if attempt.under_way and not attempt.trace and now - attempt.heard >= self._limit:
            attempt.trace = f"Timeout ({self._limit:g} s)!\nThe process did not come to say in which lines it was.\n"
        longest = self._longest.setdefault(place, attempt)
        self._longest[place] = max(longest, attempt, key=lambda one: len(one.results))
        if attempt.judged:
            self._settle(attempt)
            return "it has its results"
        if attempt.case and lost[attempt.case] >= self._patience.losses:
            died = None
            if not attempt.fatal:
                assert attempt.under_way is not None
                trace = self._keep(attempt.trace) if attempt.trace else ""
                died = UnderWay(attempt.under_way, died=True, hung=bool(attempt.trace), trace=trace)
            self._settle(attempt, died)
            return "the kernel is what ends it"
        if any(other.place == place for other in self.attempts.values()):
            return "it runs elsewhere"
        if lost.total() >= MOST_LOST:
            reason = f"its process was lost {lost.total()} times, and no case is known to be why"
            self.settled[place] = ItemOutcome(tuple(self._longest[place].results), attempt.left, given_up=reason)
            return "it is given up"
        self._queue.put_back([place])
        return RUNS_AGAIN

    def outcomes(self) -> list[ItemOutcome]:
        """Return the outcomes of all items; of unfinished ones that of the longest run."""
        longest = dict(self._longest)
        for attempt in self.attempts.values():
            if attempt.place not in longest or len(attempt.results) >= len(longest[attempt.place].results):
                longest[attempt.place] = attempt
        found = dict(self.settled)
        for place, attempt in longest.items():
            if place not in found:  # a case that it is in ends for a reason that nobody knows yet
                under_way = UnderWay(attempt.under_way, died=False) if attempt.under_way else None
                found[place] = ItemOutcome(tuple(attempt.results), attempt.left, under_way)
        return [found[place] for place in sorted(found)]

    def rest(self) -> dict[Key, int]:
        """Map items that were not finished, because their kernel had failed, to the number of cases not run."""
        left = ((self.items[place], outcome.left) for place, outcome in self.settled.items() if outcome.left)
        return {(item.kernel, item.device, item.group): cases for item, cases in left}

    def given_up(self) -> dict[Key, str]:
        """Map items that were given up to the reason."""
        found = ((self.items[place], outcome.given_up) for place, outcome in self.settled.items() if outcome.given_up)
        return {(item.kernel, item.device, item.group): reason for item, reason in found}
