"""With which expression of a kernel its values stop being those of the reference."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from harness.diagnosing.traced_stages import Stage, Stages
from harness.errors import LastbitError
from harness.tracing.cells import Ancestry, Expression


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
        ancestry: what led to what.
        known: stages from which the reference goes on, which are right.
    """

    stages: Stages
    matched: Mapping[str, Expression]
    ancestry: Ancestry
    known: Collection[str] = ()

    @cached_property
    def right(self) -> dict[str, Expression]:
        """The matched expressions that the contract allows in every cell."""
        all_stages = self.stages.all
        return {name: e for name, e in self.matched.items() if not all_stages[name].outside(e).any()}

    def fault(self) -> Fault | None:
        """The first stage of which the kernel has another value that explains what it gave.

        The last stage itself where no earlier one does; None if nothing is known of that.
        """
        last = self.stages.all.get(self.stages.last)
        for stage in self.stages.all.values():
            if stage is last:
                break
            if stage.name in self.known:
                continue
            for e in self._others(stage):
                if self._explains(stage, e):
                    return Fault(stage, e, self._span(stage, e))
        end = next((e for e in reversed(self.stages.found) if self.stages.is_given(e)), None)
        if last is None or end is None:
            return None
        value = self.matched.get(last.name, end)
        return Fault(last, value, self._span(last, value))

    def _others(self, stage: Stage) -> Iterator[Expression]:
        """Expressions that could be a stage and that the contract excludes, each value once."""
        seen = set()
        for e in self.stages.found:
            if e.events[0].places and stage.takes(e) and stage.outside(e).any():
                key = e.values.tobytes()
                if key not in seen:
                    seen.add(key)
                    yield e

    def _explains(self, stage: Stage, e: Expression) -> bool:
        """Whether what the kernel gave follows from these values of a stage, where they are known."""
        try:
            onward = self.stages.onward(self.stages.from_kernel(stage, e))
        except LastbitError:
            return False
        last = onward.trace.stages[self.stages.last].finished
        grid = self.stages.grid
        if grid.tensor.is_floating_point():
            last = last.stored_as(grid.tensor.dtype)
        wrong = last.outside(grid.given(grid.tensor)).reshape(-1)
        index = grid.in_stage(tuple(last.shape))
        return index is not None and not wrong[torch.from_numpy(index[e.known & self._judged])].any()

    @cached_property
    def _judged(self) -> np.ndarray:
        """Cells of the row to explain, or all."""
        grid = self.stages.grid
        return np.ones(grid.size, np.bool_)

    def _span(self, stage: Stage, e: Expression) -> tuple[Expression, ...]:
        """What led to an expression after what is right, and not to other stages alone."""
        names = list(self.stages.all)
        upto = names[: names.index(stage.name) + 1]
        right = [event.number for name in upto if name in self.right for event in self.right[name].events]
        known = self.ancestry.before(right)
        before = self.ancestry.before(event.number for event in e.events) - known
        between = [x for x in self.stages.found if any(event.number in before for event in x.events)]
        return tuple(x for x in between if x.events[0].places) or (e,)
