"""Results of golden files, as data: scalars and indices, never tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from lastbit.result import CaseResult, Comparison

Index = tuple[int, ...]


class Status(StrEnum):
    """The outcome of a golden or of one of its cases, worst last; see `Status.worst`."""

    SAME = "SAME"
    SKIPPED = "SKIPPED"
    NEW = "NEW"
    CHANGED = "CHANGED"
    LOST = "LOST"
    GONE = "GONE"
    CONTRACT = "CONTRACT"
    INPUTS = "INPUTS"
    BROKEN = "BROKEN"
    ERRORED = "ERRORED"

    @staticmethod
    def worst(statuses: Iterable[Status]) -> Status:
        return max(statuses, key=list(Status).index, default=Status.SAME)


REFUSED = frozenset({Status.BROKEN, Status.ERRORED})
"""Statuses of which no golden is made."""


@dataclass(frozen=True)
class Figures:
    """Distances of a stage from its contract: fields of `Comparison`."""

    numel: int
    mismatched: int
    outside: int
    rel_l2: float
    bias: float

    @classmethod
    def of(cls, comparison: Comparison) -> Figures:
        return cls(comparison.numel, comparison.mismatched, comparison.outside, comparison.rel_l2, comparison.bias)


@dataclass(frozen=True)
class Farthest:
    """The element that moved farthest: its index, and its values."""

    index: Index
    before: float
    after: float


@dataclass(frozen=True)
class Change:
    """A stage whose bits differ from the golden's, or no longer keep its contract.

    Attributes:
        stage: its name.
        before, after: dtype and shape, as in `bf16[4,128]`; empty where there is no such stage.
        changed: elements that differ, of the `compared` ones.
        compared: elements that were compared one by one: those of a sample where the golden holds one, none where dtype
            or shape differ.
        max_ulp: largest distance between the values of an element.
        farthest: the element that moved farthest, if one of those compared differs.
        blocks: for a sample, how many blocks of the tensor have another hash, and how many there are.
        spans: first and last index of each stretch of those blocks.
        figures: distance from the contract, before and after.
        unordered: whether atomic additions changed its bits between calls, before and after.
    """

    stage: str
    before: str
    after: str
    changed: int = 0
    compared: int = 0
    max_ulp: float = 0.0
    farthest: Farthest | None = None
    blocks: tuple[int, int] = (0, 0)
    spans: tuple[tuple[Index, Index], ...] = ()
    figures: tuple[Figures | None, Figures | None] = (None, None)
    unordered: tuple[bool, bool] = (False, False)

    @property
    def same_bits(self) -> bool:
        """Whether no bit differs, but only the declaration of the stage."""
        return self.before == self.after and not self.changed and not self.blocks[0]


@dataclass(frozen=True)
class CaseOutcome:
    """One case of a golden, beside the kernel's results of today, or beside another golden.

    Attributes:
        line: the case.
        changes: stages that differ bit for bit, or in whether they are `unordered`; those left out that were and are.
        result: of today; None where nothing was run.
        reason: more about the status, where there is more to say.
    """

    line: str
    status: Status
    changes: tuple[Change, ...] = ()
    result: CaseResult | None = None
    reason: str = ""


@dataclass(frozen=True)
class ProvenanceDifference:
    """An item of provenance that is not the same on both sides."""

    item: str
    before: str
    after: str


@dataclass(frozen=True)
class KernelOutcome:
    """One golden file, beside the kernel's results of today, or beside another golden.

    Attributes:
        path: the file.
        contracts: the contract of the golden, and the one of today.
        provenance: what else is not as it was when the golden was made.
        unordered: results that are only held to the enclosure, because atomic additions change their bits.
        own: status of the file itself, such as NEW, SKIPPED or ERRORED; that of its cases may be worse.
        reason: why it has that status.
        lost: a sentence for each property that its bits had, and do not have today.
        elsewhere: the same of those that they need not have on this processor, which is not the golden's; no loss.
    """

    kernel: str
    path: str
    contracts: tuple[str, str] = ("", "")
    cases: tuple[CaseOutcome, ...] = ()
    provenance: tuple[ProvenanceDifference, ...] = ()
    unordered: tuple[str, ...] = ()
    own: Status = Status.SAME
    reason: str = ""
    lost: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def status(self) -> Status:
        return Status.worst([self.own, *(case.status for case in self.cases)])

    def having(self, status: Status) -> tuple[CaseOutcome, ...]:
        """Return the cases of that status."""
        return tuple(case for case in self.cases if case.status is status)


@dataclass(frozen=True)
class GoldenReport:
    """Golden files and what became of them.

    Attributes:
        subject: what was compared, as in `cpu` or `FOLDER and FOLDER`.
        options: of the command, that say where kernels and ops are.
    """

    subject: str
    kernels: tuple[KernelOutcome, ...]
    options: str = ""

    def exit_code(self, fine: Collection[Status]) -> int:
        """Return 0 if every golden has a `fine` status, 1 if not, 2 if one was not judged, 3 if nothing was run."""
        statuses = {kernel.status for kernel in self.kernels}
        if Status.ERRORED in statuses:
            return 2
        if statuses <= {Status.SKIPPED}:
            return 3
        return 0 if statuses <= set(fine) else 1
