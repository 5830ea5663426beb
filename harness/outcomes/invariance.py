"""Results of `lastbit invariance`: the circumstances on which the bits of a kernel depend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lastbit.property_result import PropertyOutcome, PropertyResult, together


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
