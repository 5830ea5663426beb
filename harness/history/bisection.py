"""The search for the first bad commit or version: ends, criterion, steps.

A `Space` knows what lies between the ends and how to get at it; a `Measure` runs the case there. What cannot be
measured is skipped, and its neighbours are tried instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lastbit.errors import LastbitError, UsageError
from lastbit.history.criterion import BisectQuestion, criterion_of, objection
from lastbit.reports.bisection import Bisection, BisectStep, Criterion, Mark, Point
from lastbit.result import CaseResult
from lastbit.run import Run


@dataclass(frozen=True)
class RevisionPlace:
    """The folders in which a commit or version lies while it is measured.

    Attributes:
        root: its throw-away folder, which is the worktree of a commit.
        kernels: its folder of kernels; empty where it brings none.
        site: its folder of installed packages; empty where it brings none.
    """

    root: str
    kernels: str = ""
    site: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of a `Config` by which a run finds these folders."""
        kernels = {"kernel_folders": (self.kernels,), "tree": self.root} if self.kernels else {}
        return kernels | ({"site": (self.site,)} if self.site else {})


class Space(Protocol):
    """Commits or versions between a good and a bad end."""

    @property
    def what(self) -> str:
        """`commit` or `version`."""

    @property
    def good(self) -> str:
        """Name of the good end."""

    @property
    def bad(self) -> str:
        """Name of the bad end."""

    def candidates(self) -> list[str]:
        """Return the candidates for the first bad one after all marks so far, oldest first."""

    def best(self, untried: Collection[str]) -> str:
        """Return the one of `untried` candidates whose mark would tell most."""

    def mark(self, name: str, mark: Mark) -> None:
        """Take note of the mark that a measurement gave."""

    def point(self, name: str) -> Point:
        """Return the description of a candidate for a reader."""

    def key(self, name: str) -> str:
        """Return a key that is equal for two candidates that need only one measurement."""

    def place(self, name: str) -> AbstractContextManager[RevisionPlace]:
        """Provide the files of a candidate for as long as the context lasts; LastbitError if they cannot be made."""


Measure = Callable[[str, Mapping[str, Any]], Run]
"""Runs the case under a name, with changes of the run's `Config`; LastbitError if the run cannot begin."""

Tell = Callable[[Criterion, BisectStep], None]
"""Hears of every step at once."""


def bisect(space: Space, question: BisectQuestion, measure: Measure, tell: Tell) -> Bisection:
    """Find the first bad commit or version.

    Raises:
        UsageError: the ends cannot be told apart by what is asked.
        LastbitError: an end cannot be measured.
    """
    ends = _ends(space, question.kernel, measure)
    good, bad = (end.result for end in ends)
    assert good and bad
    criterion = criterion_of(question, good, bad)
    for end in ends:
        tell(criterion, end)

    def look(point: Point) -> CaseResult:
        return _usable(_alone(space, point, measure, good.kernel), good.kernel, criterion.stage)

    steps = search(space, criterion, look, ends, tell)
    candidates = tuple(map(space.point, space.candidates()))
    return Bisection(space.what, criterion, candidates, (*ends, *steps))


def search(
    space: Space,
    criterion: Criterion,
    look: Callable[[Point], CaseResult],
    ends: Sequence[BisectStep],
    tell: Tell,
) -> list[BisectStep]:
    """Measure and mark until one candidate is left, or only ones that cannot be measured.

    `look` raises LastbitError for what cannot be measured. Of equal keys, one is measured.
    """
    steps: list[BisectStep] = []
    known = {space.key(step.point.name): step for step in ends}
    marked = {step.point.name for step in ends}
    run = max(step.run for step in ends)
    while untried := [name for name in space.candidates() if name not in marked]:
        point = space.point(space.best(untried))
        key = space.key(point.name)
        step = _again(known[key], point) if key in known else _looked_at(point, criterion, look, run + 1)
        run = max(run, step.run)
        known.setdefault(key, step)
        marked.add(point.name)
        space.mark(point.name, step.mark)
        steps.append(replace(step, left=len(space.candidates())))
        tell(criterion, steps[-1])
    return steps


def _looked_at(point: Point, criterion: Criterion, look: Callable[[Point], CaseResult], run: int) -> BisectStep:
    try:
        result = look(point)
    except LastbitError as error:
        return BisectStep(point, Mark.SKIPPED, reason=str(error))
    return BisectStep(point, Mark.BAD if criterion.is_bad(result) else Mark.GOOD, run, result)


def _again(known: BisectStep, point: Point) -> BisectStep:
    """Return the step of a point that does not differ from the one that is known."""
    reason = known.reason if known.mark is Mark.SKIPPED else f"the same files as {known.point.short}"
    return replace(known, point=point, run=0, reason=reason)


Results = Mapping[str, CaseResult]
"""Name of a kernel → its result."""


def _ends(space: Space, kernel: str, measure: Measure) -> list[BisectStep]:
    """Measure the good end and the bad end."""
    ends = [(Mark.GOOD, space.point(space.good)), (Mark.BAD, space.point(space.bad))]
    found: list[Results] = []
    for mark, point in ends:
        with _naming(mark, point):
            found.append(_alone(space, point, measure, kernel))
    kernel = kernel or _shared(*found)
    left = len(space.candidates())
    steps = []
    for run, ((mark, point), results) in enumerate(zip(ends, found, strict=True), 1):
        with _naming(mark, point):
            steps.append(BisectStep(point, mark, run, _usable(results, kernel), left=left))
    return steps


@contextmanager
def _naming(mark: Mark, point: Point) -> Iterator[None]:
    """Say of an error that it is an end's."""
    try:
        yield
    except LastbitError as error:
        reason = f"the {mark} end {point.short} cannot be measured, and an end cannot be skipped: {error}"
        raise LastbitError(reason) from error


def _shared(good: Results, bad: Results) -> str:
    shared = sorted(set(good) & set(bad))
    if len(shared) == 1:
        return shared[0]
    if shared:
        raise UsageError(f"several kernels could be followed; choose one by name: {', '.join(shared)}")
    names = [", ".join(sorted(results)) or "none" for results in (good, bad)]
    raise UsageError(f"no kernel ran the case at both ends; at the good end {names[0]}, at the bad end {names[1]}")


def _alone(space: Space, point: Point, measure: Measure, kernel: str) -> Results:
    """Measure one commit or version in a run of its own, and return its results."""
    with space.place(point.name) as place:
        try:
            return _results(measure(point.short, _settings(place, kernel)))
        except LastbitError as error:
            raise LastbitError(_reason(str(error).replace(f"{place.root}/", ""))) from error


def _settings(place: RevisionPlace, kernel: str) -> dict[str, Any]:
    return place.settings | ({"kernels": (kernel,)} if kernel else {})


def _results(run: Run) -> Results:
    if run.broken:
        raise LastbitError(run.broken)
    return {result.kernel: result for result in run.results if result.counted}


def _usable(results: Results, kernel: str, stage: str = "") -> CaseResult:
    if kernel not in results:
        raise LastbitError(
            f"no kernel {kernel!r} is declared for this device; those that ran: {', '.join(results) or 'none'}"
        )
    if reason := objection(results[kernel], stage):
        raise LastbitError(reason)
    return results[kernel]


def _reason(text: str) -> str:
    """Return the line of an error that says most: the last one of a traceback, the first one of anything else."""
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[-1] if any(line.lstrip().startswith("File ") for line in lines) else lines[0]
