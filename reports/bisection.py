"""A search for the first bad commit or version on a terminal: a line for each step, then what was found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from lastbit.outcomes.bisection import METRICS, Bisection, BisectStep, Criterion, Mark, Point, stage_of
from lastbit.reports.paper import line, paragraph, verdict_word
from lastbit.reports.summary import error, plural, repro_line, share, signed
from lastbit.result import CaseResult, StageResult

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
    if step.result:
        text.append("  ").append_text(_outcome(step.result, criterion))
    for words in filter(None, (step.point.title, step.reason)):
        text.append(f"  {words}")
    text.append(f"  ({step.left} left)", "dim")
    line(console, text)


def _outcome(result: CaseResult, criterion: Criterion) -> Text:
    """Write the verdict and the figure by which a step was marked."""
    metric = criterion.metric or "outside"
    name, _ = FIGURES[metric]
    stage = stage_of(result, criterion.stage)
    verdict = verdict_word(result.verdict)
    verdict.append(f"  {name} {_written(metric, stage):<8}", "")
    return verdict


def _written(metric: str, stage: StageResult | None) -> str:
    """Format the figure by which a step is marked; `–` where the stage is not seen."""
    if stage is None:
        return "–"
    return "inf" if math.isinf(METRICS[metric](stage.cumulative)) else FIGURES[metric][1](stage)


def print_bisection(bisection: Bisection, console: Console, options: str = "") -> None:
    """Print the outcome of the search; `options` of the command line say where ops are."""
    line(console)
    _print_culprit(bisection, console)
    _print_figures(bisection, console)
    _print_change(bisection.change, console)
    _print_recipe(bisection, console, options)
    _print_log(bisection.log, console)


def _print_culprit(bisection: Bisection, console: Console) -> None:
    culprit = bisection.culprit
    if culprit:
        line(console, Text.assemble(f"First bad {bisection.what}  ", (_named(culprit), "bold")))
    else:
        text = f"The first bad {bisection.what} is one of these {len(bisection.candidates)}; it cannot be told which, "
        paragraph(console, Text(f"{text}because those between the good and the last one could not be measured:"))
        for point in bisection.candidates:
            line(console, f"  {_named(point)}")
    skipped = len(bisection.skipped)
    why = f"; {plural(skipped, bisection.what)} skipped, which could not be measured" if skipped else ""
    line(console, f"{plural(bisection.verifications, 'verification')}{why}")
    paragraph(console, Text(f"Bad means: {_meaning(bisection.criterion, bisection)}."))
    line(console)


def _named(point: Point) -> str:
    return "  ".join(filter(None, (point.short, point.date, point.title)))


def _meaning(criterion: Criterion, bisection: Bisection) -> str:
    if not criterion.metric:
        return "the verdict is FAILED"
    good, bad = (step.point.short for step in bisection.steps[:2])
    name = FIGURES[criterion.metric][0]
    figure = f"{'the size of the ' * (criterion.metric == 'bias')}{name} of stage {criterion.stage}"
    chosen = f" ({criterion.choice})" if criterion.choice else ""
    why = f"{criterion.drift:g} times that of {good}" if criterion.drift else f"nearer to {bad} than to {good}"
    return f"{figure}{chosen} is {_bound(criterion)}, {why}"


def _bound(criterion: Criterion) -> str:
    if criterion.threshold == 0:
        return "0" if criterion.falling else "above 0"
    if math.isinf(criterion.threshold):
        return "finite" if criterion.falling else "inf"
    size = f"{criterion.threshold:.2g}" if criterion.metric != "mismatch" else f"{100 * criterion.threshold:.2g} %"
    return f"{'below' if criterion.falling else 'at least'} {size}"


def _print_figures(bisection: Bisection, console: Console) -> None:
    """Print a table of the stage before and after, a row each."""
    head = ("", "", *(name for name, _ in FIGURES.values()), "verdict")
    steps = {"before": bisection.before, "after": bisection.after}
    rows = [head, *(_row(word, step, bisection.criterion.stage) for word, step in steps.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line(console, f"stage {bisection.criterion.stage}", "bold")
    for row in rows:
        line(console, f"  {_aligned(row, widths)}")
    line(console)


def _row(word: str, step: BisectStep, name: str) -> tuple[str, ...]:
    stage = stage_of(step.result, name) if step.result else None
    figures = (_written(metric, stage) for metric in FIGURES)
    return (word, step.point.short, *figures, step.result.verdict if step.result else "–")


def _aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(row, widths, strict=True)
    return "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(cells)).rstrip()


def _print_change(change: str, console: Console) -> None:
    lines = change.splitlines()
    for text in lines[:MOST_LINES]:
        line(console, text, next((style for start, style in COLOURS.items() if text.startswith(start)), ""))
    if rest := lines[MOST_LINES:]:
        line(console, f"… and {plural(len(rest), 'more line')}", "dim")
    if lines:
        line(console)


def _print_recipe(bisection: Bisection, console: Console, options: str) -> None:
    """Print the commands that run the case again as it was after the change."""
    recipe, result = bisection.recipe, bisection.after.result
    if recipe and result:
        every = " ".join(filter(None, (recipe.options, options)))
        line(console, "Look further", "bold")
        line(console, f"  {recipe.setup}")
        line(console, f"  {recipe.prefix}{repro_line(result, every)}")
        line(console)


def _print_log(log: str, console: Console) -> None:
    if log:
        line(console, "Log, for `git bisect replay`", "bold")
        for text in log.splitlines():
            line(console, f"  {text}", "dim" if text.startswith("#") else "")
