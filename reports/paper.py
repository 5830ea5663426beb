"""Lines and paragraphs on a rich console, without markup: case lines and kernel names may hold brackets.

Whatever goes to a console goes through here, which shows control characters in place of sending them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lastbit.errors import LastbitError
from lastbit.files import replace_file
from lastbit.reports.characters import visible
from lastbit.result import Verdict

STYLES: Mapping[Verdict, str] = {
    Verdict.PASSED: "green",
    Verdict.SKIPPED: "dim",
    Verdict.UNSUPPORTED: "dim",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.FAILED: "bold red",
    Verdict.ERRORED: "bold magenta",
}

STANDARD_OUTPUT = "-"

# Arbitrary: CI shows that much on most screens, and tables of 80 would wrap.
LOG_WIDTH = 100
"""Width of a console that is no terminal and says nothing about its width, such as the log of a CI job."""

# Arbitrary: narrower columns break most words.
LEAST_WIDTH = 8
"""Characters that a column of a table keeps, however narrow the console is."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave to the command line what a reader who has read enough means; rich would exit with 1, as findings do."""
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """Make the console for reports: as wide as the terminal, or `LOG_WIDTH` where there is none."""
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = _Console(stderr=stderr, highlight=False, width=LOG_WIDTH)
    return console


_LAYOUT = "\n\t"
"""Control characters that only lay text out."""


def verdict_word(verdict: Verdict) -> Text:
    return Text(verdict.value, STYLES[verdict])


def line(console: Console, text: str | Text = "", style: str = "") -> None:
    """Print one line of output, never wrapped, so that it can be copied and its path clicked."""
    shown = Text(visible(text, keep=_LAYOUT)) if isinstance(text, str) else _safe(text, console)
    console.print(shown, style=style or None, soft_wrap=True)


def paragraph(console: Console, text: Text, *, label: str = "", label_style: str = "") -> None:
    """Print `text` after `label`, wrapped to the console and indented by the label's width."""
    width = max(console.width - len(label), 20)
    for number, part in enumerate(_safe(text, console).wrap(console, width)):
        part.rstrip()
        prefix = (label, label_style) if number == 0 else " " * len(label)
        line(console, Text.assemble(prefix, part))


def print_field(
    console: Console, label: str, text: str, *, width: int = 10, style: str = "dim", to_copy: bool = False
) -> None:
    """Print a text behind its label; one `to_copy`, or a path to click, unbroken: below the label where it has room."""
    head = f"  {label:<{width}}"
    if not to_copy:
        paragraph(console, Text(text), label=head, label_style=style)
    elif len(head) + cell_len(text) <= console.width:
        line(console, Text.assemble((head, style), text))
    else:
        line(console, Text.assemble((head.rstrip(), style), f"\n    {text}"))


def print_table(
    console: Console,
    headers: Sequence[str],
    rows: Sequence[Sequence[Text] | Text],
    *,
    spare: Sequence[str] = (),
    wrap_first: bool = False,
) -> list[str]:
    """Print rows under their headers, never wider than the console, and return the headers of columns left out.

    Columns of figures are set to the right. A row that is one `Text` stands across. Where the console is too narrow,
    columns of `spare` are left out, the first one first, and then the widest cells are wrapped; with `wrap_first` only
    columns for which words would have to be broken are left out. A word is broken where nothing else helps.
    """
    body = [row if isinstance(row, Text) else [_safe(cell, console) for cell in row] for row in rows]
    cells = [row for row in body if not isinstance(row, Text)]
    widths = {n: max(cell_len(name), *(row[n].cell_len for row in cells), 0) for n, name in enumerate(headers)}
    figures = {n for n in widths if n and any(row[n].plain.lstrip("+-")[:1].isdigit() for row in cells)}
    words = {n: [*headers[n].split(), *(word for row in cells for word in row[n].plain.split())] for n in widths}
    whole = {n: max(map(cell_len, words[n]), default=0) for n in widths}
    gone: list[str] = []
    while len(gone) < len(spare) and _too_wide(whole if wrap_first else widths, console):
        gone.append(spare[len(gone)])
        for each in (widths, whole):
            del each[headers.index(gone[-1])]
    while _too_wide(widths, console):
        wraps = [n for n in widths if widths[n] > whole[n]] or [n for n in widths if widths[n] > LEAST_WIDTH]
        if not wraps:
            break
        widths[max(wraps, key=lambda n: widths[n])] -= 1
    for row in ([Text(name, "dim") for name in headers], *body):
        if isinstance(row, Text):
            paragraph(console, row)
            continue
        wrapped = [row[n].wrap(console, width) for n, width in widths.items()]
        for parts in zip_longest(*wrapped, fillvalue=Text()):
            shown = Text()
            for (n, width), part in zip(widths.items(), parts, strict=True):
                cell = part.copy()
                cell.align("right" if n in figures else "left", width)
                shown.append("  ").append_text(cell)
            shown.rstrip()
            line(console, shown)
    return gone


def fits(console: Console, headers: Sequence[str], rows: Sequence[Sequence[Text]]) -> bool:
    """Return whether a table has room for all of its cells without wrapping one."""
    widths = {n: max(cell_len(name), *(row[n].cell_len for row in rows), 0) for n, name in enumerate(headers)}
    return not _too_wide(widths, console)


def _too_wide(widths: Mapping[int, int], console: Console) -> bool:
    return sum(widths.values()) + 2 * len(widths) > console.width


def _safe(text: Text, console: Console) -> Text:
    """Escape in `text` what commands the terminal; styles stay where they are."""
    if visible(text.plain, keep=_LAYOUT) == text.plain:
        return text
    characters = ((c, text.get_style_at_offset(console, place)) for place, c in enumerate(text.plain))
    return Text.assemble(*((visible(c, keep=_LAYOUT), style) for c, style in characters))


def write_text(target: str, text: str) -> None:
    """Write to a file, which is either its old self or complete, or to standard output for `-`.

    Raises:
        LastbitError: the file cannot be written.
    """
    text = text.encode(errors="replace").decode()  # half of a surrogate pair cannot be written
    if target == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    path = Path(target)
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")  # a pipe or a device has no old self to keep
        else:
            path = path.resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise LastbitError(f"cannot write {target}: {error.strerror}") from error
