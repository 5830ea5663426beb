"""The judge of one kernel file: it runs cases one after the other, and concludes."""

from __future__ import annotations

import functools
import hashlib
import io
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from functools import partial
from pathlib import Path

from lastbit.case import Case, Group, parse_case
from lastbit.errors import LastbitError, UsageError, unknown
from lastbit.judges.confined_explanations import with_culprit
from lastbit.judges.opening import Desk, OpenedKernel, OrderedCase, desk_of, opened
from lastbit.judges.question import JudgeQuestion
from lastbit.reports.judged import CaseFinding, Contracts, DecidedShare, FileVerdict
from lastbit.result import BAD, OF_FORMULA, OF_VALUES, CaseResult, Finding, Verdict, idle_in, simplest, told
from lastbit.run import Run
from lastbit.verify.check import unsupported
from lastbit.verify.item_run import Explorer, features_of
from lastbit.verify.plan import Item
from lastbit.verify.processes import versions
from lastbit.verify.worker import Workplace

TORCH_OP = "torch_op"
"""The kind of a finding: the kernel calls torch's own operator for the whole op, where that is forbidden."""

# Arbitrary: finer kinds ask for more cases of each, coarser ones take small cases for large ones.
_BITS = 4
"""Cases of one kind differ in their number of elements by a factor of less than 2 to this power."""

# Arbitrary: each is a call and a judgement more, and a kernel that relies on PyTorch's operators does so in all.
_TRIED = 4  # cases in which torch's operators give other values


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
    try:
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:  # it cannot be loaded either
        digest = ""
    return FileVerdict(
        file=path,
        sha256=digest,
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


@functools.cache
def _versions() -> dict[str, str]:
    known = versions()
    return {name: known[name] for name in ("python", "lastbit", "torch", "triton")}


def _judged(desk: Desk, kernel: OpenedKernel, question: JudgeQuestion, empty: FileVerdict) -> FileVerdict:
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
        sentence = (
            f"the kernel calls {' and '.join(called)} of torch, which computes the whole op: with other values of "
            "that, it gives others or raises."
        )
        findings = (*seen_in.findings, Finding(TORCH_OP, "", sentence))
        results.append(replace(seen_in, verdict=Verdict.FAILED, findings=findings, counted=False))
    repro = partial(question.repro, empty.file, device=empty.device)
    # Cases that the kernel declined although its signature takes them.
    turned = [parse_case(r.case) for r in results if r.verdict is Verdict.UNSUPPORTED and r.counted]
    declined = sum(not unsupported(subject.kernel, case) for case in turned)
    if question.may_decline:
        results, declined = [replace(result, declined=False) for result in results], 0
    found = concluded(replace(empty, torch_ops=called), desk.run_of(results), len(chosen), repro, declined)
    if question.speed and found.verdict is Verdict.PASSED:
        from lastbit.judges.call_time import with_speed  # which a judge that times nothing does without

        return with_speed(found, desk, subject, question, repro)
    return with_culprit(found, desk, question, failure_of(results))


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
        return frozenset({(group_of.get(case), features, case.numel.bit_length() // _BITS)})

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
    passed = [r for r in results if r.counted and r.verdict is Verdict.PASSED and parse_case(r.case).numel]
    if not names or kernel.subject.is_lost:
        return (), None
    for result in secrets.SystemRandom().sample(passed, min(len(passed), _TRIED)):
        case = parse_case(result.case)
        if found := tuple(name for name in names if kernel.depends_on(name, case)):
            return found, result
    return (), None


# Conclusions from all cases of a file

ERRORED = "errored"
"""The kind of a finding: the kernel gave nothing that can be judged."""

Repro = Callable[[str], str]
"""The command that runs a case line again."""


def concluded(
    empty: FileVerdict,
    run: Run,
    planned: int,
    repro: Repro,
    declined: int = 0,
) -> FileVerdict:
    """Return the document with what follows from the results, those tried while a failure was shrunk included.

    A kernel that `declined` cases which it must take has not passed: it chose the ones that it was judged on.
    """
    results = run.results
    if not results:
        return replace(empty, reason="no case of the op is one that the kernel takes")
    name, device = results[0].kernel, results[0].device
    verdict = run.verdict(name, device)
    chosen = verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE) and declined > 0
    reason = _reason(run, verdict, name, device)
    if chosen:
        of_choice = (
            f"the kernel declined {declined:,} of {len(results):,} cases that its signature takes, and passed the "
            "others; --may-decline lets it choose, cases that are given say which count"
        )
        reason = "; ".join(filter(None, [of_choice, reason]))
    verdict = Verdict.INCONCLUSIVE if chosen else verdict
    counted = Counter(result.verdict for result in results if result.counted)
    return replace(
        empty,
        verdict=verdict,
        reason=reason,
        cases={str(each): counted[each] for each in Verdict},
        planned=planned,
        decided=tuple(
            DecidedShare(d.stage, d.dtype, d.numel, d.decided, round(d.decided / d.numel, 6) if d.numel else 1.0)
            for d in run.decided(name, device)
        ),
        findings=tuple(_findings(results, repro)),
        contracts=contracts_of(results, verdict, empty.contract),
        idle=idle_in(results),
    )


def failure_of(results: Sequence[CaseResult]) -> CaseResult | None:
    """Return the cheapest failing case; None if none fails."""
    failed = [result for result in results if result.verdict is Verdict.FAILED]
    return min(failed, key=_cost, default=None)


def _reason(run: Run, verdict: Verdict, kernel: str, device: str) -> str:
    """Say why there is no verdict on values; empty if there is one."""
    if verdict is Verdict.INCONCLUSIVE:
        apart = [f"{told(p.alternative, idle_in(run.results))} ({p.dtypes})" for p in run.power if p.missing]
        little = [f"{d.stage} ({d.dtype})" for d in run.decided(kernel, device) if d.missing]
        missing = [f"no case told the contract from {', '.join(apart)}"] if apart else []
        return "; ".join(missing + ([f"too little was decided of {', '.join(little)}"] if little else []))
    silent = verdict in (Verdict.PASSED, Verdict.FAILED)
    return "" if silent else next(result.reason for result in run.results if result.verdict is verdict)


def _cost(result: CaseResult) -> int:
    return parse_case(result.case).numel


def _findings(results: Sequence[CaseResult], repro: Repro) -> Iterator[CaseFinding]:
    """Yield one finding of each kind and stage, from the cheapest case that shows it, the cheapest cases first."""
    seen: set[tuple[str, str]] = set()
    for result in sorted((r for r in results if r.verdict in BAD), key=_cost):
        errored = [Finding(ERRORED, "", result.reason)] if result.verdict is Verdict.ERRORED else []
        for finding in (*errored, *result.faults):
            if (finding.kind, finding.stage) not in seen:
                seen.add((finding.kind, finding.stage))
                yield CaseFinding(finding.kind, finding.stage, finding.sentence, result.case, repro(result.case))


def contracts_of(results: Sequence[CaseResult], verdict: Verdict, claimed: str) -> Contracts:
    """Conclude from the results which contracts are kept and ruled out: the claimed one, and others."""
    out = {c for r in results for c, outside in r.ruled_out.items() if outside}
    asked = dict.fromkeys(c for r in results for c in r.ruled_out)
    failed = [  # for its values, and not for a side effect of the kernel
        r
        for r in results
        if r.verdict is Verdict.FAILED
        and (r.failing_stage is not None or any(f.kind in (*OF_VALUES, OF_FORMULA) for f in r.faults))
    ]
    if failed:
        common = [c for c in failed[0].explained_by if all(c in r.explained_by for r in failed)]
        keeps = tuple(c for c in simplest(common, claimed) if c not in out and c != claimed)
    else:
        keeps = (claimed,) if verdict in (Verdict.PASSED, Verdict.FAILED) else ()
    asked |= {claimed: None} if failed else {}
    open_ = tuple(c for c in asked if c not in (*out, *keeps, claimed))
    return Contracts(keeps, open_, tuple(c for c in asked if c in out or (c == claimed and failed)))
