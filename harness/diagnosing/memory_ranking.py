"""Which expression of a launch is at fault, where what it read from memory is known to be right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from harness.diagnosing.buffers import Held
from harness.diagnosing.ranking import Ranking
from harness.diagnosing.reads import Needs, reads, suspicious
from harness.tracing import Event
from harness.tracing.cells import Expression
from harness.tracing.memory import Write


@dataclass(frozen=True, eq=False)
class Memory:
    """What a launch found in memory.

    Attributes:
        given: stages that are right, with what the kernel had for them.
        held: the buffers that they and others are in.
        write: what wrote the element to explain.
    """

    given: Mapping[str, Tensor]
    held: Sequence[Held]
    write: Write | None


@dataclass(frozen=True, eq=False)
class MemoryRanking(Ranking):
    """The expressions of the program that wrote the wrong stage, the likeliest first."""

    memory: Memory

    def _all(self) -> Iterator[Expression]:
        span = [e for e in self.fault.span if self._own(e.events[-1])]
        if self._lacks_rounding:
            yield self.fault.value
        yield from self._misread()
        yield from (e for e in self._narrowed() if e in span)
        yield from (e for e in self._chosen() if e in span)
        yield from sorted((e for e in span if e.events[-1].is_float), key=lambda e: -e.number)

    def _own(self, event: Event) -> bool:
        write = self.memory.write
        return write is None or event.program == write.program or (event.program is None and event.is_float)

    def _misread(self) -> Iterator[Expression]:
        """Reads of other elements than those that the stage depends on."""
        grid = self.stages.grid
        visits = [visit for visit in self._path if self._own(visit.event)]
        found = list(reads(self.ancestry.log, visits, self.memory.held))
        element = int(self.fault.stage.index[grid.worst])
        needs = Needs(grid.problem, self.memory.given, self.fault.stage.name, element)
        for event in suspicious(needs, found):
            if event.number in self._by_event:
                yield self._by_event[event.number]
