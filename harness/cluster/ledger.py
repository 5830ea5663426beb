"""The account of the items of a plan: which actor runs which, what came of it, and what has to run again.

The results of an item are those of one run of it from beginning to end. A run that loses its actor counts for nothing,
unless the item loses its actor a second time in the same case: then the kernel is what ends it, and the item has the
results of that run, as if it had been the only one. At the end, actors without work run what others are slow with, and
the first to be done counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lastbit.result import BAD, CaseResult
from lastbit.verify.assemble import Key, UnderWay
from lastbit.verify.plan import Planned
from lastbit.verify.schedule import UnitQueue, units

TWICE = 2
"""Runs of an item that end in the same case before the kernel is what ends them."""

# Arbitrary: each loss costs the start of an actor, and a node that goes away takes one run of an item at a time.
MOST_LOST = 5
"""Runs of an item that lose their actors, in whatever cases, before it is given up."""

# Arbitrary: a worker that still answers tells of its limit itself; this is time for that on a busy node.
GRACE = 10.0
"""Seconds beyond its limit that a case has to be told of, before its actor is ended from outside."""

# Arbitrary: longer than drawing the cases of a group may take; what hangs is found that much later.
SILENCE = 600.0
"""Seconds beyond the limit of a case that an actor may say nothing between two cases: it draws, or waits for others."""

# Arbitrary: sooner, most items are run twice for nothing; later, the end of a run waits for its slowest node.
SLOW = 5.0
"""Seconds that an item runs before an actor without work runs it, too."""


@dataclass
class ItemAttempt:
    """A run of an item by an actor.

    Attributes:
        began, heard: when it began, and when something was last heard of it.
        under_way: the note of the case that it is in.
        trace: the lines that were under way when a case took too long.
        fatal: the last result left the accelerator unusable.
    """

    place: int
    began: float
    heard: float
    results: list[CaseResult] = field(default_factory=list)
    left: int = 0
    under_way: Mapping[str, Any] | None = None
    trace: str = ""
    fatal: bool = False

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

    `parse` reads the line of a result. `keep` puts the lines of a case that took too long where a reader finds them,
    and says where that is. `tell` is told each result that is new to the item.
    """

    def __init__(
        self,
        items: Sequence[Planned],
        actors: int,
        limit: float,
        *,
        parse: Callable[[bytes, str], CaseResult],
        keep: Callable[[str], str],
        tell: Callable[[CaseResult], None],
    ) -> None:
        self.items = tuple(items)
        self.settled: dict[int, ItemOutcome] = {}
        self.attempts: dict[Hashable, ItemAttempt] = {}
        self._limit, self._parse, self._keep, self._tell = limit, parse, keep, tell
        self._queue = UnitQueue(units([asdict(item) for item in items], actors))
        self._lost: dict[int, Counter[str]] = {}
        self._longest: dict[int, ItemAttempt] = {}  # of those that were lost, the one with most results
        self._told: Counter[int] = Counter()
        self._looked = 0.0

    @property
    def done(self) -> bool:
        """Return whether every item has its outcome."""
        return len(self.settled) == len(self.items)

    def next(self, actor: Hashable, now: float) -> int | None:
        """Assign an idle actor the place of its next item; None if there is none for it now."""
        place = next(self._candidates(actor, now), None)
        if place is not None:
            self.attempts[actor] = ItemAttempt(place, now, now)
        return place

    def _candidates(self, actor: Hashable, now: float) -> Iterator[int]:
        """Yield places by priority: the actor's own rest, the queue, another's rest from its end, slow items."""
        if (place := self._queue.next(actor)) is not None:
            yield place
        if (place := self._queue.last_of_another()) is not None:
            yield place
        running = Counter(attempt.place for attempt in self.attempts.values())
        known = self.settled.keys() | self._lost.keys()  # what was lost may be without end
        alone = [a for a in self.attempts.values() if running[a.place] == 1 and a.place not in known]
        yield from (a.place for a in sorted(alone, key=lambda a: a.began) if now - a.began >= SLOW)

    def failed(self, place: int) -> set[tuple[str, str]]:
        """Return kernel and device of each failure in items other than this one."""
        found = {other for other, outcome in self.settled.items() if outcome.bad}
        found |= {attempt.place for attempt in self.attempts.values() if attempt.bad}
        return {(self.items[other].kernel, self.items[other].device) for other in found - {place}}

    def hear(self, actor: Hashable, event: Sequence[Any], now: float) -> bool:
        """Take note of an event of `lastbit.cluster.stream`; return whether the actor is without work now."""
        attempt = self.attempts[actor]
        attempt.heard = now
        match event:
            case ["begins", note]:
                attempt.under_way = note
            case ["waits"]:
                attempt.under_way = None
            case ["result", line]:
                attempt.under_way = None
                self._take(attempt, self._parse(line.encode(), f"what came from actor {actor}"))
            case ["left", cases, *_]:
                attempt.left = cases
            case ["lost"]:
                attempt.fatal = True
            case ["hung", trace]:
                attempt.trace = trace
            case ["done"]:
                del self.attempts[actor]
                self.settled.setdefault(attempt.place, ItemOutcome(tuple(attempt.results), attempt.left))
                return True
        return False

    def _take(self, attempt: ItemAttempt, result: CaseResult) -> None:
        attempt.results.append(result)
        if attempt.place not in self.settled and len(attempt.results) > self._told[attempt.place]:
            self._told[attempt.place] += 1
            self._tell(result)

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
        lost = self._lost.setdefault(attempt.place, Counter())
        lost[attempt.case if by_kernel else ""] += 1
        if attempt.under_way and not attempt.trace and now - attempt.heard >= self._limit:
            attempt.trace = f"Timeout ({self._limit:g} s)!\nThe process did not come to say in which lines it was.\n"
        longest = self._longest.setdefault(attempt.place, attempt)
        self._longest[attempt.place] = max(longest, attempt, key=lambda one: len(one.results))
        return self._after_loss(attempt, lost)

    def _after_loss(self, attempt: ItemAttempt, lost: Counter[str]) -> str:
        place = attempt.place
        if attempt.case and lost[attempt.case] >= TWICE:
            died = None if attempt.fatal else self._died(attempt)
            self.settled[place] = ItemOutcome(tuple(attempt.results), attempt.left, died)
            return "the kernel is what ends it"
        if any(other.place == place for other in self.attempts.values()):
            return "it runs elsewhere"
        if lost.total() >= MOST_LOST:
            reason = f"its process was lost {lost.total()} times, and no case is known to be why"
            self.settled[place] = ItemOutcome(tuple(self._longest[place].results), attempt.left, given_up=reason)
            return "it is given up"
        self._queue.put_back([place])
        return "it runs again"

    def _died(self, attempt: ItemAttempt) -> UnderWay:
        assert attempt.under_way is not None
        trace = self._keep(attempt.trace) if attempt.trace else ""
        return UnderWay(attempt.under_way, died=True, hung=bool(attempt.trace), trace=trace)

    def outcomes(self) -> list[ItemOutcome]:
        """Return the outcomes of all items; of unfinished ones that of the longest run."""
        longest = dict(self._longest)
        for attempt in self.attempts.values():
            if attempt.place not in longest or len(attempt.results) >= len(longest[attempt.place].results):
                longest[attempt.place] = attempt
        begun = {place: _so_far(attempt) for place, attempt in longest.items() if place not in self.settled}
        found = {**self.settled, **begun}
        return [found[place] for place in sorted(found)]

    def rest(self) -> dict[Key, int]:
        """Map items that were not finished, because their kernel had failed, to the number of cases not run."""
        left = ((self.items[place], outcome.left) for place, outcome in self.settled.items() if outcome.left)
        return {(item.kernel, item.device, item.group): cases for item, cases in left}

    def given_up(self) -> dict[Key, str]:
        """Map items that were given up to the reason."""
        found = ((self.items[place], outcome.given_up) for place, outcome in self.settled.items() if outcome.given_up)
        return {(item.kernel, item.device, item.group): reason for item, reason in found}


def _so_far(attempt: ItemAttempt) -> ItemOutcome:
    """Return the partial outcome of an unfinished run, and its current case, for whose end there is no reason yet."""
    under_way = UnderWay(attempt.under_way, died=False) if attempt.under_way else None
    return ItemOutcome(tuple(attempt.results), attempt.left, under_way)
