"""Properties of kernels' bits, of a run and as the result of `lastbit invariance`: what the bits depend on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.encoding import as_text, encoded
from lastbit.reports.paper import line, paragraph, print_table
from lastbit.reports.summary import distance, grouped, plural, repro_command
from lastbit.run import Run

MEANING = (
    "kept: declared, and holds · holds: not declared · BROKEN: declared, or with bits that the contract excludes · "
    "broken: not declared, and each bit is legal · errored: the kernel raised · "
    "unasked: declared, and not applicable in any case · –: not declared, and not applicable or not asked"
)
"""What the words of `word` mean, for a reader."""


def word(one: PropertyResult | None) -> str:
    """Return one word for the outcome of a property; `–` if it is not applicable or was not asked."""
    if one is None:
        return "–"
    if one.outcome is PropertyOutcome.NOT_APPLICABLE:
        return "unasked" if one.declared else "–"
    if one.outcome is PropertyOutcome.HOLDS:
        return "kept" if one.declared else "holds"
    name = "errored" if one.outcome is PropertyOutcome.ERRORED else "broken"
    return name.upper() if one.fails else name


def extent(one: PropertyResult) -> str:
    """Describe a broken property: where bits change, how many, how far, whether legally; or the kernel's exception."""
    if one.outcome is PropertyOutcome.ERRORED:
        return one.reason
    rows = f" in {plural(one.rows, 'row')}" if one.rows else ""
    many = f"{one.elements:,} of {plural(one.numel, 'element')} of {one.result}{rows}, up to {distance(one.ulp)} ulp"
    return ", ".join(filter(None, (one.where, many, legality(one))))


def legality(one: PropertyResult) -> str:
    """Say whether the contract allows the results of both calls of a broken property; empty if that was not asked."""
    return {None: "", True: "legal", False: "outside the contract"}[one.legal]


@dataclass(frozen=True)
class FoundProperties:
    """The properties of one kernel on one device in a run: property → result over all cases."""

    op: str
    kernel: str
    device: str
    properties: Mapping[str, PropertyResult]


def found_in(run: Run) -> list[FoundProperties]:
    """List the kernels of a run that were asked for properties, in the order of the run."""
    found = []
    for kernel, device in run.subjects():
        results = run.of(kernel, device)
        if merged := together(one for result in results for one in result.properties):
            found.append(FoundProperties(results[0].op, kernel, device, merged))
    return found


@dataclass(frozen=True)
class PropertyTable:
    """The kernels of one op beside the properties that were asked of them: a row of words each."""

    op: str
    properties: tuple[str, ...]
    kernels: tuple[FoundProperties, ...]

    @property
    def headers(self) -> tuple[str, ...]:
        return ("kernel", "device", *self.properties)


def property_tables(found: Sequence[FoundProperties]) -> Iterator[PropertyTable]:
    """Yield one table per op, with the properties that at least one kernel has a word for."""
    for op, own in grouped((one.op, one) for one in found).items():
        names = dict.fromkeys(name for one in own for name in one.properties)
        said = tuple(n for n in names if any(word(one.properties.get(n)) != "–" for one in own))
        yield PropertyTable(op, said, tuple(own))


def held(found: FoundProperties) -> Iterator[str]:
    """Yield the properties that hold, declared or not, and the declared ones that no case could ask for."""
    for name, told in (("kept", "holds what it declares"), ("holds", "holds, undeclared")):
        if names := [one.name for one in found.properties.values() if word(one) == name]:
            yield f"{told}: {', '.join(names)}"
    if unasked := [f"{one.name} ({one.reason})" for one in found.properties.values() if word(one) == "unasked"]:
        yield f"declared, but not applicable in any case: {', '.join(unasked)}"


def broken(found: FoundProperties) -> Iterator[tuple[str, bool]]:
    """Yield a sentence for each broken property, and whether it fails the kernel; those that do come first."""
    results = [one for one in found.properties.values() if word(one).lower() in ("broken", "errored")]
    for one in sorted(results, key=lambda one: not one.fails):
        yield f"{one.name} {word(one).lower()}{'' if one.declared else ', undeclared'}: {extent(one)}", one.fails


def cell(one: PropertyResult | None) -> tuple[str, str]:
    """Return the word for a property, and the text below it.

    That is where bits change, the kernel's exception, or why a declared property could not be asked.
    """
    if one is None or word(one) == "unasked":
        return word(one), one.reason if one is not None else ""
    return word(one), extent(one) if one.outcome in (PropertyOutcome.BROKEN, PropertyOutcome.ERRORED) else ""


# Result of `lastbit invariance`


@dataclass(frozen=True)
class Invariance:
    """The properties of one kernel's bits.

    Attributes:
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
    properties = found.properties.values()
    shown = [one for one in properties if one.outcome is not PropertyOutcome.NOT_APPLICABLE]
    rows = []
    for one in shown:
        cells = [one.name, f"{one.outcome}{' (declared)' * one.declared}", f"{one.pairs:,}", *[""] * 5]
        if one.outcome is PropertyOutcome.BROKEN:
            cells[3:] = [one.where or "–", f"{one.elements:,} of {one.numel:,}", f"{one.rows:,}" if one.rows else "–"]
            cells += [distance(one.ulp), legality(one) or "–"]
        rows.append([Text(cell, STYLES[word(one)]) for cell in cells])
    if shown:
        print_table(console, _HEADERS, rows)
    unasked = (one for one in properties if one.outcome is PropertyOutcome.NOT_APPLICABLE)
    named = grouped((one.reason, f"{one.name}{' (declared)' * one.declared}") for one in unasked)
    for reason, names in named.items():
        paragraph(console, Text(f"{', '.join(names)}{': ' * bool(reason)}{reason}", "dim"), label="  not applicable: ")
    for one in shown:
        if one.reason:
            paragraph(console, Text(f"{one.name}: {one.reason}", "dim"), label="  besides: ")
        if one.outcome is PropertyOutcome.BROKEN:
            illegal = "; these bits are not legal: the contract excludes them" if one.excluded else ""
            style = "bold red" if one.fails else "bold"
            line(console, f"  {one.name}, the first pair that differs{illegal}:", style)
            line(console, f"    {one.first}")
            line(console, f"    {one.second}")
            if one.library:
                line(console, f"  {one.library}")
            line(console, "  to look further:")
            case = one.first.partition(", ")[0]  # what follows says in words how the first call differs from its line
            line(console, f"    {repro_command(case, found.kernel, found.device, [one.name], options)}")
    for error in found.errors:
        paragraph(console, Text(error, "bold magenta"), label="  errored: ")
    if not found.cases:
        line(console, "  nothing to ask: no case that it takes, or no such property of its op", "bold yellow")
    line(console)


def print_overview(found: Sequence[Invariance], console: Console) -> None:
    """Print several kernels beside the properties that were asked of them, a table per op."""
    for table in property_tables([FoundProperties(one.op, one.kernel, one.device, one.properties) for one in found]):
        line(console, f"Properties of kernels of {table.op}", "bold")
        rows = []
        for one in table.kernels:
            words = [word(one.properties.get(name)) for name in table.properties]
            rows.append((Text(one.kernel), Text(one.device), *(Text(said, STYLES[said]) for said in words)))
        print_table(console, table.headers, rows)
        line(console)
    paragraph(console, Text(MEANING, "dim"))


def as_json(found: Sequence[Invariance]) -> str:
    """Write the results as one JSON object: each kernel with each property over all cases, and in each of them."""
    kernels = []
    for kernel in found:
        each = [{**encoded(one), "fails": one.fails} for one in kernel.properties.values()]
        kernels.append({**encoded(kernel), "properties": each, "exit_code": kernel.exit_code})
    return as_text({"format": FORMAT, "kernels": tuple(kernels)})
