"""Reports of `lastbit judge` on a file: a line of JSON for a program, or a few lines for a reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from lastbit.files import BUILT_IN
from lastbit.outcomes.bench import Sample
from lastbit.outcomes.file_verdict import CallTime, FileVerdict
from lastbit.reports.bench import amount, short
from lastbit.reports.encoding import encoded
from lastbit.reports.paper import paragraph, to_copy, verdict_word
from lastbit.reports.summary import shown_path, tally
from lastbit.result import Verdict, told

_WIDTH = 10  # of labels


def schema() -> dict[str, Any]:
    """Load the JSON Schema of the document."""
    loaded: dict[str, Any] = json.loads((BUILT_IN / "reports" / "schemas" / "judge-1.json").read_text())
    return loaded


def document(found: FileVerdict) -> dict[str, Any]:
    """Encode the verdict on a file in types that JSON has, as the schema says."""
    made: dict[str, Any] = encoded(found)
    return made


def as_json_line(found: FileVerdict) -> str:
    """Write the document on one line."""
    return json.dumps(document(found), allow_nan=False)


def print_judged(found: FileVerdict, console: Console) -> None:
    """Print the verdict, the first finding, the line that is to blame, and what to do next."""
    kernel = f":{found.kernel}" if found.kernel else ""
    judged = found.verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE, Verdict.FAILED)  # else no contract was looked at
    contract = f"contract {told(found.contract, found.idle)} of " if judged else ""
    about = f"  {contract}{found.op} on {found.device}  {found.seconds:.2f} s"
    verdict = verdict_word(found.verdict)
    paragraph(
        console,
        Text.assemble(f"{shown_path(found.file)}{kernel}", (about, "dim")),
        label=f"{verdict.plain}  ",
        label_style=str(verdict.style),
    )
    for label, text in _fields(found):
        head = f"  {label:<{_WIDTH}}"
        if label == "next":
            to_copy(console, text, label=head, label_style="dim")
        else:
            paragraph(console, Text(text), label=head, label_style="dim")


def _fields(found: FileVerdict) -> Iterator[tuple[str, str]]:
    """List label and text of each line below the verdict."""
    if sum(found.cases.values()):
        counted = tally(Verdict(verdict) for verdict, count in found.cases.items() for _ in range(count))
        left = found.planned - sum(found.cases.values())
        yield "cases", counted + (f", {left:,} not run" if left else "")
    if ":" in found.seed:
        yield "again", f"with the same cases: --seed {found.seed}"
    if found.reason:
        yield "reason", found.reason
    for finding in found.findings[:1]:
        if finding.sentence != found.reason:
            yield "finding", finding.sentence
    if (culprit := found.culprit) is not None:
        yield "line", f"{shown_path(f'{culprit.file}:{culprit.line}')}  {culprit.expression}"
        yield "", culprit.sentence
    if found.verdict is Verdict.FAILED and found.contracts.keeps == (found.contract,):
        yield "values", f"every element fits {told(found.contract, found.idle)}; the kernel fails for what stands above"
    elif found.verdict is Verdict.FAILED and found.contracts.keeps:
        yield "keeps", " or ".join(told(name, found.idle) for name in found.contracts.keeps)
    if found.torch_ops:
        yield "torch", f"calls {' and '.join(found.torch_ops)}, which computes the op"
    if found.speed is not None:
        yield "speed", "; ".join(_speed(found.speed))
    if found.speed_reason:
        yield "not timed", found.speed_reason
    yield from (("note", note) for note in found.notes)
    if found.findings:
        yield "next", found.findings[0].repro


def _speed(time: CallTime) -> Iterator[str]:
    """Yield remarks on a call's time, for one line."""
    yield f"at most {_seconds(time.seconds)} on {short(time.case)}, of which nothing takes {_seconds(time.overhead)}"
    if time.roof is not None:
        yield f"at least {time.roof:.0%} of the roof"
    yield from (f"{name}: {_seconds(seconds)}" for name, seconds in time.beside.items())


def _seconds(value: float) -> str:
    return amount(Sample.of([value]), "s")
