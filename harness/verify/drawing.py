"""The cases of a group: its examples, its designed cases, and cases that Hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from lastbit.case import Case, Group
from lastbit.inputs.bits import key_of


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
