"""Two runs side by side: what got better or worse, what is new and what is gone, per kernel, device and stage.

Runs draw their cases, so two of them need not have the same ones. Figures are compared on those that both have: the
same case line on the same input bits. How many there are is part of the result, and so are the cases that only one of
the runs has. Where no case is common, the figures of either run are given, and only verdicts are compared. All is told
in sentences and cells whatever these are shown on, on a console, and as JSON.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.encoding import as_text
from lastbit.reports.invariance import extent
from lastbit.reports.paper import line, make_console, paragraph, print_table
from lastbit.reports.stage_summary import Pair as StagePair
from lastbit.reports.stage_summary import StageSummary, stage_order, summary_of
from lastbit.reports.summary import distance, elements, error, grouped, listed, plural, repro_line, share, signed, tally
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.run import DeviceAgreement, Power, Run, Undecidable

# Arbitrary: lower names what another seed does, higher misses what one rounding more does; --drift sets it.
DRIFT = 1.3
"""Factor beyond which a figure has drifted, unless the reader says otherwise."""

REVISION = "base"
"""Setting of a run that verified the kernels of another revision too: the label in their names, `KERNEL@label`."""

_NO_DIFFERENCE = frozenset({"records", "device_plan", REVISION})


class Fate(StrEnum):
    """The change of a kernel from one run to the other, worst first."""

    WORSE = "WORSE"
    DRIFTED = "DRIFTED"
    UNPAIRED = "NO COMMON CASE"
    GONE = "GONE"
    NEW = "NEW"
    BETTER = "BETTER"
    CHANGED = "BITS CHANGED"
    UNCHANGED = "UNCHANGED"


NEGLIGIBLE_BIAS = 0.05
"""Difference of two biases, in ulp, that is no drift: the mean of a hundred rounding errors varies by about that."""

# By chance one of 370 comparisons, if errors are independent.
DEVIATIONS = 3
"""Standard deviations by which counts of mismatched elements must differ to have drifted."""

Pair = tuple[CaseResult, CaseResult]


@dataclass(frozen=True)
class Drift:
    """A figure of a stage that changed by more than a factor, although it decides nothing."""

    figure: str
    before: float
    after: float

    @property
    def worse(self) -> bool:
        return math.isnan(self.after) or abs(self.after) > abs(self.before)


@dataclass(frozen=True)
class StageChange:
    """One stage in one format.

    Attributes:
        before, after: over the cases in which both runs have the stage; None for a run that never has it.
        tensors: pairs of tensors whose bits could be compared.
        equal: those of them that are equal to the last bit.
        drifts: figures that changed by more than the factor.
    """

    before: StageSummary | None
    after: StageSummary | None
    tensors: int = 0
    equal: int = 0
    drifts: tuple[Drift, ...] = ()

    @property
    def shown(self) -> StageSummary:
        """The stage in the last run that has it."""
        summary = self.after or self.before
        assert summary is not None
        return summary

    @property
    def outside_grew(self) -> int:
        """Elements outside that came on top; negative if there are fewer; 0 if a run has no such stage."""
        return self.after.outside - self.before.outside if self.before and self.after else 0

    @property
    def unchanged(self) -> bool:
        """Return whether both runs have the stage, with equal bits in every tensor and nothing else to tell."""
        both = self.before is not None and self.after is not None
        return both and self.tensors == self.equal and not self.outside_grew and not self.drifts


@dataclass(frozen=True)
class PropertyChange:
    """A property that a kernel's bits have in one of the runs alone; both have asked for it."""

    before: PropertyResult
    after: PropertyResult

    @property
    def lost(self) -> bool:
        return self.after.outcome is PropertyOutcome.BROKEN

    @property
    def worse(self) -> bool:
        """Return whether the loss counts: the kernel declares or declared the property, or the bits are not legal."""
        return self.lost and (self.after.fails or self.before.declared)


@dataclass(frozen=True)
class RunSide:
    """One kernel on one device in one of the runs."""

    device: str
    verdict: Verdict
    contract: str


@dataclass(frozen=True)
class KernelChange:
    """One kernel in two runs.

    Attributes:
        before, after: None for a run that does not have the kernel.
        pairs: results of the cases that both runs have.
        unpaired: counted cases that only the first run has, and only the second.
        other_inputs: case lines that both have, on other input bits; they are among the unpaired ones.
        stages: over the pairs; without any, over all cases of either run.
        properties: those of which both runs say something else, over all cases of either run.
    """

    op: str
    kernel: str
    before: RunSide | None
    after: RunSide | None
    pairs: tuple[Pair, ...] = ()
    unpaired: tuple[int, int] = (0, 0)
    other_inputs: int = 0
    stages: tuple[StageChange, ...] = ()
    properties: tuple[PropertyChange, ...] = ()

    @property
    def worse_cases(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if _sank(pair[0].verdict, pair[1].verdict) or _silent(*pair))

    @property
    def better_cases(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if _sank(pair[1].verdict, pair[0].verdict) and not _silent(*pair))

    @property
    def silent(self) -> bool:
        """Return whether it gives wrong results now and gave none before, as far as the cases of both runs tell."""
        if self.pairs or self.before is None or self.after is None:
            return any(_silent(*pair) for pair in self.pairs)
        return _silent(self.before, self.after)

    @property
    def tensors(self) -> int:
        return sum(stage.tensors for stage in self.stages)

    @property
    def equal(self) -> int:
        return sum(stage.equal for stage in self.stages)

    @property
    def drifts(self) -> tuple[Drift, ...]:
        return tuple(drift for stage in self.stages for drift in stage.drifts)

    @property
    def drifted_worse(self) -> bool:
        return any(drift.worse for drift in self.drifts)

    @property
    def worse(self) -> bool:
        """Return whether a verdict on the kernel or a case got worse, elements outside rose, or a property was lost.

        A new kernel is worse if it is at fault. One that was at fault and passes now is none for the cases that it
        turns down or leaves open. A wrong result in place of an error is worse: whoever calls the kernel is not told.
        """
        if self.before is None or self.after is None:
            return self.after is not None and self.after.verdict in BAD
        outside = any(self.pairs and stage.outside_grew > 0 for stage in self.stages)
        mended = self.before.verdict in BAD and self.after.verdict is Verdict.PASSED
        sank = _sank(self.before.verdict, self.after.verdict) or bool(self.worse_cases) or outside or self.silent
        return (sank and not mended) or any(change.worse for change in self.properties)

    @property
    def better(self) -> bool:
        """The opposite in kind; a kernel can be both."""
        if self.before is None or self.after is None:
            return False
        outside = any(self.pairs and stage.outside_grew < 0 for stage in self.stages)
        rose = _sank(self.after.verdict, self.before.verdict) and not self.silent
        return rose or bool(self.better_cases) or outside

    @property
    def change(self) -> Fate:
        """The most important of what happened; a new kernel is NEW even if it fails."""
        if self.before is None or self.after is None:
            return Fate.NEW if self.before is None else Fate.GONE
        happened = {
            Fate.WORSE: self.worse,
            Fate.BETTER: self.better,
            Fate.DRIFTED: bool(self.drifts),
            Fate.UNPAIRED: not self.pairs,
            Fate.CHANGED: bool(self.properties) or not all(stage.unchanged for stage in self.stages),
        }
        return next((change for change, did in happened.items() if did), Fate.UNCHANGED)

    @property
    def telling(self) -> bool:
        """Return whether there is more to tell of the kernel than that it is new, gone or unchanged."""
        return self.worse or self.change not in (Fate.NEW, Fate.GONE, Fate.UNCHANGED)


@dataclass(frozen=True)
class Changes:
    """Everything that differs between two runs.

    Attributes:
        names: what to call the two runs.
        kernels: worst first.
        settings: what the runs were made with and differs: its name, before, after.
        across: the two devices, if kernels on one were compared with the same kernels on another.
        broken: why either run ended early; empty if it did not.
        options: of the second run, for commands that run a case again.
    """

    names: tuple[str, str]
    kernels: tuple[KernelChange, ...]
    settings: tuple[tuple[str, str, str], ...] = ()
    across: tuple[str, str] | None = None
    broken: tuple[str, str] = ("", "")
    options: str = ""

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0 if nothing got worse, 1 if something did, 2 if the second run is broken, 3 without a comparison.

        `strict` counts figures that drifted for the worse and kernels that are gone as something that got worse.
        """
        if self.broken[1]:
            return 2
        if any(k.worse or (strict and (k.drifted_worse or k.change is Fate.GONE)) for k in self.kernels):
            return 1
        return 0 if any(kernel.before and kernel.after for kernel in self.kernels) else 3


def compare(base: Run, run: Run, *, names: tuple[str, str] = ("before", "after"), drift: float = DRIFT) -> Changes:
    """Compare `run` with `base`; `drift` is the factor beyond which a figure has drifted.

    A kernel is compared with itself on the device of the same name or, if each run has a single device, across them.
    """
    subjects = dict.fromkeys((*run.subjects(), *base.subjects()))
    pairs, across = [(kernel, device, device) for kernel, device in subjects], None
    before, after = ({device for _, device in r.subjects()} for r in (base, run))
    if len(before) == len(after) == 1 and before != after:
        across = before.pop(), after.pop()
        pairs = [(kernel, *across) for kernel in dict.fromkeys(kernel for kernel, _ in subjects)]
    kernels = [_kernel_change(base, run, *pair, drift=drift) for pair in pairs]
    severity = list(Fate)
    was, now = base.environment, run.environment
    settings = ((name, was.get(name, ""), now.get(name, "")) for name in {**was, **now})
    return Changes(
        names=names,
        kernels=tuple(sorted(kernels, key=lambda kernel: (not kernel.worse, severity.index(kernel.change)))),
        settings=tuple(one for one in settings if one[0] not in _NO_DIFFERENCE and one[1] != one[2]),
        across=across,
        broken=(base.broken, run.broken),
        options=run.environment.get("options", ""),
    )


def revisions(run: Run, label: str) -> tuple[Run, Run]:
    """Split a run of two revisions into two runs: the kernels of `label`, under their own names, and today's."""
    suffix = f"@{label}"
    base, today = (
        replace(
            run,
            results=_of_revision(run.results, suffix, belongs),
            power=_of_revision(run.power, suffix, belongs),
            undecidable=_of_revision(run.undecidable, suffix, belongs),
            agreement=_of_revision(run.agreement, suffix, belongs),
            not_run=tuple(n for n in run.not_run if (suffix in n.what) == belongs),
            environment={**run.environment, REVISION: label if belongs else ""},
        )
        for belongs in (True, False)
    )
    return base, today


def with_base(run: Run) -> tuple[Run, Run | None]:
    """Return the run of today's kernels, and that of the revision verified beside them, if there is one."""
    if label := run.environment.get(REVISION):
        base, today = revisions(run, label)
        return today, base
    return run, None


def names_of(base: Run) -> tuple[str, str]:
    """Return the names of a run that another is compared with, and of that other run."""
    return base.environment.get(REVISION) or "the base", "this run"


_Item = TypeVar("_Item", CaseResult, Power, DeviceAgreement, Undecidable)


def _of_revision(items: Iterable[_Item], suffix: str, belongs: bool) -> tuple[_Item, ...]:
    chosen = (item for item in items if item.kernel.endswith(suffix) == belongs)
    return tuple(replace(item, kernel=item.kernel.removesuffix(suffix)) for item in chosen)


def _sank(before: Verdict, after: Verdict) -> bool:
    order = list(Verdict)
    return order.index(after) > order.index(before)


def _silent(before: CaseResult | RunSide, after: CaseResult | RunSide) -> bool:
    return (before.verdict, after.verdict) == (Verdict.ERRORED, Verdict.FAILED)


def _kernel_change(
    base: Run, run: Run, kernel: str, device_before: str, device_after: str, *, drift: float
) -> KernelChange:
    before, after = _cases(base, kernel, device_before), _cases(run, kernel, device_after)
    pairs = []
    for case in filter(after.__contains__, before):
        bits = before[case].fingerprint, after[case].fingerprint
        if bits[0] == bits[1] or "" in bits:  # a case whose process died has left no fingerprint
            pairs.append((before[case], after[case]))
    paired = {first.case for first, _ in pairs}
    alone = [[result for case, result in cases.items() if case not in paired] for cases in (before, after)]
    stages = _stage_changes(pairs, ([], []) if pairs or not all(alone) else alone, drift)
    old, new = (together(one for r in results.values() for one in r.properties) for results in (before, after))
    turned = {PropertyOutcome.HOLDS, PropertyOutcome.BROKEN}
    names = [n for n in old if n in new and {old[n].outcome, new[n].outcome} == turned]
    return KernelChange(
        op=next(iter((*after.values(), *before.values()))).op,
        kernel=kernel,
        before=_side(base, kernel, device_before, before),
        after=_side(run, kernel, device_after, after),
        pairs=tuple(pairs),
        unpaired=(sum(r.counted for r in alone[0]), sum(r.counted for r in alone[1])),
        other_inputs=len({r.case for r in alone[0]} & {r.case for r in alone[1]}),
        stages=tuple(stages),
        properties=tuple(PropertyChange(old[name], new[name]) for name in names),
    )


def _cases(run: Run, kernel: str, device: str) -> dict[str, CaseResult]:
    """Map case lines to the results of a kernel, those tried while a failure was shrunk included."""
    cases: dict[str, CaseResult] = {}
    for result in run.results:
        if (result.kernel, result.device) == (kernel, device):
            cases.setdefault(result.case, result)
    return cases


def _side(run: Run, kernel: str, device: str, results: Mapping[str, CaseResult]) -> RunSide | None:
    if not results:
        return None
    contracts = dict.fromkeys(result.contract for result in results.values())
    return RunSide(device, run.verdict(kernel, device), " and ".join(contracts))


# Stages and properties of one kernel

_Key = tuple[str, str]
"""A stage's name and format."""


def _stage_changes(pairs: Sequence[Pair], alone: Sequence[Sequence[CaseResult]], drift: float) -> list[StageChange]:
    """List the changes of stages, in the order of the reference and then by format.

    Those of results of the same cases are compared where both results of a pair have the stage. Of results without a
    common case, which are `alone`, there are figures of either run, from which nothing follows.
    """
    both: dict[_Key, list[tuple[StagePair, StagePair]]] = {}
    sides: tuple[dict[_Key, list[StagePair]], ...] = ({}, {})
    for pair in pairs:
        first, second = map(_by_stage, pair)
        for key, seen in first.items():
            if key in second:
                both.setdefault(key, []).append((seen, second[key]))
            else:
                sides[0].setdefault(key, []).append(seen)
        for key, seen in second.items():
            if key not in first:
                sides[1].setdefault(key, []).append(seen)
    for side, results in zip(sides, alone, strict=True):
        for result in results:
            for key, seen in _by_stage(result).items():
                side.setdefault(key, []).append(seen)
    order = stage_order(result for results in (*pairs, *alone) for result in results)
    found = []
    for key in sorted({**both, **sides[0], **sides[1]}, key=lambda key: (order.index(key[0]), key[1])):
        if key in both:
            apart = [a.extreme or b.extreme for (_, a), (_, b) in both[key]]  # the same cases in both runs
            old, new = (summary_of([pair[side] for pair in both[key]], apart) for side in (0, 1))
            bits = [(a.fingerprint, b.fingerprint) for (_, a), (_, b) in both[key] if a.fingerprint and b.fingerprint]
            drifts = tuple(_drifts(old, new, drift))
            found.append(StageChange(old, new, len(bits), sum(a == b for a, b in bits), drifts))
        else:
            before, after = (summary_of(side[key]) if key in side else None for side in sides)
            found.append(StageChange(before, after))
    return found


def _by_stage(result: CaseResult) -> dict[_Key, StagePair]:
    return {(stage.name, stage.dtype): (result, stage) for stage in result.stages}


def _drifts(before: StageSummary, after: StageSummary, factor: float) -> Iterator[Drift]:
    counts = before.total.mismatched, after.total.mismatched
    if _apart(*counts, factor) and abs(counts[1] - counts[0]) > DEVIATIONS * math.sqrt(sum(counts)):
        yield Drift("mismatch", counts[0] / before.total.numel, counts[1] / after.total.numel)
    if _apart(before.worst_error, after.worst_error, factor):
        yield Drift("rel. error", before.worst_error, after.worst_error)
    if _apart(before.typical_error, after.typical_error, factor):
        yield Drift("median", before.typical_error, after.typical_error)
    biases = before.typical_bias, after.typical_bias
    if _apart(*biases, factor) and not abs(biases[1] - biases[0]) <= NEGLIGIBLE_BIAS:
        yield Drift("bias", *biases)


def _apart(first: float, second: float, factor: float) -> bool:
    """Check whether two figures differ in size by more than the factor, or just one of them is no number."""
    if math.isfinite(first) and math.isfinite(second):
        low, high = sorted((abs(first), abs(second)))
        return high > factor * low
    return not (first == second or (math.isnan(first) and math.isnan(second)))


# In sentences and cells

HEADERS = ("stage", "dtype", "cases", "same bits", "outside", "mismatch", "rel. error", "contract", "bias", "ulp")
"""Columns of `cells`."""

# What fits into a line of 100 characters, as everywhere in reports.
MOST_NAMES = 4


def summary(changes: Changes) -> str:
    """Write `2 kernels worse, 12 unchanged · bits unchanged in 812 of 812 tensors · 784 cases in both`, and so on."""
    counts = Counter(
        "new and failing" if k.change is Fate.NEW and k.worse else k.change.value.lower() for k in changes.kernels
    )
    kernels = ", ".join(f"{count:,} {word}" for word, count in counts.items()) or "none"
    parts = [f"kernels: {kernels}", bits(changes.kernels), paired(changes.kernels, changes.names)]
    return " · ".join(filter(None, parts))


def verdict(changes: Changes) -> str:
    """Return the one word that comes first."""
    if changes.broken[1]:
        return "BROKEN"
    if any(kernel.worse for kernel in changes.kernels):
        return "WORSE"
    if not any(kernel.before and kernel.after for kernel in changes.kernels):
        return "NOTHING COMPARED"
    drifted = any(kernel.drifted_worse for kernel in changes.kernels)
    return "NOTHING GOT WORSE" + (", but figures drifted" if drifted else "")


def about(changes: Changes) -> list[str]:
    """List the sentences that a reader must know of the two runs before reading on."""
    lines = [f"{name}: {before or '–'} → {after or '–'}" for name, before, after in changes.settings]
    if changes.across:
        lines.append(f"Kernels on {changes.across[0]} are compared with the same kernels on {changes.across[1]}.")
    for name, broken in zip(changes.names, changes.broken, strict=True):
        if broken:
            lines.append(f"{name} did not come to its end: {broken}")
    return lines


def bits(kernels: tuple[KernelChange, ...]) -> str:
    """Count the tensors with unchanged bits; empty where none could be compared."""
    tensors, equal = sum(k.tensors for k in kernels), sum(k.equal for k in kernels)
    return f"bits unchanged in {equal:,} of {plural(tensors, 'tensor')}" if tensors else ""


def paired(kernels: tuple[KernelChange, ...], names: tuple[str, str]) -> str:
    """Count the cases that both runs have, and those that only one of them has."""
    both = [k for k in kernels if k.before and k.after]
    if not both:
        return ""
    parts = [f"{plural(sum(len(k.pairs) for k in both), 'case')} in both"]
    for side, name in enumerate(names):
        if alone := sum(k.unpaired[side] for k in both):
            parts.append(f"{alone:,} only in {name}")
    if other := sum(k.other_inputs for k in both):
        parts.append(f"{other:,} of the same line but with other input bits")
    return ", ".join(parts)


def others(changes: Changes) -> list[tuple[Fate, str]]:
    """Write one line for each op and change of kernels that need no details: new, gone or unchanged."""
    together = grouped(((kernel.change, kernel.op), kernel) for kernel in changes.kernels if not kernel.telling)
    lines = []
    for (change, op), kernels in together.items():
        sides = [kernel.after or kernel.before for kernel in kernels]
        about = [bits(tuple(kernels)), tally(side.verdict for side in sides if side)]
        names = listed((kernel.kernel for kernel in kernels), MOST_NAMES)
        lines.append((change, f"{op}: {plural(len(kernels), 'kernel')}, {', '.join(filter(None, about))}: {names}"))
    return lines


def head(kernel: KernelChange) -> str:
    """Write `PASSED → FAILED`, `FAILED` for both runs, or the verdict in the only run that has the kernel."""
    sides = [side for side in (kernel.before, kernel.after) if side]
    return _arrow([side.verdict.value for side in sides])


def devices(kernel: KernelChange) -> str:
    """Write `cpu`, or `cpu → cuda:0`."""
    return _arrow([side.device for side in (kernel.before, kernel.after) if side])


def notes(kernel: KernelChange, names: tuple[str, str]) -> list[str]:
    """Write sentences about one kernel, most important first."""
    before, after = kernel.before, kernel.after
    if before is None or after is None:
        return [f"only in {names[0] if after is None else names[1]}"]
    lines = [", ".join(filter(None, (paired((kernel,), names), bits((kernel,)))))]
    if before.contract != after.contract:
        lines.append(f"contract: {before.contract} → {after.contract}")
    for word, pairs in (("worse", kernel.worse_cases), ("better", kernel.better_cases)):
        if pairs:
            then, now = tally(p[0].verdict for p in pairs), tally(p[1].verdict for p in pairs)
            lines.append(f"{plural(len(pairs), 'case')} got {word}: {then} → {now}")
    if kernel.silent:
        lines.append("it raised before, and gives wrong results now: whoever calls it is not told")
    for change in kernel.properties:
        one = change.after
        declared = ", which it declares" if one.declared else ", which it declared" if change.before.declared else ""
        said = f"lost: {one.name}{declared}: {extent(one)}" if change.lost else f"gained: {one.name}{declared}"
        lines.append(said)
    if before.verdict != after.verdict and not kernel.worse_cases and not kernel.better_cases:
        lines.append(
            "every case that both runs have kept its verdict: what changed comes from cases that only one of them has"
        )
    if kernel.change is not Fate.UNCHANGED and kernel.tensors == kernel.equal > 0 and not kernel.properties:
        lines.append("its bits are the same: what changed is what judges them, or which cases were run")
    return lines


def again(kernel: KernelChange, changes: Changes) -> str:
    """Return the command that runs the smallest case again that got worse, a failing one before others; or nothing."""
    worse = [after for _, after in kernel.worse_cases]
    failed = [result for result in worse if result.verdict is Verdict.FAILED]
    worst = min(failed or worse, key=lambda result: elements(result.case), default=None)
    return repro_line(worst, changes.options) if worst else ""


def rows(kernel: KernelChange) -> list[tuple[str, ...]]:
    """Return the cells of each stage that changed."""
    return [cells(stage) for stage in kernel.stages if not stage.unchanged]


def cells(stage: StageChange) -> tuple[str, ...]:
    """Write one row under `HEADERS`: `before → after`, or one value where the two read the same."""
    shown = stage.shown
    both = [summary for summary in (stage.before, stage.after) if summary]
    cases = [f"{s.cases:,}" for s in both]
    alone = "new" if stage.before is None else "gone" if stage.after is None else ""
    return (
        shown.shown_name,
        shown.dtype,
        _arrow(cases),
        alone or (f"{stage.equal:,}/{stage.tensors:,}" if stage.tensors else "–"),
        _arrow([f"{s.outside:,}" for s in both]),
        _arrow([share(s.total.mismatched, s.total.numel) for s in both]),
        _arrow([error(s.worst_error) for s in both]),
        _arrow([error(s.contract_error) for s in both]),
        _arrow([signed(s.typical_bias) for s in both]),
        _arrow([distance(s.near_ulp) for s in both]),
    )


def drifts(kernel: KernelChange) -> list[str]:
    """Write `output bf16: mismatch drifted for the worse, 0.01 % → 1.2 %` for each figure that drifted.

    There are none for a kernel that got worse, of which they say nothing more.
    """
    write = {"mismatch": lambda value: share(round(value * 1e12), 10**12), "bias": signed}
    said = []
    for stage in kernel.stages if not kernel.worse else ():
        for one in stage.drifts:
            direction = "worse" if one.worse else "better"
            figures = _arrow(list(map(write.get(one.figure, error), (one.before, one.after))))
            shown = stage.shown
            said.append(f"{shown.name} {shown.dtype}: {one.figure} drifted for the {direction}, {figures}")
    return said


def _arrow(values: list[str]) -> str:
    return " → ".join(dict.fromkeys(values))


# On a console

# A page of a terminal; the files of a run have all.
MOST_KERNELS = 30

STYLES: Mapping[Fate, str] = {
    Fate.WORSE: "bold red",
    Fate.DRIFTED: "yellow",
    Fate.UNPAIRED: "yellow",
    Fate.GONE: "yellow",
    Fate.NEW: "cyan",
    Fate.BETTER: "green",
    Fate.CHANGED: "cyan",
    Fate.UNCHANGED: "dim",
}


def print_changes(changes: Changes, console: Console | None = None, *, strict: bool = False) -> None:
    """Print what changed from one run to another, worst first, and a last line that sums it up."""
    console = console or make_console()
    line(console, f"Changes from {changes.names[0]} to {changes.names[1]}", "bold")
    for text in about(changes):
        paragraph(console, Text(text), label="  ")
    line(console)
    told = [kernel for kernel in changes.kernels if kernel.telling]
    for kernel in told[:MOST_KERNELS]:
        word = Text(kernel.change.value, STYLES[Fate.WORSE if kernel.worse else kernel.change])
        head_of = f" on {devices(kernel)}  {head(kernel)}  of {kernel.op}"
        paragraph(console, Text.assemble(word, "  ", (kernel.kernel, "bold"), head_of))
        for note in notes(kernel, changes.names):
            paragraph(console, Text(note, "dim"), label="  ")
        for text in drifts(kernel):
            paragraph(console, Text(text), label="  ")
        if changed := [[*map(Text, row)] for row in rows(kernel)]:
            print_table(console, HEADERS, changed, spare=("bias", "contract", "cases", "ulp", "rel. error", "mismatch"))
        if command := again(kernel, changes):
            line(console, "  a case that got worse")
            line(console, f"    {command}")
        line(console)
    if rest := told[MOST_KERNELS:]:
        line(console, f"and {plural(len(rest), 'more kernel')}: {listed((k.kernel for k in rest), MOST_NAMES)}")
        line(console)
    said = others(changes)
    for change, text in said:
        paragraph(console, Text.assemble((change.value, STYLES[change]), f"  {text}"))
    if said:
        line(console)
    style = "bold red" if changes.exit_code(strict=strict) else "bold green"
    paragraph(console, Text.assemble((verdict(changes), style), f"  {summary(changes)}"))


# As JSON


def as_json(changes: Changes, *, strict: bool = False) -> str:
    """Write the changes as one JSON object; a float that JSON cannot spell is a string such as `NaN` or `-Infinity`."""
    return as_text(
        {
            "runs": changes.names,
            "exit_code": changes.exit_code(strict=strict),
            "settings": {name: (before, after) for name, before, after in changes.settings},
            "across": changes.across,
            "broken": changes.broken,
            "kernels": [_plain(kernel) for kernel in changes.kernels],
        }
    )


def _plain(kernel: KernelChange) -> dict[str, Any]:
    return {
        "op": kernel.op,
        "kernel": kernel.kernel,
        "change": kernel.change.value,
        "worse": kernel.worse,
        "before": kernel.before,
        "after": kernel.after,
        "cases_in_both": len(kernel.pairs),
        "cases_in_one": kernel.unpaired,
        "cases_on_other_inputs": kernel.other_inputs,
        "cases_worse": [after.case for _, after in kernel.worse_cases],
        "cases_better": [after.case for _, after in kernel.better_cases],
        "tensors": kernel.tensors,
        "tensors_equal": kernel.equal,
        "stages": [
            {
                "stage": stage.shown.name,
                "dtype": stage.shown.dtype,
                "tensors": stage.tensors,
                "tensors_equal": stage.equal,
                "before": stage.before and stage.before.figures,
                "after": stage.after and stage.after.figures,
                "drifts": [
                    {"figure": d.figure, "worse": d.worse, "before": d.before, "after": d.after} for d in stage.drifts
                ],
            }
            for stage in kernel.stages
        ],
        "properties": [
            {"property": one.after.name, "lost": one.lost, "worse": one.worse, "where": one.after.where}
            for one in kernel.properties
        ],
    }
