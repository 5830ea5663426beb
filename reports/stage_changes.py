"""Stages of one kernel in two runs: figures before and after, bits that stayed equal, figures that drifted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lastbit.reports.stage_summary import StageSummary, stage_order, summary_of
from lastbit.result import CaseResult

NEGLIGIBLE_BIAS = 0.05
"""Difference of two biases, in ulp, that is no drift: the mean of a hundred rounding errors varies by about that."""

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
        """Whether both runs have the stage, with equal bits in every tensor and nothing else to tell."""
        both = self.before is not None and self.after is not None
        return both and self.tensors == self.equal and not self.outside_grew and not self.drifts


def paired_stages(pairs: Sequence[Pair], *, drift: float) -> tuple[StageChange, ...]:
    """Compare the stages of results of the same cases, where both results of a pair have the stage."""
    found = _Stages()
    for first, second in pairs:
        before, after = _by_stage(first), _by_stage(second)
        for key in {**before, **after}:
            if key in before and key in after:
                found.of(key).both.append((before[key], after[key]))
            else:
                found.of(key).alone[key in after].append(before.get(key) or after[key])
    return tuple(found.changes(stage_order(result for pair in pairs for result in pair), drift))


def separate_stages(before: Iterable[CaseResult], after: Iterable[CaseResult]) -> tuple[StageChange, ...]:
    """List the stages of results without a common case: figures of either run, from which nothing follows."""
    found = _Stages()
    sides = (tuple(before), tuple(after))
    for side, results in enumerate(sides):
        for result in results:
            for key, one in _by_stage(result).items():
                found.of(key).alone[side].append(one)
    return tuple(found.changes(stage_order([*sides[0], *sides[1]]), math.inf))


_Key = tuple[str, str]
"""A stage's name and format."""


class _StageOfRuns:
    """The results of two runs on one stage, cut to it: of cases in which both have it, and of the others."""

    def __init__(self) -> None:
        self.both: list[Pair] = []
        self.alone: tuple[list[CaseResult], list[CaseResult]] = ([], [])

    def change(self, drift: float) -> StageChange:
        if not self.both:
            alone = [_summary(results) if results else None for results in self.alone]
            return StageChange(alone[0], alone[1])
        apart = [any(result.stages[0].extreme for result in pair) for pair in self.both]  # the same ones in both runs
        before, after = (_summary([pair[side] for pair in self.both], apart) for side in (0, 1))
        bits = [(a.stages[0].fingerprint, b.stages[0].fingerprint) for a, b in self.both]
        known = [(a, b) for a, b in bits if a and b]
        drifts = tuple(_drifts(before, after, drift))
        return StageChange(before, after, len(known), sum(a == b for a, b in known), drifts)


class _Stages:
    """The results of two runs on every stage."""

    def __init__(self) -> None:
        self._found: dict[_Key, _StageOfRuns] = {}

    def of(self, key: _Key) -> _StageOfRuns:
        return self._found.setdefault(key, _StageOfRuns())

    def changes(self, order: Sequence[str], drift: float) -> Iterator[StageChange]:
        """Yield the stages' changes in `order`, and then by format."""
        for key in sorted(self._found, key=lambda key: (order.index(key[0]), key[1])):
            yield self._found[key].change(drift)


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
