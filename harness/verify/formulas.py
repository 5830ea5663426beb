"""The formula of a kernel in a case: the kernel is followed on residues, beside the calls that are judged."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from lastbit.case import Case
from lastbit.errors import UnsupportedCase
from lastbit.inputs import build
from lastbit.judging.formula import compare_formulas, describe_formula, explaining, kept_apart
from lastbit.judging.problem import Problem
from lastbit.kernel import Kernel
from lastbit.result import CaseResult, Judgement, Verdict
from lastbit.shadows.following import follow
from lastbit.timing import FORMULAS, timed
from lastbit.verify.check import Subject

J = TypeVar("J", bound=Judgement)

_LARGEST = 1 << 17
"""Elements of all tensors of a case that is followed: an operation on residues takes some 100 ns an element."""


def follows(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a kernel can be followed on tensors: numbers on the CPU, and not too many."""
    given = tensors.values()
    here = any(t.is_floating_point() for t in given) and all(t.device.type == "cpu" for t in given)
    return here and sum(t.numel() for t in given) < _LARGEST


def judged_by_formula(
    judgement: J, kernel: Kernel, problem: Problem, handed: Mapping[str, Tensor], params: Mapping[str, Any]
) -> J:
    """Return a judgement that broke no contract with what the formula of the kernel says of the results.

    A result whose residues are all those of the contract is decided, whatever the order of its sums left open; one of
    another formula fails. `handed` are tensors for a call of the kernel, which may write to them.
    """
    results = problem.op.in_order(stage.name for stage in judgement.stages if stage.result)
    try:
        followed = follow(kernel, handed, params, results, problem.constants)
    except UnsupportedCase:
        return judgement
    compared = compare_formulas(problem, followed.results)
    stages = tuple(
        replace(s, equal=c.equal, differing=c.differs) if (c := compared.get(s.name)) is not None else s
        for s in judgement.stages
    )
    judgement = replace(judgement, stages=stages, opaque=followed.opaque)
    if wrong := {name: c for name, c in compared.items() if c.differs}:
        explained = explaining(problem, followed.results)
        findings = tuple(describe_formula(problem, name, c, explained) for name, c in wrong.items())
        findings = (*findings, *judgement.findings)
        return replace(judgement, verdict=Verdict.FAILED, findings=findings, explained_by=explained)
    unknown = [c for c in problem.op.alternatives(problem.contract) if judgement.ruled_out.get(str(c)) == 0]
    ruled_out = {**judgement.ruled_out, **kept_apart(problem, followed.results, unknown)}
    decided = judgement.verdict is Verdict.INCONCLUSIVE and any(s.decided for s in stages if s.result)
    verdict, reason = (Verdict.PASSED, "") if decided else (judgement.verdict, judgement.reason)
    return replace(judgement, verdict=verdict, reason=reason, ruled_out=ruled_out)


@timed(FORMULAS)
def with_formula(subject: Subject, case: Case, result: CaseResult) -> CaseResult:
    """Return the result of a case of a run with what the formula of the kernel says, where it can be followed here."""
    start = time.perf_counter()
    if result.verdict not in (Verdict.PASSED, Verdict.INCONCLUSIVE) or subject.performer is not None or case.displaced:
        return result
    inputs = build(case.gathered(), subject.device)
    if not follows(inputs.tensors):
        return result
    result = judged_by_formula(result, subject.kernel, subject.problem(inputs), inputs.hand_out(), case.params)
    return replace(result, seconds=result.seconds + time.perf_counter() - start)
