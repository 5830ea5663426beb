"""Calls with other values of the same shapes, judged at once, so that nothing of them is held for long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lastbit.case import Case
from lastbit.errors import UnsupportedCase
from lastbit.inputs import Inputs, build, refilled
from lastbit.inputs.guards import Guarded
from lastbit.judging.problem import Problem
from lastbit.result import Finding
from lastbit.verify.apart import forbidden, guard_dependent
from lastbit.verify.calls import Caller

ELSEWHERE = "with other values of the same shapes"
IN_A_THREAD = ", in a thread of its own, without gradients, where torch may have two threads"
_OF_NO_LINE = 1 << 62

ProblemOf = Callable[[Inputs], Problem]
"""What the kernel has to compute for inputs."""


@dataclass(frozen=True)
class OtherValues:
    """Findings of a call on inputs of the same shapes with other values.

    Attributes:
        case: what it was called on.
        guards: the allocations of its inputs, which a later call may get; empty where nobody needs them any more.
        findings: what the kernel did that it must not do.
        apart: how its results differ from those of a call that was not guarded.
        forbidden: what the reference says against its results.
        mixed: what the kernel did that it must not do where only some inputs were these, in a call that says where.
    """

    case: Case
    guards: tuple[Guarded, ...]
    findings: tuple[Finding, ...]
    apart: tuple[Finding, ...]
    forbidden: tuple[Finding, ...]
    mixed: tuple[Finding, ...] = ()

    def located(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """Prefix the sentences of findings with the inputs they are about."""
        return (replace(f, sentence=f"{elsewhere(self.case)}: {f.sentence}") for f in findings)


def call_elsewhere(caller: Caller, case: Case, problem_of: ProblemOf) -> OtherValues | None:
    """Call the kernel on `case` with another seed and judge its results; None where the kernel declines the values."""
    case = replace(case, seed=(case.seed + 1) % 2**63)
    inputs = build(case, caller.device)
    try:
        call = caller.guarded(inputs)
        unseen = caller.unguarded(inputs) if caller.parted and is_harmless(call.findings) else None
    except UnsupportedCase:
        return None
    except Exception as error:
        error.add_note(elsewhere(case))
        raise
    problem = problem_of(inputs)
    guards = inputs.guards
    del inputs  # and the copy that the reference gets
    differing = () if unseen is None else tuple(guard_dependent(caller.kernel, call, unseen, lambda: problem))
    del unseen
    against = forbidden(problem, call.actual, "other_values", elsewhere(case))
    return OtherValues(case, guards, call.findings, differing, tuple(against))


def call_mixed(
    caller: Caller, case: Case, other: OtherValues, problem_of: ProblemOf, known: Sequence[Finding]
) -> OtherValues:
    """Call the kernel on the first input of `case` and the other inputs of `other`; return `other` with the findings.

    A kernel that keeps a result for some of its inputs, such as the weight, gives that of another call here. Where
    calls without guards have a process of their own, this one is made in a thread of its own, without gradients and
    with two threads of torch, as in a user's process, and an op with one input is called on that of `other`. All other
    calls have one thread: their bits are compared, and those of a sum may depend on it. Findings that are `known` are
    not told again.
    """
    first, *rest = (spec.name for spec in case.tensors)
    if not (other.guards and (rest or caller.parted)):
        return other
    where = f"{ELSEWHERE} for all inputs but {first}" if rest else ELSEWHERE
    where += IN_A_THREAD if caller.parted else ""
    where += f", in {case if rest else other.case}"
    named = replace(case, seed=case.seed ^ _OF_NO_LINE)  # the case of nothing else, among the problems that are kept
    inputs = replace(refilled(other.guards, case, [first] if rest else []), case=named)
    try:
        call = caller.unguarded(inputs, threaded=True) if caller.parted else caller.guarded(inputs)
    except UnsupportedCase:
        if caller.parted:  # a kernel could tell this call by its thread, and decline none but it
            raise
        return other
    except Exception as error:
        error.add_note(where)
        raise
    against = forbidden(problem_of(inputs), call.actual, "other_values", where)
    new = [found for found in call.findings if found not in (*known, *other.findings)]
    mixed = (replace(found, sentence=f"{where}: {found.sentence}") for found in new)
    return replace(other, forbidden=tuple(against), mixed=tuple(mixed))


def is_harmless(findings: Iterable[Finding]) -> bool:
    """Return whether no write outside was found; after one, calls without guards could spoil the process."""
    return all(finding.kind != "wrote_outside" for finding in findings)


def elsewhere(case: Case) -> str:
    """Describe a case with other values, for findings about it."""
    return f"{ELSEWHERE}, in {case}"
