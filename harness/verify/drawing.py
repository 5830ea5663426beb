"""Cases of a group: combinations of options by a covering design, so that nothing is left to chance, and drawn ones.

First every option of every choice is taken, each with every dtype of its tensor, then as many pairs of options as the
number of cases allows. It is greedy, as in Cohen et al., The AETG System, IEEE Transactions on Software Engineering 23
(1997): of all groups the one whose next case covers most comes next.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from lastbit.case import Case, Chosen, Group, Option
from lastbit.config import PROFILES
from lastbit.inputs.bits import key_of
from lastbit.inputs.choices import dtype_of, features

Selection = tuple[str, Option]
"""A choice and one of its options."""

_NOTHING = (0, 0)
"""The worth of a case that adds nothing."""


def designed(
    groups: Sequence[Group], cases: int, *, whole: bool = True, times: float | None = None, brief: bool = False
) -> list[Group]:
    """Return the groups with the choices of their designed cases; together they have `cases` times `times`.

    `times` is the `multiple` of the groups unless it is given. Each group has a designed case; half of the cases of a
    group that is no combination are designed, however little they add. A quarter is left for Hypothesis to draw, and
    what the design does not need. A `whole` design has more cases if every option needs more.

    A `brief` one has a case for each of the fewest combinations that have every dtype and option, and none of others.
    """
    spared: Collection[int] = ()  # combinations that have no dtype and no option which the others do not have
    if brief:
        rest = {n: {*g.combination.items()} for n, g in enumerate(groups) if g.combination and _chooses(g)}
        met = set[Selection]()
        while rest:
            best = max(rest, key=lambda n: len(rest[n] - met))
            if rest[best] <= met:
                break
            met |= rest.pop(best)
        spared = rest
    groups = [replace(group, drawn=0) if n in spared else group for n, group in enumerate(groups)]
    choosing = [n for n, group in enumerate(groups) if _chooses(group) and n not in spared]
    if not choosing or not cases:
        return list(groups)
    if brief:
        times = sum(not groups[n].combination for n in choosing)
    times = multiple(groups) if times is None else times
    design, rows = _Design(), {number: list[Chosen]() for number in choosing}
    for turn in range(max(1, cases // 2)):
        for number in (n for n in choosing if not turn or not groups[n].combination):
            row = design.best(groups[number])
            if not turn or design.worth(row) < _NOTHING:
                rows[number].append(design.added(row))
    quarter = _for_hypothesis(cases)
    left = round(times * (cases - quarter)) - sum(map(len, rows.values()))
    drawn = round(times * quarter) + min(left, 0)
    for number, row in () if brief else design.further(groups):
        if left <= 0 and not (whole and design.worth(row)[0] < 0):
            break
        rows[number].append(design.added(row))
        left -= 1
    total, count = max(drawn, 0) + max(left, 0), len(choosing)
    ends = [total * place // count for place in range(count + 1)]  # of parts as even as can be
    made = {
        number: replace(groups[number], designed=tuple(rows[number]), drawn=end - start)
        for number, (start, end) in zip(choosing, itertools.pairwise(ends), strict=True)
    }
    return [made.get(number, group) for number, group in enumerate(groups)]


def multiple(groups: Sequence[Group]) -> float:
    """Return how many times a profile's number of cases is run: for each group that chooses, and together for those of
    `combinations`.

    These are as many as pairs of options need, and would all have as many cases. So they count as the number of groups
    that gives profile ci room for a case of each, and for every option with every dtype.
    """
    alone, together = [
        [group for group in groups if _chooses(group) and bool(group.combination) is combined]
        for combined in (False, True)
    ]
    design, needed = _Design(), len(together)
    for group in together:
        design.added(design.best(group))
    for _, row in design.further(together):
        if design.worth(row)[0] == 0:
            break
        design.added(row)
        needed += 1
    ci = PROFILES["ci"]
    return len(alone) + min(len(together), needed / (ci - _for_hypothesis(ci)))


def _for_hypothesis(cases: int) -> int:
    """Return how many of so many cases Hypothesis draws: a quarter."""
    return max(1, cases // 4)


def _chooses(group: Group) -> bool:
    return bool(group.choices) and group.strategy is not None


@dataclass
class _Design:
    """The features and pairs of options covered so far; `paired` has each option with those before it in a case.

    A set of options is an integer with a bit for each: options are compared with those before them a million times.
    """

    covered: set[tuple[str, Option, str]] = field(default_factory=set)
    bits: dict[Selection, int] = field(default_factory=dict)
    paired: dict[Selection, int] = field(default_factory=dict)
    uses: Counter[Selection] = field(default_factory=Counter)

    def best(self, group: Group) -> Chosen:
        """Choose an option for each choice in turn: a new one, then the one with most new pairs, then the rarest."""
        covered, paired, uses = self.covered, self.paired.get, self.uses.get
        row: dict[str, Option] = {}
        before = 0
        for choice, options in group.choices.items():
            dtype = dtype_of(choice, row)
            chosen, most = options[0], (False, -1, 0)
            for option in options:
                own = choice, option
                new = (choice, option, "" if option is None else dtype) not in covered
                worth = new, (before & ~paired(own, 0)).bit_count(), -uses(own, 0)
                if worth > most:
                    chosen, most = option, worth
            row[choice] = chosen
            before |= self._bit((choice, chosen))
        return row

    def worth(self, row: Chosen) -> tuple[int, int]:
        """Count the features, and pairs of options, that a case would add; negated, for a heap."""
        new = sum(feature not in self.covered for feature in features(row))
        return -new, -sum((before & ~self.paired.get(own, 0)).bit_count() for own, before in self._pairs(row))

    def added(self, row: Chosen) -> Chosen:
        """Take note of a case, and return it."""
        self.covered.update(features(row))
        for own, before in self._pairs(row):
            self.paired[own] = self.paired.get(own, 0) | before
        self.uses.update(row.items())
        return row

    def _pairs(self, row: Chosen) -> Iterator[tuple[Selection, int]]:
        """Yield each option of a case with those before it."""
        before = 0
        for own in row.items():
            yield own, before
            before |= self._bit(own)

    def _bit(self, own: Selection) -> int:
        return self.bits.setdefault(own, 1 << len(self.bits))

    def further(self, groups: Sequence[Group]) -> Iterator[tuple[int, Chosen]]:
        """Yield the number of a group and its next case as long as that adds anything, the one that adds most first.

        The caller has to add the case before it asks for another one.
        """
        rows = {n: self.best(group) for n, group in enumerate(groups) if _chooses(group)}  # since a case was added
        queue = [(self.worth(row), n) for n, row in rows.items()]
        heapq.heapify(queue)
        while queue:
            before, number = heapq.heappop(queue)
            if number in rows and before < _NOTHING:
                yield number, rows[number]
                rows.clear()
            rows[number] = self.best(groups[number])
            if (worth := self.worth(rows[number])) < _NOTHING:
                heapq.heappush(queue, (worth, number))


def free(group: Group) -> Any:
    """Return the strategy for a group's cases that also draws their choices; the group must have a strategy."""
    if not group.choices:
        return group.strategy
    options = {name: st.sampled_from(options) for name, options in group.choices.items()}
    return st.fixed_dictionaries(options).flatmap(group.strategy)


def designed_cases(group: Group, seed_: int) -> tuple[Case, ...]:
    """Draw the designed cases of a group for a seed, with the rest of each case at random; skip unsatisfiable ones."""
    if not group.designed:
        return ()
    seed_ = key_of(seed_, f"{group.name} designed")
    try:
        return tuple(_second(st.tuples(*map(group.strategy, group.designed)), seed_))
    except Unsatisfiable:  # of strategies that reject much, hardly any draw is one for all of them
        found = []
        for place, chosen in enumerate(group.designed):
            with suppress(Unsatisfiable):
                found.append(_second(group.strategy(chosen), seed_ + place))
        return tuple(found)


def _second(strategy: Any, seed_: int) -> Any:
    """Draw the second value of a strategy, since the first is the simplest there is; the first if it is alone."""
    drawn: list[Any] = []
    drawing(strategy, drawn.append, count=2, seed_=seed_)
    return drawn[-1]


@lru_cache(maxsize=8)  # kernels of an op have a group one after the other
def draw(group: Group, count: int, seed_: int = 0) -> tuple[Case, ...]:
    """Draw the cases of a group for a seed, about `count` of them generated, without duplicates.

    There are fewer, or none, if what can be drawn is nearly always rejected.
    """
    drawn = dict.fromkeys((*group.examples, *designed_cases(group, seed_)))
    if left := group.left_to_draw(count):
        with suppress(Unsatisfiable):
            drawing(free(group), drawn.setdefault, count=left, seed_=key_of(seed_, group.name))
    return tuple(drawn)


def drawing(strategy: Any, take: Callable[[Any], object], *, count: int, seed_: int) -> None:
    """Draw `count` values with Hypothesis and pass each to `take`: the same values in every process."""

    @seed(seed_)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(strategy)
    def collect(value: Any) -> None:
        take(value)

    with _no_constants_of_modules():
        collect()


@contextmanager
def _no_constants_of_modules() -> Iterator[None]:
    """Keep Hypothesis from trying numbers that it finds in the code of loaded modules.

    It would draw other cases from one process to another, and in a process from one time to another. It has no setting
    for that; releases of it that do so have these names.
    """
    try:
        from hypothesis.internal.conjecture import providers
        from hypothesis.internal.constants_ast import Constants
    except ImportError:
        yield
        return
    before = providers._get_local_constants
    providers._get_local_constants = lambda: Constants()
    providers.CONSTANTS_CACHE.cache.clear()
    try:
        yield
    finally:
        providers._get_local_constants = before
        providers.CONSTANTS_CACHE.cache.clear()
