"""The formula of a kernel in a case: the kernel is followed on residues, beside the calls that are judged."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from lastbit.case import Case
from lastbit.errors import LastbitError
from lastbit.inputs import Inputs, build
from lastbit.judging.formula import Compared, compare_formulas, describe_formula, explaining, kept_apart
from lastbit.judging.problem import Problem
from lastbit.result import CaseResult, Judgement, StageResult, Verdict
from lastbit.shadows.following import Followed
from lastbit.timing import FORMULAS, timed
from lastbit.verify.calls import Here
from lastbit.verify.check import Subject, after_raising

J = TypeVar("J", bound=Judgement)

_LARGEST = 1 << 17
"""Elements of all tensors of a case that is followed: an operation on residues takes some 100 ns an element."""

_TOLD = "; its own process says that every element follows from the formula of the contract"

_SMALL = 1 << 13
"""Elements of a case that is followed for its kind alone."""


def is_small(case: Case) -> bool:
    """Return whether a case costs little to follow a kernel in."""
    return sum(tensor.numel for tensor in case.tensors) <= _SMALL


def follows(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a kernel can be followed on tensors: numbers on the CPU, and not too many."""
    given = tensors.values()
    here = any(t.is_floating_point() for t in given) and all(t.device.type == "cpu" for t in given)
    return here and sum(t.numel() for t in given) < _LARGEST


def judged_by_formula(judgement: J, problem: Problem, followed: Followed) -> J:
    """Return a judgement that broke no contract with what the formula of the kernel says of the results.

    A result whose residues are all those of the contract is decided, whatever the order of its sums left open; one of
    another formula fails. Where the kernel's own process told them, nothing is decided: it could have told the
    reference's, but none would tell those of another formula to pass.
    """
    compared = compare_formulas(problem, followed.results)
    judgement = replace(judgement, opaque=followed.opaque)
    if not followed.told:
        judgement = replace(judgement, stages=tuple(_with_residues(s, compared) for s in judgement.stages))
    if wrong := {name: c for name, c in compared.items() if c.differs}:
        explained = () if followed.told else explaining(problem, followed.results)
        findings = tuple(describe_formula(problem, name, c, explained) for name, c in wrong.items())
        findings = (*findings, *judgement.findings)
        return replace(judgement, verdict=Verdict.FAILED, reason="", findings=findings, explained_by=explained)
    if followed.told:
        equal = compared and all(c.equal == c.numel for c in compared.values())
        said = _TOLD if equal and judgement.verdict is Verdict.INCONCLUSIVE else ""
        return replace(judgement, reason=f"{judgement.reason}{said}")
    unknown = [c for c in problem.op.alternatives(problem.contract) if judgement.ruled_out.get(str(c)) == 0]
    ruled_out = {**judgement.ruled_out, **kept_apart(problem, followed.results, unknown)}
    decided = judgement.verdict is Verdict.INCONCLUSIVE and any(s.decided for s in judgement.stages if s.result)
    verdict, reason = (Verdict.PASSED, "") if decided else (judgement.verdict, judgement.reason)
    return replace(judgement, verdict=verdict, reason=reason, ruled_out=ruled_out)


def _with_residues(stage: StageResult, compared: Mapping[str, Compared]) -> StageResult:
    found = compared.get(stage.name)
    return stage if found is None else replace(stage, equal=found.equal, differing=found.differs)


@timed(FORMULAS)
def followed_in(subject: Subject, case: Case, inputs: Inputs, results: Collection[str]) -> Followed | None:
    """Return what is seen of a kernel that is called once more for a case; None where it cannot be followed here.

    Raises:
        LastbitError: the process of the kernel has ended.
    """
    if case.displaced or not follows(inputs.tensors):
        return None
    problem, performer = subject.problem(inputs), subject.performer or Here(subject.kernel, subject.device)
    shapes = {name: problem.shapes[name] for name in problem.op.in_order(results)}
    return performer.follow(inputs, case.params, shapes, problem.constants)


def followed_anew(subject: Subject, case: Case, results: Collection[str]) -> tuple[Problem, Followed] | None:
    """Build a case of a run once more and follow its kernel; return the problem and what was seen, None if nothing.

    Not on an accelerator: tensors whose rows lie far apart have few elements, and take gigabytes there.

    Raises:
        LastbitError: the process of the kernel has ended.
    """
    if subject.device.type != "cpu":
        return None
    inputs = build(case.gathered(), subject.device)
    followed = followed_in(subject, case, inputs, results)
    return None if followed is None else (subject.problem(inputs), followed)


def with_formula(subject: Subject, case: Case, result: CaseResult) -> CaseResult:
    """Return the result of a case of a run with what the formula of the kernel says, where it can be followed here."""
    return by_formula(subject, case, result)[0]


@timed(FORMULAS)
def by_formula(subject: Subject, case: Case, result: CaseResult) -> tuple[CaseResult, tuple[Problem, Followed] | None]:
    """`with_formula`, and what was seen of the kernel, if it was followed."""
    start = time.perf_counter()
    if result.verdict not in (Verdict.PASSED, Verdict.INCONCLUSIVE):
        return result, None
    try:
        found = followed_anew(subject, case, result.results)
    except LastbitError as error:
        return after_raising(subject, result, error)[0], None
    if found is None:
        return result, None
    result = judged_by_formula(result, *found)
    return replace(result, seconds=result.seconds + time.perf_counter() - start), found
