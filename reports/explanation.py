"""Why a kernel fails on a case: on a console, and in a few lines for a report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from harness.outcomes.explanation import Explanation, Worked
from harness.outcomes.trace import Element, Source, Step
from reports.records import encoded
from reports.summary import listed, quoted, shown_path

MOST_DIAGNOSES = 2
"""Sentences of diagnosis in the lines for a report."""
MOST_OTHERS = 2
"""Candidates that are named beside the likeliest."""

Field = tuple[str, str]


def explanation_lines(explanation: Explanation, options: str = "") -> list[Field]:
    """Label and text of what a report says about a failure: the line, what decides, and how to see more.

    At most eight; the label of a line that belongs to the one before it is empty. `options` say where kernels and ops
    are, as in a repro line.
    """
    said = [*_place(explanation), *_decision(explanation)]
    said += _labelled("diagnosis", explanation.diagnoses[:MOST_DIAGNOSES])
    said += _labelled("smallest", [explanation.smallest] * bool(explanation.smallest))
    return [*said, ("see more", explain_line(explanation, options))] if said else []


def explain_line(explanation: Explanation, options: str = "") -> str:
    """The command that prints the explanation."""
    words = ["lastbit explain", quoted(explanation.case), "--kernel", quoted(explanation.kernel)]
    device = "" if explanation.device == "cpu" else f"--device {explanation.device}"
    return " ".join(filter(None, [*words, device, options]))


def _labelled(label: str, texts: Sequence[str]) -> Iterator[Field]:
    return zip([label, *[""] * len(texts)], texts, strict=False)


def _place(explanation: Explanation) -> Iterator[Field]:
    """The line of the likeliest culprit, what it computed there, and other candidates."""
    first, others = explanation.culprit, explanation.trace.culprits[1 : 1 + MOST_OTHERS]
    if first is None:
        return
    yield "line", f"{shown_path(f'{first.file}:{first.line}')}  {first.code or first.text}"
    yield "", computed(first)
    if others:
        yield "", f"or {listed([f'line {step.line}, {step.text}' for step in others], MOST_OTHERS)}"


def computed(step: Step) -> str:
    """`x * rstd = -2.03795147 in fp32, from -2.03125, 1.00329924`."""
    value = number_of(step.first[0]) if step.direct and step.first else f"{step.count:,} elements"
    operands = ", ".join(filter(None, map(_operand, step.sources)))
    return f"{step.text} = {value} in {step.dtype}{f', from {operands}' if operands else ''}"


def _operand(source: Source) -> str:
    value = number_of(source.first[0]) if source.first else "unknown"
    if source.count > 1:
        return f"{source.count:,} elements"
    return f"{source.name} = {value}" if source.name else value


def _decision(explanation: Explanation) -> Iterator[Field]:
    if (deciding := explanation.deciding) is not None:
        yield "rounding", decision(deciding)


def decision(worked: Worked) -> str:
    """Between which numbers the exact value lies, what the contract does with it, and what the kernel does."""
    where = f"line {worked.line}" if worked.line else "the kernel"
    if not worked.rounds:
        held = f"The contract holds {worked.stage} in {worked.format} and allows {allowed(worked)}"
        return f"{held}, exact is {number(worked.exact)}; {where} {worked.did}."
    if worked.below == worked.above:
        lies = f"{number(worked.exact)} is a number of {worked.format}, which the contract keeps"
    else:
        ends = f"{number(worked.below)} and {number(worked.above)}"
        lies = (
            f"{number(worked.exact)} lies between {ends} (neighbours in {worked.format}); the contract rounds "
            f"{worked.stage} here, to {allowed(worked, ' or ')}"
        )
    return f"{lies}; {where} {worked.did}."


def allowed(worked: Worked, between: str = " to ") -> str:
    """The one number that is allowed, or both ends."""
    return number(worked.lo) if worked.lo == worked.hi else f"{number(worked.lo)}{between}{number(worked.hi)}"


def number(value: float) -> str:
    """As many digits as tell a number of fp32 from its neighbours."""
    return f"{value:.9g}"


def number_of(element: Element) -> str:
    return element.decimal


def as_json(found: Sequence[Explanation]) -> str:
    """A list of one object per kernel; a number that JSON cannot spell is a string."""
    return json.dumps(encoded(tuple(found)), indent=1, allow_nan=False)
