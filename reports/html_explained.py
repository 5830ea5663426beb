"""Why a kernel fails, in the HTML report: the line that is wrong among its neighbours, and the values on the way."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lastbit.outcomes.explanation import Explanation
from lastbit.outcomes.trace import Step
from lastbit.reports.explained import MOST_STEPS, excerpt, explanation_fields, shown_steps, stage_of, value_of
from lastbit.reports.html_tables import Cell, Row, Table, stage_anchor
from lastbit.reports.summary import Problem, shown_path

_COLUMNS = (
    ("line", "in the file of the kernel; sorting by it restores the order in which values were computed"),
    ("expression", ""),
    ("value", "of the worst element, or of the first of those that led to it"),
    ("stage", "the stage of the reference that it agrees with"),
)


def explained(
    explanation: Explanation | None, problem: Problem, options: str, anchors: Collection[str]
) -> dict[str, Any] | None:
    """What the template shows of an explanation; None without one."""
    if explanation is None:
        return None
    fields = explanation_fields(explanation, options)
    culprit = explanation.culprit
    return {
        "fields": [(label, text) for label, text in fields if label != "see more"],
        "more": next((text for label, text in fields if label == "see more"), ""),
        "where": shown_path(f"{culprit.file}:{culprit.line}") if culprit is not None else "",
        "source": excerpt(culprit) if culprit is not None else [],
        "steps": _table(explanation),
        "stage": next((found for found in _stages(explanation, problem) if found[1] in anchors), None),
    }


def _stages(explanation: Explanation, problem: Problem) -> list[tuple[str, str]]:
    """Stages whose row may show what is wrong, and the names of their rows: the culprit's, then the one that failed."""
    culprit, failing = explanation.culprit, problem.smallest.failing_stage
    found = [(culprit.match.stage, culprit.match.format)] if culprit is not None and culprit.match is not None else []
    found += [(failing.name, failing.dtype)] if failing is not None else []
    return [(stage, stage_anchor(explanation.kernel, explanation.device, stage, dtype)) for stage, dtype in found]


def _table(explanation: Explanation) -> Table:
    steps, every = shown_steps(explanation), sum(step.line > 0 for step in explanation.trace.steps)
    rest = f", the last {MOST_STEPS} of {every:,}" if every > len(steps) else ""
    rows = (_row(position, step) for position, step in enumerate(steps))
    return Table(f"The way of the worst element{rest}", _COLUMNS, tuple(rows))


def _row(position: int, step: Step) -> Row:
    wrong = step.match is not None and bool(step.match.outside)
    cells = (
        Cell(str(step.line), position),
        Cell(step.text, kind="name"),
        Cell(value_of(step)),
        Cell(stage_of(step), kind="verdict failed" if wrong else ""),
    )
    return Row(cells)
