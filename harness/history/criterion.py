"""The question that `lastbit bisect` is asked, and the criterion by which a commit or version counts as bad."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lastbit.errors import UsageError, unknown
from lastbit.reports.bisection import METRICS, Criterion, stage_of
from lastbit.result import CaseResult, Verdict

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
    return Criterion(metric, plain.stage, _middle(metric, low, high), falling=high < low, choice=plain.choice)


def _middle(metric: str, low: float, high: float) -> float:
    """Return the size at which a figure is equally near to both ends: as a ratio, or from 0 as a difference.

    A single element outside is a violation, so that `outside` has no middle between 0 and more.
    """
    if low and high:
        return math.sqrt(low) * math.sqrt(high)
    return 0.0 if metric == "outside" else max(low, high) / 2


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
    most = max(results, key=lambda name: _change(Criterion(metric, name), good, bad))
    return most, "" if len(results) == 1 else f"of the results {', '.join(results)} it changed most"


def _change(criterion: Criterion, good: CaseResult, bad: CaseResult) -> float:
    """Return how much the figure changed between the ends, either way, as the logarithm of a ratio."""
    low, high = sorted((criterion.figure(good), criterion.figure(bad)))
    return 0.0 if low == high else math.log(high / low) if low > 0 and high < math.inf else math.inf


def _size(criterion: Criterion, good: CaseResult, bad: CaseResult) -> str:
    return f"{criterion.figure(good):.3g} at the good end and {criterion.figure(bad):.3g} at the bad end"


def objection(result: CaseResult, stage: str) -> str:
    """Return why a result has no figure of the stage; empty if it has. An empty `stage` asks for any."""
    if result.verdict in (Verdict.ERRORED, Verdict.UNSUPPORTED, Verdict.SKIPPED):
        return f"{result.verdict}: {result.reason}"
    if stage and stage_of(result, stage) is None:
        return f"stage {stage} is not seen; seen are {', '.join(s.name for s in result.stages) or 'none'}"
    return ""
