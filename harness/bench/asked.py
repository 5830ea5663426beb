"""Kernel processes, as they are asked for times: by messages, and by memory that they have never had before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lastbit.bench.isolated import Process, TimedKernel, bound
from lastbit.bench.samples import Effort
from lastbit.bench.unseen import Shaped, contiguous, drawn
from lastbit.case import Case
from lastbit.errors import LastbitError, UsageError
from lastbit.inputs import build
from lastbit.isolation import answers
from lastbit.isolation.isolated import Isolated
from lastbit.isolation.memory import SharedBlock, fresh
from lastbit.isolation.process import ForkServer, KernelProcess, Start
from lastbit.outcomes.speed import SpeedBound
from lastbit.verify.case_calls import Caller
from lastbit.verify.check import Subject


@dataclass
class TimedProcess(Process):
    """A bare kernel process that is asked to make calls.

    Attributes:
        process: it.
        timeout: seconds that a call may take.
        given: the memory that it has been given, until it is told to let it go.
    """

    process: KernelProcess
    timeout: float
    given: list[SharedBlock] = field(default_factory=list)

    def ask(self, message: Mapping[str, Any], memory: Mapping[str, SharedBlock]) -> Mapping[str, Any]:
        gone = self.given if message["do"] == "prepare" else []  # of the call before
        self.given = [block for block in self.given if block not in gone] + list(memory.values())
        numbers = {what: block.number for what, block in memory.items()}
        shared = {"new": [block.as_json for block in memory.values()], "close": [block.number for block in gone]}
        fds = [block.descriptor for block in memory.values() if block.descriptor is not None]
        answer = self.process.ask({**message, **numbers, **shared}, self.timeout, fds)
        return {"copied": answers.integer(answer.get("copied", 0), 0, 1 << 40)}

    def memory(self, device: torch.device, size: int) -> SharedBlock:
        return fresh(device, size)


def bound_of(subject: Subject, case: Case, server: ForkServer, effort: Effort) -> SpeedBound:
    """Bound from above the time of an isolated kernel on a case, with the verdict on what its calls gave.

    Raises:
        UnsupportedCase: the kernel declines the case.
        UsageError: values stand in the case line, so that they cannot be drawn anew.
        LastbitError: the kernel raises, or its process ends.
    """
    performer = subject.performer
    assert isinstance(performer, Isolated)
    if fixed := [t.name for t in case.tensors if "(" in t.regime]:
        raise UsageError(f"{case}: the values of {fixed[0]} are given; a kernel is timed on values that are drawn anew")
    pair, case = performer.pair, case.gathered()
    results = _results(subject, case)
    nothing = server.start(Start(bare=True, device_type=subject.device.type))
    try:
        asked = TimedProcess(pair.bare, pair.timeout)
        return bound(TimedKernel(subject, case, results, asked), TimedProcess(nothing, pair.timeout), effort)
    finally:
        nothing.end()


def _results(subject: Subject, case: Case) -> tuple[Shaped, ...]:
    """Return name, dtype, shape and strides of each result of a call."""
    inputs = build(drawn(case), subject.device)
    problem = subject.problem(inputs)
    required, optional = tuple(problem.required), tuple(problem.may_return)
    caller = Caller(subject.kernel, subject.device, required, optional, subject.performer, problem.shapes)
    call = caller.unguarded(inputs)
    shaped = (contiguous(name, call.actual[name].dtype, call.actual[name].shape) for name in call.results)
    if elsewhere := [name for name in call.results if call.actual[name].device != inputs.guards[0].tensor.device]:
        raise LastbitError(f"result {elsewhere[0]} lies on another device than the inputs")
    return tuple(shaped)
