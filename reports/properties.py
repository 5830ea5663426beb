"""Properties of kernels' bits in words, and the table kernel × property of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.property_result import Outcome, PropertyResult, together
from harness.run import Run
from reports.summary import distance, plural

MEANING = (
    "kept: declared, and holds · holds: not declared · BROKEN: declared, or with bits that the contract excludes · "
    "broken: not declared, and each bit is legal · –: not applicable, or without an answer"
)
"""What the words of `word` mean, for a reader."""


def word(one: PropertyResult | None) -> str:
    """One word for what was found of a property; `–` where it means nothing or was not asked."""
    if one is None or one.outcome is Outcome.NOT_APPLICABLE:
        return "–"
    if one.outcome is Outcome.HOLDS:
        return "kept" if one.declared else "holds"
    return "BROKEN" if one.fails else "broken"


def extent(one: PropertyResult) -> str:
    """Where the bits of a broken property change, how many, how far, and whether they are legal."""
    rows = f" in {plural(one.rows, 'row')}" if one.rows else ""
    many = f"{one.elements:,} of {plural(one.numel, 'element')} of {one.result}{rows}, up to {distance(one.ulp)} ulp"
    return ", ".join(filter(None, (one.where, many, legality(one))))


def legality(one: PropertyResult) -> str:
    """Whether the contract allows what both calls of a broken property gave; empty where nobody asked."""
    return {None: "", True: "legal", False: "outside the contract"}[one.legal]


@dataclass(frozen=True)
class Found:
    """What a run found of the properties of one kernel on one device: property → result over all cases."""

    op: str
    kernel: str
    device: str
    properties: Mapping[str, PropertyResult]


def found_in(run: Run) -> list[Found]:
    """The kernels of a run that were asked, in the order of the run."""
    found = []
    for kernel, device in run.subjects():
        results = run.of(kernel, device)
        if merged := together(one for result in results for one in result.properties):
            found.append(Found(results[0].op, kernel, device, merged))
    return found


@dataclass(frozen=True)
class PropertyTable:
    """The kernels of one op beside the properties that were asked of them: a row of words each."""

    op: str
    properties: tuple[str, ...]
    kernels: tuple[Found, ...]

    @property
    def headers(self) -> tuple[str, ...]:
        return ("kernel", "device", *self.properties)


def property_tables(found: Sequence[Found]) -> Iterator[PropertyTable]:
    """One table per op, with the properties of which one kernel at least says something."""
    for op in dict.fromkeys(one.op for one in found):
        own = tuple(one for one in found if one.op == op)
        names = dict.fromkeys(name for one in own for name in one.properties)
        said = tuple(n for n in names if any(word(one.properties.get(n)) != "–" for one in own))
        yield PropertyTable(op, said, own)


def sentences(found: Found) -> Iterator[tuple[str, bool]]:
    """What a kernel keeps and what is broken, a sentence each, and whether that fails it."""
    by_word: dict[str, list[PropertyResult]] = {}
    for one in found.properties.values():
        by_word.setdefault(word(one), []).append(one)
    if kept := by_word.get("kept"):
        yield f"holds what it declares: {_names(kept)}", False
    if holds := by_word.get("holds"):
        yield f"holds undeclared: {_names(holds)}", False
    for one in [*by_word.get("BROKEN", ()), *by_word.get("broken", ())]:
        declared = "declared" if one.declared else "undeclared"
        yield f"{one.name} is broken, {declared}: {extent(one)}", one.fails


def _names(results: Iterable[PropertyResult]) -> str:
    return ", ".join(one.name for one in results)
