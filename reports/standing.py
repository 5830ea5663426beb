"""How the kernels of a run stand: everything that each form of a report says of a kernel on a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from lastbit.reports import wording
from lastbit.reports.stage_summary import (
    StageSummary,
    TracedStage,
    beside_values,
    extremes,
    stage_order,
    stage_summaries,
    traced_stages,
)
from lastbit.reports.summary import grouped, plural, share, shown_path, tally
from lastbit.result import CaseResult, Verdict, idle_in, told
from lastbit.run import LEAST_JUDGED, Decided, Run

Subject = tuple[str, str]
"""A kernel on a device."""


@dataclass(frozen=True)
class Standing:
    """One kernel on one device; `first` is its first result, counted or not."""

    run: Run
    first: CaseResult
    _orders: dict[str, list[str]] = field(default_factory=dict)

    @property
    def op(self) -> str:
        return self.first.op

    @property
    def kernel(self) -> str:
        return self.first.kernel

    @property
    def device(self) -> str:
        return self.first.device

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
    def tally(self) -> str:
        """The cases by their verdicts: `65 cases: 64 passed, 1 failed`."""
        return f"{plural(len(self.cases), 'case')}: {tally(result.verdict for result in self.cases)}"

    @property
    def on_cases(self) -> str:
        return wording.on_cases(self.run, self.subject)

    @property
    def beside(self) -> str:
        return beside_values(self.cases)

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
    return {subject: Standing(run, first[subject], orders) for subject in run.subjects()}


def by_op(found: dict[Subject, Standing]) -> dict[str, list[Standing]]:
    """Group the kernels by their ops, in the order of the run."""
    return grouped((one.op, one) for one in found.values())
