"""What a program read for an element, held against what the reference needs for it: a wrong index shows as such."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from harness.diagnosing.buffers import Held
from harness.diagnosing.in_memory import Onward
from harness.errors import LastbitError
from harness.interpret.formats import Array
from harness.judging.expected import Numbers
from harness.judging.problem import Given, Problem
from harness.numerics import Enclosure
from harness.tracing import Event, Log
from harness.tracing.cells import INPUT
from harness.tracing.follow import Visit, came_from
from harness.tracing.memory import Write

_SAME = 1e-9  # torch may round an element otherwise where its neighbours are NaN


@dataclass(frozen=True, eq=False)
class Read:
    """Elements that an event read from a tensor of the case, or from a stage in memory.

    Attributes:
        name: of the tensor or stage.
        elements: flat indices.
    """

    event: Event
    name: str
    elements: Array


def reads(log: Log, visits: Iterable[Visit], held: Sequence[Held]) -> Iterator[Read]:
    """What the events of a path read, as far as it is known which tensor that is."""
    inputs = [write for write in log.writes.all if write.event is not None and write.event.name.startswith(INPUT)]
    for visit in visits:
        for operand in visit.event.operands:
            if operand.memory is None or operand.address or not len(visit.all):
                continue
            lanes = np.unique(np.concatenate([part.reshape(-1) for part in came_from(operand, visit.all)]))
            addresses = operand.memory.at(lanes[lanes >= 0])
            if len(addresses):
                yield from _of_inputs(visit.event, addresses, inputs)
                yield from _of_stages(visit.event, addresses, held)


def _of_inputs(event: Event, addresses: Array, inputs: Sequence[Write]) -> Iterator[Read]:
    for write in inputs:
        found = write.find(addresses)
        if (found >= 0).any() and write.event is not None:
            yield Read(event, write.event.name.removeprefix(INPUT), found[found >= 0])


def _of_stages(event: Event, addresses: Array, held: Sequence[Held]) -> Iterator[Read]:
    for one in held:
        tensor = one.buffer.tensor
        own = one.buffer.where.at(np.arange(tensor.numel()))
        here = np.isin(own, addresses)
        if here.any():
            yield Read(event, one.name, one.part.numpy()[here])


@dataclass(frozen=True, eq=False)
class Needs:
    """What a stage's element depends on, found by poisoning what it may be computed from.

    Attributes:
        problem: whose reference goes on from stages, and from its inputs.
        stage, element: of which stage, and which one, as flat index.
    """

    problem: Onward
    stage: str
    element: int

    def any_of(self, name: str, elements: Collection[int] | Array, *, others: bool = False) -> bool:
        """Whether it depends on one of these elements of a tensor or stage, or on one of the `others`."""
        stage = self.problem.given.get(name)
        shape = self.problem.tensors[name].shape if stage is None else stage.shape
        mask = torch.zeros(math.prod(shape), dtype=torch.bool)
        mask[torch.as_tensor(np.asarray(elements, np.int64))] = True
        mask = (~mask if others else mask).reshape(shape)
        if not mask.any():
            return False
        if stage is not None:
            return self._changes(self.problem, {name: Enclosure(stage.full.masked_fill(mask, torch.nan))})
        poisoned = _poisoned(self.problem.tensors[name], mask)
        return self._changes(self.problem.on({**self.problem.tensors, name: poisoned}), {})

    def _changes(self, problem: Problem, given: Given) -> bool:
        try:
            trace = problem.evaluate(given)
        except LastbitError:
            return False
        return not np.isclose(self._value(trace.stages[self.stage].finished), self._before, _SAME, 0, equal_nan=True)

    def stage_matters(self, name: str) -> bool:
        """Whether it depends on a stage from which the reference does not go on."""
        shape = self.problem.trace.stages[name].shape
        poison = torch.full(tuple(shape), torch.nan, dtype=torch.float64)
        return not isinstance(self.problem.trace.stages[name], Numbers) or self._changes(self.problem, {name: poison})

    @cached_property
    def _before(self) -> float:
        return self._value(self.problem.trace.stages[self.stage].finished)

    def _value(self, expected: object) -> float:
        assert isinstance(expected, Numbers)
        return float(expected.enclosure.exact.expand(expected.shape).reshape(-1)[self.element])


def _poisoned(tensor: Tensor, mask: Tensor) -> Tensor:
    poisoned = tensor.clone()
    if tensor.is_floating_point():
        poisoned[mask] = torch.nan
    elif tensor.dtype is torch.bool:
        poisoned[mask] = ~poisoned[mask]
    else:
        poisoned[mask] = poisoned[mask] ^ 85
    return poisoned


def suspicious(needs: Needs, found: Sequence[Read]) -> Iterator[Event]:
    """Reads of what the element does not depend on, then those of a tensor of which it needs other elements too."""
    by_name: dict[str, list[Read]] = defaultdict(list)
    for read in found:
        known = read.name in needs.problem.given or read.name in needs.problem.tensors
        if known and read.name not in needs.problem.op.integers:
            by_name[read.name].append(read)
    for own in by_name.values():
        for event, elements in _by_place(own):
            if not needs.any_of(own[0].name, elements):
                yield event
    for name, own in by_name.items():
        if needs.any_of(name, np.concatenate([read.elements for read in own]), others=True):
            yield from (event for event, _ in _by_place(own))


def _by_place(found: Sequence[Read]) -> Iterator[tuple[Event, Array]]:
    places: dict[object, list[Read]] = defaultdict(list)
    for read in found:
        places[read.event.places].append(read)
    for own in places.values():
        yield own[-1].event, np.concatenate([read.elements for read in own])
