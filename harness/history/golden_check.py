"""Goldens taken from the results of a kernel today, and compared with those that were taken before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from lastbit.case import Group, parse_case
from lastbit.errors import LastbitError, UsageError
from lastbit.history.golden_file import (
    SUFFIX,
    Golden,
    RecordedCase,
    RecordedStage,
    change,
    path_of,
    read,
    same,
    store,
    write,
)
from lastbit.history.golden_provenance import differences, kind_of, provenance
from lastbit.invariance.properties import properties_of
from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.golden import REFUSED, CaseOutcome, Figures, KernelOutcome, Status
from lastbit.reports.summary import grouped
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.verify.check import Subject, examine, unsupported
from lastbit.verify.drawing import draw
from lastbit.verify.plan import Item
from lastbit.verify.property_checks import asked_cases, in_a_run, properties_on, sentence_of
from lastbit.verify.worker import Tick, Watch, Workplace


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
    cases, kernel = [], subject.kernel
    for line in lines:
        with watch(line):
            try:
                result, actual = examine(subject, parse_case(line))
            except LastbitError as error:  # a line of an older lastbit, which means nothing now
                result, actual = subject.outcome(Verdict.ERRORED, line, "", reason=str(error)), {}
        results[line] = result
        if actual:
            stages = {
                s.name: RecordedStage(store(actual[s.name]), s.name in kernel.unordered, Figures.of(s.cumulative))
                for s in result.stages
            }
            cases.append(RecordedCase(line, result.fingerprint, stages))
        tick(result)
    fails = any(result.verdict in BAD for result in results.values())
    found = found_today(subject, {} if fails else asked, watch)
    where = str(subject.contract), kind_of(subject.device), provenance(subject)
    golden = Golden(kernel.name, kernel.op, *where, cases=tuple(cases), properties=held_of(found, asked))
    return Take(results, golden, found)


def lines_for(subject: Subject, groups: Iterable[Group], *, drawn: int, seed: int, most: int) -> list[str]:
    """Return the cases of a golden of the kernel: per group its first example, and `drawn` generated cases.

    They are supported, on one device, and have at most `most` elements.
    """
    lines: list[str] = []
    for group in groups:
        cases = draw(group, drawn + _SPARE, seed)
        small = [case for case in cases if not case.displaced and case.numel <= most]
        fitting = [case for case in small if not unsupported(subject.kernel, case)]
        generated = [case for case in fitting if case not in group.examples]
        examples = [case for case in fitting if case in group.examples]
        lines += map(str, [*examples[:1], *generated[max(len(generated) - drawn, 0) :]])
    return list(dict.fromkeys(lines))


# Arbitrary: each is one more case to draw, none to run.
_SPARE = 4  # the first cases that are generated are the simplest, and say the least


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


def _outcome(
    line: str, before: RecordedCase | None, after: RecordedCase | None, result: CaseResult | None
) -> CaseOutcome:
    changes = []
    was, now = (case.stages if case else {} for case in (before, after))
    for name in dict.fromkeys([*was, *now]) if before and after else ():
        old, new = was.get(name), now.get(name)
        flags = bool(old and old.unordered), bool(new and new.unordered)
        if old and new and (all(flags) or (not any(flags) and same(old.values, new.values))):
            continue
        found = change(name, old.values if old else None, new.values if new else None)
        figures = old.figures if old else None, new.figures if new else None
        changes.append(replace(found, figures=figures, unordered=flags))
    outcome = CaseOutcome(line, Status.SAME, tuple(changes), result)
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
    found = []
    for name, line in ((name, line) for name, lines in asked.items() if name in known for line in lines):
        try:
            with watch(line):
                found.append(properties_on(subject, parse_case(line), [name])[0])
        except Exception as error:  # of the kernel: its own case, or `lastbit verify`, says more
            raised = f"the kernel raised {type(error).__name__}"
            found.append(PropertyResult(name, PropertyOutcome.NOT_APPLICABLE, reason=raised))
    return together(found)


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


# A folder of goldens beside the kernels of a plan


@dataclass(frozen=True, eq=False)
class Target:
    """A kernel, its groups of cases, and the file of its golden."""

    subject: Subject
    groups: tuple[Group, ...]
    path: Path


@dataclass(frozen=True, eq=False)
class Proposal:
    """The outcome of a golden, and the one to take its place; without one, the file is to be removed."""

    outcome: KernelOutcome
    golden: Golden | None = None

    @property
    def open(self) -> bool:
        """Return whether there is something to approve: a change, and nothing that is wrong."""
        return self.outcome.status not in REFUSED | {Status.SAME, Status.SKIPPED}


def targets(items: Iterable[Item], folder: Path) -> list[Target]:
    """Return the kernels of a plan with their files in `folder`."""
    found = grouped((item.subject.kernel.name, item) for item in items)
    return [
        Target(own[-1].subject, tuple(item.group for item in own), path_of(name, folder)) for name, own in found.items()
    ]


def load(path: Path, kernel: str, kind: str) -> Golden:
    """Load the golden of a kernel on a kind of device.

    Raises:
        LastbitError: the file cannot be read, or holds what belongs elsewhere.
    """
    golden = read(path)
    if (golden.kernel, golden.kind) != (kernel, kind):
        raise LastbitError(
            f"golden {path} is of {golden.kernel!r} on {golden.kind}, and its place is that of {kernel!r} on {kind}; "
            "move it to where it belongs"
        )
    return golden


def held(target: Target, golden: Golden, *, watch: Watch, tick: Tick, anew: bool = False) -> Proposal:
    """Run the cases of a golden again and say what became of them.

    The properties that it had are asked for, or those of a new golden if the proposed one may have them `anew`.
    """
    asked = asked_of(target.subject, target.groups) if anew else golden.properties or {}
    today = take(target.subject, [case.line for case in golden.cases], watch=watch, tick=tick, asked=asked)
    return Proposal(compare(golden, today.golden, today, str(target.path)), today.golden)


def propose_held(place: Workplace, kernel: str, folder: Path, *, anew: bool = False) -> Proposal:
    """Run `held` for a kernel whose golden is in `folder`."""
    target = _target(place, kernel, folder)
    golden = load(target.path, kernel, kind_of(target.subject.device))
    return held(target, golden, watch=place.watch, tick=place.tick, anew=anew)


def propose_fresh(place: Workplace, kernel: str, folder: Path, *, drawn: int, most: int) -> Proposal:
    """Run a kernel without a golden on the lines of the configuration, of a golden elsewhere, or on generated cases."""
    target, config = _target(place, kernel, folder), place.config
    if config.lines:
        lines = [str(case) for group in target.groups for case in group.examples]
    else:
        others = sorted(set(target.path.parent.parent.glob(f"*/{target.path.name}")) - {target.path})
        known = dict.fromkeys(case.line for path in others for case in read(path).cases)  # to be comparable with them
        lines = [*known] or lines_for(target.subject, target.groups, drawn=drawn, seed=config.seed, most=most)
    asked = asked_of(target.subject, target.groups)
    today = take(target.subject, lines, watch=place.watch, tick=place.tick, asked=asked)
    return Proposal(taken(today, str(target.path)), today.golden)


def _target(place: Workplace, kernel: str, folder: Path) -> Target:
    return next(t for t in targets(place.plan.items, folder) if t.subject.kernel.name == kernel)


def settle(proposal: Proposal) -> None:
    """Write the proposed golden, or remove the file of one that has no case any more."""
    path = Path(proposal.outcome.path)
    if proposal.golden and proposal.golden.cases:
        write(proposal.golden, path.parent)
    else:
        path.unlink(missing_ok=True)


def left_over(folder: Path, known: Collection[Path], device: str) -> Iterator[KernelOutcome]:
    """Yield an outcome for each file of a folder that belongs to no kernel any more."""
    for path in sorted(set(folder.glob(f"*{SUFFIX}")) - set(known)):
        try:
            golden = read(path)
        except LastbitError as error:
            yield broken(path.stem, path, error)
        else:
            reason = f"no kernel of that name runs on {device} now"
            yield KernelOutcome(golden.kernel, str(path), (golden.contract, ""), own=Status.GONE, reason=reason)


def broken(kernel: str, path: Path, error: LastbitError) -> KernelOutcome:
    """Return the outcome of a golden that could not be read or written."""
    return KernelOutcome(kernel, str(path), own=Status.ERRORED, reason=str(error))


def difference(first: Path, second: Path) -> list[KernelOutcome]:
    """Compare two goldens, or two folders of them, side by side; nothing is run.

    Raises:
        UsageError: one is a file and the other a folder, or a folder holds no golden.
        LastbitError: a file is broken, or the two files are of different kernels.
    """
    left, right = _goldens(first), _goldens(second)
    if first.is_file() and second.is_file() and list(left) != list(right):
        raise UsageError(f"{first} is a golden of {next(iter(left))!r}, but {second} one of {next(iter(right))!r}")
    outcomes = []
    for kernel in {**left, **right}:
        if kernel in left and kernel in right:
            outcomes.append(compare(left[kernel], right[kernel], None, str(second)))
        else:
            status, place = (Status.GONE, first) if kernel in left else (Status.NEW, second)
            outcomes.append(KernelOutcome(kernel, str(place), own=status))
    return outcomes


def _goldens(place: Path) -> dict[str, Golden]:
    """Return the goldens of a file or a folder, by kernel."""
    if not place.is_dir():
        golden = read(place)
        return {golden.kernel: golden}
    if not (paths := sorted(place.glob(f"*{SUFFIX}"))):
        below = ", ".join(sorted(path.name for path in place.iterdir() if path.is_dir())) or "none"
        raise UsageError(f"{place} holds no golden; folders in it: {below}")
    return {golden.kernel: golden for golden in map(read, paths)}
