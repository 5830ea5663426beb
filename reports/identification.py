"""Result of `lastbit identify`: contracts, and how many elements of a kernel's results lie outside each."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from rich.console import Console
from rich.text import Text

from lastbit.reports.paper import fits, line, paragraph, print_table
from lastbit.reports.summary import grouped, listed, plural
from lastbit.result import told


@dataclass(frozen=True)
class ContractTally:
    """One contract against a kernel's results in some cases.

    Attributes:
        cases: cases in which the contract was tried.
        against: those of them that rule it out.
        undefined: those of them for which the contract has no meaning.
        elements: elements of the results, where it has one.
        outside: those of them that lie outside the contract.
        rows: rows that were tried; only in cases without an element outside.
        unexplained: those of them that no single latent value explains.
        untried: cases in which it was not tried any more, because others had ruled it out.
        followed: elements that were compared by their residues; only in cases that nothing else rules out.
        equal: those of them that follow from its formula, whatever the order of sums.
        differing: those of them that follow from another formula; the others are open.
    """

    cases: int = 0
    against: int = 0
    undefined: int = 0
    elements: int = 0
    outside: int = 0
    rows: int = 0
    unexplained: int = 0
    untried: int = 0
    followed: int = 0
    equal: int = 0
    differing: int = 0

    @property
    def fits(self) -> bool:
        """The contract allows every bit of every case."""
        return self.cases > 0 and not self.against and not self.untried

    @property
    def distance(self) -> tuple[float, ...]:
        """The distance of the kernel from the contract: shares of cases, elements, rows and of the formula."""
        shares = (
            (self.undefined, self.cases),
            (self.outside, self.elements),
            (self.unexplained, self.rows),
            (self.differing, self.followed),
        )
        return tuple(part / whole if whole else 0.0 for part, whole in shares)

    @property
    def of_another_formula(self) -> bool:
        """Return whether the kernel's formula alone rules out the contract."""
        return self.differing > 0 and not self.outside and not self.unexplained and not self.undefined

    def __add__(self, other: ContractTally) -> ContractTally:
        return ContractTally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Candidate:
    """Contracts that are one computation in all cases in which they were tried.

    Attributes:
        fixed: the options that they share, as a name; empty if they are not all that these options leave open.
        free: the axes that make no difference.
        tallies: dtypes → figures of the cases with these dtypes.
        changed: whether these round otherwise than every contract of the op.
        changes: what they round otherwise than what `fixed` stands for, if they do so alike.
    """

    contracts: tuple[str, ...]
    fixed: str
    free: tuple[str, ...]
    tallies: Mapping[str, ContractTally]
    changed: bool = False
    changes: tuple[str, ...] = ()

    @property
    def total(self) -> ContractTally:
        return functools.reduce(operator.add, self.tallies.values(), ContractTally())


@dataclass(frozen=True)
class Answer:
    """The contracts that the kernel keeps for one set of dtypes.

    Attributes:
        fits: the candidates that allow every bit of them; where some fit all dtypes, only those.
        coinciding: those of `fits` that no input of these dtypes can tell from the first.
        telling: name of each other of `fits` that is a contract of the op → a case that can tell it from the first.
    """

    dtypes: str
    cases: int
    fits: tuple[Candidate, ...]
    coinciding: tuple[Candidate, ...] = ()
    telling: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CombinationSearch:
    """The combinations of rounding points that were tried where no contract of the op fits.

    Attributes:
        points: most rounding points that were changed at once, in all ways that there are.
        left: how many ways there are to change one more, if they were too many to try.
    """

    tried: int = 0
    points: int = 0
    left: int = 0


@dataclass(frozen=True)
class Identification:
    """The contracts of one kernel on one device.

    Attributes:
        claim: the contract that the kernel claims, which plays no part; empty if it claims none.
        candidates: nearest first.
        answers: one per set of dtypes.
        unsupported: reason → cases that the kernel does not take.
        errors: one line per case in which the kernel raised, or returned what cannot be judged.
        contracts: how many contracts the op has.
        beside: what else is wrong with the kernel, a sentence for each kind, whatever contract it keeps.
        followed: cases in which the kernel was followed on residues.
        opaque: operations of the kernel that have no residues, each with its place and the reason.
        untold: options that fit as well as those of the first candidate of `kept`, each beside its other options.
    """

    kernel: str
    op: str
    device: str
    claim: str
    candidates: tuple[Candidate, ...] = ()
    answers: tuple[Answer, ...] = ()
    cases: int = 0
    unsupported: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    contracts: int = 0
    search: CombinationSearch = field(default_factory=CombinationSearch)
    beside: tuple[str, ...] = ()
    followed: int = 0
    opaque: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()

    @property
    def kept(self) -> tuple[Candidate, ...]:
        """The candidates that fit every case."""
        return tuple(c for c in self.candidates if c.total.fits)

    @property
    def claimed(self) -> Candidate | None:
        """The candidate that the kernel claims to keep."""
        return next((c for c in self.candidates if self.claim in c.contracts), None)

    @property
    def keeps_claim(self) -> bool:
        return self.claimed is not None and self.claimed.total.fits

    @property
    def rivals(self) -> tuple[Candidate, ...]:
        """The candidates that fit every case like the first, and that other inputs could tell from it."""
        return tuple(c for c in self.kept[1:] if any(c not in one.coinciding for one in self.answers))

    @property
    def settled(self) -> bool:
        """The kernel keeps what it claims, or a contract if it claims none, no other contract may be the one it keeps,
        and nothing else is wrong.
        """
        keeps = self.keeps_claim if self.claim else bool(self.kept)
        return keeps and not self.rivals and not self.beside

    @property
    def exit_code(self) -> int:
        """0 the kernel is settled, 1 it does not, or that is left open, 2 it raised, 3 nothing was judged."""
        if self.errors:
            return 2
        return 3 if not self.cases else int(not self.settled)


# Arbitrary: as many as a line has room for.
MOST_NAMES = 3
# Arbitrary: cases that are against a contract mostly say the same.
MOST_LINES = 6


def print_identification(found: Identification, console: Console, *, every: bool = False) -> None:
    """Print what a kernel keeps, and what that rests on; `every` adds a table of all contracts, nearest first."""
    said = answer(found) if found.cases else f"not judged: {_why_not_judged(found)}."
    style = "green" if found.settled else "bold red"
    paragraph(console, Text.assemble((found.kernel, "bold"), f" on {found.device}  ", (said, style)), label="")
    for sentence in found.beside:
        paragraph(console, Text(f"Whatever it keeps: {sentence}", "bold red"), label="  ")
    for sentence in remarks(found) if found.cases else ():
        paragraph(console, Text(sentence), label="  ")
    turned_down = [f"{plural(n, 'case')} unsupported: {reason}" for reason, n in found.unsupported.items()]
    raised = [
        f"errored in {plural(len(cases), 'case')}, such as {cases[0]}: {error}"
        for error, cases in grouped(one.rpartition(" in ")[::2] for one in found.errors).items()
    ]
    for texts, style in ((turned_down, "dim"), (raised, "bold magenta")):
        for text in [*texts[:MOST_LINES], *([f"and {len(texts) - MOST_LINES} more"] if texts[MOST_LINES:] else [])]:
            paragraph(console, Text(text, style), label="  ")
    if every and found.cases:
        _print_candidates(found, console)
        line(console)


_HEADERS = ("contract", "elements outside", "cases against", "rows unexplained", "of another formula")


def _print_candidates(found: Identification, console: Console) -> None:
    """Print the table of candidates; on a narrow console without totals, which are given below it."""
    headers = _HEADERS if found.followed else _HEADERS[:-1]
    for whole in (True, False):
        rows = []
        for candidate in found.candidates:
            total, cells = candidate.total, [name(candidate), elements(candidate.total, whole=whole)]
            pairs = (total.against, total.cases), (total.unexplained, total.rows), (total.differing, total.followed)
            cells += [f"{part:,}{f' of {of:,}' * whole}" if of else "–" for part, of in pairs]
            rows.append([Text(cell, "green" if total.fits else "") for cell in cells[: len(headers)]])
        if whole and fits(console, headers, rows):
            print_table(console, headers, rows)
            return
    print_table(console, headers, rows)
    tried = plural(max(candidate.total.elements for candidate in found.candidates), "element")
    text = f"of up to {tried} in {plural(found.cases, 'case')}; a wider terminal shows of how many each figure is"
    paragraph(console, Text(text, "dim"), label="  ")


def print_overview(found: Sequence[Identification], console: Console) -> None:
    """Print one line per kernel: the contract it keeps, whether it claims that, and the next best one."""
    rows = []
    for one in found:
        claimed = "–"
        if one.cases:
            claimed = "yes" if one.settled else "open" if one.keeps_claim else f"no: {claim(one)}"
            claimed = claimed if one.claim else "claims none"
            claimed += f", but it errored in {plural(len(one.errors), 'case')}" if one.errors else ""
        other = next_best(one)
        next_one = (name(other), elements(other.total)) if other else ("", "")
        rows.append(tuple(map(Text, (one.kernel, kept(one), claimed, *next_one))))
    headers = ("kernel", "keeps", "as claimed", "next best", "elements outside it")
    print_table(console, headers, rows, spare=headers[:-3:-1], wrap_first=True)


def name(candidate: Candidate) -> str:
    """Name a candidate, which may be several contracts that are one computation here."""
    return ", ".join([candidate.fixed or candidate.contracts[0], *candidate.changes])


def claim(found: Identification) -> str:
    """Return the claimed contract, without options that make no difference in these cases."""
    own, words = found.claimed, found.claim.split("+")
    fixed = re.findall(r"\w+", own.fixed) if own is not None and own.free else words
    return told(found.claim, {word for word in words if word not in fixed and ":" not in word})


def elements(total: ContractTally, *, whole: bool = True) -> str:
    """Format the elements outside: `75,077 of 290,000`, `at least` if cases were left out; and cases without meaning.

    Without `whole`, `75,077`.
    """
    least = "at least " if total.untried and total.outside else ""
    undefined = f"no meaning in {plural(total.undefined, 'case')}" if total.undefined else ""
    counts = f"{least}{total.outside:,}{f' of {total.elements:,}' * whole}" if total.elements else ""
    return ", ".join(filter(None, (counts, undefined)))


def kept(found: Identification) -> str:
    """Name the contract that the kernel keeps; by dtype where that differs."""
    if not found.cases:
        return f"not judged: {_why_not_judged(found)}"
    if found.kept:
        return name(found.kept[0])
    together = grouped((name(one.fits[0]) if one.fits else "none", one.dtypes) for one in found.answers)
    if set(together) <= {"none"}:
        return "none"
    return "; ".join(f"{contract} in {', '.join(dtypes)}" for contract, dtypes in together.items())


def _why_not_judged(found: Identification) -> str:
    if found.errors:
        return f"errored in {plural(len(found.errors), 'case')}"
    turned_down = sum(found.unsupported.values())
    return f"takes none of {plural(turned_down, 'case')}" if turned_down else "there was no case"


def next_best(found: Identification) -> Candidate | None:
    """Return the nearest contract of the op that does not fit."""
    return next((c for c in found.candidates if not c.total.fits and not c.changed), None)


def answer(found: Identification) -> str:
    """Say which contract the kernel keeps, and what is wrong with its claim."""
    other = next_best(found)
    if found.kept:
        said = f"keeps {kept(found)}" + (", as it claims" if found.keeps_claim else "")
        if open_ := listed(map(name, found.rivals), MOST_NAMES):
            telling = [case for one in found.answers for case in one.telling.values()]
            said += f", or {open_}: these cases do not tell them apart" + (f", but {telling[0]} can" if telling else "")
        said += "."
    elif any(one.fits for one in found.answers):
        said = f"keeps no contract throughout: {kept(found)}."
    else:
        nearest = f"; nearest is {name(other)}, {_how_far(other.total)}" if other else ""
        if any(c.total.of_another_formula for c in found.candidates):
            said = f"follows from no contract of {found.op}{nearest}."
        else:
            said = f"keeps none of the {plural(found.contracts, 'contract')} of {found.op}{nearest}."
    if found.keeps_claim or found.claimed is None:
        return said
    wrong = found.claimed.total
    parts = [f"{elements(wrong)} elements are not possible under it"] if wrong.outside else []
    parts += [f"{wrong.unexplained:,} of {plural(wrong.rows, 'row')} cannot be explained"] if wrong.unexplained else []
    parts += (
        [f"{wrong.differing:,} of {wrong.followed:,} elements follow from another formula"] if wrong.differing else []
    )
    return f"{said} The claim {claim(found)} is wrong: {', and '.join(parts)}."


def remarks(found: Identification) -> Iterator[str]:
    """Yield what an answer rests on, and its limits.

    First how many cases there were, what was followed by its formula in them, and which axes they say nothing of.
    """
    said = plural(found.cases, "case")
    total = found.kept[0].total if found.kept else ContractTally()
    if found.followed and total.followed:
        rest = total.followed - total.equal
        said += f"; in {found.followed:,}, {total.equal:,} of {total.followed:,} elements follow from its formula"
        said += f", {rest:,} left open" if rest else ""
    elif found.followed:
        said += f"; {found.followed:,} followed by formula"
    axes = dict.fromkeys(axis for one in found.candidates for axis in one.free)
    if free := [axis for axis in axes if all(axis in one.free for one in found.candidates if one.fixed)]:
        said += f"; {' and '.join(free)} of a contract make{'s' * (len(free) == 1)} no difference in them"
    yield f"{said}."
    if found.untold:
        yield f"These options fit all of them as well: {', '.join(found.untold)}."
    if found.kept and (other := next_best(found)) is not None:
        yield f"Nearest other: {name(other)}, {_how_far(other.total)}."
    if found.opaque:
        more = f", and {len(found.opaque) - 1} more" if found.opaque[1:] else ""
        yield f"Not followed by formula: {found.opaque[0]}{more}."
    declared = found.kept[0].contracts[0] if found.kept and found.kept[0].changed else ""
    if ":" in declared and not found.keeps_claim:
        yield f"A kernel declares that as {declared}."
    search = found.search
    if search.tried or search.left:
        changed = f"up to {plural(search.points, 'rounding point')} changed"
        yield f"Where no contract fits, {plural(search.tried, 'combination')} with {changed} were tried."
    if search.left:
        yield f"{search.left:,} with {search.points + 1} changed were not: --combinations raises the limit."


def _how_far(total: ContractTally) -> str:
    """Say how far a contract is, by the evidence that rules it out."""
    if total.of_another_formula:
        return f"from which {total.equal:,} of {total.followed:,} elements follow"
    parts = [f"outside of which {elements(replace(total, undefined=0))} elements lie"] if total.elements else []
    parts += [f"which has no meaning in {plural(total.undefined, 'case')}"] if total.undefined else []
    return ", and ".join(parts)
