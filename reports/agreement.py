"""Result of `lastbit agree`: whether two kernels of one op give the same bits, and where and why they do not."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from lastbit.command_line import command
from lastbit.reports.encoding import as_text, encoded
from lastbit.reports.paper import line, paragraph, print_table
from lastbit.reports.summary import listed, plural


@dataclass(frozen=True)
class Apart:
    """The element in which two kernels are farthest apart, of the smallest case in which they differ.

    Attributes:
        values: what each kernel gave, in decimal.
    """

    index: tuple[int, ...]
    values: tuple[str, str]
    case: str


@dataclass(frozen=True)
class StageAgreement:
    """A stage that both kernels gave, over all cases.

    Attributes:
        result: it is a result; otherwise both kernels show it besides.
        cases, elements: in which it was compared.
        unequal_cases, unequal_elements: in which bits differ; all NaNs count as one.
        ulp: the largest distance of numbers; infinite where one is a NaN, or the dtypes differ.
        apart: where, if anywhere.
    """

    stage: str
    result: bool
    cases: int
    elements: int
    unequal_cases: int = 0
    unequal_elements: int = 0
    ulp: float = 0.0
    apart: Apart | None = None


@dataclass(frozen=True)
class KernelSide:
    """One of the two kernels, and the contracts that it keeps.

    Attributes:
        kept: the contracts of the op that allow every bit that it gave, the likeliest first.
        unsupported: reason → cases that it turned down for it.
        errors: what it raised, with the case.
        beside: what else is wrong with it, a sentence for each kind, as bits that differ from call to call.
    """

    kernel: str
    claim: str
    kept: tuple[str, ...] = ()
    unsupported: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Does:
    """The behaviour of a kernel at a stage.

    Attributes:
        contract: the one of its contracts that is nearest to the other kernel's.
        options: the options in which that differs from the other one; empty for options without a name.
        rounds_to: the format that it rounds the stage to; empty if it does not round it.
        recorded: the contract has the stage at all.
        place: the file, line and expression of the kernel that agree with the stage, where they were found.
    """

    contract: str
    options: tuple[str, ...]
    rounds_to: str = ""
    recorded: bool = True
    place: str = ""


@dataclass(frozen=True)
class Parting:
    """The first stage at which the contracts of two kernels compute different values, and what each does there."""

    stage: str
    does: tuple[Does, Does]


@dataclass(frozen=True)
class Agreement:
    """Two kernels on the cases that both take.

    Attributes:
        cases: cases in which both gave something.
        unequal_cases: those in which a result differs in a bit.
        stages: what both gave, in the order of the reference.
        common: contracts that both keep; bits that differ then are legal for both.
        parting: where contracts part, if both keep some and none of them in common.
        line: the smallest case in which a result differs; empty if there is none.
    """

    op: str
    device: str
    sides: tuple[KernelSide, KernelSide]
    cases: int = 0
    unequal_cases: int = 0
    stages: tuple[StageAgreement, ...] = ()
    common: tuple[str, ...] = ()
    parting: Parting | None = None
    line: str = ""

    @property
    def results(self) -> tuple[StageAgreement, ...]:
        return tuple(stage for stage in self.stages if stage.result)

    @property
    def shown(self) -> str:
        """The first stage that both kernels show and that differs; empty if there is none."""
        return next((stage.stage for stage in self.stages if stage.unequal_elements), "")

    @property
    def exit_code(self) -> int:
        """0 all results are equal, 1 some are not, 2 a kernel raised, 3 there was nothing to compare."""
        if any(side.errors for side in self.sides):
            return 2
        return 3 if not self.cases else int(self.unequal_cases > 0)


VERSION = 1
"""Of the JSON; it grows when a field goes or means something else."""

_HEADERS = ("stage", "elements that differ", "cases", "ulp", "farthest apart")
# What fits into a line; the JSON has all.
_MOST_NAMES = 3


def as_json(found: Agreement) -> str:
    """Write the agreement as one JSON object; a float that JSON cannot spell is a string."""
    about = {"version": VERSION, "exit_code": found.exit_code, "says": tuple(sentences(found))}
    return as_text(about | encoded(found))


def print_agreement(found: Agreement, console: Console, options: str = "") -> None:
    """Print the stages in a table, then what the kernels keep and where they part.

    `options` say where kernels and ops are, as in a repro line.
    """
    one, other = (side.kernel for side in found.sides)
    line(console, Text.assemble((one, "bold"), " and ", (other, "bold"), f" on {found.device}"))
    rows = []
    for stage in found.stages:
        apart = stage.apart
        cells = (
            stage.stage if stage.result else f"({stage.stage})",
            f"{stage.unequal_elements:,} of {stage.elements:,}",
            f"{stage.unequal_cases:,} of {stage.cases:,}",
            f"{stage.ulp:.0f}" if stage.unequal_elements else "–",
            f"[{', '.join(map(str, apart.index))}]: {' and '.join(apart.values)}" if apart else "",
        )
        rows.append([Text(cell, "" if stage.unequal_elements else "green") for cell in cells])
    if found.cases:
        print_table(console, _HEADERS, rows)
    styles = {0: "green", 1: "bold red"}
    for number, sentence in enumerate(sentences(found)):
        style = "" if number else styles.get(found.exit_code, "bold magenta")
        paragraph(console, Text(sentence, style), label="    " if number else "  → ")
    if found.line:
        line(console, "  a case in which they differ")
        for name in (one, other):  # a kernel of another revision is run beside today's
            kernel, mark, revision = name.partition("@")
            base = f"--base {shlex.quote(revision)}" * bool(mark)
            again = command("verify", kernel, found.line, f"--device {found.device} {base} {options}")
            line(console, f"    {again}")


def sentences(found: Agreement) -> Iterator[str]:
    """Yield sentences: whether the kernels agree, the contract of each, and where these part."""
    if not found.cases:
        yield "There was nothing to compare."
        yield from tuple(_not_compared(found)) or (
            f"No case with elements is one of {found.op} that both kernels take.",
        )
        return
    unequal, elements = (sum(getattr(s, what) for s in found.results) for what in ("unequal_elements", "elements"))
    cases = plural(found.cases, "case")
    if found.unequal_cases:
        yield f"They differ in {found.unequal_cases:,} of {cases}."
        if found.shown:
            yield f"Of the stages that both give, {found.shown} is the first that differs."
    else:
        where = " where neither kernel errored" if any(side.errors for side in found.sides) else ""
        yield f"Every bit is equal{where}: {plural(elements, 'element')} in {cases}."
    for side in found.sides:
        if side.kept:
            claims = ", as it claims" if side.claim in side.kept else f", and claims {side.claim}"
            yield f"{side.kernel} keeps {listed(side.kept, _MOST_NAMES)}{claims}."
        else:
            none = f"keeps no contract of {found.op} throughout; lastbit identify says more"
            yield f"{side.kernel} {none}. It claims {side.claim}."
    if found.parting is not None:
        pairs = tuple(zip(found.sides, found.parting.does, strict=True))
        one, other = (_does(side, does, found.parting) for side, does in pairs)
        yield f"Their contracts part at {found.parting.stage}: {one}, {other}."
        yield from (f"In {side.kernel} that is {does.place}." for side, does in pairs if does.place)
    elif found.unequal_cases and found.common:  # orders of sums would be named here
        freedom = "Same contract: the bits differ within its freedom, both legal"
        share = f"{100 * unequal / elements:.2g} % of the elements"
        yield f"{freedom}, in {share}. Another order of sums or another formula does that."
    yield from _not_compared(found)


def _does(side: KernelSide, does: Does, parting: Parting) -> str:
    """Describe what one kernel does at the stage, and under which options."""
    options = f" ({' and '.join(does.options)})" if does.options else ""
    if not does.recorded:
        return f"{side.kernel} has no such stage{options}"
    if parting.does[0].rounds_to == parting.does[1].rounds_to:
        return f"{side.kernel} computes it under {does.contract}"
    rounds = f"rounds it to {does.rounds_to}" if does.rounds_to else "does not round it"
    return f"{side.kernel} {rounds}{options}"


def _not_compared(found: Agreement) -> Iterator[str]:
    for side in found.sides:
        for reason, count in side.unsupported.items():
            yield f"{side.kernel} turned down {plural(count, 'case')}: {reason}."
        if side.errors:
            yield f"{side.kernel} errored in {plural(len(side.errors), 'case')}: {side.errors[0]}"
        yield from (f"Beside its values, {side.kernel}: {sentence}" for sentence in side.beside)
