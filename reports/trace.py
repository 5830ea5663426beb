"""Report of `lastbit explain --trace`, on a console and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from lastbit.reports.paper import line, paragraph, print_table, verdict_word
from lastbit.reports.summary import shown_path
from lastbit.reports.why import Element, KernelTrace, Source, StageMatch, Step
from lastbit.result import Worst, told

# Beside place and value it leaves a step one line of 100 characters.
MOST_TEXT = 40
"""Characters of an expression that are shown."""
INPUT = "input"

Row = tuple[Text, ...]
_HEADERS = ("line", "expression", "dtype", "value", "bits", "stage", "from")
_SPARE = ("from", "dtype")
"""Columns that a narrow console does without, the first one first."""


def print_trace(found: KernelTrace, console: Console) -> None:
    """Print the element, the steps that led to it as a table, and the line where it leaves the contract."""
    head = f" on {found.device}  contract {told(found.contract, found.idle)} of {found.op}  "
    line(console, Text.assemble((found.kernel, "bold"), head, verdict_word(found.verdict)))
    line(console, f"  {found.case}", "dim")
    if found.worst is not None:
        paragraph(console, Text(about(found.stage, found.worst)), label="  ")
    if found.reason:
        paragraph(console, Text(f"Nothing is traced: {found.reason}", "bold magenta"), label="  ")
        return
    _print_steps(found.all or found.steps, found.leaves, console)
    for sentence, style in _sentences(found):
        paragraph(console, Text(sentence, style), label="  → ")
    line(console)


def _print_steps(steps: Sequence[Step], leaves: Step | None, console: Console) -> None:
    rows: list[Row | Text] = []
    for who, group in groupby(steps, key=_who):
        rows.append(Text(f"  {who}", "bold cyan"))
        for where, part in groupby(group, key=_where):
            rows += [Text(f"  {where}", "cyan")] * bool(where)
            rows += (_row(step, leaves is not None and _at(step) == _at(leaves)) for step in part)
    if gone := print_table(console, _HEADERS, rows, spare=_SPARE, wrap_first=True):
        paragraph(console, Text(f"columns that this width has no room for: {', '.join(gone)}", "dim"), label="  ")


def _who(step: Step) -> str:
    """Name the performer of a step: a Triton program, PyTorch, or the tensors of the case."""
    if step.operation == INPUT:
        return "Tensors of the case"
    return f"Program {step.program} of {step.launch}" if step.launch else "PyTorch"


def _where(step: Step) -> str:
    """Name the function and file of a step."""
    if not step.file:
        return ""
    called = f", called in line {step.called[0].rsplit(':', 2)[1]}" if step.called else ""
    return f"{step.function} in {shown_path(step.file)}{called}"


def _at(step: Step) -> tuple[object, ...]:
    """Return a key of a step's operation and place."""
    return step.file, step.line, step.column, step.text, step.operation, step.called, step.program


def _row(step: Step, leaves: bool) -> Row:
    if step.again:
        lines = f"lines {step.line} to {step.end_line}" if step.line != step.end_line else f"line {step.line}"
        more = Text(f"… {step.again:,} more rounds of {lines}", "dim")
        return (Text("…", "dim"), more, *(Text() for _ in _HEADERS[2:]))
    alone = step.first[0] if step.direct and step.first and step.count else None
    return (
        Text(str(step.line) if step.line else ""),
        Text(_shortened(_expression(step))),
        Text(step.dtype),
        Text(alone.decimal, "bold") if alone else Text(_several(step.count, step.first)),
        Text(alone.bits if alone else "", "bold"),
        _stage(step.match, leaves),
        Text(_from(step), "dim"),
    )


def _from(step: Step) -> str:
    """List the operands of one element; for several elements, name the operation and its shape."""
    if step.direct and step.sources:
        return ", ".join(map(_source, step.sources))
    return f"{step.operation} {list(step.shape)}" if step.line else ""


def _expression(step: Step) -> str:
    return f"{step.operation} in {step.text}" if step.part else step.text or step.operation


def _shortened(text: str) -> str:
    """Shorten a text in the middle: its beginning and end say what is loaded and what becomes of it."""
    if len(text) <= MOST_TEXT:
        return text
    end = MOST_TEXT // 3
    return f"{text[: MOST_TEXT - end - 1]}…{text[-end:]}"


def _several(count: int, first: Sequence[Element]) -> str:
    shown = ", ".join(_short(element) for element in first[:2])
    return f"{count:,}: {shown}, …" if count > len(first[:2]) else shown


def _short(element: Element) -> str:
    return f"{float(element.decimal):.6g}" if element.bits else element.decimal


def _source(source: Source) -> str:
    if source.count > 1:
        return _several(source.count, source.first)
    if source.name.endswith("]"):
        return source.name
    known = _short(source.first[0]) if source.first else "unknown"
    return f"{source.name} = {known}" if source.name else known


def _stage(match: StageMatch | None, leaves: bool) -> Text:
    name = "" if match is None else match.stage
    return Text(f"✗ {name}".rstrip(), "bold red") if leaves else Text(name, "green")


def about(stage: str, worst: Worst) -> str:
    """Describe the element to explain and the values that the contract allows for it."""
    index = ", ".join(map(str, worst.index))
    may = allowed(worst.lo, worst.hi)
    relation = f"as the contract allows ({may})" if worst.is_allowed else f"but the contract allows {may}"
    exact = "" if math.isnan(worst.exact) else f"; exact {number(worst.exact)}"
    return f"{stage}[{index}] is {number(worst.actual)}, {relation}{exact}"


def allowed(lo: float, hi: float) -> str:
    """Describe the allowed values: the only one, or both ends."""
    return f"{number(lo)} only" if lo == hi or math.isnan(lo) else f"{number(lo)} to {number(hi)}"


def number(value: float) -> str:
    """Format a number with nine digits, enough to tell fp32 numbers apart."""
    return f"{value:.9g}"


def _sentences(found: KernelTrace) -> Iterator[tuple[str, str]]:
    step = found.leaves
    if step is not None and step.match is not None and step.match.leaves:
        yield _leaving(step, step.match), "bold red"
    elif step is not None and found.wrong:
        said = f"The value leaves the contract in line {step.line}, {_expression(step)}"
        yield f"{said}: with it, stage {found.wrong} does not follow from what the kernel had before.", "bold red"
    elif found.steps and found.worst is not None and found.exit_code == 1 and not found.worst.is_allowed:
        first = f" No step agrees with stage {found.unmatched[0]}." if found.unmatched else ""
        yield f"No step was found with which the value leaves what the contract allows.{first}", "bold red"
    yield from ((note, "") for note in found.notes)


def _leaving(step: Step, match: StageMatch) -> str:
    """Say at which line the value leaves the contract, and how far."""
    own = step.first[0] if step.direct and step.first else Element("unknown")
    exact = "" if math.isnan(match.exact) else f", exact is {number(match.exact)}"
    return (
        f"The value leaves the contract in line {step.line}, {_expression(step)}: as stage {match.stage}, "
        f"{match.outside:,} of {match.of:,} elements are not possible. Here it is {own.decimal} in {step.dtype}; the "
        f"contract allows {allowed(match.lo, match.hi)}{exact}."
    )
