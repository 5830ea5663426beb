"""Hunting for faults with the cases that `lastbit verify` generates."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lastbit.case import Case, Group, parse_case
from lastbit.config import Config
from lastbit.inputs import build, guarded_allocations
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.ops import Contract, Op
from lastbit.result import BAD, CaseResult, Comparison
from lastbit.verify.check import Subject, examine
from lastbit.verify.drawing import designed, draw
from lastbit.verify.project import Project, open_project
from tests.faults.catalogue import GROUPS
from tests.faults.plant import Fault, kernel_of, without_faults

KEPT: dict[str, tuple[int, int]] = json.loads((Path(__file__).with_name("shown.json")).read_text())
"""Fault → number of the case that shows it, and of the one that shows it in its results, where it is not the first."""

Options = tuple[tuple[str, Any], ...]
"""Axes of combinations and their options; None for one that is left out or no axis for the kernel."""

_STAGE_KINDS = ("outside", "special")


@functools.cache
def project() -> Project:
    return open_project(Config(folder=""))


def clean_kernels() -> tuple[Kernel, ...]:
    return without_faults().kernels


def clean(fault: Fault, family: str = "triton") -> Kernel:
    """Find the kernel that the fault was planted in, or another one of its variant."""
    return kernel_of(clean_kernels(), fault.variant, family)


def cases_for(fault: Fault, dtype: str, count: int, seed_: int = 0) -> Iterator[Case]:
    """Yield the cases that the fault is hunted with; those of a table of shapes are the same for every seed.

    A group is drawn when its first case is asked for, since most faults are shown by the first few cases.
    """
    wanted = GROUPS[fault.op][fault.options][dtype]
    cases = cases_of(fault.variant, wanted, count, seed_, fault.family)
    if not isinstance(wanted, str):  # then those of other options: a parameter that the fault needs may be among these
        cases = itertools.chain(cases, cases_of(fault.variant, (), count, seed_, fault.family))
    seen = set[Case]()
    for case in cases:
        if case.tensors[0].dtype == dtype and case not in seen:
            seen.add(case)
            yield case
    assert seen, f"no case for {fault.name!r} has a first input of {dtype}"


def cases_of(variant: str, wanted: str | Options, count: int, seed_: int = 0, family: str = "triton") -> Iterator[Case]:
    """Yield the cases among about `count` that a run with this seed has for a kernel of that variant.

    They are of the group of that name, or of all groups of combinations that have these options, in turn. Cut to the
    size for a CPU on every device, so that all devices see the same bits.
    """
    kernel = kernel_of(clean_kernels(), variant, family)
    groups = _groups(kernel.op, kernel.accepts, count)
    drawn = functools.partial(_drawn, kernel.op, kernel.accepts, count, seed_)
    if isinstance(wanted, str):
        number, group = next((n, g) for n, g in enumerate(groups) if g.name == wanted)
        yield from group.examples if group.strategy is None else drawn(number, examples=False)
        return
    chosen = [
        number
        for number, g in enumerate(groups)
        if g.combination and all(g.combination.get(axis) == option for axis, option in wanted)
    ]
    for turn in itertools.count():
        left = [number for number in chosen if turn == 0 or turn < len(drawn(number))]
        if not left:
            return
        for number in left:
            yield from drawn(number)[turn : turn + 1]


@functools.cache
def _drawn(
    op: str, accepts: frozenset[str], count: int, seed_: int, number: int, *, examples: bool = True
) -> tuple[Case, ...]:
    """Draw the cases of the group with that number."""
    group = _groups(op, accepts, count)[number]
    return tuple(draw(group if examples else replace(group, examples=()), count, seed_))


@functools.cache
def _groups(op: str, accepts: frozenset[str], count: int) -> list[Group]:
    return designed(project().groups(op, accepts, small=True), count)


class OneContract(Op):
    """An op of which other contracts are not tried; no verdict depends on them, and they take most of the time."""

    def alternatives(self, contract: Contract) -> Iterator[Contract]:
        return iter(())

    def candidates(self, contract: Contract) -> tuple[Contract, ...]:
        return ()


@functools.cache
def op_of(name: str) -> OneContract:
    """One object per op, so that all kernels of an op are given the same problems."""
    op = project().op(name)
    return OneContract(**{field.name: getattr(op, field.name) for field in fields(op)})


def subject_of(kernel: Kernel, device: torch.device) -> Subject:
    return Subject(kernel, op_of(kernel.op), device)


def without_stages(kernel: Kernel) -> Kernel:
    """Make the kernel one that returns its results only."""
    return replace(kernel, stages=())


@dataclass(frozen=True)
class Sighting:
    """How a kernel was caught.

    Attributes:
        cases: generated cases up to the one that failed, that one included.
        result: of the case that failed.
        actual: copies of the tensors that were judged, by stage.
    """

    cases: int
    result: CaseResult
    actual: Mapping[str, Tensor]

    @property
    def named(self) -> str:
        """The stage, or the kind of finding, that a report leads with."""
        kinds = [f.kind for f in self.result.findings if f.kind not in _STAGE_KINDS]
        if kinds and kinds != ["rows"]:
            return kinds[0]
        stage = self.result.failing_stage
        if stage is not None:
            return stage.name
        return self.result.findings[0].stage if kinds else self.result.verdict.lower()

    @property
    def comparison(self) -> Comparison:
        """Statistics of the first result with an element outside, or else of the op's first result."""
        results = [s.cumulative for s in self.result.stages if s.result]
        return next((c for c in results if c.outside), results[-1] if results else Comparison())


def hunt(kernel: Kernel, cases: Sequence[Case], device: torch.device, start: int = 1) -> Sighting | None:
    """Find the first of `cases` that the kernel fails, from the one with the number `start` on; None if none."""
    subject = subject_of(kernel, device)
    for number, case in enumerate(cases[start - 1 :], start):
        result, actual = examine(subject, case)
        if result.verdict in BAD:
            return Sighting(number, result, actual)
    return None


def judged_alone(kernel: Kernel, seen: Sighting, device: torch.device) -> Sighting:
    """Judge the same results without the kernel's stages."""
    problem = subject_of(kernel, device).problem(build(parse_case(seen.result.case).gathered(), device))
    results = {name: seen.actual[name] for name in (*problem.required, *problem.may_return) if name in seen.actual}
    return replace(seen, result=seen.result.judged(judge(problem, results)))


@dataclass(frozen=True)
class Effects:
    """What a fault does to the results of some cases.

    Attributes:
        cases: how many.
        elements: of all results.
        changed: elements whose bits are not those of the kernel without the fault.
        alarms: cases in which assert_close sets the kernel apart from the reference.
        false_alarms: the same for the kernel without the fault.
        caught: cases in which assert_close alarms on the kernel with the fault only.
    """

    cases: int = 0
    elements: int = 0
    changed: int = 0
    alarms: int = 0
    false_alarms: int = 0
    caught: int = 0


def effects(kernel: Kernel, without: Kernel, reference: Kernel, cases: Iterable[Case], device: torch.device) -> Effects:
    """Compare a kernel with the one it was copied from, and both with a reference by torch.testing.assert_close.

    The defaults of assert_close apply, but NaN equals NaN.
    """
    total = Effects()
    for case in cases:
        inputs = build(case, device)
        wanted, right, actual = (_results(k, inputs.hand_out(), case) for k in (reference, without, kernel))
        alarm, false_alarm = _apart(actual, wanted), _apart(right, wanted)
        total = Effects(
            total.cases + 1,
            total.elements + sum(t.numel() for t in right.values()),
            total.changed + sum(_changed(actual.get(name), t) for name, t in right.items()),
            total.alarms + alarm,
            total.false_alarms + false_alarm,
            total.caught + (alarm and not false_alarm),
        )
    return total


def changed(kernel: Kernel, without: Kernel, case: Case, device: torch.device) -> int:
    """How many elements of the results of a case have other bits than those of the kernel without the fault."""
    inputs = build(case, device)
    right, actual = (_results(k, inputs.hand_out(), case) for k in (without, kernel))
    return sum(_changed(actual.get(name), t) for name, t in right.items())


def _changed(actual: Tensor | None, right: Tensor) -> int:
    """Elements whose bits differ, all of them where the result is missing."""
    return right.numel() if actual is None else int((_bits(actual) != _bits(right)).sum())


def _apart(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    if wanted.keys() - actual.keys():
        return True
    try:
        for name, tensor in wanted.items():
            torch.testing.assert_close(actual[name], tensor, equal_nan=True)
    except AssertionError:
        return True
    return False


def _results(kernel: Kernel, tensors: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    with guarded_allocations(0):  # a fault may write past what it allocates
        returned: Any = kernel.call(**tensors, **case.params)
    return returned if isinstance(returned, dict) else {"output": returned}


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
