"""Results of `lastbit bisect`: the commits or versions that were measured, and the first bad one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lastbit.result import CaseResult, Comparison, StageResult, Verdict

Figure = Callable[[Comparison], float]


def _unless_special(figure: Figure) -> Figure:
    """Make a figure infinite if an element is NaN or infinite and must not be, or the reverse: sums omit these.

    Infinite, too, where elements are too far away for the figure to mean anything.
    """
    return lambda seen: math.inf if seen.special or (seen.numel and math.isnan(figure(seen))) else figure(seen)


METRICS: Mapping[str, Figure] = {
    "rel_l2": _unless_special(lambda seen: seen.rel_l2),
    "mismatch": _unless_special(lambda seen: seen.mismatched / seen.numel if seen.numel else 0.0),
    "bias": _unless_special(lambda seen: seen.bias),
    "outside": lambda seen: float(seen.outside),
}
"""Name → figure of a stage, from the inputs of the case: relative L2 error, share, ulp, elements."""


class Mark(StrEnum):
    """The verdict of a measurement on a commit or version, in the words of `git bisect`."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skip"


@dataclass(frozen=True)
class Point:
    """A commit or version.

    Attributes:
        name: the whole hash, or the version.
        short: what a reader sees instead.
        title, date: of a commit; empty for a version.
    """

    name: str
    short: str
    title: str = ""
    date: str = ""


@dataclass(frozen=True)
class Criterion:
    """The rule by which a commit or version counts as bad.

    Attributes:
        metric: one of `METRICS`; empty for the verdict FAILED.
        stage: whose figures are looked at.
        threshold: size of the figure at which bad begins.
        falling: bad is below the threshold, not above.
        drift: the factor that `threshold` is of the good end's figure, if it was asked for.
        choice: why this stage, where there were several; empty if there was nothing to choose.
    """

    metric: str
    stage: str
    threshold: float = 0.0
    falling: bool = False
    drift: float | None = None
    choice: str = ""

    def figure(self, result: CaseResult) -> float:
        """Return the size of the figure; NaN where the stage is not seen."""
        seen = stage_of(result, self.stage)
        return abs(METRICS[self.metric](seen.cumulative)) if seen else math.nan

    def is_bad(self, result: CaseResult) -> bool:
        """Check whether a result counts as bad; only defined where the stage is seen."""
        if not self.metric:
            return result.verdict is Verdict.FAILED
        figure = self.figure(result)
        if self.falling:
            return figure < self.threshold or figure == 0
        return figure >= self.threshold and figure > 0


def stage_of(result: CaseResult, name: str) -> StageResult | None:
    """Return the stage of that name, if the kernel let it be seen."""
    return next((stage for stage in result.stages if stage.name == name), None)


@dataclass(frozen=True)
class BisectStep:
    """One commit or version that was looked at.

    Attributes:
        run: number of the run that measured it, from 1 on; 0 if it was skipped or does not differ from another.
        result: the kernel on the case; None where there is none.
        reason: why it was skipped, or which other it does not differ from.
        left: commits or versions that may still be the first bad one, after this step.
    """

    point: Point
    mark: Mark
    run: int = 0
    result: CaseResult | None = None
    reason: str = ""
    left: int = 0


@dataclass(frozen=True)
class Recipe:
    """Instructions by which a reader gets at a commit or version again.

    Attributes:
        setup: a command that fetches it into a folder.
        prefix: variables in front of the command that runs the case.
        options: options of that command.
    """

    setup: str
    prefix: str = ""
    options: str = ""


@dataclass(frozen=True)
class Bisection:
    """The outcome of a search.

    Attributes:
        what: `commit` or `version`.
        candidates: what may be the first bad one: one, or several if those in between could not be measured.
        steps: in order; the good end and the bad end first.
        change: the difference that the first bad commit made, in the format of `git diff`.
        log: of `git bisect`, which can replay it.
    """

    what: str
    criterion: Criterion
    candidates: tuple[Point, ...]
    steps: tuple[BisectStep, ...]
    change: str = ""
    log: str = ""
    recipe: Recipe | None = None

    @property
    def culprit(self) -> Point | None:
        """The first bad commit or version, if it could be told."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    @property
    def verifications(self) -> int:
        """Return how many runs measured something."""
        return max(step.run for step in self.steps)

    @property
    def before(self) -> BisectStep:
        """The last step that was good."""
        return next(step for step in reversed(self.steps) if step.mark is Mark.GOOD)

    @property
    def after(self) -> BisectStep:
        """The last step that was bad, which is the culprit's own if there is one."""
        return next(step for step in reversed(self.steps) if step.mark is Mark.BAD)

    @property
    def skipped(self) -> tuple[BisectStep, ...]:
        return tuple(step for step in self.steps if step.mark is Mark.SKIPPED)
