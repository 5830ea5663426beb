"""A run as Markdown, for a comment on a pull request or the summary of a job: what is wrong comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from lastbit.property_result import PropertyResult
from lastbit.reports import changes_text, unreached, wording
from lastbit.reports.changes import Changes, KernelChange, compare, names_of
from lastbit.reports.coverage import COVERAGE_HEADERS, MEANING, coverage_tables
from lastbit.reports.explanation import explanation_of, problem_and_why
from lastbit.reports.markdown_text import MarkdownBlock, block_of_code, bullets, code, folded, joined, plain, table
from lastbit.reports.properties import MEANING as MEANING_OF_WORDS
from lastbit.reports.properties import cell, found_in, property_tables
from lastbit.reports.stage_summary import STAGE_COLUMNS, StageFigure, stage_cells, traced_cells
from lastbit.reports.standing import Standing, standings
from lastbit.reports.summary import (
    ORDER,
    KernelFailure,
    noticed,
    problems,
    repro_line,
    tally,
)
from lastbit.result import BAD, Verdict
from lastbit.run import Run

LIMIT = 60 * 1024
"""Most bytes of a page. A comment on GitHub may have 65,536 characters."""

_CODE = frozenset({"line", "smallest", "see more"})
"""Labels of lines of source and of commands."""

# Arbitrary: what is seen of a comment without scrolling; the others unfold.
MOST_OPEN = 3

SYMBOLS: Mapping[Verdict, str] = {
    Verdict.PASSED: "✅",
    Verdict.SKIPPED: "⚠️",
    Verdict.INCONCLUSIVE: "⚠️",
    Verdict.FAILED: "❌",
    Verdict.ERRORED: "💥",
}


def page(run: Run, *, base: Run | None = None) -> str:
    """Write the run as Markdown of at most `LIMIT` bytes, compared with `base`.

    What has no room is left out as a whole, and the last line says how much that is.
    """
    blocks = [_headline(run)]
    if base is not None:
        blocks += _changes(compare(base, run, names=names_of(base)))
    blocks += _problems(run)
    blocks += _notices(run)
    blocks += _stages(run)
    blocks += [*_properties(run), *_gaps(run), *_unreached(run), *_coverage(run), _environment(run)]
    return joined(blocks, LIMIT)


def _headline(run: Run) -> MarkdownBlock:
    verdict = run.overall
    word = f"{SYMBOLS[verdict]} {verdict.value}" if verdict else "⚠️ NOTHING VERIFIED"
    kernels = tally(run.verdict(*subject) for subject in run.subjects())
    word += wording.on_cases(run, *run.subjects())
    text = f"## {word} · kernels: {kernels} · cases: {tally(r.verdict for r in run.results if r.counted)}"
    if run.broken:
        text += f"\n\nThe run did not come to its end: {plain(run.broken)}"
    if unverified := wording.unverified(run):
        text += f"\n\n{plain(unverified)}"
    return MarkdownBlock(text, "headline", important=True)


def _changes(changes: Changes) -> Iterator[MarkdownBlock]:
    about = [*changes_text.about(changes), *(f"{c.value}  {text}" for c, text in changes_text.others(changes))]
    text = f"### Against {plain(changes.names[0])}: {changes_text.verdict(changes)}\n\n"
    text += plain(changes_text.summary(changes)) + "\n\n" + bullets([plain(line) for line in about])
    yield MarkdownBlock(text.rstrip(), "summary of changes", important=True)
    for kernel in changes.kernels:
        if kernel.telling:
            title = (
                f"{kernel.change.value} {kernel.kernel} {changes_text.head(kernel)}, on {changes_text.devices(kernel)}"
            )
            body = _changed(kernel, changes)
            shown = f"#### {plain(title)}\n\n{body}" if kernel.worse else folded(title, body)
            yield MarkdownBlock(shown, "kernel that changed")


def _changed(kernel: KernelChange, changes: Changes) -> str:
    lines = [*changes_text.notes(kernel, changes.names), *changes_text.drifts(kernel)]
    parts = [bullets([plain(line) for line in lines])]
    if rows := [[*map(plain, row)] for row in changes_text.rows(kernel)]:
        parts.append(table(changes_text.HEADERS, rows, left=2))
    if again := changes_text.again(kernel, changes):
        parts.append(block_of_code(again))
    return "\n\n".join(parts)


def _problems(run: Run) -> Iterator[MarkdownBlock]:
    found = problems(run)
    if len(found) > 1:
        yield MarkdownBlock(plain(ORDER), "order of findings")
    for number, problem in enumerate(found):
        result = problem.smallest
        title = ", ".join(filter(None, (f"{result.verdict.value} {result.kernel}", wording.problem_groups(problem))))
        body = _problem(problem, run)
        shown = f"### {SYMBOLS[result.verdict]} {plain(title)}\n\n{body}" if number < MOST_OPEN else folded(title, body)
        yield MarkdownBlock(shown, "finding")


def _problem(problem: KernelFailure, run: Run) -> str:
    options = run.environment.get("options", "")
    fields = problem_and_why(problem, explanation_of(run, problem), options, most_sentences=5)
    shown = [(label, code(text) if label in _CODE else plain(text)) for label, text in fields]
    lines = [f"**{label}**: {text}" if label else text for label, text in shown]
    again = repro_line(problem.smallest, options)
    return f"{bullets(lines)}\n\n{block_of_code(again)}" if again else bullets(lines)


def _notices(run: Run) -> Iterator[MarkdownBlock]:
    options = run.environment.get("options", "")
    for number, entry in enumerate(noticed(run)):
        heading = "" if number else "### Notices\n\n"
        yield MarkdownBlock(f"{heading}{plain(entry.sentence)}\n\n{block_of_code(entry.repro(options))}", "notice")


def _stages(run: Run) -> Iterator[MarkdownBlock]:
    """Yield the table of every kernel, those that failed first and open."""
    found = sorted(standings(run).values(), key=lambda one: one.verdict not in BAD)
    if found:
        meanings = bullets([f"**{name}**: {plain(meaning)}" for name, meaning in wording.legend(run)])
        legend = folded("What the columns mean", meanings)
        yield MarkdownBlock(f"### Stages\n\n{legend}", "legend", important=True)
    for one in found:
        title, body = f"{one.verdict.value} {one.kernel} on {one.device}{one.on_cases}", _stage_table(one)
        yield MarkdownBlock(
            f"#### {plain(title)}\n\n{body}" if one.verdict in BAD else folded(title, body), "stage table"
        )


def _stage_table(one: Standing) -> str:
    about = f"contract {code(one.contract)} of {code(one.op)}, {code(one.source)}; {one.tally}"
    about += f"; beside the values below, {one.beside}" if one.beside else ""
    rows = [_cells(cells) for cells in (*map(stage_cells, one.stages), *map(traced_cells, one.traced))]
    extreme = f"extreme: {plain(one.extremes)}" if one.extremes else ""
    return "\n\n".join(filter(None, [about, table(tuple(STAGE_COLUMNS), rows, left=2) if rows else "", extreme]))


def _cells(cells: Mapping[str, StageFigure]) -> Sequence[str]:
    return [f"**{plain(cell.text)}**" if cell.wrong else plain(cell.text) for cell in cells.values()]


def _properties(run: Run) -> Iterator[MarkdownBlock]:
    """Yield the properties that were asked of the kernels' bits, op by op; open where one fails a kernel."""
    for found in property_tables(found_in(run)):
        rows = [
            (plain(one.kernel), plain(one.device), *(_word(one.properties.get(name)) for name in found.properties))
            for one in found.kernels
        ]
        body = f"{plain(MEANING_OF_WORDS)}\n\n{table(found.headers, rows, left=len(found.headers))}"
        title = f"Properties of the bits of {found.op}"
        fails = any(one.fails for kernel in found.kernels for one in kernel.properties.values())
        yield MarkdownBlock(f"### {plain(title)}\n\n{body}" if fails else folded(title, body), "table of properties")


def _word(one: PropertyResult | None) -> str:
    text, detail = map(plain, cell(one))
    return f"**{text}**: {detail}" if detail else text


def _gaps(run: Run) -> Iterator[MarkdownBlock]:
    """Yield what was not run, and the differences that the run could not have seen."""
    not_run = [*wording.first_lines(wording.not_run(run)), *wording.first_lines(wording.turned_down(run))]
    unseen = wording.unseen(run)
    for heading, lines in (("Not run", not_run), ("What this run could not have seen", unseen)):
        if lines:
            yield MarkdownBlock(
                f"### {heading}\n\n{bullets([plain(line) for line in lines])}", "list of gaps", important=True
            )


def _unreached(run: Run) -> Iterator[MarkdownBlock]:
    """Yield the branches of the kernels' own files that no case took."""
    if run.unreached:
        text = bullets([plain(said) for said in unreached.every_line(run)])
        yield MarkdownBlock(folded(f"{unreached.HEADING}: {len(run.unreached)} branches", text), "branches")


def _coverage(run: Run) -> Iterator[MarkdownBlock]:
    """Yield the coverage of the choices of cases, op by op."""
    for found in coverage_tables(run):
        body = table(COVERAGE_HEADERS, [tuple(map(plain, cells)) for cells in found.rows], left=2)
        gaps = bullets([plain(gap) for gap in wording.first_lines(found.gaps)]) if found.gaps else ""
        text = "\n\n".join(filter(None, [plain(MEANING), body, gaps]))
        yield MarkdownBlock(folded(f"Coverage of {found.op} on {found.device}", text), "coverage")


def _environment(run: Run) -> MarkdownBlock:
    rows = [(plain(name), code(value)) for name, value in run.environment.items() if value]
    rows += [("time", plain(spent))] if (spent := wording.time_spent(run)) else []
    return MarkdownBlock(
        folded("Environment", table(("setting", "value"), rows, left=2)), "environment", important=True
    )
