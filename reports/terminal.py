"""A run on a terminal or in a log: an op a line if all is well, and what is wrong before anything else if not."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import accumulate
from textwrap import shorten, wrap

from rich.console import Console
from rich.text import Text

from lastbit.reports import coverage, wording
from lastbit.reports.coverage import COVERAGE_HEADERS, coverage_tables
from lastbit.reports.explanation import brief_lines, explain_line, explanation_of, problem_and_why
from lastbit.reports.invariance import broken, found_in, held
from lastbit.reports.paper import STYLES, line, make_console, paragraph, print_field, print_table, verdict_word
from lastbit.reports.stage_summary import (
    STAGE_COLUMNS,
    Standing,
    by_op,
    kept_of,
    on_cases,
    stage_cells,
    standings,
    traced_cells,
)
from lastbit.reports.summary import (
    ORDER,
    KernelFailure,
    grouped,
    listed,
    noticed,
    plural,
    problems,
    repro_line,
    share,
    shown_path,
    tally,
    wrong_stage,
)
from lastbit.reports.why import Explanation
from lastbit.result import BAD, OF_VALUES, Verdict
from lastbit.run import Run

# Five lines each: two pages. Of more, the HTML report is the better place.
MOST_FINDINGS = 10
# One line beside the name of the kernel.
MOST_OF_THE_REST = 120
"""Characters that each finding beyond those has for what it says."""

# More numbers than that are copied, not read.
MOST_CASE_LINES = 3
"""Lines of the terminal that the smallest tensors of a finding take; of longer ones the values are left out."""

# Arbitrary: -v has all.
MOST_REASONS = 8
"""Lines of what was not run, without -v."""

# Arbitrary: the first ones name the stage and the worst element.
MOST_SENTENCES = (2, 5)
"""Sentences of a finding without -v and with it."""

_OPS = ("op", "kernels", "cases", "decided", "time", "verdict")
_SPARE = ("cases", "extreme", "mismatch", "bias", "contract", "ulp", "rel. error")
"""Columns of the table of stages that a narrow terminal does without, the first one first."""

DECIDED = "decided: elements of results for which the contract allows one value alone"

_TO_COPY = frozenset({"source", "smallest", "see more"})
"""Labels of what is not wrapped: paths to click, and lines to copy."""

_GIVEN = re.compile(r"\bvalues\([^()]*\)")

Cause = list[tuple[KernelFailure, Explanation | None]]


def print_run(
    run: Run,
    console: Console | None = None,
    *,
    verbose: int = 0,
    stages_of: Run | None = None,
    uncovered: bool = False,
) -> None:
    """Print the verdict and the findings, then a line for each op, what is open and what was not run.

    `verbose` 1 adds the table of stages, statistics, properties, notices and, as `uncovered` does, the branches that no
    case reached; 2 adds coverage, what the run could not have seen and where its time went. The stages are those of
    `stages_of`, which may have another revision's besides. Where nothing is wrong the verdict comes last.
    """
    console = console or make_console()
    if run.overall in BAD:
        _print_verdict(run, console)
        line(console)
        _print_findings(run, console, verbose)
    if verbose:
        _print_stages(stages_of or run, console)
        properties = list[str | Text]()
        for one in found_in(run):
            properties.append(f"{one.kernel} on {one.device}: {'; '.join(held(one)) or 'nothing holds'}")
            for text, fails in broken(one):
                properties.append(Text(f"  {text}", STYLES[Verdict.FAILED if fails else Verdict.INCONCLUSIVE]))
        _print_list(console, "Properties of the bits", properties)
        _print_notices(run, console)
        _print_agreement(run, console)
    if verbose > 1:
        _print_coverage(run, console)
    _print_ops(run, console)
    _print_list(console, "Inconclusive", wording.inconclusive(run))
    if uncovered or (verbose and run.unreached):
        _print_list(console, coverage.HEADING, coverage.every_line(run))
    every_reason = [*wording.first_lines(wording.not_run(run)), *wording.first_lines(wording.turned_down(run))]
    _print_list(console, "Not run", every_reason if verbose else list(_not_run(run, console.width - 2)))
    facts = {"Kernels in processes of their own, which were kept from": "isolated", "Sanitized": "sanitized"}
    about = {said: run.environment.get(key, "") for said, key in facts.items()}
    if verbose > 1:
        about |= {"Error bounds": run.environment.get("premises", ""), "Time": wording.time_spent(run)}
    for said, text in about.items():
        if text:
            paragraph(console, Text(f"{said}: {text}", "dim"))
    if run.overall not in BAD:
        _print_verdict(run, console)
    if folder := run.environment.get("records"):
        line(console, f"records in {shown_path(folder)}")
        if run.coverage and (count := len(coverage.telling(run))) and not (verbose or uncovered):
            said = f"{count:,} branch{'' if count == 1 else 'es'} that no case reached"
            line(console, f"{said}: lastbit report {shlex.quote(shown_path(folder))} --uncovered", "dim")
        if verbose < 2:
            more = "coverage" if verbose else "stages and statistics"
            if not verbose and (found := noticed(run)):
                more = f"{plural(len(found), 'notice')}, {more}"
            line(console, f"{more}: lastbit report {shlex.quote(shown_path(folder))} -{'v' * (verbose + 1)}", "dim")


def _print_verdict(run: Run, console: Console) -> None:
    if run.broken:
        paragraph(console, Text(f"The run did not come to its end: {run.broken}", "bold red"))
    if unverified := wording.unverified(run):
        paragraph(console, Text(unverified, "bold yellow"))
    text = verdict_word(run.overall) if run.overall else Text("NOTHING VERIFIED", "bold yellow")
    text.append(on_cases(run, *run.subjects()), "yellow")
    text.append(f"  kernels: {tally(run.verdict(*subject) for subject in run.subjects())}{kept_of(run)}", "")
    text.append(f" · cases: {tally(r.verdict for r in run.results if r.counted)}", "")
    text.append(f" · {sum(r.seconds for r in run.results):,.1f} s in cases", "")
    paragraph(console, text)


def _print_findings(run: Run, console: Console, verbose: int) -> None:
    """Print each cause once, with all kernels that show it.

    Problems have one cause if the line that is proven wrong is the same, or else all that is known.
    """
    causes: dict[tuple[object, ...], Cause] = {}
    for problem in problems(run):
        result, explanation = problem.smallest, explanation_of(run, problem)
        kinds = tuple(dict.fromkeys(finding.kind for finding in result.faults))
        key: tuple[object, ...]
        if explanation is not None and explanation.culprit is not None:
            key = result.verdict, explanation.culprit.file, explanation.culprit.line
        elif result.verdict is Verdict.ERRORED:
            key = result.op, result.reason
        else:
            key = result.op, result.source, result.contract, problem.explained_by, wrong_stage(result), kinds
        causes.setdefault(key, []).append((problem, explanation))
    if verbose and len(causes) > 1:
        paragraph(console, Text(ORDER, "dim"))
    found = list(causes.values())
    for cause in found[:MOST_FINDINGS]:
        _print_finding(cause, run, console, verbose)
    if rest := found[MOST_FINDINGS:]:
        line(console, f"and {plural(len(rest), 'more finding')}; the records have all of them")
        for cause in rest:
            _, text = next(_brief(cause))
            title = _title(cause).append(f": {shorten(text, MOST_OF_THE_REST, placeholder='…')}", "")
            paragraph(console, title, label="  ")
        line(console)


def _print_finding(cause: Cause, run: Run, console: Console, verbose: int) -> None:
    """Print what the worst of the problems of one cause says, and the commands that run its case again and say why."""
    problem, explanation = cause[0]
    result, options = problem.smallest, run.environment.get("options", "")
    groups = wording.problem_groups(problem) if verbose else ""
    paragraph(console, _title(cause).append(f", {groups}" if groups else ""))
    fields = list(_brief(cause))
    if verbose:
        fields = problem_and_why(problem, explanation, options, most_sentences=MOST_SENTENCES[1])
    width = max(len("rounding"), *(len(label) for label, _ in fields)) + 1
    for label, text in fields:
        too_long = label == "smallest" and len(text) > MOST_CASE_LINES * console.width
        if too_long:
            text = f"{_GIVEN.sub('values(…)', text)}; `lastbit explain` and run.json of the records have the values"
        print_field(console, label, text, width=width, to_copy=label in _TO_COPY and not too_long)
    if again := repro_line(result, options):
        line(console, f"  {again}")
    if explanation is not None and not verbose:  # with -v it stands under "see more"
        line(console, f"  {explain_line(explanation, options)}")
    line(console)


def _title(cause: Cause) -> Text:
    """Return the verdict, and every kernel that shows the cause: those that are not named here are named nowhere."""
    result = cause[0][0].smallest
    names = ", ".join(dict.fromkeys(other.smallest.kernel for other, _ in cause))
    devices = listed(dict.fromkeys(r.device for other, _ in cause for r in other.bad), wording.MOST_NAMES)
    return Text.assemble(verdict_word(result.verdict), "  ", (names, "bold"), f" of {result.op} on {devices}")


def _brief(cause: Cause) -> Iterator[tuple[str, str]]:
    """Yield label and text of what is sure: what the kernels keep, or what is wrong; the line, and the tensors."""
    problem, explanation = cause[0]
    result = problem.smallest
    kept = dict[str, None]()
    for other in (other for other, _ in cause if other.kept):
        names = [*other.kept, other.claimed]  # options that differ, or whole contracts if one has none
        common = set.intersection(*(set(name.split("+")) for name in names))
        differing = ["+".join(option for option in name.split("+") if option not in common) for name in names]
        *keeps, claims = differing if all(differing) else names
        kept[f"{' or '.join(keeps)} where it claims {claims}"] = None
    yield from (("keeps", said) for said in kept)
    if result.verdict is Verdict.ERRORED:
        yield "error", result.reason
    sentences = [f.sentence for f in result.faults if not problem.explained_by or f.kind not in OF_VALUES]
    for number, sentence in enumerate(sentences[: MOST_SENTENCES[0]]):
        yield "" if number else "finding", sentence
    if (rest := len(sentences) - MOST_SENTENCES[0]) > 0:
        yield "", f"and {plural(rest, 'more sentence')} with -v"
    explained = list(brief_lines(explanation)) if explanation is not None else []
    if "line" not in dict(explained):
        yield "source", shown_path(result.source)
    yield from explained


def _print_ops(run: Run, console: Console) -> None:
    rows = []
    for op, found in by_op(standings(run)).items():
        results = [result for result in run.results if result.op == op]
        decided = [part for one in found for part in one.decided]
        verdicts = [one.verdict for one in found]
        verdict = verdict_word(worst := Verdict.worst(*verdicts))
        if (count := verdicts.count(worst)) < len(verdicts):
            verdict.append(f" {count:,}/{len(verdicts):,}")
        seconds = sum(result.seconds for result in results)
        cells = (
            op,
            f"{len({one.kernel for one in found}):,}",
            f"{sum(result.counted for result in results):,}",
            share(sum(one.decided for one in decided), sum(one.numel for one in decided)),
            f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s",
        )
        rows.append((*map(Text, cells), verdict.append(on_cases(run, *(one.subject for one in found)), "yellow")))
    if rows:
        print_table(console, _OPS, rows, spare=("time", "cases"))
        paragraph(console, Text(DECIDED, "dim"), label="  ")
        line(console)


def _not_run(run: Run, width: int) -> Iterator[str]:
    """Yield what was asked for and not run, and the cases that kernels turned down: a paragraph for each reason.

    They take `MOST_REASONS` lines of this width at most, but for a first one that takes more.
    """
    reasons = grouped((one.reason, one.what) for one in run.not_run)
    lines = [f"{reason}: {listed(what, wording.MOST_NAMES)}" for reason, what in reasons.items()]
    lines += wording.turned_down(run)
    ends = list(accumulate(len(wrap(text, width)) for text in lines))
    shown = max(sum(end <= MOST_REASONS for end in ends), 1)
    yield from lines[:shown]
    if rest := lines[shown:]:
        yield f"and for {plural(len(rest), 'more reason')}"


def _print_stages(run: Run, console: Console) -> None:
    found = grouped((one.device, one) for one in standings(run).values())
    gone: list[str] = []
    for device, kernels in found.items():
        line(console, f"Stages on {device}", "bold")
        rows = [row for one in kernels for row in _stage_rows(one)]
        gone += print_table(console, tuple(STAGE_COLUMNS), rows, spare=_SPARE)
        line(console)
    if not found:
        return
    for name, meaning in wording.legend(run):
        if name not in gone:
            paragraph(console, Text(meaning, "dim"), label=f"{name:<12} ", label_style="dim")
    if gone:
        said = f"columns that this width has no room for: {', '.join(dict.fromkeys(gone))}"
        paragraph(console, Text(said, "dim"))
    line(console)


def _stage_rows(one: Standing) -> Iterator[Sequence[Text] | Text]:
    title = Text.assemble((one.kernel, "bold"), " on ", one.device, "  ", verdict_word(one.verdict))
    yield title.append(one.on_cases, "yellow").append(f"  {one.source}" if one.source else "", "dim")
    yield Text(f"  contract {one.contract} of {one.op}  {one.tally}", "dim")
    if one.origin:
        yield Text(f"  {one.origin}", "dim")
    if one.beside:
        yield Text(f"  beside the values below, {one.beside}", STYLES[Verdict.FAILED])
    for stage in one.stages:
        cells = stage_cells(stage)
        words = {name: Text(cell.text, STYLES[Verdict.FAILED] if cell.wrong else "") for name, cell in cells.items()}
        yield tuple((words | {"values": verdict_word(stage.verdict)}).values())
    for traced in one.traced:  # decides nothing
        yield tuple(Text(cell.text, "dim") for cell in traced_cells(traced).values())
    if one.extremes:
        yield Text(f"  extreme: {one.extremes}", "dim")


def _print_notices(run: Run, console: Console) -> None:
    """Print what was noticed and fails nothing, with a case to repeat for each."""
    if found := noticed(run):
        line(console, "Notices", "bold")
        for entry in found[: wording.MOST_LINES]:
            paragraph(console, Text(entry.sentence), label="  ")
            line(console, f"    {entry.repro(run.environment.get('options', ''))}")
        if rest := found[wording.MOST_LINES :]:
            line(console, f"  and {plural(len(rest), 'more notice')}; the records have them all")
        line(console)


def _print_agreement(run: Run, console: Console) -> None:
    """Print in one line how many tensors have the same bits on two devices, and a line per kernel where some differ."""
    for devices, entries in grouped((a.devices, a) for a in run.agreement).items():
        tensors, equal = sum(a.tensors for a in entries), sum(a.equal for a in entries)
        unlike = (a for a in entries if a.equal < a.tensors)
        differ = grouped((a.kernel, f"{a.stage} {a.equal:,}/{a.tensors:,}") for a in unlike)
        said = [f"{equal:,} of {plural(tensors, 'tensor')} are equal to the last bit"]
        said += [f"{kernel}: {', '.join(parts)} equal" for kernel, parts in differ.items()]
        _print_list(console, f"Bits on {devices[0]} and {devices[1]}", said)


def _print_coverage(run: Run, console: Console) -> None:
    """Print a table per op and device, what was never judged below it, and what the run could not have seen."""
    tables = coverage_tables(run)
    for table in tables:
        line(console, f"Coverage of {table.op} on {table.device}", "bold")
        print_table(console, COVERAGE_HEADERS, [[*map(Text, cells)] for cells in table.rows])
        for gap in wording.first_lines(table.gaps):
            paragraph(console, Text(gap), label="  ")
        line(console)
    if tables:
        paragraph(console, Text(coverage.MEANING, "dim"), label="coverage   ", label_style="dim")
        line(console)
    _print_list(console, "What this run could not have seen", wording.unseen(run))


def _print_list(console: Console, heading: str, lines: Sequence[str | Text]) -> None:
    if lines:
        line(console, heading, "bold")
        for text in lines:
            paragraph(console, Text(text) if isinstance(text, str) else text, label="  ")
        line(console)
