"""What a kernel has for the stages of the reference, and whether the last of them is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lastbit.diagnosing.traced_stages import Stage, Stages
from lastbit.tracing.cells import Expression, residues_of_cells


@dataclass(frozen=True, eq=False)
class CulpritSearch:
    """Which stage of a kernel went wrong, seen from the values of its expressions.

    Attributes:
        stages: what its stages must be, seen from the inputs.
        matched: stage → the expression that agrees with it best.
    """

    stages: Stages
    matched: Mapping[str, Expression]

    @cached_property
    def right(self) -> dict[str, Expression]:
        """The matched expressions that the contract allows in every cell that was written."""
        written, stages = self.stages.written, self.stages.all
        return {n: e for n, e in self.matched.items() if e.known[written].all() and not stages[n].outside(e).any()}

    def fault(self) -> tuple[Stage, Expression] | None:
        """The last stage and what the kernel has for it, if that is wrong."""
        last = self.stages.all.get(self.stages.last)
        if last is None or not last.outside(self.result).any() or last.name not in self.matched:
            return None
        return last, self.matched[last.name]

    @cached_property
    def result(self) -> Expression:
        """What the kernel gave for the last stage."""
        ends = {event.number: (event, e.lanes[event.number]) for e in self.stages.found for event in e.events}
        own = [ends[number] for number in self.stages.ends]
        residues = residues_of_cells(
            {event.number: event.made for event, _ in own},
            {event.number: lanes for event, lanes in own},
            self.stages.grid.size,
        )
        return Expression((), {}, self.stages.grid.given_values, self.stages.written, residues)
