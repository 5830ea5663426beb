"""Result of `lastbit list`: everything that a command line, a case line or a declaration can name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from lastbit.reports.paper import line, paragraph
from lastbit.reports.summary import shown_path


@dataclass(frozen=True)
class Entry:
    """A name, and the facts about it.

    Attributes:
        name: as it is written on the command line, in a case line or in a declaration.
        about: what it is, in a sentence; empty where there is nothing to say.
        facts: label → what is to be known under it.
    """

    name: str
    about: str = ""
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


Listing = Mapping[str, tuple[Entry, ...]]
"""Section, such as `ops`, → its entries."""


MEANINGS = {
    "regimes": "ways to choose the values of a tensor, :NAME in a case",
    "layouts": "ways to place a tensor in memory, which a case has as @STRIDES and +OFFSET",
    "properties": "things that the bits of a kernel do not depend on",
}
"""Section → what it lists, where its name does not say it."""


def print_listing(listing: Listing, console: Console) -> None:
    """Print each section under a heading: entries with facts as blocks, and others a line each."""
    for section, entries in listing.items():
        line(console, f"{section.capitalize()}: {len(entries)}", "bold")
        if section in MEANINGS:
            paragraph(console, Text(MEANINGS[section], "dim"), label="  ")
        width = max((len(entry.name) for entry in entries if not entry.facts), default=0)
        for entry in entries:
            _print_block(entry, console) if entry.facts else _print_short(entry, width, console)
        line(console)


def _print_short(entry: Entry, width: int, console: Console) -> None:
    paragraph(console, Text(entry.about), label=f"  {entry.name:<{width}}  ", label_style="bold")


def _print_block(entry: Entry, console: Console) -> None:
    line(console, Text.assemble("  ", (entry.name, "bold")))
    if entry.about:
        paragraph(console, Text(entry.about), label="    ")
    width = max(map(len, entry.facts))
    for label, values in entry.facts.items():
        _print_fact(f"    {label:<{width}}  ", label, values, console)


def _print_fact(head: str, label: str, values: Sequence[str], console: Console) -> None:
    if label == "source":
        line(console, Text.assemble((head, "dim"), *map(shown_path, values)))
    else:
        paragraph(console, Text(", ".join(values) or "none"), label=head, label_style="dim")
