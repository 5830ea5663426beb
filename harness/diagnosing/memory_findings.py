"""Source lines of findings about memory: the line that a finding names, or the lines that write to its tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from torch import Tensor

from lastbit.diagnosing.responsible import chain_of_address, lines_of
from lastbit.diagnosing.steps import step_at, step_of
from lastbit.interpret.places import Place
from lastbit.reports.why import Step
from lastbit.result import Finding
from lastbit.tracing import Log
from lastbit.tracing.ancestry import INPUT
from lastbit.tracing.of_torch import UNWRITTEN, addresses_of


def steps_of_findings(log: Log, findings: Iterable[Finding], tensors: Mapping[str, Tensor]) -> tuple[Step, ...]:
    """List the steps that findings name by place; for others, the writes to their tensor, a result or an input."""
    found: dict[tuple[str, int], Step] = {}
    for finding in findings:
        for step in steps_named(log, [finding]) or tuple(_writing(log, tensors.get(finding.stage))):
            found.setdefault((step.file, step.line), step)
    return tuple(found.values())


def steps_named(log: Log, findings: Iterable[Finding]) -> tuple[Step, ...]:
    """Return the steps that findings name by place, such as a load of a gap."""
    known = {str(place): place for place in _places(log)}
    return tuple(step_at(place) for f in findings for text, place in known.items() if text in f.sentence)


def is_sure(log: Log, step: Step) -> bool:
    """Return whether the addresses that a step reads or writes are computed in its own line, as far as was recorded."""
    at = step.file, step.line, step.column
    here = [e for e in log.events if e.places and (e.place.file, e.place.line, e.place.column) == at]
    return all(lines_of(chain_of_address(event, pointer=True)) <= {at[:2]} for event in here)


def _places(log: Log) -> Iterator[Place]:
    yield from (event.places[0] for event in log.events if event.places)
    yield from (write.places[0] for write in log.writes if write.places)


def _writing(log: Log, tensor: Tensor | None) -> Iterator[Step]:
    """Yield the writes to a tensor, the last one first, without mere allocations and inputs of the case."""
    if tensor is None or not tensor.numel():
        return
    ends = addresses_of(tensor).at(np.array([0, tensor.numel() - 1]))
    writes = [w for w in log.writes if w.first <= ends.max() and w.last >= ends.min() and w.places]
    for write in reversed(writes):
        name = "" if write.event is None else write.event.name
        if not name.startswith(INPUT) and name.rpartition(".")[2] not in UNWRITTEN:
            yield step_at(write.places[0]) if write.event is None else step_of(log, write.event, -1)
