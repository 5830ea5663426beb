"""Explanations of failures, and the traces they rest on: printed on a console, as JSON, or as lines of a report."""

from __future__ import annotations

import ast
import json
import linecache
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from lastbit.command_line import command
from lastbit.reports.encoding import encoded
from lastbit.reports.paper import line, paragraph, print_field, print_table, verdict_word
from lastbit.reports.summary import KernelFailure, shown_path
from lastbit.reports.why import Element, Explanation, KernelTrace, Source, Step, WorkedStage
from lastbit.reports.wording import allowed_by, problem_fields
from lastbit.result import Worst, told
from lastbit.run import Run

# Arbitrary: `explain` prints all.
MOST_DIAGNOSES = 2
"""Sentences of diagnosis in the lines for a report."""
# What fits into the line.
MOST_OTHERS = 2
"""Candidates that are named beside the likeliest."""

NO_TEST = "none: an assertion on the result does not see what is wrong; `lastbit verify` on the case shows it"
"""What is said where tensors are shown without a test."""

# Of more, none is a hint.
MOST_LINES = 3
"""Lines of which one may be wrong, where none is named."""
# What fits into two lines.
MOST_FILES = 3
"""Files whose lines are named where the one that is wrong was not found."""

# What fits into one line of numbers.
MOST_INPUTS = 8
"""Elements of inputs that are shown."""

Field = tuple[str, str]
_HEADERS = ("stage", "exact", "allowed", "as", "kernel", "bits", "in", "ulp", "line")
_SPARE = ("bits", "in", "as", "line", "ulp")
"""Columns that a narrow console does without, the first one first."""
_EACH_ROW = "each row goes on from the kernel's own values in the rows above; ✗: its value is not allowed"


def print_explanation(explanation: Explanation, console: Console) -> None:
    """Print the element, its arithmetic as a table, and what is wrong with it; the test to paste comes last.

    The arithmetic is the inputs, the formulas of the reference, and each stage as the contract and the kernel have it.
    """
    trace = explanation.trace
    _print_head(explanation, trace, console)
    if explanation.explained_by:  # it is sure, and leads
        names = [told(name, trace.idle) for name in explanation.explained_by]
        kept = f"{allowed_by(names, 'the case')}; it claims {told(trace.contract, trace.idle)}"
        print_field(console, "keeps", kept, style="bold")
    if explanation.arithmetic:
        if inputs := ", ".join(_inputs(explanation.inputs)):
            print_field(console, "inputs", inputs)
        if formulas := "; ".join(f"{w.stage} = {w.formula}" for w in explanation.arithmetic if w.formula):
            print_field(console, "formulas", formulas)
        paragraph(console, Text(_EACH_ROW, "dim"), label="  ")
        rows = [_row(worked, worked is explanation.deciding) for worked in explanation.arithmetic]
        print_table(console, _HEADERS, rows, spare=_SPARE, wrap_first=True)
    fields = [*_place(explanation, others=MOST_OTHERS), *_decision(explanation)]
    if explanation.worst is None or explanation.worst.is_allowed:
        fields = [*_labelled("finding", explanation.findings), *fields]
    fields += _labelled("diagnosis", explanation.diagnoses)
    fields += _labelled("smallest", filter(None, [explanation.smallest]))
    if explanation.arithmetic and trace.reason:
        fields.append(("way", f"not followed: {trace.reason}"))
    notes = [note for note in trace.notes if note not in explanation.findings]
    taken = explanation.elsewhere[:MOST_INPUTS]
    came = f"the kernel's value came from {' and '.join(taken)}" if taken else ""
    fields += _labelled("note", filter(None, [came, explanation.reason, *notes]))
    for label, text in fields:
        print_field(console, label, text, style="bold" if label == "line" else "dim", to_copy=label == "smallest")
    if explanation.test:
        line(console, "  test", "dim")
        line(console, "\n".join(f"    {text}".rstrip() for text in explanation.test.splitlines()))
    elif explanation.smallest:
        print_field(console, "test", NO_TEST)
    line(console)


def _print_head(found: Explanation | KernelTrace, trace: KernelTrace, console: Console) -> None:
    """Print the kernel with its contract, verdict and case, and the element that is to be explained."""
    head = f" on {found.device}  contract {told(trace.contract, trace.idle)} of {trace.op}  "
    line(console, Text.assemble((found.kernel, "bold"), head, verdict_word(found.verdict)))
    line(console, f"  {found.case}", "dim")
    if found.worst is not None:
        paragraph(console, Text(about(found.stage, found.worst)), label="  ")


def explanation_lines(explanation: Explanation, options: str = "") -> list[Field]:
    """Return labels and texts of a report about a failure: the wrong line, the decisive value, how to see more.

    At most eight; the label of a line that belongs to the one before it is empty. `options` say where kernels and ops
    are, as in a repro line. There are none where nothing is known beside the findings.
    """
    said = [*_place(explanation, others=1), *_decision(explanation)]
    said += _labelled("diagnosis", explanation.diagnoses[:MOST_DIAGNOSES])
    said += _labelled("smallest", filter(None, [explanation.smallest]))
    return [*said, ("see more", explain_line(explanation, options))] if said else []


def brief_lines(explanation: Explanation) -> Iterator[Field]:
    """Yield the line, under it its value and the correction, and the smallest tensors: nothing twice.

    A missing rounding needs no correction beside it. Where no line is known, the common pattern of the errors stands in
    its place.
    """
    first, decided = explanation.culprit, list(_decision(explanation))
    yield from list(_place(explanation, others=0))[:1]
    yield from decided
    if first is None:
        yield from _labelled("diagnosis", explanation.diagnoses[:1])
    elif first.mend and "rounding" not in dict(decided):
        yield "", first.right
    yield from _labelled("smallest", filter(None, [explanation.smallest]))


def explain_line(explanation: Explanation, options: str = "") -> str:
    """Return the command that prints the explanation."""
    device = "" if explanation.device == "cpu" else f"--device {explanation.device}"
    return command("explain", explanation.kernel, explanation.case, f"{device} {options.replace('--strict', '')}")


def _row(worked: WorkedStage, deciding: bool) -> tuple[Text, ...]:
    actual = worked.actual or Element("not seen")
    return (
        Text(f"✗ {worked.stage}" if worked.did else worked.stage, "bold red" if deciding else ""),
        Text("" if _is_open(worked) else number(worked.exact)),
        Text(_ends(worked)),
        Text(worked.format),
        Text(actual.decimal, "bold"),
        Text(actual.bits),
        Text(worked.dtype),
        Text("" if math.isnan(worked.ulp) else f"{worked.ulp:.3g}"),
        Text(str(worked.line) if worked.line else ""),
    )


def _is_open(worked: WorkedStage) -> bool:
    """Return whether the exact value is unknown: it is NaN though NaN need not be given."""
    return math.isnan(worked.exact) and not math.isnan(worked.lo)


def _ends(worked: WorkedStage, between: str = " to ") -> str:
    """Format the allowed value, or both ends of the allowed interval."""
    ends = dict.fromkeys((number(worked.lo), number(worked.hi)))
    return between.join(ends)


def _inputs(sources: Sequence[Source]) -> Iterator[str]:
    for source in sources[:MOST_INPUTS]:
        element = source.first[0]
        yield f"{source.name} = {element.decimal}{f' ({element.bits})' if element.bits else ''}"
    if rest := sources[MOST_INPUTS:]:
        yield f"{len(rest):,} more"


def _labelled(label: str, texts: Iterable[str]) -> Iterator[Field]:
    return ((label if position == 0 else "", text) for position, text in enumerate(texts))


def _place(explanation: Explanation, *, others: int) -> Iterator[Field]:
    """Yield the wrong line and its computation, or the lines it is between; then at most `others` corrections."""
    trace, first = explanation.trace, explanation.culprit
    if first is not None:
        yield "line", f"{shown_path(f'{first.file}:{first.line}')}  {first.code or first.text}{_called(first)}"
        if first.count or not first.mend:
            yield "", computed(first)
        if first.mend:
            yield "", first.right
        elif trace.until and trace.since:
            yield "", f"this alone is computed between {_right(trace)}, and {trace.until}, which is wrong"
    elif trace.held:
        yield "line", f"not found; where {trace.until} is due, the kernel has {trace.held}"
    elif trace.between:
        spans, more = ", ".join(map(shown_path, trace.between[:MOST_FILES])), len(trace.between) - MOST_FILES
        rest = f" and {more} more files" if more > 0 else ""
        yield "line", f"not found; between {_right(trace)}, and {trace.until}, which is wrong, are {spans}{rest}"
    if first is None and trace.mended:
        lines = dict.fromkeys(shown_path(f"{step.file}:{step.line}") for step in trace.mended)
        yield "", f"perhaps {' or '.join(list(lines)[:MOST_LINES])}, or what is passed there"
    if trace.by:
        yield "", f"as seen in the same case with other numbers: {trace.by}"
    so = "so are they" if first else "every element is right"
    for step in [step for step in trace.mended if first is None or step.line != first.line][:others]:
        yield "", f"{so} with line {step.line}, {step.text}, {step.mend}"


def _right(trace: KernelTrace) -> str:
    """Name the stages that are right before the wrong one."""
    return (
        f"{' and '.join(trace.since)}, which {'is' if len(trace.since) == 1 else 'are'} right"
        if trace.since
        else "the inputs"
    )


def _called(step: Step) -> str:
    return f", called in line {step.called[0].rsplit(':', 2)[1]}" if step.called else ""


def computed(step: Step) -> str:
    """Write a step as `x * rstd = -2.03125 * 1.00329924 = -2.03795147 in fp32`; operands without names come last."""
    if not step.count:  # known by its place alone
        return f"{step.text}: the finding is about this line"
    value = _element(step.first) if step.direct and step.first else f"{step.count:,} elements"
    made = f"{value} in {step.dtype}"
    if step.direct and len(step.sources) == 2 and (middle := _between_names(step.text)):
        return f"{step.text} = {middle.join(map(_value, step.sources))} = {made}"
    named = ((f"{source.name} = " if source.name else "", _value(source)) for source in step.sources if source.first)
    operands = ", ".join(name + value for name, value in named)
    return f"{step.text} = {made}{f', from {operands}' if operands else ''}"


def _between_names(text: str) -> str:
    """Return what stands between the names of an expression of two names; empty for any other expression."""
    try:
        made = ast.parse(text, mode="eval").body
    except SyntaxError:
        return ""
    match made:
        case ast.BinOp(left=ast.Name() as left, right=ast.Name() as right):
            return text.encode()[left.end_col_offset : right.col_offset].decode()  # ast counts bytes
    return ""


def _value(source: Source) -> str:
    return _element(source.first) if source.count == 1 else f"{source.count:,} elements"


def _element(first: Sequence[Element]) -> str:
    return first[0].decimal if first else "unknown"


def _decision(explanation: Explanation) -> Iterator[Field]:
    if (deciding := explanation.deciding) is not None:
        yield "rounding" if deciding.misrounded else "value", decision(deciding, sure=explanation.is_sure)


def decision(worked: WorkedStage, *, sure: bool) -> str:
    """Say how the contract rounds the exact value, and what the kernel does instead.

    The line that the value was seen in is named only if it is `sure` that this is the wrong one.
    """
    where = f"line {worked.line}" if worked.line and sure else "the kernel"
    exact = number(worked.exact)
    if not worked.rounds or not worked.misrounded:
        may = f"the contract allows {_ends(worked)} in {worked.format}"
        if _is_open(worked):
            return f"of {worked.stage} {may}; {where} {worked.did}."
        return f"{worked.stage} is {exact} exactly, and {may}; {where} {worked.did}."
    if worked.below == worked.above:
        lies = f"{exact} is a number of {worked.format}, which the contract keeps as {worked.stage}"
    elif abs(worked.expected - worked.exact) > min(worked.exact - worked.below, worked.above - worked.exact):
        lies = f"without a rounding before it {worked.stage} is {exact}, and with those of the contract {_ends(worked)}"
    else:
        ends = f"{number(worked.below)} and {number(worked.above)}"
        lies = (
            f"{exact} lies between {ends} (neighbours in {worked.format}); the contract rounds {worked.stage} here, to "
        )
        lies += _ends(worked, " or ")
    return f"{lies}; {where} {worked.did}."


def as_json(found: Sequence[object]) -> str:
    """Encode what was found as a JSON list, one object per kernel; a number that JSON cannot spell becomes a string."""
    return json.dumps(encoded(tuple(found)), indent=1, allow_nan=False)


# Explanations of the problems of a run: the same words and places in every form of a report

# As a unified difference shows.
AROUND = 3
"""Lines of source that are shown above and below the one that is wrong."""

_FIGURES = frozenset({"first wrong", "statistics", "explained by", "cases", "source"})
"""Labels of what no reader needs who has the line."""

# Arbitrary: about a page; --format json has all.
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
    places = [_spot(one) for one in explanation.trace.steps]
    if explanation.culprit is None or (wrong := _spot(explanation.culprit)) not in places:
        return False
    later = places[places.index(wrong) + 1 :]
    return _spot(step) in later


def _spot(step: Step) -> tuple[str, int, int, int, int]:
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


# `lastbit explain --trace`

# Beside place and value it leaves a step one line of 100 characters.
MOST_TEXT = 40
"""Characters of an expression that are shown."""
INPUT = "input"

_STEP_HEADERS = ("line", "expression", "dtype", "value", "bits", "stage", "from")
_STEP_SPARE = ("from", "dtype")


def print_trace(found: KernelTrace, console: Console) -> None:
    """Print the element, the steps that led to it as a table, and the line where it leaves the contract."""
    _print_head(found, found, console)
    if found.reason:
        paragraph(console, Text(f"Nothing is traced: {found.reason}", "bold magenta"), label="  ")
        return
    rows: list[tuple[Text, ...] | Text] = []
    for who, group in groupby(found.all or found.steps, key=_who):
        rows.append(Text(f"  {who}", "bold cyan"))
        for where, part in groupby(group, key=_where):
            rows += [Text(f"  {where}", "cyan")] * bool(where)
            rows += (_step_row(step, found.leaves is not None and _at(step) == _at(found.leaves)) for step in part)
    if gone := print_table(console, _STEP_HEADERS, rows, spare=_STEP_SPARE, wrap_first=True):
        paragraph(console, Text(f"columns that this width has no room for: {', '.join(gone)}", "dim"), label="  ")
    step = found.leaves
    said = "" if step is None else f"The value leaves the contract in line {step.line}, {_expression(step)}: "
    if step is not None and step.match is not None and step.match.leaves:
        match, own = step.match, step.first[0] if step.direct and step.first else Element("unknown")
        exact = "" if math.isnan(match.exact) else f", exact is {number(match.exact)}"
        said += f"as stage {match.stage}, {match.outside:,} of {match.of:,} elements are not possible. Here it is "
        said += f"{own.decimal} in {step.dtype}; the contract allows {allowed(match.lo, match.hi)}{exact}."
    elif step is not None and found.wrong:
        said += f"with it, stage {found.wrong} does not follow from what the kernel had before."
    elif found.steps and found.worst is not None and found.exit_code == 1 and not found.worst.is_allowed:
        first = f" No step agrees with stage {found.unmatched[0]}." if found.unmatched else ""
        said = f"No step was found with which the value leaves what the contract allows.{first}"
    else:
        said = ""
    for sentence, style in [*[(said, "bold red")] * bool(said), *((note, "") for note in found.notes)]:
        paragraph(console, Text(sentence, style), label="  → ")
    line(console)


def _who(step: Step) -> str:
    """Name the performer of a step: a Triton program, PyTorch, or the tensors of the case."""
    if step.operation == INPUT:
        return "Tensors of the case"
    return f"Program {step.program} of {step.launch}" if step.launch else "PyTorch"


def _where(step: Step) -> str:
    return f"{step.function} in {shown_path(step.file)}{_called(step)}" if step.file else ""


def _at(step: Step) -> tuple[object, ...]:
    return step.file, step.line, step.column, step.text, step.operation, step.called, step.program


def _step_row(step: Step, leaves: bool) -> tuple[Text, ...]:
    if step.again:
        lines = f"lines {step.line} to {step.end_line}" if step.line != step.end_line else f"line {step.line}"
        more = Text(f"… {step.again:,} more rounds of {lines}", "dim")
        return (Text("…", "dim"), more, *(Text() for _ in _STEP_HEADERS[2:]))
    alone = step.first[0] if step.direct and step.first and step.count else None
    text = _expression(step)
    if len(text) > MOST_TEXT:  # its beginning and end say what is loaded and what becomes of it
        end = MOST_TEXT // 3
        text = f"{text[: MOST_TEXT - end - 1]}…{text[-end:]}"
    stage = "" if step.match is None else step.match.stage
    led = ", ".join(map(_source, step.sources))  # of several elements the operation and its shape
    if not step.direct or not step.sources:
        led = f"{step.operation} {list(step.shape)}" if step.line else ""
    return (
        Text(str(step.line) if step.line else ""),
        Text(text),
        Text(step.dtype),
        Text(alone.decimal, "bold") if alone else Text(_several(step.count, step.first)),
        Text(alone.bits if alone else "", "bold"),
        Text(f"✗ {stage}".rstrip(), "bold red") if leaves else Text(stage, "green"),
        Text(led, "dim"),
    )


def _expression(step: Step) -> str:
    return f"{step.operation} in {step.text}" if step.part else step.text or step.operation


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
