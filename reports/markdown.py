"""A run as Markdown, for a comment on a pull request or the summary of a job: what is wrong comes first.

Text is escaped and clipped so that GitHub and GitLab show it as it stands, and put together to a given size.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lastbit.reports import changes, coverage, wording
from lastbit.reports.characters import visible
from lastbit.reports.coverage import COVERAGE_HEADERS, coverage_tables
from lastbit.reports.explanation import explanation_of, problem_and_why
from lastbit.reports.invariance import MEANING, cell, found_in, property_tables
from lastbit.reports.stage_summary import STAGE_COLUMNS, kept_of, on_cases, stage_cells, standings, traced_cells
from lastbit.reports.summary import ORDER, noticed, plural, problems, repro_line, tally
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


# Arbitrary: some fifteen lines of a comment.
MOST_CHARACTERS = 1500
"""Longest text that is not clipped; the message of an exception can hold the source of a kernel."""

# Above the longest such sentence, which names a number and the report.
_TAIL = 500  # bytes for the sentence that says what was left out
_LAYOUT = "\n\t"  # control characters that only lay text out
_NOTHING = "\u200b"  # of no width; keeps a name after @ from being notified and a number after # from becoming a link


@dataclass(frozen=True)
class MarkdownBlock:
    """A piece of a page that is there as a whole or not at all.

    Attributes:
        what: what to call it where it was left out, in the singular.
        important: to be kept before all blocks that are not.
    """

    text: str
    what: str
    important: bool = False


def page(run: Run, *, base: Run | None = None) -> str:
    """Write the run as Markdown of at most `LIMIT` bytes, compared with `base`.

    What has no room is left out as a whole, and the last line says how much that is.
    """
    verdict, options = run.overall, run.environment.get("options", "")
    word = f"{SYMBOLS[verdict]} {verdict.value}" if verdict else "⚠️ NOTHING VERIFIED"
    word += on_cases(run, *run.subjects())
    kernels, cases = (
        (run.verdict(*subject) for subject in run.subjects()),
        (r.verdict for r in run.results if r.counted),
    )
    text = f"## {word} · kernels: {tally(kernels)}{kept_of(run)} · cases: {tally(cases)}"
    if run.broken:
        text += f"\n\nThe run did not come to its end: {plain(run.broken)}"
    if unverified := wording.unverified(run):
        text += f"\n\n{plain(unverified)}"
    blocks = [MarkdownBlock(text, "headline", important=True)]
    if base is not None:
        blocks += _changes(changes.compare(base, run, names=changes.names_of(base)))
    blocks += _problems(run, options)
    for number, entry in enumerate(noticed(run)):
        heading = "" if number else "### Notices\n\n"
        text = f"{heading}{plain(entry.sentence)}\n\n{block_of_code(entry.repro(options))}"
        blocks.append(MarkdownBlock(text, "notice"))
    blocks += [*_stages(run), *_properties(run), *_gaps(run)]
    rows = [(plain(name), code(value)) for name, value in run.environment.items() if value]
    rows += [("time", plain(spent))] if (spent := wording.time_spent(run)) else []
    text = folded("Environment", table(("setting", "value"), rows, left=2))
    return joined([*blocks, MarkdownBlock(text, "environment", important=True)], LIMIT)


def _changes(found: changes.Changes) -> Iterator[MarkdownBlock]:
    about = [*changes.about(found), *(f"{change.value}  {text}" for change, text in changes.others(found))]
    text = f"### Against {plain(found.names[0])}: {changes.verdict(found)}\n\n"
    text += plain(changes.summary(found)) + "\n\n" + bullets(map(plain, about))
    yield MarkdownBlock(text.rstrip(), "summary of changes", important=True)
    for kernel in found.kernels:
        if kernel.telling:
            title = f"{kernel.change.value} {kernel.kernel} {changes.head(kernel)}, on {changes.devices(kernel)}"
            parts = [bullets(map(plain, [*changes.notes(kernel, found.names), *changes.drifts(kernel)]))]
            if rows := [[*map(plain, row)] for row in changes.rows(kernel)]:
                parts.append(table(changes.HEADERS, rows, left=2))
            if again := changes.again(kernel, found):
                parts.append(block_of_code(again))
            yield _block(title, "\n\n".join(parts), "kernel that changed", opened=kernel.worse, level=4)


def _problems(run: Run, options: str) -> Iterator[MarkdownBlock]:
    found = problems(run)
    if len(found) > 1:
        yield MarkdownBlock(plain(ORDER), "order of findings")
    for number, problem in enumerate(found):
        result = problem.smallest
        title = ", ".join(filter(None, (f"{result.verdict.value} {result.kernel}", wording.problem_groups(problem))))
        lines = []
        for label, text in problem_and_why(problem, explanation_of(run, problem), options, most_sentences=5):
            shown = code(text) if label in _CODE else plain(text)
            lines.append(f"**{label}**: {shown}" if label else shown)
        again = repro_line(result, options)
        body = f"{bullets(lines)}\n\n{block_of_code(again)}" if again else bullets(lines)
        heading = f"### {SYMBOLS[result.verdict]} {plain(title)}\n\n{body}"
        yield MarkdownBlock(heading if number < MOST_OPEN else folded(title, body), "finding")


def _stages(run: Run) -> Iterator[MarkdownBlock]:
    """Yield the table of every kernel, those that failed first and open."""
    found = sorted(standings(run).values(), key=lambda one: one.verdict not in BAD)
    if found:
        meanings = bullets([f"**{name}**: {plain(meaning)}" for name, meaning in wording.legend(run)])
        legend = folded("What the columns mean", meanings)
        yield MarkdownBlock(f"### Stages\n\n{legend}", "legend", important=True)
    for one in found:
        about = f"contract {code(one.contract)} of {code(one.op)}, {code(one.source)}; {one.tally}"
        about += f"; beside the values below, {one.beside}" if one.beside else ""
        about += f"; {plain(one.origin)}" if one.origin else ""
        rows = []
        for cells in (*map(stage_cells, one.stages), *map(traced_cells, one.traced)):
            rows.append([f"**{plain(each.text)}**" if each.wrong else plain(each.text) for each in cells.values()])
        shown = table(tuple(STAGE_COLUMNS), rows, left=2) if rows else ""
        extreme = f"extreme: {plain(one.extremes)}" if one.extremes else ""
        body = "\n\n".join(filter(None, [about, shown, extreme]))
        title = f"{one.verdict.value} {one.kernel} on {one.device}{one.on_cases}"
        yield _block(title, body, "stage table", opened=one.verdict in BAD, level=4)


def _properties(run: Run) -> Iterator[MarkdownBlock]:
    """Yield the properties that were asked of the kernels' bits, op by op; open where one fails a kernel."""
    for found in property_tables(found_in(run)):
        rows = []
        for one in found.kernels:
            words = [map(plain, cell(one.properties.get(name))) for name in found.properties]
            said = [f"**{text}**: {detail}" if detail else text for text, detail in words]
            rows.append([plain(one.kernel), plain(one.device), *said])
        body = f"{plain(MEANING)}\n\n{table(found.headers, rows, left=len(found.headers))}"
        fails = any(one.fails for kernel in found.kernels for one in kernel.properties.values())
        yield _block(f"Properties of the bits of {found.op}", body, "table of properties", opened=fails)


def _gaps(run: Run) -> Iterator[MarkdownBlock]:
    """Yield what was not run, differences that the run could not have seen, branches not taken, and the coverage."""
    not_run = [*wording.first_lines(wording.not_run(run)), *wording.first_lines(wording.turned_down(run))]
    for heading, lines in (("Not run", not_run), ("What this run could not have seen", wording.unseen(run))):
        if lines:
            yield MarkdownBlock(f"### {heading}\n\n{bullets(map(plain, lines))}", "list of gaps", important=True)
    if run.unreached:
        text = bullets(map(plain, coverage.every_line(run)))
        yield MarkdownBlock(folded(f"{coverage.HEADING}: {len(run.unreached)} branches", text), "branches")
    for found in coverage_tables(run):
        body = table(COVERAGE_HEADERS, [tuple(map(plain, cells)) for cells in found.rows], left=2)
        gaps = bullets(map(plain, wording.first_lines(found.gaps))) if found.gaps else ""
        text = "\n\n".join(filter(None, [plain(coverage.MEANING), body, gaps]))
        yield MarkdownBlock(folded(f"Coverage of {found.op} on {found.device}", text), "coverage")


# Pieces of Markdown


def _block(title: str, body: str, what: str, *, opened: bool, level: int = 3) -> MarkdownBlock:
    return MarkdownBlock(f"{'#' * level} {plain(title)}\n\n{body}" if opened else folded(title, body), what)


def joined(blocks: Sequence[MarkdownBlock], limit: int) -> str:
    """Join the blocks, in order, in at most `limit` bytes of UTF-8; a last line counts those left out."""
    room = limit - _TAIL
    kept: set[int] = set()
    for number in sorted(range(len(blocks)), key=lambda number: not blocks[number].important):
        size = len(_encodable(blocks[number].text).encode()) + 2
        if size <= room:
            room -= size
            kept.add(number)
    texts = [block.text for number, block in enumerate(blocks) if number in kept]
    left_out = Counter(block.what for number, block in enumerate(blocks) if number not in kept)
    if left_out:
        parts = ", ".join(plural(count, what) for what, count in left_out.items())
        texts.append(f"**Left out** to stay below {limit // 1024} KiB: {parts}. `lastbit report` shows all of them.")
    return _encodable("\n\n".join(texts) + "\n")


def plain(text: str) -> str:
    """Put `text` on one line, showing every character as it is, outside of code."""
    escaped = re.sub(r"([\\`*_\[\]|~$])", r"\\\1", html.escape(_clipped(text), quote=False))
    return re.sub(r"([@#])(?=\w)", rf"\1{_NOTHING}", escaped)


def code(text: str) -> str:
    """Put `text` on one line as code, also within a table."""
    shown = _clipped(text).replace("|", r"\|")
    fence = "`" * (_longest_run(shown) + 1)
    space = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{space}{shown}{space}{fence}" if shown else ""


def block_of_code(text: str) -> str:
    """Write `text` as a block of code, to be copied: it is never clipped."""
    fence = "`" * max(3, _longest_run(text) + 1)
    return f"{fence}sh\n{visible(text, keep=_LAYOUT)}\n{fence}"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Write a table of Markdown cells; the first `left` columns are left-aligned, the others right-aligned."""
    rule = [":--" if number < left else "--:" for number in range(len(headers))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, rule, *rows))


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def folded(summary: str, body: str) -> str:
    """Fold `body` behind a line to click on; `summary` is plain text."""
    return f"<details><summary>{html.escape(_clipped(summary))}</summary>\n\n{body}\n\n</details>"


def _clipped(text: str) -> str:
    """Put `text` on one line, without characters that control a terminal, cut to `MOST_CHARACTERS`."""
    line = visible(" ".join(text.split()))
    rest = len(line) - MOST_CHARACTERS
    return f"{line[:MOST_CHARACTERS]}… ({rest:,} more characters)" if rest > 0 else line


def _encodable(text: str) -> str:
    """Replace in `text` half of a surrogate pair, which UTF-8 cannot write, by a question mark."""
    return text.encode(errors="replace").decode()


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
