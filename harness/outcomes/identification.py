"""Results of `lastbit identify`: the contracts that a kernel keeps, and its distance from the others."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields


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
        """Whether the kernel's formula alone rules out the contract."""
        return self.differing > 0 and not self.outside and not self.unexplained and not self.undefined

    def __add__(self, other: ContractTally) -> ContractTally:
        return ContractTally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


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
class CombinationSearch:
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
        followed: cases in which the kernel was followed on residues.
        opaque: operations of the kernel that have no residues, each with its place and the reason.
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
