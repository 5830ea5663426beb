"""Lines and paragraphs on a rich console, without markup: case lines and kernel names may hold brackets."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

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

LOG_WIDTH = 120
"""Width of a console that is no terminal and says nothing about its width, such as the log of a CI job."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave to the command line what a reader who has read enough means; rich would exit with 1, as findings do."""
        raise BrokenPipeError


def make_console(*, stderr: bool = False) -> Console:
    """The console for reports: as wide as the terminal, or `LOG_WIDTH` where there is none."""
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = _Console(stderr=stderr, highlight=False, width=LOG_WIDTH)
    return console


_LAYOUT = "\n\t"
"""Control characters that only lay text out."""


def verdict_word(verdict: Verdict) -> Text:
    return Text(verdict.value, STYLES[verdict])


def line(console: Console, text: str | Text = "", style: str = "") -> None:
    """One line of output, never wrapped, so that it can be copied and its path clicked."""
    shown = Text(visible(text, keep=_LAYOUT)) if isinstance(text, str) else _safe(text, console)
    console.print(shown, style=style or None, soft_wrap=True)


def paragraph(console: Console, text: Text, *, label: str = "", label_style: str = "") -> None:
    """`text` after `label`, wrapped to the console and indented by the label's width."""
    width = max(console.width - len(label), 20)
    for number, part in enumerate(_safe(text, console).wrap(console, width)):
        part.rstrip()
        prefix = (label, label_style) if number == 0 else " " * len(label)
        line(console, Text.assemble(prefix, part))


def _safe(text: Text, console: Console) -> Text:
    """`text` in which nothing commands the terminal; styles stay where they are."""
    if visible(text.plain, keep=_LAYOUT) == text.plain:
        return text
    characters = ((c, text.get_style_at_offset(console, place)) for place, c in enumerate(text.plain))
    return Text.assemble(*((visible(c, keep=_LAYOUT), style) for c, style in characters))
