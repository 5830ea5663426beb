"""Result of `lastbit bisect`: the commits or versions that were measured, and the first bad one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from lastbit.reports.paper import line, paragraph, print_table, verdict_word
from lastbit.reports.summary import error, plural, repro_line, share, signed
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


# Two pages of a terminal: a longer difference is better read with git.
MOST_LINES = 80
"""Lines of a difference that are shown."""

MARKS = {Mark.GOOD: ("good", "green"), Mark.BAD: ("bad", "bold red"), Mark.SKIPPED: ("skipped", "yellow")}

FIGURES: dict[str, tuple[str, Callable[[StageResult], str]]] = {
    "rel_l2": ("rel. error", lambda stage: error(stage.cumulative.rel_l2)),
    "mismatch": ("mismatch", lambda stage: share(stage.cumulative.mismatched, stage.cumulative.numel)),
    "bias": ("bias", lambda stage: signed(stage.cumulative.bias)),
    "outside": ("outside", lambda stage: f"{stage.cumulative.outside:,}"),
}
"""Metric → its name for a reader, and how its value is written."""

assert FIGURES.keys() == METRICS.keys()

COLOURS = {"+++": "bold", "---": "bold", "dif": "bold", "+": "green", "-": "red", "@": "cyan"}


def print_extent(what: str, left: int, good: str, bad: str, console: Console) -> None:
    """Print one line before the search: how much lies between the ends, and how long it may take."""
    runs = 2 + math.ceil(math.log2(left))
    line(console, f"{plural(left, what)} after {good}, up to {bad}: about {plural(runs, 'verification')}")


def print_step(criterion: Criterion, step: BisectStep, console: Console) -> None:
    """Print one line: the number of the run, the commit or version, its outcome, and how many are left."""
    word, style = MARKS[step.mark]
    text = Text.assemble(f"{step.run or '–':>3}  {step.point.short:<7}  ", (f"{word:<7}", style))
    if step.result:  # with the figure by which it was marked
        metric = criterion.metric or "outside"
        figure = _written(metric, stage_of(step.result, criterion.stage))
        verdict = verdict_word(step.result.verdict).append(f"  {FIGURES[metric][0]} {figure:<8}", "")
        text.append("  ").append_text(verdict)
    for words in filter(None, (step.point.title, step.reason)):
        text.append(f"  {words}")
    text.append(f"  ({step.left} left)", "dim")
    line(console, text)


def _written(metric: str, stage: StageResult | None) -> str:
    """Format the figure by which a step is marked; `–` where the stage is not seen."""
    if stage is None:
        return "–"
    return "inf" if math.isinf(METRICS[metric](stage.cumulative)) else FIGURES[metric][1](stage)


def print_bisection(bisection: Bisection, console: Console, options: str = "") -> None:
    """Print the outcome of the search; `options` of the command line say where ops are."""
    what, criterion, candidates = bisection.what, bisection.criterion, bisection.candidates
    line(console)
    if len(candidates) == 1:
        line(console, Text.assemble(f"First bad {what}  ", (_named(candidates[0]), "bold")))
    else:
        text = f"The first bad {what} is one of these {len(candidates)}; it cannot be told which, "
        paragraph(console, Text(f"{text}because those between the good and the last one could not be measured:"))
        for point in candidates:
            line(console, f"  {_named(point)}")
    skipped = len(bisection.skipped)
    why = f"; {plural(skipped, what)} skipped, which could not be measured" if skipped else ""
    line(console, f"{plural(bisection.verifications, 'verification')}{why}")
    paragraph(console, Text(f"Bad means: {_meaning(criterion, bisection)}."))
    line(console)
    line(console, f"stage {criterion.stage}", "bold")
    rows = []
    for word, step in {"before": bisection.before, "after": bisection.after}.items():
        stage = stage_of(step.result, criterion.stage) if step.result else None
        figures = (_written(metric, stage) for metric in FIGURES)
        rows.append([*map(Text, (word, step.point.short, *figures, step.result.verdict if step.result else "–"))])
    print_table(console, ("", "", *(name for name, _ in FIGURES.values()), "verdict"), rows)
    line(console)
    lines = bisection.change.splitlines()
    for text in lines[:MOST_LINES]:
        line(console, text, next((style for start, style in COLOURS.items() if text.startswith(start)), ""))
    if rest := lines[MOST_LINES:]:
        line(console, f"… and {plural(len(rest), 'more line')}", "dim")
    if lines:
        line(console)
    recipe, result = bisection.recipe, bisection.after.result
    if recipe and result:  # commands that run the case again as it was after the change
        line(console, "Look further", "bold")
        line(console, f"  {recipe.setup}")
        line(console, f"  {recipe.prefix}{repro_line(result, ' '.join(filter(None, (recipe.options, options))))}")
        line(console)
    if bisection.log:
        line(console, "Log, for `git bisect replay`", "bold")
        for text in bisection.log.splitlines():
            line(console, f"  {text}", "dim" if text.startswith("#") else "")


def _named(point: Point) -> str:
    return "  ".join(filter(None, (point.short, point.date, point.title)))


def _meaning(criterion: Criterion, bisection: Bisection) -> str:
    if not criterion.metric:
        return "the verdict is FAILED"
    good, bad = (step.point.short for step in bisection.steps[:2])
    name, threshold, falling = FIGURES[criterion.metric][0], criterion.threshold, criterion.falling
    figure = f"{'the size of the ' * (criterion.metric == 'bias')}{name} of stage {criterion.stage}"
    chosen = f" ({criterion.choice})" if criterion.choice else ""
    why = f"{criterion.drift:g} times that of {good}" if criterion.drift else f"nearer to {bad} than to {good}"
    size = f"{threshold:.2g}" if criterion.metric != "mismatch" else f"{100 * threshold:.2g} %"
    bound = f"{'below' if falling else 'at least'} {size}"
    if threshold == 0:
        bound = "0" if falling else "above 0"
    elif math.isinf(threshold):
        bound = "finite" if falling else "inf"
    return f"{figure}{chosen} is {bound}, {why}"
