"""Results of `lastbit golden`: which bits moved since they were recorded, and whether the contract allows that."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from lastbit.reports.paper import line, print_field
from lastbit.reports.summary import (
    KernelFailure,
    distance,
    elements,
    error,
    listed,
    plural,
    repro_line,
    share,
    shown_path,
    signed,
)
from lastbit.reports.wording import allowed_by
from lastbit.result import CaseResult, Comparison, Verdict

Index = tuple[int, ...]


class Status(StrEnum):
    """The outcome of a golden or of one of its cases, worst last; see `Status.worst`."""

    SAME = "SAME"
    SKIPPED = "SKIPPED"
    NEW = "NEW"
    CHANGED = "CHANGED"
    LOST = "LOST"
    GONE = "GONE"
    CONTRACT = "CONTRACT"
    INPUTS = "INPUTS"
    BROKEN = "BROKEN"
    ERRORED = "ERRORED"

    @staticmethod
    def worst(statuses: Iterable[Status]) -> Status:
        return max(statuses, key=list(Status).index, default=Status.SAME)


REFUSED = frozenset({Status.BROKEN, Status.ERRORED})
"""Statuses of which no golden is made."""


@dataclass(frozen=True)
class Figures:
    """Distances of a stage from its contract: fields of `Comparison`."""

    numel: int
    mismatched: int
    outside: int
    rel_l2: float
    bias: float

    @classmethod
    def of(cls, comparison: Comparison) -> Figures:
        return cls(comparison.numel, comparison.mismatched, comparison.outside, comparison.rel_l2, comparison.bias)


@dataclass(frozen=True)
class Farthest:
    """The element that moved farthest: its index, and its values."""

    index: Index
    before: float
    after: float


@dataclass(frozen=True)
class Change:
    """A stage whose bits differ from the golden's, or no longer keep its contract.

    Attributes:
        before, after: dtype and shape, as in `bf16[4,128]`; empty where there is no such stage.
        changed: elements that differ, of the `compared` ones.
        compared: elements that were compared one by one: those of a sample where the golden holds one, none where dtype
            or shape differ.
        max_ulp: largest distance between the values of an element.
        farthest: the element that moved farthest, if one of those compared differs.
        blocks: for a sample, how many blocks of the tensor have another hash, and how many there are.
        spans: first and last index of each stretch of those blocks.
        figures: distance from the contract, before and after.
        unordered: whether atomic additions changed its bits between calls, before and after.
    """

    stage: str
    before: str
    after: str
    changed: int = 0
    compared: int = 0
    max_ulp: float = 0.0
    farthest: Farthest | None = None
    blocks: tuple[int, int] = (0, 0)
    spans: tuple[tuple[Index, Index], ...] = ()
    figures: tuple[Figures | None, Figures | None] = (None, None)
    unordered: tuple[bool, bool] = (False, False)

    @property
    def same_bits(self) -> bool:
        """Return whether no bit differs, but only the declaration of the stage."""
        return self.before == self.after and not self.changed and not self.blocks[0]


@dataclass(frozen=True)
class CaseOutcome:
    """One case of a golden, beside the kernel's results of today, or beside another golden.

    Attributes:
        changes: stages that differ bit for bit, or in whether they are `unordered`; those left out that were and are.
        result: of today; None where nothing was run.
        reason: more about the status, where there is more to say.
    """

    line: str
    status: Status
    changes: tuple[Change, ...] = ()
    result: CaseResult | None = None
    reason: str = ""


@dataclass(frozen=True)
class ProvenanceDifference:
    """An item of provenance that is not the same on both sides."""

    item: str
    before: str
    after: str


@dataclass(frozen=True)
class KernelOutcome:
    """One golden file, beside the kernel's results of today, or beside another golden.

    Attributes:
        contracts: the contract of the golden, and the one of today.
        provenance: what else is not as it was when the golden was made.
        unordered: results that are only held to the enclosure, because atomic additions change their bits.
        own: status of the file itself, such as NEW, SKIPPED or ERRORED; that of its cases may be worse.
        lost: a sentence for each property that its bits had, and do not have today.
        elsewhere: the same of those that they need not have on this processor, which is not the golden's; no loss.
    """

    kernel: str
    path: str
    contracts: tuple[str, str] = ("", "")
    cases: tuple[CaseOutcome, ...] = ()
    provenance: tuple[ProvenanceDifference, ...] = ()
    unordered: tuple[str, ...] = ()
    own: Status = Status.SAME
    reason: str = ""
    lost: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        return Status.worst([self.own, *(case.status for case in self.cases)])

    def having(self, status: Status) -> tuple[CaseOutcome, ...]:
        """Return the cases of that status."""
        return tuple(case for case in self.cases if case.status is status)


@dataclass(frozen=True)
class GoldenReport:
    """Golden files and what became of them.

    Attributes:
        subject: what was compared, as in `cpu` or `FOLDER and FOLDER`.
        options: of the command, that say where kernels and ops are.
    """

    subject: str
    kernels: tuple[KernelOutcome, ...]
    options: str = ""

    def exit_code(self, fine: Collection[Status]) -> int:
        """Return 0 if every golden has a `fine` status, 1 if not, 2 if one was not judged, 3 if nothing was run."""
        statuses = {kernel.status for kernel in self.kernels}
        if Status.ERRORED in statuses:
            return 2
        if statuses <= {Status.SKIPPED}:
            return 3
        return 0 if statuses <= set(fine) else 1


# Arbitrary: other cases of one change mostly say the same.
MOST_CASES = 2
# What fits into a line.
MOST_SPANS = 4

STYLES: Mapping[Status, str] = {
    Status.SAME: "green",
    Status.SKIPPED: "cyan",
    Status.NEW: "cyan",
    Status.CHANGED: "yellow",
    Status.LOST: "bold yellow",
    Status.GONE: "yellow",
    Status.CONTRACT: "bold yellow",
    Status.INPUTS: "bold yellow",
    Status.BROKEN: "bold red",
    Status.ERRORED: "bold magenta",
}

CHECKED: Mapping[Status, str] = {
    Status.SAME: "same",
    Status.SKIPPED: "no case fits: raise --most-elements or --cases-per-group, or give lines with --cases",
    Status.NEW: "without a golden: record or approve makes one",
    Status.CHANGED: "changed, still legal",
    Status.LOST: "without a property that they had",
    Status.GONE: "no longer run",
    Status.CONTRACT: "under another contract",
    Status.INPUTS: "made from other input bits: approve what these give",
    Status.BROKEN: "broken",
    Status.ERRORED: "not checked",
}
RECORDED: Mapping[Status, str] = {
    **CHECKED,
    Status.SAME: "left as it is",
    Status.NEW: "recorded",
    Status.BROKEN: "refused: fix the kernel, or claim the contract that it keeps",
    Status.ERRORED: "refused",
}
COMPARED: Mapping[Status, str] = {
    Status.SAME: "equal",
    Status.NEW: "only in the second",
    Status.CHANGED: "differs",
    Status.LOST: "without a property that the first has",
    Status.GONE: "only in the first",
    Status.CONTRACT: "under another contract",
    Status.INPUTS: "made from other input bits",
}


_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def print_goldens(report: GoldenReport, console: Console, words: Mapping[Status, str] = CHECKED) -> None:
    """Print the outcome of each golden, the worst first, in the words for what was done with them."""
    line(console, f"Goldens on {report.subject}" if words is not COMPARED else f"Goldens in {report.subject}", "bold")
    ranks = list(Status)
    for kernel in sorted(report.kernels, key=lambda k: ranks.index(k.status), reverse=True):
        _print_kernel(kernel, console, words, report.options)
    line(console)
    counts = Counter(kernel.status for kernel in report.kernels)
    told = [Text(f"{counts[s]:,} {words[s].partition(':')[0]}", STYLES[s]) for s in reversed(Status) if counts[s]]
    line(console, Text("goldens: ").append_text(Text(", ").join(told) if told else Text("none")))


def _print_kernel(kernel: KernelOutcome, console: Console, words: Mapping[Status, str], options: str) -> None:
    """Print a golden, the provenance that has changed since it was made, and the cases that changed.

    The worst and smallest cases come first; of many, the first of each status are shown.
    """
    status = kernel.status
    what, _, advice = words[status].partition(": ")
    head = Text.assemble((f"{status.value:<9}", STYLES[status]), (kernel.kernel, "bold"))
    if kernel.cases:
        of = kernel.having(status)
        some = f"{len(of):,} of " if of and len(of) < len(kernel.cases) else ""
        head.append(f"  {some}{plural(len(kernel.cases), 'case')}")
    if words[status].lower() != status.value.lower():
        head.append(f"  {what}")
    line(console, head)
    if advice:
        _field(console, "what to do", advice)
    if kernel.reason:
        _field(console, "reason", kernel.reason)
    if kernel.unordered:
        names = ", ".join(kernel.unordered)
        _field(console, "unordered", f"{names}: summed by atomic additions, held to the contract and not bit for bit")
    if status is Status.SAME and not kernel.reason and not kernel.elsewhere:
        return
    if kernel.cases or status not in (Status.NEW, Status.SKIPPED):
        _field(console, "golden", shown_path(kernel.path))
    if status is Status.NEW:
        return
    before, after = kernel.contracts
    if before and after and before != after:
        _field(console, "contract", f"{before} → {after}")
    if kernel.cases and before:  # of a git commit, the first digits
        shown = [
            (d.item, *(_COMMIT.sub(r"\1", v) or "unknown" for v in (d.before, d.after))) for d in kernel.provenance
        ]
        parts = ", ".join(f"{item} {old} → {new}" for item, old, new in shown)
        _field(console, "provenance", parts or "same code, packages, device, driver, torch and triton")
    for sentence in kernel.lost:
        _field(console, "lost", sentence)
    for sentence in kernel.elsewhere:
        _field(console, "elsewhere", f"{sentence} The golden is of another processor, and this is no loss.")
    broken = tuple(case.result for case in kernel.having(Status.BROKEN) if case.result is not None)
    if broken and (kept := KernelFailure(broken, len(broken)).kept):
        extent = f"all {len(broken):,} broken cases" if len(broken) > 1 else "the broken case"
        _field(console, "explained by", allowed_by(kept, extent))
    for one in (status for status in reversed(Status) if status is not Status.SAME):
        cases = sorted(kernel.having(one), key=lambda case: elements(case.line))
        for case in cases[:MOST_CASES]:
            _print_case(case, console, held=bool(before))
            if one in (Status.BROKEN, Status.ERRORED) and case.result is not None:
                line(console, f"    {repro_line(case.result, options)}")
        if rest := cases[MOST_CASES:]:
            extent = ""
            if changes := [change for case in rest for change in case.changes if change.compared]:
                changed, compared = (sum(getattr(c, name) for c in changes) for name in ("changed", "compared"))
                farthest = distance(max(change.max_ulp for change in changes))
                extent = f": {changed:,} of {plural(compared, 'element')}, by at most {farthest} ulp"
            _field(console, "", f"and {plural(len(rest), 'more case')} {one.value.lower()}{extent}")


def _print_case(case: CaseOutcome, console: Console, *, held: bool) -> None:
    """Print a case with what is wrong; `held` says whether there is a golden of the kernel."""
    _field(console, case.status.value.lower(), case.line)
    if case.reason:
        _field(console, "", case.reason)
    if case.result is not None:
        for finding in case.result.findings:
            _field(console, "", f"{finding.stage}: {finding.sentence}")
        if held and case.status is Status.BROKEN and not case.changes:
            _field(console, "", "The bits are those of the golden: the reference or its error bounds have changed.")
        if case.result.verdict is Verdict.INCONCLUSIVE:
            _field(console, "", f"Today's verdict is INCONCLUSIVE: {case.result.reason}.")
    for change in case.changes:
        _field(console, "", _sentence(change))


def _sentence(change: Change) -> str:
    """Say what changed in a stage: whether it is declared unordered, its elements, and how far it is from its contract.

    Elements are counted as far as the golden tells.
    """
    if change.before != change.after:
        return f"{change.stage}: {change.before or 'not there'} → {change.after or 'not there'}"
    was, now = change.unordered
    declared = "" if was == now else f"{'now' if now else 'no longer'} declared unordered; "
    by = f", by at most {distance(change.max_ulp)} ulp" if change.changed else ""
    differing, blocks = change.blocks
    if change.same_bits:
        counted = "the same bits"
    elif blocks:
        spans = listed((f"{list(first)} to {list(last)}" for first, last in change.spans), MOST_SPANS)
        where = "everywhere" if differing == blocks else f"in {plural(differing, 'block')} of {blocks}, {spans}"
        counted = f"changed {where}; {change.changed:,} of a sample of {plural(change.compared, 'element')}{by}"
    else:
        counted = f"{change.changed:,} of {plural(change.compared, 'element')} changed{by}"
    parts = [f"{change.stage} {change.before}: {declared}{counted}"]
    if (farthest := change.farthest) is not None:
        parts.append(f"farthest at {list(farthest.index)}: {farthest.before:.9g} → {farthest.after:.9g}")
    before, after = change.figures
    if before is not None and after is not None:
        pairs = (
            ("mismatch", share(before.mismatched, before.numel), share(after.mismatched, after.numel)),
            ("rel. error", error(before.rel_l2), error(after.rel_l2)),
            ("bias", signed(before.bias), signed(after.bias)),
        )
        moved = (f"{name} {old} → {new}" if old != new else f"{name} {old} as before" for name, old, new in pairs)
        parts.append(", ".join(moved))
    return "; ".join(parts)


def _field(console: Console, label: str, text: str) -> None:
    print_field(console, label, text, width=13)
