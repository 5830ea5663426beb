"""The kernel's expression for each stage of the reference, and whether the one for the last stage is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lastbit.diagnosing.traced_stages import Stage, Stages
from lastbit.tracing.cells import Expression, residues_of_cells


@dataclass(frozen=True, eq=False)
class CulpritSearch:
    """The kernel's values matched to stages of the reference, to find the stage that is wrong.

    Attributes:
        stages: what its stages must be, seen from the inputs.
        matched: stage → the expression that agrees with it best.
    """

    stages: Stages
    matched: Mapping[str, Expression]

    @cached_property
    def right(self) -> dict[str, Expression]:
        """Map each stage to its matched expression, if the contract allows its value in every cell that was written."""
        written, stages = self.stages.written, self.stages.all
        return {n: e for n, e in self.matched.items() if e.known[written].all() and not stages[n].outside(e).any()}

    def fault(self) -> tuple[Stage, Expression] | None:
        """Return the last stage and the kernel's expression for it, if a value of the result is outside; else None."""
        last = self.stages.all.get(self.stages.last)
        if last is None or not last.outside(self.result).any() or last.name not in self.matched:
            return None
        return last, self.matched[last.name]

    @cached_property
    def result(self) -> Expression:
        """The kernel's result as an expression: its value and residue for each cell."""
        ends = {event.number: (event, e.lanes[event.number]) for e in self.stages.found for event in e.events}
        own = [ends[number] for number in self.stages.ends]
        residues = residues_of_cells(
            {event.number: event.made for event, _ in own},
            {event.number: lanes for event, lanes in own},
            self.stages.grid.size,
        )
        return Expression((), {}, self.stages.grid.given_values, self.stages.written, residues)
