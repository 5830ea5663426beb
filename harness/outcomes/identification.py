"""What `lastbit identify` found: which contracts a kernel keeps, and how far it is from the others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Tally:
    """One contract against what a kernel gave in some cases.

    Attributes:
        cases: cases in which the contract was tried.
        against: those of them that rule it out.
        undefined: those of them for which the contract has no meaning.
        elements: elements of the results, where it has one.
        outside: those of them that lie outside the contract.
        rows: rows that were tried; only in cases without an element outside.
        unexplained: those of them that no single latent value explains.
        untried: cases in which it was not tried any more, because others had ruled it out.
    """

    cases: int = 0
    against: int = 0
    undefined: int = 0
    elements: int = 0
    outside: int = 0
    rows: int = 0
    unexplained: int = 0
    untried: int = 0

    @property
    def fits(self) -> bool:
        """The contract allows every bit of every case."""
        return self.cases > 0 and not self.against and not self.untried

    @property
    def distance(self) -> tuple[float, float, float]:
        """How far the kernel is from the contract, the smaller the nearer: shares of cases, elements and rows."""
        shares = (self.undefined, self.cases), (self.outside, self.elements), (self.unexplained, self.rows)
        without, elements, rows = (part / whole if whole else 0.0 for part, whole in shares)
        return without, elements, rows

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.cases + other.cases,
            self.against + other.against,
            self.undefined + other.undefined,
            self.elements + other.elements,
            self.outside + other.outside,
            self.rows + other.rows,
            self.unexplained + other.unexplained,
            self.untried + other.untried,
        )


@dataclass(frozen=True)
class Candidate:
    """Contracts that are one computation in all cases in which they were tried.

    Attributes:
        contracts: their names.
        fixed: the options that they share, as a name; empty if they are not all that these options leave open.
        free: the axes that make no difference.
        tallies: dtypes → figures of the cases with these dtypes.
        changed: whether these round otherwise than every contract of the op.
        changes: what they round otherwise than what `fixed` stands for, if they do so alike.
    """

    contracts: tuple[str, ...]
    fixed: str
    free: tuple[str, ...]
    tallies: Mapping[str, Tally]
    changed: bool = False
    changes: tuple[str, ...] = ()

    @property
    def total(self) -> Tally:
        return functools.reduce(operator.add, self.tallies.values(), Tally())


@dataclass(frozen=True)
class Answer:
    """What the kernel keeps for one set of dtypes.

    Attributes:
        dtypes: those of the inputs.
        cases: cases with these dtypes.
        fits: the candidates that allow every bit of them, those first that fit all dtypes.
        coinciding: those of `fits` that no input of these dtypes can tell from the first.
    """

    dtypes: str
    cases: int
    fits: tuple[Candidate, ...]
    coinciding: tuple[Candidate, ...] = ()


@dataclass(frozen=True)
class Search:
    """The combinations of rounding points that were tried where no contract of the op fits.

    Attributes:
        tried: how many.
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
        cases: cases that were judged.
        unsupported: reason → cases that the kernel does not take.
        errors: one line per case in which the kernel raised, or returned what cannot be judged.
        contracts: how many contracts the op has.
        beside: what else is wrong with the kernel, a sentence for each kind, whatever contract it keeps.
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
    search: Search = field(default_factory=Search)
    beside: tuple[str, ...] = ()

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
