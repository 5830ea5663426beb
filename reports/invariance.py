"""Result of `lastbit invariance`: the circumstances on which the bits of a kernel depend."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.encoding import encoded
from lastbit.reports.paper import line, paragraph, print_table
from lastbit.reports.properties import MEANING, FoundProperties, legality, property_tables, word
from lastbit.reports.summary import distance, grouped, plural, repro_command


@dataclass(frozen=True)
class Invariance:
    """The properties of one kernel's bits.

    Attributes:
        kernel, op, contract, device: what was asked.
        cases: lines of the cases.
        results: of each property on each case, but for those in `errors`.
        errors: one for each question that has no answer because the kernel raised, or ended its process.
    """

    kernel: str
    op: str
    contract: str
    device: str
    cases: tuple[str, ...] = ()
    results: tuple[PropertyResult, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def properties(self) -> Mapping[str, PropertyResult]:
        """The result of each property over all cases."""
        return together(self.results)

    @property
    def exit_code(self) -> int:
        """0 nothing that fails the kernel is broken, 1 something is, 2 it raised, 3 there was no case that it takes."""
        if self.errors or any(one.fails and one.outcome is PropertyOutcome.ERRORED for one in self.results):
            return 2
        return int(any(one.fails for one in self.results)) if self.cases else 3


FORMAT = 1
"""Version of the JSON object."""

STYLES = {
    "kept": "green",
    "holds": "green",
    "BROKEN": "bold red",
    "broken": "yellow",
    "ERRORED": "bold magenta",
    "errored": "magenta",
    "unasked": "yellow",
    "–": "dim",
}

_HEADERS = ("property", "outcome", "pairs", "where", "elements", "rows", "ulp", "bits")


def print_invariance(found: Invariance, console: Console, options: str = "") -> None:
    """Print a table of a kernel's properties, and the first pair of calls of each that is broken."""
    head = Text.assemble((found.kernel, "bold"), f" on {found.device}  contract {found.contract} of {found.op}")
    line(console, head.append(f"  {plural(len(found.cases), 'case')}"))
    shown = [one for one in found.properties.values() if one.outcome is not PropertyOutcome.NOT_APPLICABLE]
    if shown:
        print_table(console, _HEADERS, [_row(one) for one in shown])
    unasked = (one for one in found.properties.values() if one.outcome is PropertyOutcome.NOT_APPLICABLE)
    named = grouped((one.reason, f"{one.name}{' (declared)' * one.declared}") for one in unasked)
    for reason, names in named.items():
        paragraph(console, Text(f"{', '.join(names)}{': ' * bool(reason)}{reason}", "dim"), label="  not applicable: ")
    for one in shown:
        if one.reason:
            paragraph(console, Text(f"{one.name}: {one.reason}", "dim"), label="  besides: ")
        if one.outcome is PropertyOutcome.BROKEN:
            _print_pair(found, one, console, options)
    for error in found.errors:
        paragraph(console, Text(error, "bold magenta"), label="  errored: ")
    if not found.cases:
        line(console, "  nothing to ask: no case that it takes, or no such property of its op", "bold yellow")
    line(console)


def _row(one: PropertyResult) -> tuple[Text, ...]:
    outcome = f"{one.outcome}{' (declared)' * one.declared}"
    cells = [one.name, outcome, f"{one.pairs:,}"]
    if one.outcome is PropertyOutcome.BROKEN:
        cells += [one.where or "–", f"{one.elements:,} of {one.numel:,}", f"{one.rows:,}" if one.rows else "–"]
        cells += [distance(one.ulp), legality(one) or "–"]
    else:
        cells += [""] * (len(_HEADERS) - len(cells))
    return tuple(Text(cell, STYLES[word(one)]) for cell in cells)


def _print_pair(found: Invariance, one: PropertyResult, console: Console, options: str) -> None:
    """Print two calls whose bits differ, as lines to paste, and the command that makes them again."""
    illegal = "; these bits are not legal: the contract excludes them" if one.excluded else ""
    line(console, f"  {one.name}, the first pair that differs{illegal}:", "bold red" if one.fails else "bold")
    line(console, f"    {one.first}")
    line(console, f"    {one.second}")
    if one.library:
        line(console, f"  {one.library}")
    line(console, "  to look further:")
    case = one.first.partition(", ")[0]  # what follows says in words how the first call differs from its line
    line(console, f"    {repro_command(case, found.kernel, found.device, [one.name], options)}")


def print_overview(found: Sequence[Invariance], console: Console) -> None:
    """Print several kernels beside the properties that were asked of them, a table per op."""
    for table in property_tables([FoundProperties(one.op, one.kernel, one.device, one.properties) for one in found]):
        line(console, f"Properties of kernels of {table.op}", "bold")
        rows = [
            (Text(one.kernel), Text(one.device), *(_cell(one.properties.get(name)) for name in table.properties))
            for one in table.kernels
        ]
        print_table(console, table.headers, rows)
        line(console)
    paragraph(console, Text(MEANING, "dim"))


def _cell(one: PropertyResult | None) -> Text:
    return Text(word(one), STYLES[word(one)])


def as_json(found: Sequence[Invariance]) -> str:
    """Write the results as one JSON object; a float that JSON cannot spell is the string `Infinity`."""
    data = {"format": FORMAT, "kernels": [_document(one) for one in found]}
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)


def _document(found: Invariance) -> dict[str, Any]:
    """Encode a kernel: each property over all cases, and in each of them."""
    each = [{**encoded(one), "fails": one.fails} for one in found.properties.values()]
    return {**encoded(found), "properties": each, "exit_code": found.exit_code}
