"""The groups of cases that the kernels of a run get, where no lines of cases are given: designed and drawn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from hypothesis import strategies as st

from lastbit.branches.size_constants import SizeConstants, size_constants
from lastbit.case import PEER, Case, Group
from lastbit.config import PROFILES, Config
from lastbit.devices import machine
from lastbit.inputs.combinations import Accepted
from lastbit.kernel import Kernel
from lastbit.run import NotRun
from lastbit.verify.check import Subject
from lastbit.verify.drawing import designed, free, multiple
from lastbit.verify.narrowing import groups_of, not_asked, takes_less
from lastbit.verify.plan import NO_SIZES_LEFT, SIZED
from lastbit.verify.project import Project
from lastbit.verify.property_checks import ordinary_group
from lastbit.verify.sizes import cases_of_each, sized_cases, templates_of

_MOST_NUMBERS = 6  # that a note names
# Arbitrary: of one kernel that has all options it is some 60 rows in place of 15, seconds of a run of a minute.
_FEW_FUNCTIONS = 4
"""Functions of a run up to which every three options meet; of more every two do, but for ops that ask for three."""


def groups_in_a_run(
    project: Project, config: Config, functions: int = 1
) -> Callable[[Subject], tuple[list[Group], list[NotRun]]]:
    """Return a function that makes the groups of a kernel on a device, and notes of those that it does not take.

    `functions` is how many functions the kernels have, which share sized cases in a run; of few, more options meet.
    """
    most = cases_of_each(functions, share=config.cases_per_group / PROFILES["ci"])
    compared = bool(config.revision or config.revisions)  # case by case, and each may name other sizes

    templates = functools.cache(partial(templates_of, project, small=config.small))
    strength = 3 if functions <= _FEW_FUNCTIONS and not config.brief and not compared else 2
    every = functools.cache(
        lambda op, accepts: project.groups(op, Accepted.of(accepts, strength=strength), small=config.small)
    )
    times = functools.cache(lambda op, accepts: multiple(every(op, accepts)))

    @functools.cache  # most kernels of an op have groups in common
    def made(op: str, accepts: frozenset[str], taking_less: Kernel | None) -> list[Group]:
        """Make the groups of cases for an op's kernels that take the same, with the run's number of cases.

        A kernel that takes fewer groups has as many cases to design and draw in the groups that are left.
        """
        groups = every(op, accepts)
        if taking_less is not None:
            groups = groups_of(project, taking_less, small=config.small, strength=strength)
        whole = config.cases_per_group >= PROFILES["ci"]
        if config.brief:
            return designed(groups, config.cases_per_group, brief=True)
        return designed(groups, config.cases_per_group, whole=whole, times=times(op, accepts))

    def groups_and_notes(subject: Subject) -> tuple[list[Group], list[NotRun]]:
        kernel, op = subject.kernel, subject.op
        groups = made(kernel.op, kernel.accepts, kernel if takes_less(kernel, op) else None)
        groups = [*groups, *_further(project, subject, groups, small=config.small)]
        constants = SizeConstants() if compared else size_constants(kernel.call, kernel.source)
        sized = sized_cases(templates(kernel.op), kernel, constants, most)
        groups += [Group(SIZED, examples=sized.cases)] if sized.cases else []
        notes = [*not_asked(kernel, op, every(kernel.op, kernel.accepts), groups)]
        if sized.left:
            numbers = ", ".join(map(str, sized.left[:_MOST_NUMBERS])) + ", …" * (len(sized.left) > _MOST_NUMBERS)
            notes.append(NotRun(f"{kernel.name} beside {numbers}", NO_SIZES_LEFT))
        return groups, notes

    return groups_and_notes


def _further(project: Project, subject: Subject, groups: Iterable[Group], *, small: bool) -> Iterator[Group]:
    """Yield a group for the properties that a kernel declares, if its op has none, and one with tensors elsewhere."""
    kernel = subject.kernel
    if kernel.invariant and not any(group.properties for group in groups):
        yield ordinary_group(subject, groups_of(project, kernel, small=small))
    if subject.device.type != "cpu" and subject.takes_several:
        cases = groups_of(project, kernel, small=True)
        places = ("cpu", PEER) if machine().peers(str(subject.device)) else ("cpu",)
        yield Group("placement", strategy=displaced_cases(cases, subject.op.inputs[0], places))


@st.composite
def displaced_cases(draw: st.DrawFn, groups: Iterable[Group], first: str, places: Sequence[str]) -> Case:
    """Draw a case of one of the groups, with tensors besides `first`, at least one if there is any, on `places`."""
    strategies = [free(group) for group in groups if group.strategy is not None]
    examples = [st.sampled_from(group.examples) for group in groups if group.examples]
    case: Case = draw(st.one_of([*strategies, *examples]))
    movable = [tensor.name for tensor in case.tensors if tensor.name != first]
    chosen = draw(st.sets(st.sampled_from(movable), min_size=1)) if movable else set()
    placed = {name: draw(st.sampled_from(places)) for name in sorted(chosen)}
    tensors = (replace(t, device=placed.get(t.name, "")) for t in case.apart().tensors)
    return replace(case, tensors=tuple(tensors))
