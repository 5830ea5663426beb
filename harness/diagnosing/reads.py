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

from lastbit.diagnosing.buffers import Held
from lastbit.diagnosing.in_memory import Onward
from lastbit.errors import LastbitError
from lastbit.interpret.formats import Array
from lastbit.judging.expected import Numbers
from lastbit.judging.problem import Given, Problem
from lastbit.numerics import Enclosure
from lastbit.tracing import Event, Log
from lastbit.tracing.cells import INPUT
from lastbit.tracing.follow import Visit, came_from
from lastbit.tracing.memory import Write

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
        mask = torch.zeros(math.prod(self._shape(name)), dtype=torch.bool)
        mask[torch.as_tensor(np.asarray(elements, np.int64))] = True
        mask = (~mask if others else mask).reshape(self._shape(name))
        return bool(mask.any()) and bool(self._changed(name, mask)[self.element])

    def is_beside(self, name: str) -> bool:
        """Whether it depends on no element of a tensor or stage on which other elements of its stage depend."""
        changed = self._changed(name, torch.ones(self._shape(name), dtype=torch.bool))
        return bool(changed.any()) and not changed[self.element]

    @property
    def is_unknown(self) -> bool:
        """Whether it is NaN, so that nothing changes it."""
        return bool(np.isnan(self._before[self.element]))

    def _shape(self, name: str) -> tuple[int, ...]:
        stage = self.problem.given.get(name)
        return tuple(self.problem.tensors[name].shape if stage is None else stage.shape)

    def _changed(self, name: str, mask: Tensor) -> Array:
        """Which elements of the stage are others if these of a tensor or stage are."""
        stage = self.problem.given.get(name)
        if stage is not None:
            return self._differs(self.problem, {name: Enclosure(stage.full.masked_fill(mask, torch.nan))})
        poisoned = _poisoned(self.problem.tensors[name], mask)
        return self._differs(self.problem.on({**self.problem.tensors, name: poisoned}), {})

    def _differs(self, problem: Problem, given: Given) -> Array:
        try:
            trace = problem.evaluate(given)
        except LastbitError:
            return np.zeros(len(self._before), np.bool_)
        values = _exact(trace.stages[self.stage].finished)
        return np.asarray(~np.isclose(values, self._before, _SAME, 0, equal_nan=True))

    def stage_matters(self, name: str) -> bool:
        """Whether it depends on a stage from which the reference does not go on."""
        expected = self.problem.trace.stages[name]
        poison = torch.full(tuple(expected.shape), torch.nan, dtype=torch.float64)
        return not isinstance(expected, Numbers) or bool(self._differs(self.problem, {name: poison})[self.element])

    @cached_property
    def _before(self) -> Array:
        return _exact(self.problem.trace.stages[self.stage].finished)


def _exact(expected: object) -> Array:
    """The exact value of each element of a stage of numbers, flat."""
    assert isinstance(expected, Numbers)
    return np.asarray(expected.enclosure.exact.expand(expected.shape).reshape(-1).numpy())


def _poisoned(tensor: Tensor, mask: Tensor) -> Tensor:
    poisoned = tensor.clone()
    if tensor.is_floating_point():
        poisoned[mask] = torch.nan
    else:
        poisoned[mask] = ~poisoned[mask]  # of every code that a word holds
    return poisoned


def suspicious(needs: Needs, found: Sequence[Read], rounds: Sequence[Read]) -> Iterator[Event]:
    """Reads of what the element does not depend on, then those of a tensor of which it needs other elements too.

    Not those of a tensor that the element is kept from, where other elements of the stage depend on it; and not where
    other `rounds` of the same read have what it needs: these were dropped later.
    """
    if needs.is_unknown:
        return
    by_name: dict[str, list[Read]] = defaultdict(list)
    for read in found:
        known = read.name in needs.problem.given or read.name in needs.problem.tensors
        if known and read.name not in needs.problem.op.integers:
            by_name[read.name].append(read)
    for own in by_name.values():
        for event, elements in _by_place(own):
            if not needs.any_of(own[0].name, elements) and not needs.is_beside(own[0].name):
                yield event
    for name, own in by_name.items():
        more = [read for read in rounds if read.name == name]
        if needs.any_of(name, np.concatenate([read.elements for read in (*own, *more)]), others=True):
            yield from (event for event, _ in _by_place(own))


def _by_place(found: Sequence[Read]) -> Iterator[tuple[Event, Array]]:
    places: dict[object, list[Read]] = defaultdict(list)
    for read in found:
        places[read.event.places].append(read)
    for own in places.values():
        yield own[-1].event, np.concatenate([read.elements for read in own])
