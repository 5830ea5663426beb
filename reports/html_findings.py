"""One finding of the HTML report: certain facts and places come first, its numbers and other cases behind them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lastbit.reports import wording
from lastbit.reports.explanation import (
    MOST_STEPS,
    excerpt,
    explanation_fields,
    explanation_of,
    follows,
    shown_steps,
    stage_of,
    value_of,
)
from lastbit.reports.html_tables import Cell, Row, Table, stage_anchor
from lastbit.reports.summary import KernelFailure, elements, plural, repro_line, shown_path
from lastbit.reports.why import Explanation, Step
from lastbit.result import OF_VALUES, Verdict
from lastbit.run import Run

# They are folded away; more make the page large, and the records have them.
MOST_CASES = 20
"""Commands of one finding, besides that of its smallest case."""

# Arbitrary: the others unfold.
MOST_SENTENCES = 2
"""Sentences of a finding that no line explains, before the others are behind it."""

Field = tuple[str, str]
Words = list[tuple[str, bool]]

_STEPS = {
    "line": "in the file of the kernel; sorting by it restores the order in which values were computed",
    "stage": "the stage of the reference that it agrees with",
    "value": "of the worst element, or of the first of those that led to it",
}


def finding(problem: KernelFailure, run: Run, anchors: Collection[str]) -> dict[str, Any]:
    """Return what the template shows of a problem; rows of stages that a link may lead to are called `anchors`."""
    result, options = problem.smallest, run.environment.get("options", "")
    explanation = explanation_of(run, problem)
    culprit = explanation.culprit if explanation else None
    failing = result.failing_stage
    said = _by_label([*wording.problem_fields(problem), *explanation_fields(explanation, options)])
    gist = _gist(problem, said)
    _, *computed = said.pop("line") if culprit else [""]
    first = _fields((label, said.pop(label)) for label in ("rounding", "value", "diagnosis", "line") if label in said)
    sentences = said.pop("finding", [])  # without one that is the gist
    if not first or {fault.kind for fault in result.faults if fault.sentence in sentences} - OF_VALUES:
        first += _fields([("finding", sentences[:MOST_SENTENCES])])
        sentences = sentences[MOST_SENTENCES:]
    said = {"finding": sentences, **said}
    smallest = said.pop("smallest", [])
    case = replace(result, case=smallest[0], device=explanation.device) if explanation and smallest else result
    command = repro_line(case, options)
    others = sorted((r for r in problem.bad if r.counted and r is not result), key=lambda r: elements(r.case))
    commands = [line for line in (repro_line(r, options) for r in (result, *others)) if line not in ("", command)]
    explain = "".join(said.pop("see more", []))
    return {
        "verdict": result.verdict,
        "kernel": result.kernel,
        "op": result.op,
        "stage": failing.name if failing else "",
        "devices": " ".join(dict.fromkeys(r.device for r in problem.bad)),
        "dtypes": " ".join(dict.fromkeys(d for r in problem.bad for d in r.dtypes.split("/"))),
        "gist": gist,
        "where": shown_path(f"{culprit.file}:{culprit.line}") if culprit else "",
        "defined": shown_path(result.source),
        "source": excerpt(culprit) if culprit else [],
        "computed": computed,
        "fields": first,
        "command": command,
        "more": _fields([*said.items(), ("groups", [", ".join(problem.groups)])]),
        "link": _link(explanation, problem, anchors),
        "steps": _steps(explanation) if explanation else None,
        "explain": explain,
        "others": commands[:MOST_CASES],
        "rest": max(0, len(commands) - MOST_CASES),
    }


def _by_label(fields: Iterable[Field]) -> dict[str, list[str]]:
    """Group the texts by label; a text without a label belongs to the label before it."""
    said: dict[str, list[str]] = {}
    label = ""
    for name, text in fields:
        label = name or label
        said.setdefault(label, []).append(text)
    return said


def _fields(said: Iterable[tuple[str, Sequence[str]]]) -> list[Field]:
    return [(label if n == 0 else "", text) for label, texts in said for n, text in enumerate(texts) if text]


def _gist(problem: KernelFailure, said: dict[str, list[str]]) -> Words:
    """Summarize the problem on one line, as words and whether to stress them: contracts, an error or a sentence."""
    result = problem.smallest
    if kept := problem.kept:
        claimed = set(problem.claimed.split("+"))
        common = set[str].intersection(*(set(name.split("+")) for name in kept))
        words: Words = []
        for name in kept:
            words += [(" or " if words else "keeps ", False), *_options(name, claimed)]
        return [*words, (", claims ", False), *_options(problem.claimed, common)]
    if result.verdict is Verdict.ERRORED:
        return [(" ".join(said.pop("error", [])), False)]
    return [(said["finding"].pop(0) if said.get("finding") else "", False)]


def _options(contract: str, known: Collection[str]) -> Words:
    """Split a contract into its options, and stress those that are not `known`."""
    words: Words = []
    for option in contract.split("+"):
        words += [("+", False)] * bool(words) + [(option, option not in known)]
    return words


def _link(explanation: Explanation | None, problem: KernelFailure, anchors: Collection[str]) -> Field | None:
    """Link to the row of the wrong stage: the culprit's, or else the one that failed; return stage and row."""
    if explanation is None:
        return None
    culprit, failing = explanation.culprit, problem.smallest.failing_stage
    found = [(culprit.match.stage, culprit.match.format)] if culprit is not None and culprit.match is not None else []
    found += [(failing.name, failing.dtype)] if failing is not None else []
    links = [(stage, stage_anchor(explanation.kernel, explanation.device, stage, dtype)) for stage, dtype in found]
    return next((link for link in links if link[1] in anchors), None)


def _steps(explanation: Explanation) -> Table:
    steps, every = shown_steps(explanation), sum(step.line > 0 for step in explanation.trace.steps)
    rest = f", the last {MOST_STEPS} of {plural(every, 'step')}" if every > len(steps) else ""
    rows = [_step(position, step, explanation) for position, step in enumerate(steps)]
    return Table(f"The way of the worst element{rest}", rows, _STEPS)


def _step(position: int, step: Step, explanation: Explanation) -> Row:
    wrong = step.match is not None and bool(step.match.outside) and not follows(step, explanation)
    cells = {
        "line": Cell(str(step.line), position),
        "expression": Cell(step.text, kind="name"),
        "value": Cell(value_of(step)),
        "stage": Cell(stage_of(step, explanation), kind="verdict failed" if wrong else ""),
    }
    return Row(cells)
