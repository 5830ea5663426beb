"""Notices of a run, which it does not hold against a kernel: one entry per kernel, device and kind of notice."""

from __future__ import annotations

from dataclasses import dataclass

from lastbit.reports.summary import elements, plural, repro_line
from lastbit.result import CaseResult
from lastbit.run import Run


@dataclass(frozen=True)
class Noticed:
    """The results of one kernel on one device that have a notice of one kind."""

    kind: str
    results: tuple[CaseResult, ...]

    @property
    def smallest(self) -> CaseResult:
        """The one with the fewest elements."""
        return min(self.results, key=lambda result: elements(result.case))

    @property
    def sentence(self) -> str:
        """The number of cases and rows with the notice, and its sentence in the smallest of them."""
        cases = sum(result.counted for result in self.results) or len(self.results)
        rows = sum(result.rows.split for result in self.results if result.rows is not None)
        extent = plural(cases, "case") + (f", {plural(rows, 'row')}" if rows else "")
        said = next(notice.sentence for notice in self.smallest.notices if notice.kind == self.kind)
        return f"{self.smallest.kernel} on {self.smallest.device}: {extent}; in the case below, {said}"

    def repro(self, options: str) -> str:
        """Return the command that runs the smallest case again."""
        return repro_line(self.smallest, options)


def noticed(run: Run) -> list[Noticed]:
    """List every kind of notice of every kernel on every device, in the order of the run."""
    together: dict[tuple[str, str, str], list[CaseResult]] = {}
    for result in run.results:
        for kind in dict.fromkeys(notice.kind for notice in result.notices):
            together.setdefault((result.kernel, result.device, kind), []).append(result)
    return [Noticed(kind, tuple(results)) for (_, _, kind), results in together.items()]
