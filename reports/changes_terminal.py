"""Two runs side by side on a terminal or in a log: what got worse first, what stayed the same last."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from lastbit.reports.changes import Changes, Fate, KernelChange
from lastbit.reports.changes_text import (
    HEADERS,
    about,
    cells,
    devices,
    drifts,
    head,
    notes,
    others,
    smallest_worse,
    summary,
    verdict,
)
from lastbit.reports.paper import line, make_console, paragraph, print_table
from lastbit.reports.summary import listed, plural, repro_line

MOST_KERNELS = 30
MOST_NAMES = 4

STYLES: Mapping[Fate, str] = {
    Fate.WORSE: "bold red",
    Fate.DRIFTED: "yellow",
    Fate.UNPAIRED: "yellow",
    Fate.GONE: "yellow",
    Fate.NEW: "cyan",
    Fate.BETTER: "green",
    Fate.CHANGED: "cyan",
    Fate.UNCHANGED: "dim",
}


def print_changes(changes: Changes, console: Console | None = None, *, strict: bool = False) -> None:
    """Print what changed from one run to another, worst first, and a last line that sums it up."""
    console = console or make_console()
    line(console, f"Changes from {changes.names[0]} to {changes.names[1]}", "bold")
    for text in about(changes):
        paragraph(console, Text(text), label="  ")
    line(console)
    told = [kernel for kernel in changes.kernels if kernel.telling]
    for kernel in told[:MOST_KERNELS]:
        _print_kernel(kernel, changes, console)
    if rest := told[MOST_KERNELS:]:
        line(console, f"and {plural(len(rest), 'more kernel')}: {listed((k.kernel for k in rest), MOST_NAMES)}")
        line(console)
    _print_others(changes, console)
    style = "bold red" if changes.exit_code(strict=strict) else "bold green"
    paragraph(console, Text.assemble((verdict(changes), style), f"  {summary(changes)}"))


def _print_kernel(kernel: KernelChange, changes: Changes, console: Console) -> None:
    style = STYLES[Fate.WORSE if kernel.worse else kernel.change]
    word = Text(kernel.change.value, style)
    rest = f" on {devices(kernel)}  {head(kernel)}  of {kernel.op}"
    paragraph(console, Text.assemble(word, "  ", (kernel.kernel, "bold"), rest))
    for note in notes(kernel, changes.names):
        paragraph(console, Text(note, "dim"), label="  ")
    for text in drifts(kernel):
        paragraph(console, Text(text), label="  ")
    if rows := [[*map(Text, cells(stage))] for stage in kernel.stages if not stage.unchanged]:
        print_table(console, HEADERS, rows, spare=("bias", "contract", "cases", "ulp", "rel. error", "mismatch"))
    if (worst := smallest_worse(kernel)) and (again := repro_line(worst, changes.options)):
        line(console, "  a case that got worse")
        line(console, f"    {again}")
    line(console)


def _print_others(changes: Changes, console: Console) -> None:
    """Print one paragraph for the kernels of an op that are new, gone or unchanged."""
    said = others(changes)
    for change, text in said:
        paragraph(console, Text.assemble((change.value, STYLES[change]), f"  {text}"))
    if said:
        line(console)
