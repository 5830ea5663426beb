"""Goldens taken from the results of a kernel today, and compared with those that were taken before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from torch import Tensor

from lastbit.case import Case, Group, parse_case
from lastbit.errors import LastbitError
from lastbit.history.golden_file import Golden, RecordedCase, RecordedStage
from lastbit.history.golden_provenance import differences, kind_of, provenance
from lastbit.history.golden_values import change, same, store
from lastbit.invariance.properties import properties_of
from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.golden import CaseOutcome, Change, Figures, KernelOutcome, Status
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.verify.check import Subject, examine, unsupported
from lastbit.verify.drawing import draw
from lastbit.verify.property_checks import asked_cases, in_a_run, properties_on, sentence_of
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


Held = Mapping[str, Sequence[str]]
"""Property → the lines of the cases on which it holds."""

Found = Mapping[str, PropertyResult]
"""Property → what all the cases on which it was asked say of it."""


def asked_of(subject: Subject, groups: Sequence[Group]) -> Held:
    """Return the properties that a new golden asks about, with the lines of the cases."""
    lines = [str(case) for case in asked_cases(subject, groups)]
    return dict.fromkeys(in_a_run(subject), lines) if lines else {}


def found_today(subject: Subject, asked: Held, watch: Watch) -> Found:
    """Ask for properties today, and return what is found; those that nobody knows any more are left out."""
    known = properties_of(subject.op)
    pairs = [(line, name) for name, lines in asked.items() if name in known for line in lines]
    return together(_found(subject, line, name, watch) for line, name in pairs)


def _found(subject: Subject, line: str, name: str, watch: Watch) -> PropertyResult:
    try:
        with watch(line):
            return properties_on(subject, parse_case(line), [name])[0]
    except Exception as error:  # of the kernel: its own case, or `lastbit verify`, says more
        return PropertyResult(name, PropertyOutcome.NOT_APPLICABLE, reason=f"the kernel raised {type(error).__name__}")


def held_of(found: Found, asked: Held) -> Held:
    """Return the properties that hold, for the file of a golden."""
    return {name: tuple(asked[name]) for name, one in found.items() if one.outcome is PropertyOutcome.HOLDS}


def lost(before: Golden, after: Golden, found: Found) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a sentence for each property that held when a golden was made, and does not today or in the other golden.

    The second ones are no loss: on another processor than the golden's, torch and its libraries multiply and add in
    other ways. So a property that the kernel does not declare may hold on one of them alone, within the contract.
    """
    losses: list[str] = []
    elsewhere: list[str] = []
    if before.properties is None or after.properties is None:
        return (), ()
    moved = before.provenance.get("device") != after.provenance.get("device")
    for name in sorted(before.properties.keys() - after.properties.keys()):
        one = found.get(name)
        if one is None:
            losses.append(f"{name} held, and does not any more.")
        elif one.outcome is not PropertyOutcome.BROKEN:
            losses.append(f"{name} held, and cannot be asked any more: {one.reason}.")
        else:
            (elsewhere if moved and not one.fails else losses).append(sentence_of(one))
    return tuple(losses), tuple(elsewhere)
