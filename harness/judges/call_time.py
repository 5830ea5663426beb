"""Time of a call of a kernel that has passed, and the verdict on the calls that were timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lastbit.bench.case_lines import bench_cases
from lastbit.bench.samples import QUICK, Effort
from lastbit.bench.untrusted import bound_of
from lastbit.case import Case, parse_case
from lastbit.errors import LastbitError, UnsupportedCase, UsageError
from lastbit.isolation.isolated import Isolated
from lastbit.judges.judge_file import Repro
from lastbit.judges.opening import Desk
from lastbit.judges.question import JudgeQuestion
from lastbit.kernel import Kernel
from lastbit.reports.bench import SpeedBound
from lastbit.reports.judged import CallTime, CaseFinding, FileVerdict
from lastbit.result import Verdict
from lastbit.verify.check import Subject, unsupported

TIMED = "timed"
"""The kind of a finding: what the kernel gave is wrong where it was timed."""


def with_speed(found: FileVerdict, desk: Desk, subject: Subject, question: JudgeQuestion, repro: Repro) -> FileVerdict:
    """Add to the document of a kernel that passed the time of a call, or the reason why there is none.

    Results of timed calls that are wrong make it FAILED. A kernel that cannot be timed has passed all the same.
    """
    try:
        bound = _timed(desk, subject, question)
        overhead, roof = bound.empty.median, round(bound.share(desk.roof), 6)
        time = CallTime(bound.of, bound.time.median, overhead, bound.time.count, roof=roof)
    except LastbitError as error:
        return replace(found, speed_reason=str(error))
    reason = ""
    if question.beside:
        try:
            other = beside(desk, question, parse_case(time.case), QUICK)
            if other is None:
                reason = "beside it: no kernel of the project keeps the contract and takes the case"
            else:
                time = replace(time, beside={other.kernel: other.time.median})
        except LastbitError as error:
            reason = f"beside it: {error}"
    found = replace(found, speed=time, speed_reason=reason)
    if bound.verdict != Verdict.FAILED:
        return found
    finding = CaseFinding(TIMED, "", f"in calls that were timed: {bound.why}", bound.of, repro(bound.of))
    contracts = replace(found.contracts, keeps=())
    return replace(found, verdict=Verdict.FAILED, findings=(*found.findings, finding), contracts=contracts)


def _timed(desk: Desk, subject: Subject, question: JudgeQuestion) -> SpeedBound:
    """Bound the time on the first case that the kernel takes, of the question or of those that are measured."""
    reason = f"no case of {question.op} that is measured is one that the kernel takes; give a 'CASE'"
    cases = map(parse_case, question.lines) if question.lines else bench_cases(desk.project, desk.device, "kernels.txt")
    for case in cases:
        if case.op == question.op and not unsupported(subject.kernel, case):
            try:
                with desk.watch(case):
                    return bound_of(subject, case, desk.kernels.server, QUICK)
            except (UnsupportedCase, UsageError) as error:  # the next one may be of another kind
                reason = str(error)
    raise LastbitError(reason)


def beside(desk: Desk, question: JudgeQuestion, case: Case, effort: Effort) -> SpeedBound | None:
    """Time the first kernel of the project that keeps the contract and takes the case, in its own processes.

    Raises:
        LastbitError: it cannot be timed.
    """
    kernel = next(_trusted(desk, question, case), None)
    if kernel is None:
        return None
    with desk.kernels.pair(kernel, question.timeout) as pair:
        isolated = Isolated(pair, desk.device)
        subject = Subject(kernel, desk.project.op(kernel.op), desk.device, performer=isolated)
        return bound_of(subject, case, desk.kernels.server, effort)


def _trusted(desk: Desk, question: JudgeQuestion, case: Case) -> Iterator[Kernel]:
    """Yield kernels of the project, or those that the configuration names, that keep the contract and take the case."""
    op = desk.project.op(question.op)
    contract = op.contract(question.contract)
    for folder in desk.project.kernel_folders:
        for kernel in desk.kernels.declared(Path(folder).resolve()):
            named = not desk.config.kernels or kernel.name in desk.config.kernels
            here = not kernel.devices or desk.device.type in kernel.devices
            same = kernel.op == op.name and op.contract(kernel.contract) == contract
            if named and here and same and not unsupported(kernel, case):
                yield kernel
