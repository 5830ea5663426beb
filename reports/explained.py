"""Explanations of a run's problems: the same words and places in every form of a report."""

from __future__ import annotations

import linecache
from dataclasses import dataclass

from lastbit.reports.explanation import explain_line, explanation_lines
from lastbit.reports.summary import KernelFailure
from lastbit.reports.why import Explanation, Step
from lastbit.reports.wording import problem_fields
from lastbit.run import Run

AROUND = 3
"""Lines of source that are shown above and below the one that is wrong."""

_FIGURES = frozenset({"first wrong", "statistics", "explained by", "cases", "source"})
"""Labels of what no reader needs who has the line."""

MOST_STEPS = 30
"""Steps of the way of an element that a report shows: the last ones."""


def explanation_of(run: Run, problem: KernelFailure) -> Explanation | None:
    """Return the explanation of one of the cases of the problem, preferably on the device of the smallest."""
    cases = {(result.kernel, result.device, result.case) for result in problem.bad}
    found = [one for one in run.explanations if (one.kernel, one.device, one.case) in cases]
    return min(found, key=lambda one: one.device != problem.smallest.device, default=None)


def explanation_fields(explanation: Explanation | None, options: str) -> list[tuple[str, str]]:
    """List label and text of what is known about why a kernel fails, or about why nothing is."""
    if explanation is None:
        return []
    if said := explanation_lines(explanation, options):
        return said
    reason = explanation.reason or explanation.trace.reason or "no line was found that is to blame"
    why = [] if explanation.explained_by else [("why", f"not explained: {reason}")]
    return [*why, ("see more", explain_line(explanation, options))]


def problem_and_why(
    problem: KernelFailure, explanation: Explanation | None, options: str, *, most_sentences: int | None = None
) -> list[tuple[str, str]]:
    """List label and text of all that is said of a problem: certain facts, the line and why, figures, tensors, a
    command.

    For `most_sentences` see `problem_fields`.
    """
    said, label = list[tuple[int, str, str]](), ""
    fields = problem_fields(problem, most_sentences=most_sentences)
    for name, text in (*fields, *explanation_fields(explanation, options)):
        label = name or label
        said.append((2 if label in ("smallest", "see more") else 1 if label in _FIGURES else 0, name, text))
    return [(name, text) for _, name, text in sorted(said, key=lambda one: one[0])]


def shown_steps(explanation: Explanation) -> tuple[Step, ...]:
    """Return the last steps on the way of the element that stand in a file."""
    return tuple(step for step in explanation.trace.steps if step.line)[-MOST_STEPS:]


def value_of(step: Step) -> str:
    """Write `-2.03795147 in fp32`; of several elements the first."""
    if not step.first:
        return step.dtype
    more = f" and {step.count - 1:,} more" if step.count > 1 and not step.direct else ""
    return f"{step.first[0].decimal}{more} in {step.dtype}"


def stage_of(step: Step, explanation: Explanation) -> str:
    """Return the stage that a step agrees with, and how many elements are wrong; empty if it agrees with none."""
    match = step.match
    if match is None or not match.outside:
        return match.stage if match else ""
    said = "follow from a wrong value" if follows(step, explanation) else "not possible"
    return f"{match.stage}, {match.outside:,} of {match.of:,} elements {said}"


def follows(step: Step, explanation: Explanation) -> bool:
    """Return whether a step comes after the one that is proven wrong, and is none that is wrong by itself."""
    places = [_place(one) for one in explanation.trace.steps]
    if explanation.culprit is None or (wrong := _place(explanation.culprit)) not in places:
        return False
    later = places[places.index(wrong) + 1 :]
    return _place(step) in later


def _place(step: Step) -> tuple[str, int, int, int, int]:
    return step.file, step.line, step.column, step.end_line, step.end_column


@dataclass(frozen=True)
class SourceLine:
    """A line of a file, from 1 on; `blamed` if it is of the expression that is wrong."""

    number: int
    text: str
    blamed: bool


def excerpt(step: Step) -> list[SourceLine]:
    """Return the lines of a step with some around them; the step's own text where the file has changed."""
    linecache.checkcache(step.file)
    lines = [text.rstrip("\n") for text in linecache.getlines(step.file)]
    if step.line > len(lines) or lines[step.line - 1].strip() != step.code:
        return [SourceLine(step.line, step.code or step.text, blamed=True)]
    last = max(step.line, step.end_line)
    shown = range(max(1, step.line - AROUND), min(len(lines), last + AROUND) + 1)
    return [SourceLine(number, lines[number - 1], step.line <= number <= last) for number in shown]
