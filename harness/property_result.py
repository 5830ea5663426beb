"""The result of a property of a kernel: whether its bits depend on something that they need not depend on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class PropertyOutcome(StrEnum):
    """The bits of calls that a property relates, equal or not; errored if the kernel raised in one of them."""

    HOLDS = "holds"
    BROKEN = "broken"
    ERRORED = "errored"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class PropertyResult:
    """A property of one kernel on one case, or on several.

    Attributes:
        name: the property: `rows`.
        outcome: what was found.
        declared: the kernel promises it, so that it fails where this is broken.
        pairs: pairs of calls that were compared.
        reason: why it is not applicable, what the kernel raised, or what was not tried, left out or seen besides.
        first, second: the first pair that differs, or one with bits that are not legal: a case line, and what
            differs in the other call, as a case line if it is one.
        where: what the change depends on, where that was found: "changes between 255 and 256 rows".
        result: the result that differs.
        elements, numel: how many of its elements differ in the pair where most do, of how many.
        rows: how many rows these are in; 0 where rows mean nothing.
        ulp: the largest distance in units in the last place; infinite between a number and what is none.
        legal: the contract allows the bits of both calls, of each pair of which it was asked; None if of none.
        library: the operation of torch that breaks it, where that is proven, and what it did; a sentence.
    """

    name: str
    outcome: PropertyOutcome
    declared: bool = False
    pairs: int = 0
    reason: str = ""
    first: str = ""
    second: str = ""
    where: str = ""
    result: str = ""
    elements: int = 0
    numel: int = 0
    rows: int = 0
    ulp: float = 0.0
    legal: bool | None = None
    library: str = ""

    @property
    def excluded(self) -> bool:
        """The contract excludes bits of the pair that differs."""
        return self.legal is False

    @property
    def fails(self) -> bool:
        """The kernel does not keep what it declares, or gives bits that its contract excludes."""
        wrong = self.outcome in (PropertyOutcome.BROKEN, PropertyOutcome.ERRORED)
        return wrong and (self.declared or self.excluded)


def together(results: Iterable[PropertyResult]) -> dict[str, PropertyResult]:
    """Combine results on several cases by property: the worst of them, with the pairs of all."""
    found: dict[str, PropertyResult] = {}
    for one in results:
        if (before := found.get(one.name)) is not None:
            one = replace(max(before, one, key=_severity), pairs=before.pairs + one.pairs)
        found[one.name] = one
    return found


def _severity(one: PropertyResult) -> tuple[bool, int, bool, int]:
    """Return a sort key for results of one property, the worst last: what fails the kernel, then what was tried."""
    order = (PropertyOutcome.NOT_APPLICABLE, PropertyOutcome.HOLDS, PropertyOutcome.ERRORED, PropertyOutcome.BROKEN)
    return one.fails, order.index(one.outcome), one.excluded, one.elements
