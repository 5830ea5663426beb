"""The call with other values of the same shapes: judged at once, so that nothing of it is held for long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from harness.case import Case
from harness.errors import KernelError, UnsupportedCase, UsageError
from harness.inputs import Inputs, build
from harness.inputs.guards import Guarded
from harness.judging.judge import judge
from harness.judging.problem import Problem
from harness.result import Finding
from harness.timing import REST, timed
from harness.verify.calls import Call, Caller

ELSEWHERE = "with other values of the same shapes"

ProblemOf = Callable[[Inputs], Problem]
"""What the kernel has to compute for inputs."""


@dataclass(frozen=True)
class OtherValues:
    """A call on inputs of the same shapes with other values, of which nothing but this is recorded.

    Attributes:
        case: what it was called on.
        guards: the allocations of its inputs, which a later call may get; empty where nobody needs them any more.
        findings: what the kernel did that it must not do.
        forbidden: what the reference says against its results.
    """

    case: Case
    guards: tuple[Guarded, ...]
    findings: tuple[Finding, ...]
    forbidden: tuple[Finding, ...]


def call_elsewhere(caller: Caller, case: Case, problem_of: ProblemOf) -> OtherValues | None:
    """Call the kernel on `case` with another seed and judge its results; None where the kernel declines the values."""
    case = replace(case, seed=(case.seed + 1) % 2**63)
    inputs = build(case, caller.device)
    try:
        call = caller.guarded(inputs)
        caller.unseen(inputs)
    except UnsupportedCase:
        return None
    except Exception as error:
        error.add_note(elsewhere(case))
        raise
    problem = problem_of(inputs)
    guards = inputs.guards
    del inputs  # and the copy that the reference gets
    return OtherValues(case, guards, call.findings, tuple(_forbidden(problem, call, case)))


def elsewhere(case: Case) -> str:
    """Which inputs a finding is about that are not those of the case."""
    return f"{ELSEWHERE}, in {case}"


def _forbidden(problem: Problem, call: Call, case: Case) -> Iterator[Finding]:
    """What the reference says against the results."""
    try:
        with timed(REST):
            judgement = judge(problem, call.actual, alternatives=False)
    except UsageError:  # the op is not defined for values that nobody chose
        return
    except KernelError as error:
        yield Finding("other_values", "", f"{elsewhere(case)}: {error}")
        return
    for finding in judgement.faults:
        yield Finding("other_values", finding.stage, f"{elsewhere(case)}: {finding.sentence}")
