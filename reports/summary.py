"""Summaries of a run that all reports share, in numbers and words."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lastbit.command_line import command
from lastbit.result import BAD, OF_PROPERTIES, SANITIZED, ULP_BINS, CaseResult, Verdict, idle_in, simplest, told
from lastbit.run import Run

Key = TypeVar("Key")
Item = TypeVar("Item")


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Group the second items of pairs by the first, in order of appearance."""
    together: dict[Key, list[Item]] = {}
    for key, item in pairs:
        together.setdefault(key, []).append(item)
    return together


@dataclass(frozen=True)
class KernelFailure:
    """A fault of one kernel at one stage for one cause, on all devices and in all groups of cases.

    Attributes:
        bad: every failed or errored result, in the order of the run, those tried while shrinking included.
        cases: counted results of the kernel on the groups of those, whatever their verdict.
    """

    bad: tuple[CaseResult, ...]
    cases: int

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of cases that show it, those with most of them first."""
        count = Counter(r.group for r in self.bad if r.group)
        return tuple(sorted(count, key=lambda group: (-count[group], group)))

    @property
    def smallest(self) -> CaseResult:
        """The failing case with the fewest elements; among equals of a group the last, which shrinking ended with."""
        failed = [r for r in self.bad if r.verdict is Verdict.FAILED] or list(self.bad)
        return min(reversed(failed), key=lambda result: (elements(result.case), result.group, result.device))

    @property
    def explained_by(self) -> tuple[str, ...]:
        """Contracts that allow every bit of every failed result, without those that change more than they need to."""
        failed = [r.explained_by for r in self.bad if r.verdict is Verdict.FAILED]
        common = [c for c in failed[0] if all(c in others for others in failed)] if failed else []
        return simplest(common, self.smallest.contract)

    @property
    def kept(self) -> tuple[str, ...]:
        """The contracts of `explained_by`, as a reader is told them."""
        return tuple(told(name, idle_in(self.bad)) for name in self.explained_by)

    @property
    def claimed(self) -> str:
        """The contract of the kernel, as a reader is told it."""
        return told(self.smallest.contract, idle_in(self.bad))

    @property
    def severity(self) -> tuple[bool, bool, int, int]:
        """The sort key of problems, the worst last: an error, a wrong result, how many cases, how many elements."""
        outside = [max(s.cumulative.outside, s.isolated.outside) for r in self.bad for s in r.stages if s.result]
        cases = self.counted(Verdict.FAILED) + self.counted(Verdict.ERRORED)
        return self.smallest.verdict is Verdict.ERRORED, any(outside), cases, sum(outside)

    def counted(self, verdict: Verdict) -> int:
        return sum(r.counted and r.verdict is verdict for r in self.bad)

    @property
    def shrunk(self) -> int:
        """Results that went wrong while a failure was shrunk, which are not counted."""
        return sum(not r.counted for r in self.bad)


ORDER = (
    "The worst of each kernel first: errors before wrong results, wrong results before other faults, and what most "
    "cases show before what few do."
)
"""What the order of `problems` is, for a reader."""


def problems(run: Run) -> list[KernelFailure]:
    """List one problem per kernel, wrong stage and cause: the worst of every kernel before any second.

    Cases in which nothing but NaN and infinities is wrong have a cause of their own, so that they hide no wrong number.
    """
    together: dict[tuple[str, str, bool], list[CaseResult]] = {}
    for r in run.results:
        if r.verdict in BAD:
            special = bool(r.faults) and r.faults[0].kind == "special"
            together.setdefault((r.kernel, wrong_stage(r), special), []).append(r)
    found = []
    for (kernel, *_), bad in sorted(together.items(), key=lambda one: one[0]):  # workers record in any order
        groups = {result.group for result in bad}
        cases = sum(r.counted for r in run.results if r.kernel == kernel and r.group in groups)
        found.append(KernelFailure(tuple(bad), cases))
    found.sort(key=lambda problem: problem.severity, reverse=True)
    by_kernel = grouped((problem.smallest.kernel, problem) for problem in found)
    rank = {id(problem): place for own in by_kernel.values() for place, problem in enumerate(own)}
    return sorted(found, key=lambda problem: rank[id(problem)])


def wrong_stage(result: CaseResult) -> str:
    """Name the stage that a reader would look at first; empty for a kernel that raised."""
    if result.failing_stage is not None:
        return result.failing_stage.name
    return result.faults[0].stage if result.faults else ""


def elements(case: str) -> int:
    """Count the elements of all tensors of a case line."""
    shapes = re.findall(r"=\w+\[([\d,]*)\]", case)
    return sum(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)


def tally(verdicts: Iterable[Verdict]) -> str:
    """Write `118 passed, 1 failed`; `none` for none."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[v]:,} {v.value.lower()}" for v in Verdict if counts[v]) or "none"


def share(part: int, whole: int) -> str:
    """Format `0.0004 %`; `–` of nothing."""
    if not whole:
        return "–"
    percent = 100 * part / whole
    return f"{percent:.3g} %" if percent >= 10 else f"{percent:.2g} %"


def signed(value: float) -> str:
    """Format with two digits and a sign, except for zero; `–` for NaN."""
    if math.isnan(value):
        return "–"
    return f"{value:+.2g}" if value else "0"


def distance(ulp: float) -> str:
    """Format a distance in ulp, which is a whole number; `–` for NaN."""
    if math.isnan(ulp):
        return "–"
    return f"{ulp:,.0f}" if ulp < 1e5 else f"{ulp:.1e}"


def error(value: float) -> str:
    """Format `3.9e-03`, `0`, or `–` where there was nothing to measure."""
    if math.isnan(value):
        return "–"
    return f"{value:.1e}" if value else "0"


def ulp_names(to: str = "–", above: str = ">") -> tuple[str, ...]:
    """Name the bins of a histogram of distances in ulp: `0`, `1`, `2`, `3–4`, … and `>16`."""
    starts = (0, *(end + 1 for end in ULP_BINS))
    names = (str(hi) if lo == hi else f"{lo}{to}{hi}" for lo, hi in zip(starts, ULP_BINS, strict=False))
    return (*names, f"{above}{ULP_BINS[-1]}")


def listed(names: Iterable[str], most: int) -> str:
    """List the first `most` names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most:,} more" if len(every) > most else ""
    return ", ".join(every[:most]) + more


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shown_path(source: str) -> str:
    """Make a `file:line` relative to the working directory if it is below it."""
    folder = f"{Path.cwd()}/"
    return source.removeprefix(folder)


def repro_line(result: CaseResult, options: str = "") -> str:
    """Write the command that runs this case again, with the run's options for the places of kernels and ops.

    It sanitizes, and asks for properties, where a finding would not be there without. Empty for a group of which no
    case could be made.
    """
    if f"{result.op} (group " in result.case:
        return ""
    sanitize = any(finding.kind in SANITIZED for finding in result.findings)
    broken = [finding.stage for finding in result.faults if finding.kind in OF_PROPERTIES]
    more = " ".join(filter(None, ("--sanitize" * sanitize, options)))
    return repro_command(result.case, result.kernel, result.device, broken, more)


def repro_command(case: str, kernel: str, device: str, properties: Iterable[str] = (), options: str = "") -> str:
    """Write the command that runs a case of a kernel again, and asks for these properties."""
    asked = [f"--property {shlex.quote(name)}" for name in properties]
    return command("verify", kernel, case, " ".join(filter(None, ["--device", device, *asked, options])))


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
    kinds = ((r, kind) for r in run.results for kind in dict.fromkeys(notice.kind for notice in r.notices))
    together = grouped(((r.kernel, r.device, kind), r) for r, kind in kinds)
    return [Noticed(kind, tuple(results)) for (_, _, kind), results in together.items()]
