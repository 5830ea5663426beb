"""Two runs side by side: what got better or worse, what is new and what is gone, per kernel, device and stage.

Runs draw their cases, so two of them need not have the same ones. Figures are compared on those that both have: the
same case line on the same input bits. How many there are is part of the result, and so are the cases that only one of
the runs has. Where no case is common, the figures of either run are given, and only verdicts are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.stage_summary import StageSummary, stage_order, summary_of
from lastbit.reports.summary import grouped
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
    across = _across(base, run)
    kernels = [_kernel_change(base, run, *subject, drift=drift) for subject in _subjects(base, run, across)]
    severity = list(Fate)
    return Changes(
        names=names,
        kernels=tuple(sorted(kernels, key=lambda kernel: (not kernel.worse, severity.index(kernel.change)))),
        settings=tuple(_settings(base.environment, run.environment)),
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


def _settings(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for name in {**before, **after}:
        values = before.get(name, ""), after.get(name, "")
        if name not in _NO_DIFFERENCE and values[0] != values[1]:
            yield (name, *values)


def _across(base: Run, run: Run) -> tuple[str, str] | None:
    """Return the devices of two runs that have one each, if these have different names."""
    before, after = ({device for _, device in r.subjects()} for r in (base, run))
    if len(before) == len(after) == 1 and before != after:
        return before.pop(), after.pop()
    return None


def _subjects(base: Run, run: Run, across: tuple[str, str] | None) -> Iterator[tuple[str, str, str]]:
    """Yield kernel, device before, device after; a run without such a kernel has no results of it either."""
    if across:
        kernels = dict.fromkeys(kernel for kernel, _ in (*run.subjects(), *base.subjects()))
        yield from ((kernel, *across) for kernel in kernels)
    else:
        subjects = dict.fromkeys((*run.subjects(), *base.subjects()))
        yield from ((kernel, device, device) for kernel, device in subjects)


def _kernel_change(
    base: Run, run: Run, kernel: str, device_before: str, device_after: str, *, drift: float
) -> KernelChange:
    before, after = _cases(base, kernel, device_before), _cases(run, kernel, device_after)
    pairs = tuple((before[line], after[line]) for line in before if _same_inputs(before[line], after.get(line)))
    paired = {first.case for first, _ in pairs}
    alone = [[result for line, result in cases.items() if line not in paired] for cases in (before, after)]
    stages = paired_stages(pairs, drift=drift) if pairs else separate_stages(*alone) if all(alone) else ()
    return KernelChange(
        op=next(iter((*after.values(), *before.values()))).op,
        kernel=kernel,
        before=_side(base, kernel, device_before, before),
        after=_side(run, kernel, device_after, after),
        pairs=pairs,
        unpaired=(sum(r.counted for r in alone[0]), sum(r.counted for r in alone[1])),
        other_inputs=len({r.case for r in alone[0]} & {r.case for r in alone[1]}),
        stages=stages,
        properties=tuple(properties_changed(before.values(), after.values())),
    )


def _cases(run: Run, kernel: str, device: str) -> dict[str, CaseResult]:
    """Map case lines to the results of a kernel, those tried while a failure was shrunk included."""
    cases: dict[str, CaseResult] = {}
    for result in run.results:
        if (result.kernel, result.device) == (kernel, device):
            cases.setdefault(result.case, result)
    return cases


def _same_inputs(before: CaseResult, after: CaseResult | None) -> bool:
    """Check whether both runs had the same input bits; a case whose process died has left no fingerprint."""
    if after is None:
        return False
    return before.fingerprint == after.fingerprint or "" in (before.fingerprint, after.fingerprint)


def _side(run: Run, kernel: str, device: str, results: Mapping[str, CaseResult]) -> RunSide | None:
    if not results:
        return None
    contracts = dict.fromkeys(result.contract for result in results.values())
    return RunSide(device, run.verdict(kernel, device), " and ".join(contracts))


# Stages and properties of one kernel


_Key = tuple[str, str]
"""A stage's name and format."""
_Alone = Sequence[Mapping[_Key, Sequence[CaseResult]]]
"""Of each run, the results on stages without a counterpart, cut to the stage."""


def paired_stages(pairs: Sequence[Pair], *, drift: float) -> tuple[StageChange, ...]:
    """Compare the stages of results of the same cases, where both results of a pair have the stage."""
    cut = [(_by_stage(first), _by_stage(second)) for first, second in pairs]
    both = grouped((key, (before[key], after[key])) for before, after in cut for key in before if key in after)
    alone = [
        grouped((key, own[side][key]) for own in cut for key in own[side] if key not in own[1 - side])
        for side in (0, 1)
    ]
    return _changes(both, alone, stage_order(result for pair in pairs for result in pair), drift)


def separate_stages(before: Iterable[CaseResult], after: Iterable[CaseResult]) -> tuple[StageChange, ...]:
    """List the stages of results without a common case: figures of either run, from which nothing follows."""
    sides = (tuple(before), tuple(after))
    alone = [grouped(one for result in results for one in _by_stage(result).items()) for results in sides]
    return _changes({}, alone, stage_order([*sides[0], *sides[1]]), math.inf)


def _changes(
    both: Mapping[_Key, Sequence[Pair]], alone: _Alone, order: Sequence[str], drift: float
) -> tuple[StageChange, ...]:
    """Return the stages' changes in `order`, and then by format."""
    keys = sorted({**both, **alone[0], **alone[1]}, key=lambda key: (order.index(key[0]), key[1]))
    before, after = ({key: _summary(pairs) for key, pairs in side.items()} for side in alone)
    return tuple(
        _change(both[key], drift) if key in both else StageChange(before.get(key), after.get(key)) for key in keys
    )


def _change(both: Sequence[Pair], drift: float) -> StageChange:
    apart = [any(result.stages[0].extreme for result in pair) for pair in both]  # the same ones in both runs
    before, after = (_summary([pair[side] for pair in both], apart) for side in (0, 1))
    bits = [(a.stages[0].fingerprint, b.stages[0].fingerprint) for a, b in both]
    known = [(a, b) for a, b in bits if a and b]
    return StageChange(before, after, len(known), sum(a == b for a, b in known), tuple(_drifts(before, after, drift)))


def _by_stage(result: CaseResult) -> dict[_Key, CaseResult]:
    """Cut the result to each of its stages."""
    return {(stage.name, stage.dtype): replace(result, stages=(stage,)) for stage in result.stages}


def _summary(results: Sequence[CaseResult], apart: Sequence[bool] | None = None) -> StageSummary:
    """Summarize results that are cut to one stage."""
    return summary_of([(result, result.stages[0]) for result in results], apart)


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


def properties_changed(before: Iterable[CaseResult], after: Iterable[CaseResult]) -> Iterator[PropertyChange]:
    """Yield the properties that hold in one run and are broken in the other."""
    old, new = (together(one for result in results for one in result.properties) for results in (before, after))
    for name in old:
        if name in new and {old[name].outcome, new[name].outcome} == {PropertyOutcome.HOLDS, PropertyOutcome.BROKEN}:
            yield PropertyChange(old[name], new[name])
