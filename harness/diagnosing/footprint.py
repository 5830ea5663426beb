"""Which elements of the inputs led to a value of a kernel, and which should have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lastbit.diagnosing.culprits import Fault
from lastbit.diagnosing.traced_stages import Stages
from lastbit.errors import LastbitError
from lastbit.interpret.formats import Array
from lastbit.tracing import Event, Operand
from lastbit.tracing.cells import INPUT, Expression
from lastbit.tracing.follow import Visit, follow
from lastbit.tracing.memory import Addresses


@dataclass(frozen=True, eq=False)
class Footprint:
    """What the wrong value of a fault was made of, in the cell to explain."""

    stages: Stages
    fault: Fault

    @cached_property
    def _origins(self) -> dict[int, dict[str, Array]]:
        return self.stages.ancestry.origins()

    @cached_property
    def _path(self) -> list[Visit]:
        cell, value = self.stages.grid.worst, self.fault.value
        event = value.event_of(cell)
        return follow(self.stages.ancestry.log, event, [max(0, int(value.lanes[event.number][cell]))]).visits

    @cached_property
    def _span(self) -> Mapping[int, Expression]:
        return {event.number: e for e in self.fault.span for event in e.events}

    def misplaced(self) -> Iterator[Expression]:
        """Reads of another element of an input than the one that the cell has; a sum over them may be right."""
        before = self.stages.ancestry.before(event.number for event in self.fault.value.events)
        for e in self.stages.found:
            reads = [event for event in e.events if event.number in before and _reads_memory(event)]
            if any(self._is_misplaced(event, e.lanes[event.number]) for event in reads):
                yield e

    def _is_misplaced(self, event: Event, lanes: Array) -> bool:
        grid, cells = self.stages.grid, np.nonzero(lanes >= 0)[0]
        for name, elements in self._origins[event.number].items():
            tensor = grid.whole.tensors[name]
            wanted = grid.in_case(tuple(tensor.shape))
            wanted = grid.in_column(tuple(tensor.shape)) if wanted is None else wanted
            if wanted is not None:
                own = elements[lanes[cells]]
                if (own < 0).any() or (_offsets(tensor, own) != _offsets(tensor, wanted[cells])).any():
                    return True
        return False

    def foreign(self) -> Iterator[Expression]:
        """Reads of other rows, or of what nothing wrote."""
        for visit in self._path:
            own = self._span.get(visit.event.number)
            if own is not None and _reads_memory(visit.event) and (self._strays(visit) or self._is_unknown(visit)):
                yield own

    def _strays(self, visit: Visit) -> bool:
        found = False
        for name, elements in self._origins[visit.event.number].items():
            rows, own = self._rows.get(name), elements[visit.all]
            found |= rows is not None and bool((rows[own[own >= 0]] != 0).any())
        return found

    def _is_unknown(self, visit: Visit) -> bool:
        """Whether an element came from nowhere that is known."""
        known = np.zeros(len(visit.all), np.bool_)
        for edge in self.stages.ancestry.edges[visit.event.number]:
            known |= True if edge.lanes is None else edge.lanes[visit.all] >= 0
        for operand in visit.event.operands:
            if operand.memory is None and not operand.address:
                known |= (operand.source(visit.all) >= 0).any(axis=1)
            elif operand.memory is not None:
                known |= self._by_others(visit, operand, operand.memory)
        return not known.all()

    def _by_others(self, visit: Visit, operand: Operand, memory: Addresses) -> Array:
        """For each element of an event whether a program that was not recorded wrote what it read."""
        lanes = operand.source(visit.all)
        found, flat = np.zeros(lanes.shape, np.bool_), lanes.reshape(-1)
        read = np.nonzero(flat >= 0)[0]
        for write, at, _ in self.stages.ancestry.log.writes.last(memory.at(flat[read]), visit.event.number):
            found.reshape(-1)[read[at]] = write.event is None
        return np.asarray(found.any(axis=1))

    @cached_property
    def _rows(self) -> dict[str, Array]:
        """Input with rows → for each element the number of its row among those compared; 0 is that to explain."""
        grid = self.stages.grid
        if not grid.leading:
            return {}
        return {name: np.where(c >= 0, c // grid.columns, -1) for name, c in grid.cells_of_inputs().items()}

    def left_out(self) -> Iterator[Expression]:
        """Selections that leave out elements on which the stage depends; else the first sum that lacks them."""
        missing = self._missing
        if not missing:
            return
        for visit in self._path:
            own = self._span.get(visit.event.number)
            if own is not None and visit.event.name == "select" and self._leaves_out(visit.event, missing):
                yield own
        yield from [e for e in self.fault.span if any(self._gathers(event) for event in e.events)][:1]

    def _gathers(self, event: Event) -> bool:
        return any(edge.lanes is None for edge in self.stages.ancestry.edges[event.number])

    def _leaves_out(self, event: Event, missing: Mapping[str, Array]) -> bool:
        for operand in event.operands[1:]:
            before = {} if operand.event is None else self._origins.get(operand.event.number, {})
            if any(np.isin(missing[name], before[name]).any() for name in missing.keys() & before.keys()):
                return True
        return False

    @cached_property
    def _missing(self) -> dict[str, Array]:
        """Input with rows → its elements in the row to explain that matter and did not lead to the value."""
        if not any(self._gathers(event) for e in self.fault.span for event in e.events):
            return {}
        used = {v.event.name.removeprefix(INPUT): v.all for v in self._path if v.event.name.startswith(INPUT)}
        found = {}
        for name, tensor in self.stages.grid.whole.tensors.items():
            own = np.nonzero(self._rows[name] == 0)[0] if name in self._rows else np.arange(tensor.numel())
            unused = np.setdiff1d(own, used.get(name, []))
            shared = name not in self._rows and name in self.stages.grid.problem.op.rows
            if len(unused) and not shared and self._matters(name, unused):
                found[name] = unused
        return found

    def _matters(self, name: str, elements: Array) -> bool:
        """Whether the stage would be another with other elements there; not where the reference takes no others."""
        grid = self.stages.grid
        cells = torch.from_numpy(grid.cells_of_inputs()[name][elements] if name in self._rows else elements)
        changed = grid.problem.tensors[name].clone(memory_format=torch.contiguous_format)
        flat = changed.view(-1)
        flat[cells] = flat[cells] + 1 if not changed.is_floating_point() else flat[cells] * 2 + 1
        try:
            other = grid.problem.on({**grid.problem.tensors, name: changed}).evaluate().stages[self.fault.stage.name]
        except LastbitError:
            return False
        return not self.fault.stage.expected.same(other)


def _offsets(tensor: Tensor, elements: Array) -> Array:
    """Where elements of a tensor are in its memory."""
    index = np.unravel_index(elements, tuple(tensor.shape)) if tensor.ndim else ()
    return np.asarray(sum((i * stride for i, stride in zip(index, tensor.stride(), strict=True)), elements * 0))


def _reads_memory(event: Event) -> bool:
    return any(operand.memory is not None for operand in event.operands)
