"""Which operations of a kernel agree with which stages of the reference, and with which the contract is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from harness.interpret.formats import Array
from harness.judging.expected import Expected, Numbers
from harness.judging.problem import Problem
from harness.outcomes.trace import StageMatch
from harness.tracing import Event, Log
from harness.tracing.follow import aligned
from harness.tracing.memory import Write
from harness.tracing.of_torch import addresses_of

NEAR = 2.0**-6
"""Relative L2 error up to which an operation agrees with a stage: the coarsest rounding that a stage may have here."""
MOST = 4096
"""Elements that are compared."""
_LARGEST = 1 << 22  # elements of the op's first input; the reference is evaluated at once


@dataclass(frozen=True, eq=False)
class _Stage:
    """What a stage must be, for each of the elements that are compared: [L] of fp64."""

    name: str
    exact: Array
    lo: Array
    hi: Array


@dataclass(frozen=True, eq=False)
class _Candidate:
    """An event that agrees with a stage."""

    event: Event
    stage: _Stage
    outside: int

    def match(self, *, leaves: bool = False) -> StageMatch:
        s = self.stage
        ends = float(s.exact[0]), float(s.lo[0]), float(s.hi[0])
        return StageMatch(s.name, *ends, self.outside, len(s.exact), leaves)


def matches(
    problem: Problem, log: Log, tensor: Tensor, stage: str, index: tuple[int, ...], write: Write | None
) -> dict[int, StageMatch]:
    """Number of an event → the stage that it agrees with, over the elements that were written with the worst one.

    An explanation, no judgement: small tensors and plain values can make an operation agree by chance.
    """
    if write is None or write.event is None or problem.main.numel() > _LARGEST:
        return {}
    numbers, lanes = _written_together(tensor, write, index)
    columns = np.stack(np.unravel_index(numbers, tuple(tensor.shape))) if tensor.ndim else np.zeros((0, 1), np.int64)
    stages = list(_stages(problem, stage, tensor, columns))
    values = {
        event.number: (event, event.at(found).astype(np.float64))
        for event, found in aligned(log, write.event, lanes)
        if event.is_float and not event.name.startswith("input ")
    }
    found = [c for s in stages for event, value in values.values() if (c := _candidate(event, value, s))]
    return _marked(stages, found)


def _written_together(tensor: Tensor, write: Write, index: tuple[int, ...]) -> tuple[Array, Array]:
    """Elements of a tensor that one write wrote, and its lanes; the worst one comes first."""
    numbers = np.arange(tensor.numel())
    worst = int(np.ravel_multi_index(index, tuple(tensor.shape))) if index else 0
    lanes = write.find(addresses_of(tensor).at(numbers))
    others = numbers[(lanes >= 0) & (numbers != worst)]
    step = max(1, -(-len(others) // MOST))
    chosen = np.concatenate([[worst], others[::step]])
    return chosen, lanes[chosen]


def _stages(problem: Problem, last: str, tensor: Tensor, columns: Array) -> Iterator[_Stage]:
    """The stages of numbers up to one of them, that have an element for each of these."""
    for name, expected in problem.trace.stages.items():
        at = None if expected.of_all_rows or not isinstance(expected, Numbers) else _index(expected, tensor, columns)
        if at is not None:
            stored = expected.stored_as(tensor.dtype) if name == last and tensor.is_floating_point() else expected
            assert isinstance(stored, Numbers)
            e = stored.enclosure
            parts = (part.expand(expected.shape)[at].numpy() for part in (e.exact, e.lo, e.hi))
            yield _Stage(name, *parts)
        if name == last:
            return


def _index(expected: Expected, tensor: Tensor, columns: Array) -> tuple[Tensor, ...] | None:
    """Where a stage has what belongs to elements of a tensor; None if it is not of the same rows."""
    shape = tuple(expected.shape)
    pairs = list(zip(shape, tuple(tensor.shape), strict=False))
    if len(shape) > tensor.ndim or any(a not in (1, b) for a, b in pairs):
        return None
    return tuple(torch.from_numpy(columns[axis] if size > 1 else columns[axis] * 0) for axis, size in enumerate(shape))


def _candidate(event: Event, value: Array, stage: _Stage) -> _Candidate | None:
    finite = np.isfinite(value) & np.isfinite(stage.exact)
    size = np.linalg.norm(stage.exact[finite])
    if not size or np.linalg.norm((value - stage.exact)[finite]) > NEAR * size:
        return None
    allowed = (value >= stage.lo) & (value <= stage.hi) | np.isnan(value) & np.isnan(stage.lo)
    return _Candidate(event, stage, int((~allowed).sum()))


def _marked(stages: Sequence[_Stage], found: Sequence[_Candidate]) -> dict[int, StageMatch]:
    """For each stage the first event that the contract allows for it; then the first that it excludes."""
    marked: dict[int, StageMatch] = {}
    reached = 0
    for stage in stages:
        own = [c for c in found if c.stage is stage]
        inside = [c for c in own if not c.outside]
        if inside:
            first = min(inside, key=lambda c: c.event.number)
            marked.setdefault(first.event.number, first.match())
            reached = max(reached, *(c.event.number for c in inside))
        elif own:
            culprit = _leaving(found, reached, max(own, key=lambda c: -c.outside))
            marked[culprit.event.number] = culprit.match(leaves=True)
            break
    return marked


def _leaving(found: Sequence[_Candidate], reached: int, seen: _Candidate) -> _Candidate:
    """The first event after the last that was allowed which agrees with a stage, and which no such stage allows."""
    after = [c for c in found if reached < c.event.number <= seen.event.number]
    allowed = {c.event.number for c in after if not c.outside}
    return min((c for c in after if c.event.number not in allowed), key=lambda c: c.event.number, default=seen)


