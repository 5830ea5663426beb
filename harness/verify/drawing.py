"""The cases of a group: its examples, those that a design has chosen for, and what Hypothesis draws."""

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
    """The strategy of the group's cases, which draws what is to be chosen, too; the group has one."""
    if not group.choices:
        return group.strategy
    options = {name: st.sampled_from(options) for name, options in group.choices.items()}
    return st.fixed_dictionaries(options).flatmap(group.strategy)


def designed_cases(group: Group, seed_: int) -> tuple[Case, ...]:
    """The designed cases of a group in a run with this seed, in which all else is drawn, those that can be drawn."""
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
    """The second value that Hypothesis draws, as the first is the simplest there is; that one if there is no other."""
    drawn: list[Any] = []
    drawing(strategy, drawn.append, count=2, seed_=seed_)
    return drawn[-1]


def draw(group: Group, count: int, seed_: int = 0) -> list[Case]:
    """The cases of a group in a run with this seed and about `count` cases per group, without those that are twice.

    There are fewer, or none, if what can be drawn is nearly always rejected.
    """
    drawn = dict.fromkeys((*group.examples, *designed_cases(group, seed_)))
    if left := group.left_to_draw(count):
        with suppress(Unsatisfiable):
            drawing(free(group), drawn.setdefault, count=left, seed_=key_of(seed_, group.name))
    return list(drawn)


def drawing(strategy: Any, take: Callable[[Any], object], *, count: int, seed_: int) -> None:
    """Let Hypothesis draw `count` values, and hand over each: the same ones in every process."""

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
    """Let Hypothesis try none of the numbers that it finds in the code of the modules that happen to be loaded.

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
