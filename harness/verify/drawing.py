"""Cases of a group: combinations of options by a covering design, so that nothing is left to chance, and drawn ones.

First every option of every choice is taken, each with every dtype of its tensor, then as many pairs of options as the
number of cases allows. It is greedy, as in Cohen et al., The AETG System, IEEE Transactions on Software Engineering 23
(1997): of all groups the one whose next case covers most comes next.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from lastbit.case import Case, Chosen, Group, Option
from lastbit.inputs.bits import key_of
from lastbit.inputs.choices import Feature, feature, features

Selection = tuple[str, Option]
"""A choice and one of its options."""


def designed(groups: Sequence[Group], cases: int, *, whole: bool = True) -> list[Group]:
    """Return the groups with the choices of their designed cases; together they have `cases` per group.

    A quarter is left for Hypothesis to draw, and what the design does not need. A `whole` design has more cases if
    every option needs more.
    """
    choosing = [n for n, group in enumerate(groups) if group.choices and group.strategy is not None]
    if not choosing or not cases:
        return list(groups)
    design, rows = _Design(), {number: list[Chosen]() for number in choosing}
    for number in choosing * (cases // 2):
        design.add(rows[number], design.best(groups[number]))
    left = len(choosing) * (cases - max(1, cases // 4)) - sum(map(len, rows.values()))
    queue = [(design.worth(design.best(groups[number])), number) for number in choosing]
    heapq.heapify(queue)
    while queue and (left > 0 or (whole and queue[0][0][0] < 0)):  # the next case has a new option
        before, number = heapq.heappop(queue)
        row = design.best(groups[number])
        if (worth := design.worth(row)) == before:
            left -= design.add(rows[number], row)
            worth = design.worth(design.best(groups[number]))
        if worth < (0, 0):
            heapq.heappush(queue, (worth, number))
    drawn = max(1, cases // 4) + max(left, 0) // len(choosing)
    return [
        replace(group, designed=tuple(rows[number]), drawn=drawn) if number in rows else group
        for number, group in enumerate(groups)
    ]


@dataclass
class _Design:
    """The features and pairs of options covered so far; `paired` has each option with those before it in a case."""

    covered: set[Feature] = field(default_factory=set)
    paired: defaultdict[Selection, set[Selection]] = field(default_factory=lambda: defaultdict(set))
    uses: Counter[Selection] = field(default_factory=Counter)

    def best(self, group: Group) -> Chosen:
        """Choose an option for each choice in turn: a new one, then the one with most new pairs, then the rarest."""
        row: dict[str, Option] = {}
        before: set[Selection] = set()
        for choice, options in group.choices.items():
            row[choice] = max(options, key=lambda option: self._preference(row, before, choice, option))
            before.add((choice, row[choice]))
        return row

    def _preference(
        self, row: dict[str, Option], before: set[Selection], choice: str, option: Option
    ) -> tuple[bool, int, int]:
        row[choice] = option
        own = choice, option
        return feature(choice, option, row) not in self.covered, len(before - self.paired[own]), -self.uses[own]

    def worth(self, row: Chosen) -> tuple[int, int]:
        """Count the features, and pairs of options, that a case would add; negated, for a heap."""
        new = sum(feature not in self.covered for feature in features(row))
        return -new, -sum(len(before - self.paired[own]) for own, before in _with_those_before(row))

    def add(self, rows: list[Chosen], row: Chosen) -> bool:
        """Take a case if it adds anything; return whether it does."""
        if self.worth(row) == (0, 0):
            return False
        rows.append(row)
        self.covered.update(features(row))
        for own, before in _with_those_before(row):
            self.paired[own] |= before
        self.uses.update(row.items())
        return True


def _with_those_before(row: Chosen) -> Iterator[tuple[Selection, set[Selection]]]:
    before: set[Selection] = set()
    for own in row.items():
        yield own, before
        before.add(own)


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
        return tuple(_each_designed(group, seed_))


def _each_designed(group: Group, seed_: int) -> Iterator[Case]:
    for place, chosen in enumerate(group.designed):
        with suppress(Unsatisfiable):
            yield _second(group.strategy(chosen), seed_ + place)


def _second(strategy: Any, seed_: int) -> Any:
    """Draw the second value of a strategy, since the first is the simplest there is; the first if it is alone."""
    drawn: list[Any] = []
    drawing(strategy, drawn.append, count=2, seed_=seed_)
    return drawn[-1]


def draw(group: Group, count: int, seed_: int = 0) -> list[Case]:
    """Draw the cases of a group for a seed, about `count` of them generated, without duplicates.

    There are fewer, or none, if what can be drawn is nearly always rejected.
    """
    drawn = dict.fromkeys((*group.examples, *designed_cases(group, seed_)))
    if left := group.left_to_draw(count):
        with suppress(Unsatisfiable):
            drawing(free(group), drawn.setdefault, count=left, seed_=key_of(seed_, group.name))
    return list(drawn)


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
