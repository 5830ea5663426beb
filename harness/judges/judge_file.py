"""The judge of one kernel file: it runs cases one after the other, and concludes."""

from __future__ import annotations

import functools
import hashlib
import io
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lastbit.case import Case, Group, parse_case
from lastbit.errors import LastbitError, UsageError, unknown
from lastbit.judges.case_order import OrderedCase, elements
from lastbit.judges.conclusions import concluded, failure_of
from lastbit.judges.confined_explanations import with_culprit
from lastbit.judges.opening import Desk, OpenedKernel, desk_of, opened
from lastbit.judges.question import JudgeQuestion
from lastbit.reports.judged import FileVerdict
from lastbit.result import BAD, CaseResult, Finding, Verdict
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.item_run import Explorer, features_of
from lastbit.verify.plan import Item
from lastbit.verify.worker import Workplace

TORCH_OP = "torch_op"
"""The kind of a finding: the kernel calls torch's own operator for the whole op, where that is forbidden."""

_BITS = 4
"""Cases of one kind differ in their number of elements by a factor of less than 2 to this power."""

_TRIED = 4  # cases in which torch's operators give other values

_PACKAGES = ("lastbit", "torch", "triton")


def ready(place: Workplace, question: JudgeQuestion | None) -> None:
    """Prepare for files: start the server of kernel processes, and evaluate one case of each group of the question."""
    desk = desk_of(place)
    desk.kernels.begin()
    if question is not None:
        _check(desk, question)
        op = desk.project.op(question.op)
        of_groups = {one.group: one.case for one in desk.cases.of(question, frozenset((*op.inputs, *op.params)))}
        for case in of_groups.values():
            desk.evaluate(op, op.contract(question.contract), case)


def judge_file(place: Workplace, path: str, question: JudgeQuestion) -> FileVerdict:
    """Judge the kernel of a file, which is loaded in a process of its own.

    Raises:
        UsageError: the question names an op, contract, input or case that there is not.
    """
    start, desk = time.perf_counter(), desk_of(place)
    _check(desk, question)
    contract = str(desk.project.op(question.op).contract(question.contract))
    empty = replace(unjudged(path, question, desk.config.devices[0]), contract=contract)
    try:
        with opened(desk, Path(path), question) as kernel:
            found = _judged(desk, kernel, question, empty)
    except LastbitError as error:  # of the file: what the question names is there
        found = replace(empty, verdict=Verdict.ERRORED, reason=str(error))
    return replace(found, seconds=round(time.perf_counter() - start, 4))


def _check(desk: Desk, question: JudgeQuestion) -> None:
    """Raise `UsageError` if a question means nothing for the project, whatever the file."""
    op = desk.project.op(question.op)
    op.contract(question.contract)
    for name in question.mutates:
        if name not in op.inputs:
            raise unknown(f"input of {op.name} that may be overwritten:", name, op.inputs)
    for line in question.lines:
        if (named := parse_case(line).op) != question.op:
            raise UsageError(f"the case is of {named}, and the file is judged as {question.op}: {line}")


def unjudged(
    path: str, question: JudgeQuestion, device: str, *, verdict: Verdict = Verdict.SKIPPED, reason: str = ""
) -> FileVerdict:
    """Make the document of a file that was not judged."""
    return FileVerdict(
        file=path,
        sha256=_sha256(Path(path)),
        op=question.op,
        kernel=question.function,
        contract=question.contract,
        device=device,
        verdict=verdict,
        reason=reason,
        cases=dict.fromkeys(Verdict, 0),
        seed=question.seed,
        profile="" if question.lines else question.profile,
        versions=_versions(),
    )


def _sha256(path: Path) -> str:
    """Hash a file that can be read; empty for any other, which cannot be loaded either."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **dict.fromkeys(_PACKAGES, "not installed")}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _judged(desk: Desk, kernel: OpenedKernel, question: JudgeQuestion, empty: FileVerdict) -> FileVerdict:
    """Judge a kernel that is loaded."""
    subject, question = kernel.subject, question.drawn
    empty = replace(empty, kernel=subject.kernel.name, notes=kernel.notes, confinement=kernel.confinement)
    empty = replace(empty, seed=question.seed)
    if subject.kernel.devices and subject.device.type not in subject.kernel.devices:
        reason = f"the file declares it for {', '.join(subject.kernel.devices)} only"
        return replace(empty, verdict=Verdict.UNSUPPORTED, reason=reason)
    chosen = desk.cases.of(question, subject.kernel.accepts)
    results = _results(desk, kernel, question, chosen)
    try:
        called, seen_in = _torch_ops(kernel, results)
    except LastbitError as error:  # what the cases have shown counts all the same
        called, seen_in, failed = (), None, f"a call in which torch's operators give other values failed: {error}"
        results.append(replace(results[-1], verdict=Verdict.ERRORED, reason=failed, counted=False))
    if seen_in is not None and called and question.forbid_torch_op:
        results.append(_with_torch_op(seen_in, called))
    repro = partial(question.repro, empty.file, device=empty.device)
    declined = _declined(subject, results)
    if question.may_decline:
        results, declined = [replace(result, declined=False) for result in results], 0
    found = concluded(replace(empty, torch_ops=called), desk.run_of(results), len(chosen), repro, declined)
    if question.speed and found.verdict is Verdict.PASSED:
        from lastbit.judges.call_time import with_speed  # which a judge that times nothing does without

        return with_speed(found, desk, subject, question, repro)
    return with_culprit(found, desk, question, failure_of(results))


def _declined(subject: Subject, results: Sequence[CaseResult]) -> int:
    """Count the cases that the kernel declined although its signature takes them."""
    turned = (parse_case(result.case) for result in results if result.verdict is Verdict.UNSUPPORTED and result.counted)
    return sum(not unsupported(subject.kernel, case) for case in turned)


def _results(
    desk: Desk, kernel: OpenedKernel, question: JudgeQuestion, chosen: Sequence[OrderedCase]
) -> list[CaseResult]:
    """Judge the cases in order, until the process is gone or, with `fail_fast`, to the first failing one."""
    results: list[CaseResult] = []

    def watched(attempt: Callable[[], CaseResult]) -> CaseResult:
        with desk.watch(question.op), redirect_stderr(io.StringIO()):  # tracebacks are for the log of a run
            return desk.verify(attempt)

    group_of = {one.case: one.group for one in chosen}

    def kind(case: Case) -> frozenset[object]:
        """Classify a case by its likely path through the kernel; one per class is also called with other values."""
        features = features_of(case, kernel.subject.kernel.accepts)
        return frozenset({(group_of.get(case), features, elements(case).bit_length() // _BITS)})

    item = Item(kernel.subject, Group("file"), asked=bool(question.lines))
    explorer = Explorer(item, results.append, lambda item, case, counted: None, watched, kind)
    for one in chosen:
        result = explorer.run(one.case)
        desk.tick(result)
        if kernel.subject.is_lost or (question.fail_fast and result.verdict in BAD):
            return results
    first = next(((c, r) for c, r in zip(chosen, results, strict=True) if r.verdict in BAD), None)
    if first is not None and not question.lines:
        explorer.shrunk(first[0].case, first[1], first[0].alike)
    return results


def _torch_ops(kernel: OpenedKernel, results: Sequence[CaseResult]) -> tuple[tuple[str, ...], CaseResult | None]:
    """Return the operators of torch for the whole op on which the kernel depends, and a case that shows it.

    A few of the cases that it passed are drawn when all are over, and tried one after the other.
    """
    names = kernel.subject.op.torch_ops
    passed = [r for r in results if r.counted and r.verdict is Verdict.PASSED and elements(parse_case(r.case))]
    if not names or kernel.subject.is_lost:
        return (), None
    for result in secrets.SystemRandom().sample(passed, min(len(passed), _TRIED)):
        case = parse_case(result.case)
        if found := tuple(name for name in names if kernel.depends_on(name, case)):
            return found, result
    return (), None


def _with_torch_op(result: CaseResult, called: Sequence[str]) -> CaseResult:
    sentence = (
        f"the kernel calls {' and '.join(called)} of torch, which computes the whole op: with other values of that, it "
        "gives others or raises."
    )
    findings = (*result.findings, Finding(TORCH_OP, "", sentence))
    return replace(result, verdict=Verdict.FAILED, findings=findings, counted=False)
