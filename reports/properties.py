"""Properties of kernels' bits in words, and the table kernel × property of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.summary import distance, grouped, plural
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
    """Return the word for a property, and the text below it."""
    return word(one), _below(one) if one is not None else ""


def _below(one: PropertyResult) -> str:
    """Describe where bits change, the kernel's exception, or why a declared property could not be asked."""
    if word(one) == "unasked":
        return one.reason
    return extent(one) if one.outcome in (PropertyOutcome.BROKEN, PropertyOutcome.ERRORED) else ""
