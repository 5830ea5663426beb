"""Cost of a verified case beside one call of its kernel: time and its parts, memory, and use of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lastbit.bench.samples import Effort, in_turn, now, on_device, peak_memory, size_of, wall
from lastbit.bench.subjects import subject_for
from lastbit.case import Case, parse_case
from lastbit.devices import made_current
from lastbit.errors import LastbitError
from lastbit.inputs import build
from lastbit.judging.problem import PROBLEMS
from lastbit.outcomes.bench import BUSY, MEMORY, OPERATIONS, PARTS, VERIFIED, Measurement, Sample
from lastbit.result import TURNED_DOWN, CaseResult, Verdict
from lastbit.timing import PARTS as PARTS_OF_TIME
from lastbit.timing import Clock, listening
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.worker import Workplace

_ONE = "one call of the kernel"
_WHOLE = "verify_case"


def cost(place: Workplace, line: str, effort: Effort) -> list[Measurement]:
    """Measure the cost of one case line.

    Raises:
        LastbitError: the kernel declines the case, or raises.
    """
    case = parse_case(line)
    subject = subject_for(place, case)
    with made_current(subject.device):
        memory = list(_memory(subject, case))
        whole = _wall(subject, case, effort, repeat=True)
        verified = _verified(subject, case, whole, effort)
        return [*verified, *memory, *_use(subject, case, whole), *_parts(subject, case)]


def _wall(subject: Subject, case: Case, effort: Effort, *, repeat: bool) -> Sample:
    return wall(lambda number: _verify(subject, reseeded(case, number), repeat=repeat), effort)


def _verify(subject: Subject, case: Case, *, repeat: bool = True) -> CaseResult:
    """Verify a case that no other kernel was given before."""
    PROBLEMS.forget()
    return verify_case(subject, case, repeat=repeat)


def reseeded(case: Case, number: int) -> Case:
    """Reseed a case, so that each number gives the same problem other values."""
    return replace(case, seed=(case.seed + number) % 2**63)


def _checked(result: CaseResult) -> None:
    """Raise unless the case ran to its end, whatever the verdict."""
    if result.verdict in TURNED_DOWN | {Verdict.ERRORED}:
        raise LastbitError(f"{result.kernel} on {result.device}: {result.reason}, in {result.case}")


def _verified(subject: Subject, case: Case, whole: Sample, effort: Effort) -> list[Measurement]:
    """Measure a verified case with four calls of the kernel, and with two as in most cases of a run."""
    name, one = subject.kernel.name, on_device(_one_call(subject, case), subject.device, effort)
    most = _wall(subject, case, effort, repeat=False)
    ways = ((f"{name}, four calls", whole), (f"{name}, two calls", most))
    return [Measurement(VERIFIED, str(case), what, "s", sample, _ONE, one) for what, sample in ways]


def _one_call(subject: Subject, case: Case) -> Callable[[], Any]:
    tensors = in_turn(lambda number: build(reseeded(case, number), subject.device).tensors, subject.device)
    return lambda: subject.kernel.call(**next(tensors), **case.params)


def _memory(subject: Subject, case: Case) -> Iterator[Measurement]:
    """Yield the peak memory of a verified case beside the bytes of its inputs, on an accelerator."""
    inputs = size_of(build(case, subject.device).tensors)
    most = peak_memory(lambda: _checked(_verify(subject, case)), subject.device)
    if most is not None:
        yield Measurement(MEMORY, str(case), _WHOLE, "B", Sample.of([most]), "bytes of the inputs", Sample.of([inputs]))


def _use(subject: Subject, case: Case, whole: Sample) -> Iterator[Measurement]:
    """Measure how long an accelerator works during a verified case, and how many operations it does."""
    if subject.device.type == "cpu":
        return
    activities = set(torch.profiler.supported_activities()) - {ProfilerActivity.CPU}
    with profile(activities=activities, acc_events=True) as profiled:
        _verify(subject, case)
        torch.accelerator.synchronize(subject.device)
    operations = [event for event in profiled.events() or () if event.device_type.name != "CPU"]
    busy = sum(event.time_range.elapsed_us() for event in operations) / 1e6
    yield Measurement(BUSY, str(case), "time of operations", "s", Sample.of([busy]), _WHOLE, whole)
    yield Measurement(OPERATIONS, str(case), _WHOLE, "operations", Sample.of([len(operations)]))


def _parts(subject: Subject, case: Case) -> Iterator[Measurement]:
    """Measure the time of each part of a verified case, where every part waits for the device."""
    with listening(Clock(now(subject.device))) as clock:
        _verify(subject, case)
        seconds = clock.seconds
    total = Sample.of([sum(seconds.values())])
    for part in filter(seconds.get, PARTS_OF_TIME):
        yield Measurement(PARTS, str(case), part, "s", Sample.of([seconds[part]]), _WHOLE, total)
