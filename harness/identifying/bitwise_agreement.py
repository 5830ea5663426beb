"""Bitwise agreement of two kernels of one op, and the stage at which their contracts differ where they disagree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.diagnosing.trace import stages_in_sight
from lastbit.errors import UsageError
from lastbit.identifying.kept_contracts import Observed, cases_of, identified, observe
from lastbit.identifying.trials import TrialSample
from lastbit.inputs.bits import bits_with_one_nan, distance
from lastbit.judging.problem import Problem
from lastbit.numerics import Premises
from lastbit.ops import Contract
from lastbit.reports.agreement import Agreement, Apart, Does, KernelSide, Parting, StageAgreement
from lastbit.reports.stage_summary import in_one_order
from lastbit.verify.check import Subject
from lastbit.verify.worker import Workplace


def agree_kernels(place: Workplace, first: str, second: str, *, most: int) -> Agreement:
    """Compare two kernels on the lines of the configuration, or on generated cases that both take.

    `most` combinations of roundings are tried to find out what a kernel keeps of which no contract of the op fits.

    Raises:
        UsageError: they are of two ops, or one of them does not run on this device.
    """
    subjects = _subject(place, first), _subject(place, second)
    one, other = (subject.kernel for subject in subjects)
    if one.op != other.op:
        raise UsageError(f"{one.name} computes {one.op}, but {other.name} {other.op}: only kernels of one op can agree")
    cases = list(cases_of(place, *subjects, small=place.config.small))
    seen = tuple(observe(subject, cases, watch=place.watch) for subject in subjects)
    found = _compared(subjects, seen, most)
    if found.parting is None:
        return found
    one_does, other_does = (
        replace(own, place=_place_of(place, kernel.name, found.parting.stage, found.line))
        for own, kernel in zip(found.parting.does, (one, other), strict=True)
    )
    return replace(found, parting=replace(found.parting, does=(one_does, other_does)))


def _subject(place: Workplace, name: str) -> Subject:
    if name not in place.subjects:
        raise UsageError(f"{name} does not run on {place.config.devices[0]}; its declaration names other devices")
    return place.subjects[name]


def _compared(subjects: Sequence[Subject], seen: Sequence[Observed], most: int) -> Agreement:
    one, other = subjects
    op, of_case = one.op, {sample.case: sample for sample in seen[1].samples}
    pairs = [(sample, of_case[sample.case]) for sample in seen[0].samples if sample.case in of_case]
    compared, unequal = list[list[StageAgreement]](), list[TrialSample]()
    for a, b in pairs:
        trace, left, right = a.problem.trace, a.seen.actual, b.seen.actual
        names = [name for name in trace.formats if name in left and name in right]
        stages = [_compare(name, name in trace.results, left[name], right[name], str(a.case)) for name in names]
        compared.append(stages)
        if any(stage.result and stage.unequal_elements > 0 for stage in stages):
            unequal.append(a)
    kept = []  # for each the contracts of the op that allow every bit of its results, the likeliest first
    for subject, observed in zip(subjects, seen, strict=True):
        fitting = [c for c in identified(subject, observed, most=most).kept if not c.changed]
        kept.append(tuple(name for candidate in fitting for name in candidate.contracts))
    common = tuple(name for name in kept[0] if name in kept[1])
    parting = None
    if unequal and all(kept) and not common:
        parting = _parting(unequal[0].problem, [[op.contract(name) for name in names] for names in kept])
    return Agreement(
        op=op.name,
        device=str(one.device),
        sides=(_side(one, seen[0], kept[0]), _side(other, seen[1], kept[1])),
        cases=len(pairs),
        unequal_cases=len(unequal),
        stages=tuple(_together(compared)),
        common=common,
        parting=parting,
        line=str(unequal[0].case) if unequal else "",
    )


def _side(subject: Subject, seen: Observed, kept: tuple[str, ...]) -> KernelSide:
    return KernelSide(
        subject.kernel.name, str(subject.contract), kept, dict(seen.unsupported), seen.errors, seen.beside
    )


# Bits


def _compare(stage: str, result: bool, a: Tensor, b: Tensor, case: str) -> StageAgreement:
    """Compare one stage of one case bit by bit; if the dtypes differ, every element counts as unequal."""
    found = StageAgreement(stage, result, 1, a.numel())
    if not a.numel():
        return found
    if a.dtype != b.dtype:
        apart, ulp = torch.ones_like(a, dtype=torch.bool), torch.full(a.shape, math.inf, dtype=torch.float64)
    else:
        apart, ulp = bits_with_one_nan(a) != bits_with_one_nan(b), distance(a, b)
    count = int(apart.sum())
    if not count:
        return found
    ulp = torch.where(apart.to(ulp.device), ulp, -1.0)  # not the smallest distance of all: zeros may differ in sign
    worst = tuple(map(int, torch.unravel_index(ulp.argmax(), ulp.shape)))
    where = Apart(worst, (_decimal(a[worst]), _decimal(b[worst])), case)
    return replace(found, unequal_cases=1, unequal_elements=count, ulp=float(ulp.max()), apart=where)


def _decimal(element: Tensor) -> str:
    """Format a number; with nine digits, enough to tell a fp32 number from its neighbours, if it is floating-point."""
    return f"{float(element):.9g}" if element.is_floating_point() else str(element.item())


def _together(compared: Sequence[Sequence[StageAgreement]]) -> Iterator[StageAgreement]:
    """Yield each stage with its counts summed over all cases; the smallest case, which is first, gives the example."""
    found: dict[str, StageAgreement] = {}
    for stage in (stage for stages in compared for stage in stages):
        if (before := found.get(stage.stage)) is not None:
            stage = replace(
                before,
                cases=before.cases + stage.cases,
                elements=before.elements + stage.elements,
                unequal_cases=before.unequal_cases + stage.unequal_cases,
                unequal_elements=before.unequal_elements + stage.unequal_elements,
                ulp=max(before.ulp, stage.ulp),
                apart=before.apart or stage.apart,
            )
        found[stage.stage] = stage
    yield from (found[name] for name in in_one_order([stage.stage for stage in stages] for stages in compared))


# Contracts


def _parting(problem: Problem, kept: Sequence[Sequence[Contract]]) -> Parting | None:
    """Find the first stage at which two contracts differ in value, one kept by each kernel, as alike as possible."""
    one, other = min(itertools.product(*kept), key=lambda pair: len(_options(*pair)))
    exact = replace(problem, premises=Premises(exact_sums=True), siblings=None)
    problems = replace(exact, contract=one), replace(exact, contract=other)
    traces = [problem.trace for problem in problems]
    for stage in dict.fromkeys(name for trace in traces for name in trace.stages):
        a, b = (trace.stages.get(stage) for trace in traces)
        if a is None or b is None or a.format != b.format:
            break
        if not torch.equal(bits_with_one_nan(a.value), bits_with_one_nan(b.value)):
            break
    else:
        return None
    one_does, other_does = (
        Does(
            str(own.contract),
            tuple(filter(None, _options(own.contract, beside.contract))),
            own.format(stage).told if stage in own.contract.rounds else "",
            stage in own.trace.stages,
        )
        for own, beside in (problems, problems[::-1])
    )
    return Parting(stage, (one_does, other_does))


def _options(own: Contract, other: Contract) -> tuple[str, ...]:
    """List the options and directions of a contract that another one lacks."""
    points = (f"{stage}:{way}" for stage, way in own.directions.items() if other.directions.get(stage) != way)
    return (*(a for a, b in zip(own.options, other.options, strict=True) if a != b), *points)


def _place_of(place: Workplace, name: str, stage: str, line: str) -> str:
    """Return where a kernel computes a stage; empty if it cannot be traced, as under torch.compile or on a GPU."""
    if place.subjects[name].device.type != "cpu":
        return ""
    try:
        traced = stages_in_sight(place.subjects[name], parse_case(line), watch=place.watch)
    except Exception:  # whatever a kernel may do that is observed
        return ""
    steps = () if traced is None else traced.stages
    seen = next((step for step in steps if step.match is not None and step.match.stage == stage), None)
    return "" if seen is None else f"{Path(seen.file).name}:{seen.line}  {seen.text}  ({seen.dtype})"
