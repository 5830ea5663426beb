"""How the kernels of a run stand: the table of their stages, and what else every form of a report says of each.

Figures are those of ordinary cases, and apart from them stand the cases that are extreme. A case is extreme at a stage
if the contract itself loses more there than its roundings explain, or lets a kernel lose far more
(`StageResult.extreme`). A kernel's own fault makes no case extreme.
"""

from __future__ import annotations

import functools
import math
import operator
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from lastbit.reports.summary import distance, error, grouped, plural, share, shown_path, signed, tally
from lastbit.result import BAD, NEAR, CaseResult, Comparison, StageResult, Verdict, idle_in, told
from lastbit.run import LEAST_JUDGED, Decided, Run

if TYPE_CHECKING:
    import pandas as pd

Pair = tuple[CaseResult, StageResult]

# What fits into a cell of the table.
MOST_REGIMES = 4


@dataclass(frozen=True)
class StageSummary:
    """One stage in one format, over all counted cases of one kernel on one device.

    Attributes:
        total: statistics over the elements of all cases, from their inputs.
        ordinary, extreme: those of each case that has elements.
        outside: elements outside the enclosure, seen from the inputs or from earlier stages, whichever are more.
    """

    name: str
    dtype: str
    result: bool
    cases: int
    total: Comparison
    ordinary: tuple[Comparison, ...]
    extreme: tuple[Comparison, ...]
    outside: int
    verdict: Verdict

    @property
    def shown_name(self) -> str:
        """The name, in parentheses unless the stage is a result."""
        return self.name if self.result else f"({self.name})"

    @property
    def worst(self) -> Comparison | None:
        """The ordinary case with the largest error."""
        return max(self.ordinary, key=lambda c: math.inf if math.isnan(c.rel_l2) else c.rel_l2, default=None)

    @property
    def worst_error(self) -> float:
        return math.nan if self.worst is None else self.worst.rel_l2

    @property
    def contract_error(self) -> float:
        """The error that the contract itself makes in the case of `worst_error`."""
        return math.nan if self.worst is None else self.worst.contract_l2

    @property
    def typical_error(self) -> float:
        return _median(comparison.rel_l2 for comparison in self.ordinary)

    @property
    def typical_bias(self) -> float:
        """The bias of the median case: one case of few elements would decide a mean."""
        return _median(comparison.bias for comparison in self.ordinary)

    @property
    def near_ulp(self) -> float:
        """The largest `Comparison.near_ulp` of an ordinary case."""
        return max((comparison.near_ulp for comparison in self.ordinary), default=math.nan)

    @property
    def figures(self) -> dict[str, int | float | str]:
        """Name → figure, as programs read them."""
        return {
            "cases": self.cases,
            "extreme_cases": len(self.extreme),
            "verdict": self.verdict.value,
            "numel": self.total.numel,
            "outside": self.outside,
            "mismatched": self.total.mismatched,
            "worst_rel_l2": self.worst_error,
            "contract_rel_l2": self.contract_error,
            "median_rel_l2": self.typical_error,
            "median_bias": self.typical_bias,
            "max_ulp": self.total.max_ulp,
        }


def _median(values: Iterable[float]) -> float:
    """Return the median without NaN; NaN for no values."""
    known = [value for value in values if not math.isnan(value)]
    return statistics.median(known) if known else math.nan


class StageFigure(NamedTuple):
    """A cell of a table of stages.

    Attributes:
        value: what it is sorted by; NaN for a word, and for an unknown number.
        wrong: the kernel fails for it.
    """

    text: str
    value: float = math.nan
    wrong: bool = False


STAGE_COLUMNS: Mapping[str, Callable[[StageSummary], StageFigure]] = {
    "stage": lambda stage: StageFigure(stage.shown_name),
    "dtype": lambda stage: StageFigure(stage.dtype),
    "cases": lambda stage: StageFigure(f"{stage.cases:,}", stage.cases),
    "extreme": lambda stage: StageFigure(f"{len(stage.extreme):,}", len(stage.extreme)),
    "rel. error": lambda stage: StageFigure(error(stage.worst_error), stage.worst_error),
    "contract": lambda stage: StageFigure(error(stage.contract_error), stage.contract_error),
    "ulp": lambda stage: StageFigure(distance(stage.near_ulp), stage.near_ulp),
    "mismatch": lambda stage: StageFigure(
        share(stage.total.mismatched, stage.total.numel),
        stage.total.mismatched / stage.total.numel if stage.total.numel else math.nan,
    ),
    "outside": lambda stage: StageFigure(f"{stage.outside:,}", stage.outside, wrong=stage.outside > 0),
    "bias": lambda stage: StageFigure(signed(stage.typical_bias), stage.typical_bias),
    "values": lambda stage: StageFigure(stage.verdict.value),
}
"""Column of a table of stages → its cell: the terminal, Markdown and HTML take them from here, with the meanings of
`LEGEND` in `lastbit.reports.wording`."""


def stage_cells(stage: StageSummary) -> dict[str, StageFigure]:
    """Return the cells of a stage by column."""
    return {name: cell(stage) for name, cell in STAGE_COLUMNS.items()}


def stage_order(results: Iterable[CaseResult]) -> list[str]:
    """List every stage of these results of one op, in the order of its reference, of which each result shows a part."""
    return in_one_order(tuple(stage.name for stage in result.stages) for result in results)


def in_one_order(parts: Iterable[Sequence[str]]) -> list[str]:
    """Merge parts of one order of names.

    Where parts contradict each other, as the order of stages may depend on the contract, it is that of appearance.
    """
    sequences = dict.fromkeys(map(tuple, parts))
    before = TopologicalSorter[str]()
    for sequence in sequences:
        for position, name in enumerate(sequence):
            before.add(name, *sequence[:position])
    try:
        return list(before.static_order())
    except CycleError:
        return list(dict.fromkeys(name for sequence in sequences for name in sequence))


def stage_summaries(results: Sequence[CaseResult], order: Sequence[str]) -> list[StageSummary]:
    """Summarize the stages of one kernel on one device, in `order` and then by format."""
    found = grouped(((stage.name, stage.dtype), (result, stage)) for result in results for stage in result.stages)
    return [summary_of(found[key]) for key in sorted(found, key=lambda key: (order.index(key[0]), key[1]))]


def summary_of(pairs: Sequence[Pair], apart: Sequence[bool] | None = None) -> StageSummary:
    """Summarize one stage; `apart` says which cases count as extreme, if they do not say so themselves.

    It is FAILED if a case has elements outside or a finding at the stage, INCONCLUSIVE if every case is. A case may
    have failed besides for what is no value of a stage: see `Standing.beside`.
    """
    first = pairs[0][1]
    apart = [stage.extreme for _, stage in pairs] if apart is None else apart
    seen = [(stage.cumulative, extreme) for (_, stage), extreme in zip(pairs, apart, strict=True)]
    verdict = Verdict.INCONCLUSIVE
    if any(_stage_is_wrong(result, stage) for result, stage in pairs):
        verdict = Verdict.FAILED
    elif any(result.verdict is not Verdict.INCONCLUSIVE for result, _ in pairs):
        verdict = Verdict.PASSED
    return StageSummary(
        name=first.name,
        dtype=first.dtype,
        result=any(stage.result for _, stage in pairs),
        cases=len(pairs),
        total=functools.reduce(operator.add, (comparison for comparison, _ in seen)),
        ordinary=tuple(comparison for comparison, extreme in seen if comparison.numel and not extreme),
        extreme=tuple(comparison for comparison, extreme in seen if comparison.numel and extreme),
        outside=sum(max(stage.cumulative.outside, stage.isolated.outside) for _, stage in pairs),
        verdict=verdict,
    )


def _stage_is_wrong(result: CaseResult, stage: StageResult) -> bool:
    named = any(finding.stage == stage.name for finding in result.faults)
    return bool(stage.cumulative.outside or stage.isolated.outside or named)


def extremes(results: Sequence[CaseResult]) -> str:
    """Write `6 of 65 cases (x huge 4, 2 others): contract up to 1.0e+00, kernel up to 1.0e+00`, and far elements.

    Empty if no case is extreme and no element farther than 16 ulp.
    """
    cases = [result for result in results if any(stage.extreme for stage in result.stages)]
    seen = [stage.cumulative for result in cases for stage in result.stages if stage.extreme]
    parts = []
    if cases:
        contract, kernel = max(c.contract_l2 for c in seen), max(c.rel_l2 for c in seen)
        named = f"{len(cases):,} of {plural(len(results), 'case')}{_regimes(cases, results)}"
        parts.append(f"{named}: contract up to {error(contract)}, kernel up to {error(kernel)}")
    every = [stage.cumulative for result in results for stage in result.stages]
    if far := sum(c.ulp_histogram[-1] for c in every):
        farthest = distance(max(c.max_ulp for c in every))
        parts.append(f"{share(far, sum(c.numel for c in every))} of elements beyond {NEAR} ulp, up to {farthest}")
    return "; ".join(parts)


def _regimes(cases: Sequence[CaseResult], results: Sequence[CaseResult]) -> str:
    """Write ` (x huge 4, 2 others)`: the regimes that explain most of these cases and are rare among other results."""
    everywhere = Counter(regime for result in results for regime in _regimes_of(result))
    rest, named = [_regimes_of(case) for case in cases], list[str]()
    while rest and len(named) < MOST_REGIMES:
        counts = Counter(regime for regimes in rest for regime in regimes)
        best = max(counts, key=lambda regime: (2 * counts[regime] - everywhere[regime], regime), default="")
        if 2 * counts[best] <= everywhere[best]:
            break
        named.append(f"{best} {counts[best]}")
        rest = [regimes for regimes in rest if best not in regimes]
    if named and rest:
        named.append(plural(len(rest), "other"))
    return f" ({', '.join(named)})" if named else ""


def _regimes_of(result: CaseResult) -> list[str]:
    """Yield `x huge` for each tensor of the case line that names its regime, without what stands in parentheses."""
    parts = (word.partition("=") for word in result.case.split())
    named = ((name, spec.partition(":")[2].partition("(")[0]) for name, _, spec in parts)
    return [f"{name} {regime}" for name, regime in named if regime]


# Stages that were found in kernels which declare none

MEANING = "the line of a kernel that shows no stages whose values agree best with one, on the CPU; it decides nothing"


@dataclass(frozen=True)
class TracedStage:
    """A stage at a line of a kernel, over the cases in which it was found there.

    Attributes:
        dtype: what the line holds it in; that of the contract is `format`.
        error, contract_error: relative L2 error of the line's values and of the contract's, in the worst of the cases.
        outside, of: elements that the contract excludes, of those compared.
    """

    kernel: str
    stage: str
    dtype: str
    format: str
    file: str
    line: int
    code: str
    cases: int
    error: float
    contract_error: float
    outside: int
    of: int

    @property
    def name(self) -> str:
        """`(variance) line 9`."""
        return f"({self.stage}) line {self.line}"


def traced_stages(run: Run, kernel: str, device: str) -> list[TracedStage]:
    """List the stages found in a kernel on a device, or else on the CPU for it, in the order of the reference."""
    alone = (kernel, "cpu") not in run.subjects()
    traces = [t for t in run.traces if t.kernel == kernel and (t.device == device or (alone and t.device == "cpu"))]
    matched = [(step, step.match) for trace in traces for step in trace.stages if step.match is not None]
    found = grouped(((match.stage, step.file, step.line, step.dtype), (step, match)) for step, match in matched)
    stages = []
    for seen in found.values():
        step, match = max(seen, key=lambda pair: -1.0 if math.isnan(pair[1].error) else pair[1].error)
        stage = TracedStage(
            kernel=kernel,
            stage=match.stage,
            dtype=step.dtype,
            format=match.format,
            file=step.file,
            line=step.line,
            code=step.code,
            cases=len(seen),
            error=match.error,
            contract_error=match.contract_error,
            outside=sum(m.outside for _, m in seen),
            of=sum(m.of for _, m in seen),
        )
        stages.append(stage)
    return stages


def traced_cells(stage: TracedStage) -> dict[str, StageFigure]:
    """Return the cells of such a stage by column; it decides nothing."""
    known = {
        "stage": StageFigure(stage.name),
        "dtype": StageFigure(stage.dtype),
        "cases": StageFigure(f"{stage.cases:,}", stage.cases),
        "rel. error": StageFigure(error(stage.error), stage.error),
        "contract": StageFigure(error(stage.contract_error), stage.contract_error),
        "outside": StageFigure(f"{stage.outside:,} of {stage.of:,}" if stage.outside else "0"),
    }
    return {name: known.get(name, StageFigure("–")) for name in STAGE_COLUMNS}


def frame(run: Run) -> pd.DataFrame:
    """Make a table with a row for each kernel, stage and line, and the attributes of `TracedStage` as columns."""
    import pandas as pd

    kernels = dict.fromkeys(trace.kernel for trace in run.traces)
    rows = [asdict(stage) for kernel in kernels for stage in traced_stages(run, kernel, "cpu")]
    return pd.DataFrame(rows, columns=list(TracedStage.__dataclass_fields__))


# Kernels

Subject = tuple[str, str]
"""A kernel on a device."""


@dataclass(frozen=True)
class Standing:
    """One kernel on one device; `first` is its first result, counted or not."""

    run: Run
    op: str
    kernel: str
    device: str
    first: CaseResult
    _orders: dict[str, list[str]] = field(default_factory=dict)

    @property
    def subject(self) -> Subject:
        return self.kernel, self.device

    @property
    def source(self) -> str:
        return shown_path(self.first.source)

    @cached_property
    def verdict(self) -> Verdict:
        return self.run.verdict(*self.subject)

    @cached_property
    def cases(self) -> tuple[CaseResult, ...]:
        """The counted results."""
        return self.run.of(*self.subject)

    @cached_property
    def decided(self) -> tuple[Decided, ...]:
        """Return what the run decided of each result."""
        return self.run.decided(*self.subject)

    @property
    def contract(self) -> str:
        """The contract, as a reader is told it."""
        return told(self.first.contract, idle_in(self.cases))

    @property
    def origin(self) -> str:
        """Where the verdict is from: `kept from RUN` or `judged`, with the reason; empty in a run that keeps none."""
        found = [one for one in self.run.origins if (one.kernel, one.device) == self.subject]
        return (f"kept from {found[0].run}" if found[0].run else f"judged: {found[0].why}") if found else ""

    @property
    def tally(self) -> str:
        """The cases by their verdicts: `65 cases: 64 passed, 1 failed`."""
        return f"{plural(len(self.cases), 'case')}: {tally(result.verdict for result in self.cases)}"

    @property
    def on_cases(self) -> str:
        return on_cases(self.run, self.subject)

    @property
    def beside(self) -> str:
        """Say why cases failed whose stages hold allowed values only: `2 cases failed for wrote outside`; or empty."""
        kinds = Counter[str]()
        for result in self.cases:
            if result.verdict is Verdict.FAILED and not any(_stage_is_wrong(result, stage) for stage in result.stages):
                kinds.update({finding.kind.replace("_", " ") for finding in result.faults} or {"no stated reason"})
        return ", ".join(f"{plural(count, 'case')} failed for {kind}" for kind, count in kinds.items())

    @property
    def extremes(self) -> str:
        return extremes(self.cases)

    @cached_property
    def stages(self) -> list[StageSummary]:
        """The stages over all cases, in the order of the reference."""
        if self.op not in self._orders:
            self._orders[self.op] = stage_order(result for result in self.run.results if result.op == self.op)
        return stage_summaries(self.cases, self._orders[self.op])

    @cached_property
    def traced(self) -> list[TracedStage]:
        return traced_stages(self.run, *self.subject)

    @cached_property
    def short(self) -> str:
        """Return how little of a kernel that PASSED was judged, as `on 2 of 122 cases`; empty if it was enough."""
        if self.verdict is not Verdict.PASSED:
            return ""
        judged, planned = self.run.judged(*self.subject)
        of = f"of {plural(planned, 'case')}"
        if judged < planned:
            return f"on {judged:,} {of}"
        passed = sum(result.verdict is Verdict.PASSED for result in self.cases)
        if passed < LEAST_JUDGED * planned:
            return f"on {passed:,} {of}, the others decided nothing"
        few = (d for d in self.decided if d.few)
        return ", ".join(f"{share(d.decided, d.numel)} of {d.stage} ({d.dtype}) decided" for d in few)


def standings(run: Run) -> dict[Subject, Standing]:
    """Return how every kernel of a run stands on every device, in the order of the run."""
    first, orders = {(r.kernel, r.device): r for r in reversed(run.results)}, dict[str, list[str]]()
    return {one: Standing(run, first[one].op, *one, first[one], orders) for one in run.subjects()}


def by_op(found: dict[Subject, Standing]) -> dict[str, list[Standing]]:
    """Group the kernels by their ops, in the order of the run."""
    return grouped((one.op, one) for one in found.values())


def kept_of(run: Run) -> str:
    """Write ` (95 kept from RUN)` after the count of kernels, of which so many verdicts are of earlier runs."""
    kept = [one.run for one in run.origins if one.run]
    runs = dict.fromkeys(kept)
    return f" ({len(kept):,} kept from {kept[0] if len(runs) == 1 else f'{len(runs)} runs'})" if kept else ""


def on_cases(run: Run, *subjects: tuple[str, str]) -> str:
    """Write ` on 2 of 122 cases` after the verdict on kernels that declined the others; empty if none or they fail."""
    verdicts = {run.verdict(*subject) for subject in subjects}
    judged, planned = (
        sum(counts) for counts in zip((0, 0), *(run.judged(*subject) for subject in subjects), strict=True)
    )
    said = 0 < judged < planned and verdicts.isdisjoint(BAD)
    return f" on {judged:,} of {plural(planned, 'case')}" if said else ""
