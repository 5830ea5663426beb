"""Which of the expressions that led to a wrong stage is the likeliest to be at fault, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from harness.diagnosing.culprits import Fault
from harness.diagnosing.traced_stages import Stages
from harness.interpret.formats import Array
from harness.judging.expected import Numbers
from harness.numerics import round_to
from harness.tracing import Event
from harness.tracing.cells import INPUT, Ancestry, Expression
from harness.tracing.follow import follow

MOST = 5
"""Expressions that are named."""
_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8, "fp8e5": 8}


@dataclass(frozen=True, eq=False)
class Ranking:
    """The expressions of the span of a fault, the likeliest first."""

    stages: Stages
    fault: Fault
    ancestry: Ancestry

    def first(self) -> list[Expression]:
        """Up to `MOST`, each of another line."""
        found: dict[tuple[str, int], Expression] = {}
        for e in self._all():
            place = e.events[0].place
            found.setdefault((place.file, place.line), e)
        return list(found.values())[:MOST]

    def _all(self) -> Iterator[Expression]:
        yield from self._misplaced()
        if self._lacks_rounding:
            yield self.fault.value
        yield from self._foreign()
        yield from self._narrowed()
        yield from self._left_out()
        yield from self._chosen()
        yield from self._with_constants()
        yield from sorted(self.fault.span, key=lambda e: -e.number)

    def _misplaced(self) -> Iterator[Expression]:
        """What is read from memory and is not the element of the input that the cell has."""
        grid = self.stages.grid
        for e in self.fault.span:
            for event in e.events:
                if not any(operand.memory is not None for operand in event.operands):
                    continue
                lanes = e.lanes[event.number]
                cells = np.nonzero(lanes >= 0)[0]
                for name, elements in self._origins[event.number].items():
                    shape = tuple(grid.whole.tensors[name].shape)
                    wanted = grid.in_case(shape)
                    wanted = grid.in_column(shape) if wanted is None else wanted
                    if wanted is not None and (elements[lanes[cells]] != wanted[cells]).any():
                        yield e
                        break

    @cached_property
    def _origins(self) -> dict[int, dict[str, Array]]:
        return self.ancestry.origins()

    @property
    def _lacks_rounding(self) -> bool:
        """Whether the value is right but for a rounding that the contract has there."""
        stage, e = self.fault.stage, self.fault.value
        if not isinstance(stage.expected, Numbers):
            return False
        _, _, lo, hi = stage.parts
        rounded = round_to(torch.from_numpy(e.values[e.known]), stage.expected.format).numpy()
        inside = (rounded >= lo[e.known]) & (rounded <= hi[e.known]) | np.isnan(rounded)
        return bool(inside.all())

    def _foreign(self) -> Iterator[Expression]:
        """Reads of other rows, or of what nothing wrote, that led to the value."""
        rows = self._rows_of_inputs
        for visit in self._path:
            event = visit.event
            if not any(operand.memory is not None for operand in event.operands):
                continue
            own = self._by_event.get(event.number)
            if own is None or own not in self.fault.span:
                continue
            sources = [operand.source(visit.all) for operand in event.operands if not operand.address]
            unknown = np.all([(source < 0).all(axis=1) for source in sources], axis=0) if sources else np.zeros(1)
            strange = any(
                (rows[name][elements[visit.all]] != 0).any()
                for name, elements in self._origins[event.number].items()
                if name in rows and (elements[visit.all] >= 0).all()
            )
            none = not self._origins[event.number]
            if unknown.any() or strange or none:
                yield own

    @cached_property
    def _rows_of_inputs(self) -> dict[str, Array]:
        """Input with rows → for each element the number of its row among those compared; 0 is that to explain."""
        grid = self.stages.grid
        return {name: np.where(c >= 0, c // grid.columns, -1) for name, c in grid.cells_of_inputs().items()}

    @cached_property
    def _by_event(self) -> dict[int, Expression]:
        return {event.number: e for e in self.stages.found for event in e.events}

    @cached_property
    def _path(self):
        """What led to the value in the cell to explain."""
        cell = self.stages.grid.worst
        event = self.fault.value.event_of(cell)
        lane = self.fault.value.lanes[event.number][cell]
        return follow(self.ancestry.log, event, [max(0, lane)]).visits

    def _narrowed(self) -> Iterator[Expression]:
        """Casts to a narrower format that change something."""
        for e in self.fault.span:
            event = e.events[-1]
            for operand in event.operands:
                before = operand.event
                if before is None or _BITS.get(event.dtype, 99) >= _BITS.get(before.dtype, 0):
                    continue
                lanes = operand.source(np.arange(event.values.size))[:, 0]
                if (event.at(np.arange(event.values.size)) != before.at(lanes)).any():
                    yield e

    def _left_out(self) -> Iterator[Expression]:
        """Where elements of an input get lost on which the stage depends."""
        missing = self._missing
        for visit in self._path:
            event = visit.event
            own = self._by_event.get(event.number)
            if own is None or own not in self.fault.span or len(event.operands) < 3:
                continue
            if event.name == "select" and missing:
                for edge in self._condition_sides(event):
                    if edge & missing:
                        yield own
        if missing:
            reducing = [e for e in self.fault.span if _reduces(e.events[-1])]
            yield from reducing[:1]

    @cached_property
    def _missing(self) -> set[tuple[str, int]]:
        """Elements of the row to explain that did not lead to the value: input and flat index."""
        used: dict[str, set[int]] = {}
        for visit in self._path:
            if visit.event.name.startswith(INPUT):
                used.setdefault(visit.event.name.removeprefix(INPUT), set()).update(visit.all.tolist())
        grid = self.stages.grid
        row = [(n, np.nonzero(r == 0)[0]) for n, r in self._rows_of_inputs.items()]
        reduced = any(_reduces(e.events[-1]) for e in self.fault.span)
        if not reduced:
            return set()
        return {(n, int(i)) for n, elements in row for i in elements if int(i) not in used.get(n, set())}

    def _condition_sides(self, event: Event) -> Iterator[set[tuple[str, int]]]:
        for operand in event.operands[1:]:
            if operand.event is not None:
                for name, elements in self._origins.get(operand.event.number, {}).items():
                    yield {(name, int(i)) for i in elements}

    def _chosen(self) -> Iterator[Expression]:
        """Selections that take a constant in every wrong cell."""
        wrong = self.fault.stage.outside(self.fault.value)
        for e in self.fault.span:
            event = e.events[-1]
            if event.name != "select" or len(event.operands) < 3:
                continue
            lanes = e.lanes[event.number]
            here = wrong & (lanes >= 0)
            if not here.any():
                continue
            for operand in event.operands[1:]:
                if operand.event is None and (operand.source(lanes[here]) >= 0).all():
                    yield e

    def _with_constants(self) -> Iterator[Expression]:
        """Operations with arguments or constants, the last first."""
        for e in sorted(self.fault.span, key=lambda e: -e.number):
            event = e.events[-1]
            if any(_is_constant(event, operand) for operand in event.operands):
                yield e


def _is_constant(event: Event, operand) -> bool:
    if operand.address or operand.memory is not None:
        return False
    return operand.event is None or operand.event.origin < 2


def _reduces(event: Event) -> bool:
    if not event.values.size:
        return False
    return any(not o.address and o.source(np.zeros(1, np.int64)).shape[1] > 1 for o in event.operands)
