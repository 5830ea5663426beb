"""With which expression of a kernel its values stop being those of the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lastbit.diagnosing.traced_stages import Stage, Stages, distance
from lastbit.errors import LastbitError
from lastbit.judging.expected import Numbers
from lastbit.numerics import Format
from lastbit.tracing.cells import Expression, residues_of_cells

LIKE = 0.5
"""Relative L2 error up to which another value of a stage is tried first."""
COARSEST = 2.0**-4
"""Relative error of the coarsest rounding, to e4m3."""


@dataclass(frozen=True, eq=False)
class Fault:
    """The first stage that does not follow from the kernel's own earlier ones.

    Attributes:
        stage: what it must be.
        value: the kernel's value of it: if the reference goes on from there, what the kernel gave is right.
        span: the expressions from the kernel's last right stages to that, in order, that one included.
    """

    stage: Stage
    value: Expression
    span: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Search:
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

    def fault(self) -> Fault | None:
        """The first stage of which the kernel has another value that explains what it gave.

        The last stage itself where no earlier one does; None if nothing is wrong with that.
        """
        found = self._explaining()
        if found is None:
            return None
        for name, e in self.matched.items():  # one before that, which is wrong as well
            if name == found.stage.name:
                break
            if name not in self.right and e in found.span:
                return Fault(self.stages.all[name], e, self._span(self.stages.all[name], e))
        return found

    def _explaining(self) -> Fault | None:
        last = self.stages.all.get(self.stages.last)
        if last is None or not last.outside(self.result).any():
            return None
        earlier = [s for s in self.stages.all.values() if s is not last]
        for is_plausible in (self._is_like, self._is_unlike):
            for stage in earlier:
                for e in self._others(stage):
                    if is_plausible(stage, e) and self._explains(stage, e):
                        return Fault(stage, e, self._span(stage, e))
        value = self.matched.get(last.name)
        return None if value is None else Fault(last, value, self._span(last, value))

    def _is_like(self, stage: Stage, e: Expression) -> bool:
        return _error(stage, e) <= LIKE

    def _is_unlike(self, stage: Stage, e: Expression) -> bool:
        """Far off, where the kernel has no right value; and nothing that the last stage only hands on."""
        if self._is_like(stage, e) or e in self.stages.given:
            return False
        return stage.name not in self.right or not isinstance(stage.expected, Numbers)

    def _others(self, stage: Stage) -> Iterator[Expression]:
        """Expressions that could be a stage and that the contract excludes, each value once.

        Not what led to the right value of the stage: from that another one may follow, or one that has passed it by.
        And not what follows from the right value of a later stage.
        """
        known = self.led_to_right([stage.name])
        names = list(self.stages.all)
        later = [self.right[name] for name in names[names.index(stage.name) + 1 :] if name in self.right]
        numbers = {event.number for e in later for event in e.events}
        taken = {id(e) for e in self.stages.full if self.stages.is_input(e) or e in self.right.values()}
        seen: dict[bytes, Expression] = {}
        for e in self.stages.full:
            if e.number not in known and stage.takes(e) and stage.outside(e).any():
                before = self.stages.ancestry.before(event.number for event in e.events)
                if numbers & before or self._goes_on(stage, e, before):
                    continue
                key = e.values.tobytes()
                if key not in seen or id(seen[key]) in taken:  # no input and no other stage, or the last of these
                    seen[key] = e
        yield from sorted(seen.values(), key=lambda e: e.number)

    def _goes_on(self, stage: Stage, e: Expression, before: set[int]) -> bool:
        """Whether it follows from the right value of a stage, and is more than that rounded once more."""
        right = self.right.get(stage.name)
        if right is None or not before & {event.number for event in right.events}:
            return False
        both = right.known & e.known
        apart = np.abs(e.values[both].astype(np.float64) - right.values[both])
        return bool((apart > COARSEST * np.abs(right.values[both])).any())

    def _explains(self, stage: Stage, e: Expression) -> bool:
        """Whether what the kernel gave follows from these values of a stage, where they are known."""
        try:
            onward = self.stages.onward(self.stages.from_kernel(stage, e))
        except LastbitError:
            return False
        last = onward.all.get(self.stages.last)
        if last is None or last.outside(self.result).any():
            return False
        error, before = (_error(stage, self.result) for stage in (last, self.stages.all[self.stages.last]))
        return not np.isfinite(error) or error <= max(before / 2, 2 * _epsilon(last))

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

    def _span(self, stage: Stage, e: Expression) -> tuple[Expression, ...]:
        """What led to an expression after what is right, and not to other stages alone."""
        known = self.led_to_right(self.stages.upto(stage.name))
        before = self.stages.ancestry.before(event.number for event in e.events) - known
        between = [x for x in self.stages.found if any(event.number in before for event in x.events)]
        return tuple(x for x in between if x.events[0].places) or (e,)

    def led_to_right(self, stages: Collection[str]) -> set[int]:
        """Numbers of the events that are one of these stages, rightly, or led to one."""
        same: list[Expression] = []
        for name in stages:
            if name in self.right:
                stage, values = self.stages.all[name], self.right[name].values.tobytes()
                others = [e for e in self.stages.found if e.values.tobytes() == values and stage.takes(e)]
                same += [self.right[name], *(e for e in others if e not in self.stages.given)]
        return self.stages.ancestry.before(event.number for e in same for event in e.events)


def _error(stage: Stage, e: Expression) -> float:
    return distance(e.values, stage.parts[1], e.known)


def _epsilon(stage: Stage) -> float:
    return stage.expected.format.epsilon if isinstance(stage.expected.format, Format) else 0.0
