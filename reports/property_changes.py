"""Properties of a kernel's bits in two runs: gained and lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.properties import extent
from lastbit.result import CaseResult


@dataclass(frozen=True)
class PropertyChange:
    """A property that a kernel's bits have in one of the runs alone; both have asked for it."""

    before: PropertyResult
    after: PropertyResult

    @property
    def lost(self) -> bool:
        return self.after.outcome is PropertyOutcome.BROKEN

    @property
    def worse(self) -> bool:
        """Whether the loss counts: the kernel declares or declared the property, or the new bits are not legal."""
        return self.lost and (self.after.fails or self.before.declared)


def properties_changed(before: Iterable[CaseResult], after: Iterable[CaseResult]) -> Iterator[PropertyChange]:
    """Yield the properties that hold in one run and are broken in the other."""
    old, new = (together(one for result in results for one in result.properties) for results in (before, after))
    for name in old:
        if name in new and {old[name].outcome, new[name].outcome} == {PropertyOutcome.HOLDS, PropertyOutcome.BROKEN}:
            yield PropertyChange(old[name], new[name])


def sentence(change: PropertyChange) -> str:
    """Write `lost: rows, which it declares: changes between 255 and 256 rows, …`, or what was gained."""
    one = change.after
    declared = ", which it declares" if one.declared else ", which it declared" if change.before.declared else ""
    return f"lost: {one.name}{declared}: {extent(one)}" if change.lost else f"gained: {one.name}{declared}"
