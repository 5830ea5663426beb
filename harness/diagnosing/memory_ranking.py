"""Which expression of a launch is at fault, where what it read from memory is known to be right."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from lastbit.diagnosing.buffers import Held
from lastbit.diagnosing.culprits import Fault, Search
from lastbit.diagnosing.in_memory import Onward
from lastbit.diagnosing.ranking import reduces, takes_constant
from lastbit.diagnosing.reads import Needs, reads, suspicious
from lastbit.diagnosing.traced_stages import NEAR, Stages, distance
from lastbit.judging.expected import Numbers
from lastbit.numerics import round_to
from lastbit.tracing import Event
from lastbit.tracing.cells import Expression
from lastbit.tracing.follow import Visit, follow
from lastbit.tracing.memory import Write
from lastbit.tracing.triton_lanes import MOVERS

MOST = 5
"""Expressions that are named."""


@dataclass(frozen=True, eq=False)
class Memory:
    """What a launch found in memory.

    Attributes:
        problem: seen from the stages that the kernel had in memory, which are right.
        held: the buffers that they and others are in.
        write: what wrote the element to explain.
    """

    problem: Onward
    held: Sequence[Held]
    write: Write | None

    def unconcerned(self, stages: Stages) -> list[str]:
        """The stages that are right, and those on which the worst element of the last one does not depend."""
        last = stages.all[stages.last]
        needs = Needs(self.problem, last.name, int(last.index[stages.grid.worst]))
        others = [name for name in stages.all if name != last.name]
        return [name for name in others if name in self.problem.given or not needs.stage_matters(name)]


@dataclass(frozen=True, eq=False)
class MemoryRanking:
    """The expressions of the program that wrote the wrong stage, the likeliest first."""

    search: Search
    fault: Fault
    memory: Memory

    def first(self) -> list[Expression]:
        """Up to `MOST`, each of another line."""
        found: dict[tuple[str, int], Expression] = {}
        for e in self._all():
            place = e.events[0].place
            found.setdefault((place.file, place.line), e)
        return list(found.values())[:MOST]

    def _all(self) -> Iterator[Expression]:
        if any(operand.memory is not None for operand in self.fault.value.events[-1].operands):
            yield from self._takers  # what was read stands for the stage
        elif self._lacks_rounding:
            within = _is_part(self.fault.value)
            yield from [self.fault.value] if within else self._takers
            yield from self._takers if within else [self.fault.value]
        yield from self._chosen()
        yield from self._misread()
        yield from (e for e in self._span if e.events[-1].program is None and not e.events[-1].name.endswith("clone"))
        if self._is_near:
            yield from (e for e in self._span if e is not self.fault.value and _narrows(e.events[-1]))
        yield from self._added_up
        yield from (e for e in reversed(self._span) if e.events[-1].name != "select")
        yield from reversed(self._span)

    @property
    def _is_near(self) -> bool:
        """Whether the value is as near to what it must be as a rounding can leave it."""
        _, value, _, _ = self.fault.stage.parts
        return distance(self.fault.value.values, value, self.fault.value.known) <= NEAR

    @property
    def _added_up(self) -> Iterator[Expression]:
        """Of a sum or dot of what was computed: what goes into it, then what that was computed from, in order."""
        if any(map(reduces, self.fault.value.events)):
            before = self.search.stages.ancestry.before(event.number for event in self.fault.value.events)
            before -= {event.number for event in self.fault.value.events}
            computed = [e for e in self._span if e.events[-1].name != "load" and e.events[-1].number in before]
            yield from computed[-1:]
            yield from computed

    @cached_property
    def _span(self) -> list[Expression]:
        """What computes floating-point numbers from the right stages to the wrong one, in order."""
        found = [e for e in self.fault.span if e.events[-1].is_float and self._own(e.events[-1])]
        return sorted((e for e in found if e.events[-1].name not in MOVERS), key=lambda e: e.number)

    def _own(self, event: Event) -> bool:
        """Whether an event is of the program, or of PyTorch."""
        write = self.memory.write
        return write is None or event.program is None or event.program == write.program

    @property
    def _lacks_rounding(self) -> bool:
        """Whether the value is right but for a rounding that the contract has there."""
        stage, e = self.fault.stage, self.fault.value
        if not isinstance(stage.expected, Numbers):
            return False
        _, _, lo, hi = stage.parts
        rounded = round_to(torch.from_numpy(e.values[e.known]), stage.expected.format).numpy()
        return bool(((rounded >= lo[e.known]) & (rounded <= hi[e.known]) | np.isnan(rounded)).all())

    @property
    def _takers(self) -> Iterator[Expression]:
        """What computes from the value: there it should have been rounded."""
        numbers = {event.number for event in self.fault.value.events}
        ahead = [e for e in self.search.stages.found if e.number > self.fault.value.number]
        for e in ahead:
            edges = [edge for event in e.events for edge in self.search.stages.ancestry.edges[event.number]]
            if any(edge.event.number in numbers for edge in edges):
                same_line = e.events[-1].place.line == self.fault.value.events[-1].place.line
                if same_line or e.events[-1].name in MOVERS or e.events[-1].name == "select":
                    numbers.update(event.number for event in e.events)
                elif self._own(e.events[-1]):
                    yield e
                    return

    def _chosen(self) -> Iterator[Expression]:
        """Where the value is a constant that was selected: the selections in integers that led there, then its own."""
        value, cell = self.fault.value, self.search.stages.grid.worst
        event = value.event_of(cell)
        if takes_constant(event, value.lanes[event.number][[cell]]):
            for visit in self._path:
                if not visit.event.is_float and takes_constant(visit.event, visit.all, some=True):
                    yield from self._of_events([visit.event])
            yield value

    def _of_events(self, events: Iterable[Event]) -> Iterator[Expression]:
        by_event = {event.number: e for e in self.search.stages.found for event in e.events}
        yield from (by_event[event.number] for event in events if event.number in by_event)

    def _misread(self) -> Iterator[Expression]:
        """Reads of other elements than those that the stage depends on."""
        grid = self.search.stages.grid
        visits = [visit for visit in self._path if visit.event.program is not None and self._own(visit.event)]
        found = list(reads(self.search.stages.ancestry.log, visits, self.memory.held))
        element = int(self.fault.stage.index[grid.worst])
        needs = Needs(self.memory.problem, self.fault.stage.name, element)
        others = list(reads(self.search.stages.ancestry.log, self._rounds(visits), self.memory.held))
        yield from self._of_events(suspicious(needs, found, others))

    def _rounds(self, visits: Sequence[Visit]) -> Iterator[Visit]:
        """The same operations in other rounds of a loop, with the elements that the value came from in one of them."""
        by_place = {(visit.event.program, visit.event.places, visit.event.shape): visit for visit in visits}
        for event in self.search.stages.ancestry.log.events:
            visit = by_place.get((event.program, event.places, event.shape))
            if visit is not None and event is not visit.event:
                yield Visit(event, visit.direct, visit.all)

    @property
    def _path(self) -> list[Visit]:
        cell, value = self.search.stages.grid.worst, self.fault.value
        event = value.event_of(cell)
        return follow(self.search.stages.ancestry.log, event, [max(0, int(value.lanes[event.number][cell]))]).visits


def _is_part(e: Expression) -> bool:
    """Whether the text goes on with an expression in its own line, and does not only give it a name."""
    place = e.events[-1].place
    code = linecache.getline(place.file, place.line).strip()
    return not code.endswith(f"= {place.text}")


def _narrows(event: Event) -> bool:
    """Whether it gives another number than the one it was given: a cast that loses digits."""
    operands = [operand for operand in event.operands if not operand.address]
    if len(operands) != 1 or operands[0].event is None:
        return False
    before = operands[0].event
    if not before.is_float or before.values.dtype.itemsize <= event.values.dtype.itemsize:
        return False
    own = np.arange(event.values.size)
    lanes = operands[0].source(own)[:, 0]
    return bool((event.at(own) != before.at(lanes)).any())
