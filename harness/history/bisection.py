"""The search for the first bad commit or version: what is asked, the criterion by which one is bad, ends, steps.

A `Space` knows what lies between the ends and how to get at it; a `Measure` runs the case there. What cannot be
measured is skipped, and its neighbours are tried instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from lastbit.errors import LastbitError, UsageError, unknown
from lastbit.reports.bisection import METRICS, Bisection, BisectStep, Criterion, Mark, Point, stage_of
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run

# Arbitrary: drawn cases alone vary by some per cent.
CLEARLY = 1.1
"""Factor by which the figures of both ends must differ. If they hardly do, being nearer to one of them says nothing."""


@dataclass(frozen=True)
class BisectQuestion:
    """The user's question: the figure of a kernel that is followed.

    Attributes:
        kernel: whose figures are followed; empty for the only one that both ends have.
        stage: empty for the first that is a result.
        metric: one of `METRICS`; empty for the verdict.
        drift: the factor by which the metric must have risen; None to ask which end it is nearer to.
    """

    kernel: str = ""
    stage: str = ""
    metric: str = ""
    drift: float | None = None

    def __post_init__(self) -> None:
        if self.metric and self.metric not in METRICS:
            raise unknown("metric", self.metric, METRICS)
        if self.drift is not None and not 1 < self.drift < math.inf:
            raise UsageError(f"--drift {self.drift:g} must be a factor above 1, such as 1.3")


def criterion_of(question: BisectQuestion, good: CaseResult, bad: CaseResult) -> Criterion:
    """Return the criterion by which the good end is good and the bad end is bad.

    Raises:
        UsageError: there is none; the message shows the figures of both ends.
    """
    metric = question.metric or ("rel_l2" if question.drift is not None else "")
    stage, choice = _stage(question.stage, metric, good, bad)
    if metric:
        return _of_figures(Criterion(metric, stage, drift=question.drift, choice=choice), good, bad)
    if (good.verdict is Verdict.FAILED) or (bad.verdict is not Verdict.FAILED):
        figures = "; ".join(f"{name} {_size(Criterion(name, stage), good, bad)}" for name in METRICS)
        raise UsageError(
            f"the verdict is {good.verdict} at the good end and {bad.verdict} at the bad end, so it cannot tell where "
            f"{good.kernel} began to fail. Stage {stage}: {figures}. Follow one of these with --metric or --drift, or "
            "choose other ends or another case"
        )
    return Criterion("", stage, choice=choice)


def _of_figures(plain: Criterion, good: CaseResult, bad: CaseResult) -> Criterion:
    """Return `plain` with the threshold that the figures of the ends give."""
    metric, drift = plain.metric, plain.drift
    low, high = plain.figure(good), plain.figure(bad)
    if drift is not None:
        made = Criterion(metric, plain.stage, drift * low, drift=drift, choice=plain.choice)
        if high <= low or not made.is_bad(bad):
            raise UsageError(
                f"--drift {drift:g}: {metric} of stage {plain.stage} has not risen by that factor; it is "
                f"{_size(plain, good, bad)}"
            )
        return made
    if max(low, high) < CLEARLY * min(low, high) or low == high:
        raise UsageError(
            f"--metric {metric}: no clear difference between the ends; {metric} of stage {plain.stage} is "
            f"{_size(plain, good, bad)}. Choose other ends, another case, or a small --drift"
        )
    # Equally near to both ends: as a ratio, or from 0 as a difference. A single element outside is a violation, so that
    # `outside` has no middle between 0 and more.
    from_zero = 0.0 if metric == "outside" else max(low, high) / 2
    middle = math.sqrt(low) * math.sqrt(high) if low and high else from_zero
    return Criterion(metric, plain.stage, middle, falling=high < low, choice=plain.choice)


def _stage(asked: str, metric: str, good: CaseResult, bad: CaseResult) -> tuple[str, str]:
    """Return the stage to look at, and why this one where there was a choice."""
    names = {stage.name for stage in bad.stages}
    seen = [stage for stage in good.stages if stage.name in names]
    if asked:
        if asked not in {stage.name for stage in seen}:
            hint = "A stage that is no result is seen if the kernel declares and returns it at both ends."
            raise UsageError(f"{unknown('stage', asked, (s.name for s in seen))} {hint}")
        return asked, ""
    results = [stage.name for stage in seen if stage.result]
    if not results:
        raise UsageError(f"{good.kernel} gives no result at one of the ends, so that there is nothing to compare")
    if not metric:
        wrong = bad.failing_stage
        return (wrong.name, "") if wrong and wrong.name in {s.name for s in seen} else (results[0], "")

    def change(name: str) -> float:
        """Return how much the figure changed between the ends, either way, as the logarithm of a ratio."""
        low, high = sorted(Criterion(metric, name).figure(end) for end in (good, bad))
        return 0.0 if low == high else math.log(high / low) if low > 0 and high < math.inf else math.inf

    most = max(results, key=change)
    return most, "" if len(results) == 1 else f"of the results {', '.join(results)} it changed most"


def _size(criterion: Criterion, good: CaseResult, bad: CaseResult) -> str:
    return f"{criterion.figure(good):.3g} at the good end and {criterion.figure(bad):.3g} at the bad end"


def objection(result: CaseResult, stage: str) -> str:
    """Return why a result has no figure of the stage; empty if it has. An empty `stage` asks for any."""
    if result.verdict in (Verdict.ERRORED, Verdict.UNSUPPORTED, Verdict.SKIPPED):
        return f"{result.verdict}: {result.reason}"
    if stage and stage_of(result, stage) is None:
        return f"stage {stage} is not seen; seen are {', '.join(s.name for s in result.stages) or 'none'}"
    return ""


# The search


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
        if (like := known.get(key)) is not None:
            reason = like.reason if like.mark is Mark.SKIPPED else f"the same files as {like.point.short}"
            step = replace(like, point=point, run=0, reason=reason)
        else:
            try:
                result = look(point)
            except LastbitError as error:
                step = BisectStep(point, Mark.SKIPPED, reason=str(error))
            else:
                step = BisectStep(point, Mark.BAD if criterion.is_bad(result) else Mark.GOOD, run + 1, result)
        run = max(run, step.run)
        known.setdefault(key, step)
        marked.add(point.name)
        space.mark(point.name, step.mark)
        steps.append(replace(step, left=len(space.candidates())))
        tell(criterion, steps[-1])
    return steps


Results = Mapping[str, CaseResult]
"""Name of a kernel → its result."""


def _ends(space: Space, kernel: str, measure: Measure) -> list[BisectStep]:
    """Measure the good end and the bad end."""
    ends = [(Mark.GOOD, space.point(space.good)), (Mark.BAD, space.point(space.bad))]
    found: list[Results] = []
    for mark, point in ends:
        with _naming(mark, point):
            found.append(_alone(space, point, measure, kernel))
    shared = sorted(set(found[0]) & set(found[1]))
    if not kernel and len(shared) > 1:
        raise UsageError(f"several kernels could be followed; choose one by name: {', '.join(shared)}")
    if not kernel and not shared:
        names = [", ".join(sorted(results)) or "none" for results in found]
        raise UsageError(f"no kernel ran the case at both ends; at the good end {names[0]}, at the bad end {names[1]}")
    kernel = kernel or shared[0]
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


def _alone(space: Space, point: Point, measure: Measure, kernel: str) -> Results:
    """Measure one commit or version in a run of its own, and return its results."""
    with space.place(point.name) as place:
        try:
            run = measure(point.short, place.settings | ({"kernels": (kernel,)} if kernel else {}))
            if run.broken:
                raise LastbitError(run.broken)
            return {result.kernel: result for result in run.results if result.counted}
        except LastbitError as error:
            lines = [line for line in str(error).replace(f"{place.root}/", "").splitlines() if line.strip()] or [""]
            of_traceback = any(line.lstrip().startswith("File ") for line in lines)  # whose last line says most
            raise LastbitError(lines[-1] if of_traceback else lines[0]) from error


def _usable(results: Results, kernel: str, stage: str = "") -> CaseResult:
    if kernel not in results:
        raise LastbitError(
            f"no kernel {kernel!r} is declared for this device; those that ran: {', '.join(results) or 'none'}"
        )
    if reason := objection(results[kernel], stage):
        raise LastbitError(reason)
    return results[kernel]
