"""Goldens taken from the results of a kernel today, and compared with those that were taken before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from lastbit.case import Case, Group, parse_case
from lastbit.errors import LastbitError
from lastbit.history.golden_file import Golden, RecordedCase, RecordedStage
from lastbit.history.golden_properties import Found, Held, found_today, held_of, lost
from lastbit.history.golden_provenance import differences, kind_of, provenance
from lastbit.history.golden_values import change, same, store
from lastbit.reports.golden import CaseOutcome, Change, Figures, KernelOutcome, Status
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.verify.check import Subject, examine, unsupported
from lastbit.verify.drawing import draw
from lastbit.verify.worker import Tick, Watch


@dataclass(frozen=True, eq=False)
class Take:
    """The results of a kernel today.

    Attributes:
        results: one for each case line that was run.
        golden: what of it was judged; only of use as a golden where nothing failed.
        properties: what was found of those that were asked.
    """

    results: Mapping[str, CaseResult]
    golden: Golden
    properties: Found = field(default_factory=dict)


def take(
    subject: Subject, lines: Iterable[str], *, watch: Watch, tick: Tick, asked: Held = MappingProxyType({})
) -> Take:
    """Run the kernel on case lines, telling `tick` each result, and ask for properties, each on lines of its own."""
    results: dict[str, CaseResult] = {}
    cases = []
    for line in lines:
        with watch(line):
            result, actual = _examined(subject, line)
        results[line] = result
        if actual:
            cases.append(_recorded(line, result, actual, subject.kernel.unordered))
        tick(result)
    fails = any(result.verdict in BAD for result in results.values())
    found = found_today(subject, {} if fails else asked, watch)
    kernel, contract = subject.kernel, str(subject.contract)
    where = kind_of(subject.device), provenance(subject)
    golden = Golden(kernel.name, kernel.op, contract, *where, cases=tuple(cases), properties=held_of(found, asked))
    return Take(results, golden, found)


def lines_for(subject: Subject, groups: Iterable[Group], *, drawn: int, seed: int, most: int) -> list[str]:
    """Return the cases of a golden of the kernel: per group its first example, and `drawn` generated cases.

    They are supported, on one device, and have at most `most` elements.
    """
    lines: list[str] = []
    for group in groups:
        cases = draw(group, drawn + _SPARE, seed)
        fitting = [case for case in cases if not case.displaced and _fits(subject, case, most)]
        generated = [case for case in fitting if case not in group.examples]
        examples = [case for case in fitting if case in group.examples]
        lines += map(str, [*examples[:1], *generated[max(len(generated) - drawn, 0) :]])
    return list(dict.fromkeys(lines))


_SPARE = 4  # the first cases that are generated are the simplest, and say the least


def _fits(subject: Subject, case: Case, most: int) -> bool:
    return sum(tensor.numel for tensor in case.tensors) <= most and not unsupported(subject.kernel, case)


def compare(before: Golden, after: Golden, today: Take | None, path: str) -> KernelOutcome:
    """Compare a golden with the golden `before`, which lies at `path`.

    `after` was taken from what the kernel does `today`; without that, it is another golden.
    """
    results = today.results if today else {}
    old, new = ({case.line: case for case in golden.cases} for golden in (before, after))
    lines = [*old, *(line for line in new if line not in old)]
    contracts = before.contract, after.contract
    cases = (_outcome(n, old.get(n), new.get(n), results.get(n)) for n in lines)
    gone, elsewhere = lost(before, after, today.properties if today else {})
    return KernelOutcome(
        kernel=before.kernel,
        path=path,
        contracts=contracts,
        cases=tuple(cases),
        provenance=differences(before.provenance, after.provenance),
        unordered=tuple(name for name in _unordered(after) if name in _unordered(before)),
        own=Status.CONTRACT if contracts[0] != contracts[1] else Status.LOST if gone else Status.SAME,
        lost=gone,
        elsewhere=elsewhere,
    )


def taken(after: Take, path: str) -> KernelOutcome:
    """Return the outcome of a kernel without a golden, with the cases that it supports; SKIPPED if there is none."""
    supported = ((n, result) for n, result in after.results.items() if result.verdict is not Verdict.UNSUPPORTED)
    cases = tuple(_outcome(line, None, None, result) for line, result in supported)
    golden, own = after.golden, Status.NEW if cases else Status.SKIPPED
    return KernelOutcome(golden.kernel, path, ("", golden.contract), cases, unordered=_unordered(golden), own=own)


def _unordered(golden: Golden) -> tuple[str, ...]:
    """Return the stages that are only held to the contract."""
    stages = (stage for case in golden.cases for stage in case.stages.items())
    return tuple(dict.fromkeys(name for name, stage in stages if stage.unordered))


def _examined(subject: Subject, line: str) -> tuple[CaseResult, dict[str, Tensor]]:
    try:
        return examine(subject, parse_case(line))
    except LastbitError as error:  # a line of an older lastbit, which means nothing now
        return subject.outcome(Verdict.ERRORED, line, "", reason=str(error)), {}


def _recorded(line: str, result: CaseResult, actual: Mapping[str, Tensor], unordered: tuple[str, ...]) -> RecordedCase:
    stages = {
        stage.name: RecordedStage(store(actual[stage.name]), stage.name in unordered, Figures.of(stage.cumulative))
        for stage in result.stages
    }
    return RecordedCase(line, result.fingerprint, stages)


def _outcome(
    line: str, before: RecordedCase | None, after: RecordedCase | None, result: CaseResult | None
) -> CaseOutcome:
    changes = tuple(_changes(before, after)) if before and after else ()
    outcome = CaseOutcome(line, Status.SAME, changes, result)
    if result is not None and result.verdict in _STATUSES:
        return replace(outcome, status=_STATUSES[result.verdict], reason=result.reason)
    if before is None or after is None:
        return replace(outcome, status=Status.NEW if before is None else Status.GONE)
    if before.inputs != after.inputs:
        reason = f"input bits were {before.inputs}, and are {after.inputs}"
        return replace(outcome, status=Status.INPUTS, reason=reason)
    return replace(outcome, status=Status.CHANGED if changes else Status.SAME)


_STATUSES = {
    Verdict.FAILED: Status.BROKEN,
    Verdict.ERRORED: Status.ERRORED,
    Verdict.SKIPPED: Status.ERRORED,
    Verdict.UNSUPPORTED: Status.GONE,
}


def _changes(before: RecordedCase, after: RecordedCase) -> Iterator[Change]:
    for name in dict.fromkeys([*before.stages, *after.stages]):
        old, new = before.stages.get(name), after.stages.get(name)
        flags = bool(old and old.unordered), bool(new and new.unordered)
        if old and new and (all(flags) or (not any(flags) and same(old.values, new.values))):
            continue
        found = change(name, old.values if old else None, new.values if new else None)
        figures = old.figures if old else None, new.figures if new else None
        yield replace(found, figures=figures, unordered=flags)
