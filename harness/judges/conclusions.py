"""Conclusions from all cases of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lastbit.case import parse_case
from lastbit.judges.case_order import elements
from lastbit.reports.judged import CaseFinding, Contracts, DecidedShare, FileVerdict
from lastbit.result import BAD, OF_FORMULA, OF_VALUES, CaseResult, Finding, Verdict, idle_in, simplest, told
from lastbit.run import Run

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
    verdict = Verdict.INCONCLUSIVE if chosen else verdict
    counted = Counter(result.verdict for result in results if result.counted)
    return replace(
        empty,
        verdict=verdict,
        reason="; ".join(filter(None, [_of_choice(declined, len(results)) if chosen else "", reason])),
        cases={str(each): counted[each] for each in Verdict},
        planned=planned,
        decided=_decided(run, name, device),
        findings=tuple(_findings(results, repro)),
        contracts=contracts_of(results, verdict, empty.contract),
        idle=idle_in(results),
    )


def _of_choice(declined: int, cases: int) -> str:
    return (
        f"the kernel declined {declined:,} of {cases:,} cases that its signature takes, and passed the others; "
        "--may-decline lets it choose, cases that are given say which count"
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


def _decided(run: Run, kernel: str, device: str) -> tuple[DecidedShare, ...]:
    return tuple(
        DecidedShare(d.stage, d.dtype, d.numel, d.decided, round(d.decided / d.numel, 6) if d.numel else 1.0)
        for d in run.decided(kernel, device)
    )


def _cost(result: CaseResult) -> int:
    return elements(parse_case(result.case))


def _findings(results: Sequence[CaseResult], repro: Repro) -> Iterator[CaseFinding]:
    """Yield one finding of each kind and stage, from the cheapest case that shows it, the cheapest cases first."""
    seen: set[tuple[str, str]] = set()
    for result in sorted((r for r in results if r.verdict in BAD), key=_cost):
        errored = [Finding(ERRORED, "", result.reason)] if result.verdict is Verdict.ERRORED else []
        for finding in (*errored, *result.faults):
            if (finding.kind, finding.stage) not in seen:
                seen.add((finding.kind, finding.stage))
                yield CaseFinding(finding.kind, finding.stage, finding.sentence, result.case, repro(result.case))


def _is_of_values(result: CaseResult) -> bool:
    """Check whether a result fails for its values, and not for a side effect of the kernel."""
    return result.failing_stage is not None or any(f.kind in (*OF_VALUES, OF_FORMULA) for f in result.faults)


def contracts_of(results: Sequence[CaseResult], verdict: Verdict, claimed: str) -> Contracts:
    """Conclude from the results which contracts are kept and ruled out: the claimed one, and others."""
    out = {c for r in results for c, outside in r.ruled_out.items() if outside}
    asked = dict.fromkeys(c for r in results for c in r.ruled_out)
    failed = [r for r in results if r.verdict is Verdict.FAILED and _is_of_values(r)]
    if failed:
        common = [c for c in failed[0].explained_by if all(c in r.explained_by for r in failed)]
        keeps = tuple(c for c in simplest(common, claimed) if c not in out and c != claimed)
    else:
        keeps = (claimed,) if verdict in (Verdict.PASSED, Verdict.FAILED) else ()
    asked |= {claimed: None} if failed else {}
    open_ = tuple(c for c in asked if c not in (*out, *keeps, claimed))
    return Contracts(keeps, open_, tuple(c for c in asked if c in out or (c == claimed and failed)))
