"""Bitwise agreement of two kernels of one op, and the stage at which their contracts differ where they disagree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
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
from lastbit.reports.identification import Identification
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
    return found if found.parting is None else replace(found, parting=_with_places(place, found, found.parting))


def _subject(place: Workplace, name: str) -> Subject:
    if name not in place.subjects:
        raise UsageError(f"{name} does not run on {place.config.devices[0]}; its declaration names other devices")
    return place.subjects[name]


def _compared(subjects: Sequence[Subject], seen: Sequence[Observed], most: int) -> Agreement:
    one, other = subjects
    op, of_case = one.op, {sample.case: sample for sample in seen[1].samples}
    pairs = [(sample, of_case[sample.case]) for sample in seen[0].samples if sample.case in of_case]
    compared = [tuple(_stages(*pair)) for pair in pairs]
    unequal = [pair[0] for pair, stages in zip(pairs, compared, strict=True) if any(map(_differs, stages))]
    kept = [_kept(identified(subject, given, most=most)) for subject, given in zip(subjects, seen, strict=True)]
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


def _kept(found: Identification) -> tuple[str, ...]:
    """Return the names of the op's contracts that allow every bit of a kernel's results, the likeliest first."""
    return tuple(name for candidate in found.kept if not candidate.changed for name in candidate.contracts)


# Bits


def _differs(stage: StageAgreement) -> bool:
    return stage.result and stage.unequal_elements > 0


def _stages(one: TrialSample, other: TrialSample) -> Iterator[StageAgreement]:
    """Yield the bitwise comparison of every stage that both kernels gave for a case, in the reference's order."""
    trace = one.problem.trace
    for name in trace.formats:
        if name in one.seen.actual and name in other.seen.actual:
            tensors = one.seen.actual[name], other.seen.actual[name]
            yield _compare(name, name in trace.results, *tensors, str(one.case))


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


def _together(compared: Sequence[tuple[StageAgreement, ...]]) -> Iterator[StageAgreement]:
    """Yield each stage with its counts summed over all cases; the smallest case, which is first, gives the example."""
    found: dict[str, StageAgreement] = {}
    for stage in (stage for stages in compared for stage in stages):
        found[stage.stage] = _sum(found[stage.stage], stage) if stage.stage in found else stage
    yield from (found[name] for name in _in_order([stage.stage for stage in stages] for stages in compared))


def _in_order(lists: Iterable[list[str]]) -> list[str]:
    """Merge lists of names that have one common order; a new name goes before the one that follows it in its list."""
    merged: list[str] = []
    for names in lists:
        at = len(merged)
        for name in reversed(names):
            if name in merged:
                at = merged.index(name)
            else:
                merged.insert(at, name)
    return merged


def _sum(a: StageAgreement, b: StageAgreement) -> StageAgreement:
    return StageAgreement(
        a.stage,
        a.result,
        a.cases + b.cases,
        a.elements + b.elements,
        a.unequal_cases + b.unequal_cases,
        a.unequal_elements + b.unequal_elements,
        max(a.ulp, b.ulp),
        a.apart or b.apart,
    )


# Contracts


def _parting(problem: Problem, kept: Sequence[Sequence[Contract]]) -> Parting | None:
    """Find the first stage at which two contracts differ in value, one kept by each kernel, as alike as possible."""
    one, other = min(itertools.product(*kept), key=lambda pair: len(_options(*pair)))
    exact = replace(problem, premises=Premises(exact_sums=True), siblings=None)
    problems = replace(exact, contract=one), replace(exact, contract=other)
    stage = _first_apart(*problems)
    if not stage:
        return None
    one_does, other_does = (
        _does(own, stage, _options(own.contract, beside.contract)) for own, beside in (problems, problems[::-1])
    )
    return Parting(stage, (one_does, other_does))


def _options(own: Contract, other: Contract) -> tuple[str, ...]:
    """List the options and directions of a contract that another one lacks."""
    points = (f"{stage}:{way}" for stage, way in own.directions.items() if other.directions.get(stage) != way)
    return (*(a for a, b in zip(own.options, other.options, strict=True) if a != b), *points)


def _first_apart(one: Problem, other: Problem) -> str:
    """Return the first stage that one evaluation lacks, or whose format or values differ; empty if there is none."""
    for name in dict.fromkeys([*one.trace.stages, *other.trace.stages]):
        a, b = one.trace.stages.get(name), other.trace.stages.get(name)
        if a is None or b is None or a.format != b.format:
            return name
        if not torch.equal(bits_with_one_nan(a.value), bits_with_one_nan(b.value)):
            return name
    return ""


def _does(problem: Problem, stage: str, options: tuple[str, ...]) -> Does:
    rounds = stage in problem.contract.rounds
    return Does(
        str(problem.contract),
        tuple(filter(None, options)),
        problem.format(stage).told if rounds else "",
        stage in problem.trace.stages,
    )


def _with_places(place: Workplace, found: Agreement, parting: Parting) -> Parting:
    """Add the source line at which each kernel computes the parting stage, where it can be traced."""
    one, other = parting.does
    names = (side.kernel for side in found.sides)
    places = [_place_of(place, name, parting.stage, found.line) for name in names]
    return replace(parting, does=(replace(one, place=places[0]), replace(other, place=places[1])))


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
