"""The formula of a kernel in the cases of a run: a few are followed on residues, beside the calls that are judged."""

from __future__ import annotations

import time
from dataclasses import replace

from lastbit.case import Case
from lastbit.errors import UnsupportedCase
from lastbit.inputs import build
from lastbit.judging.formula import compare_formulas, describe_formula, explaining, kept_apart
from lastbit.result import CaseResult, Verdict
from lastbit.shadows.following import follow
from lastbit.timing import FORMULAS, timed
from lastbit.verify.check import Subject

_LARGEST = 1 << 17
"""Elements of a tensor of a case that is followed: an operation on residues takes some 100 ns an element."""


def follows(subject: Subject, case: Case) -> bool:
    """Return whether a kernel can be followed in a case: on the CPU, in this process, and it is not too large."""
    small = all(tensor.numel <= _LARGEST for tensor in case.tensors)
    return small and subject.device.type == "cpu" and subject.performer is None and not case.displaced


@timed(FORMULAS)
def with_formula(subject: Subject, case: Case, result: CaseResult) -> CaseResult:
    """Return the result of a case that broke no contract with what the formula of the kernel says of it.

    A result whose residues are all those of the contract is decided, whatever the order of its sums left open; one of
    another formula fails. What the kernel raises says nothing: the calls that are judged have raised nothing.
    """
    if result.verdict not in (Verdict.PASSED, Verdict.INCONCLUSIVE) or not follows(subject, case):
        return result
    start = time.perf_counter()
    problem = subject.problem(build(case.gathered(), subject.device))
    results = [stage.name for stage in result.stages if stage.result]
    try:
        tensors = build(case.gathered(), subject.device).hand_out()
        followed = follow(subject.kernel, tensors, case.params, results, problem.constants)
    except UnsupportedCase:
        return result
    compared = compare_formulas(problem, followed.results)
    stages = tuple(
        replace(s, equal=c.equal, differing=c.differs) if (c := compared.get(s.name)) is not None else s
        for s in result.stages
    )
    wrong = {name: c for name, c in compared.items() if c.differs}
    if wrong:
        explained = explaining(problem, followed.results)
        findings = tuple(describe_formula(problem, name, c, explained) for name, c in wrong.items())
        result = replace(result, verdict=Verdict.FAILED, findings=(*findings, *result.findings), explained_by=explained)
    else:
        unknown = [c for c in problem.op.alternatives(problem.contract) if result.ruled_out.get(str(c)) == 0]
        result = replace(result, ruled_out={**result.ruled_out, **kept_apart(problem, followed.results, unknown)})
        if any(s.equal for s in stages if s.result) and result.verdict is Verdict.INCONCLUSIVE:
            result = replace(result, verdict=Verdict.PASSED, reason="")
    return replace(result, stages=stages, opaque=followed.opaque, seconds=result.seconds + time.perf_counter() - start)
