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
from harness.tracing.memory import Addresses, Write

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
    error: float

    def match(self, *, leaves: bool = False) -> StageMatch:
        s = self.stage
        ends = float(s.exact[0]), float(s.lo[0]), float(s.hi[0])
        return StageMatch(s.name, *ends, self.outside, len(s.exact), leaves)


@dataclass(frozen=True, eq=False)
class Together:
    """Elements of a tensor that one event wrote, the worst one first.

    Attributes:
        tensor: what they are elements of.
        columns: their indices, [dimensions, L].
        event, lanes: what wrote them, and which of its elements they are.
    """

    tensor: Tensor
    columns: Array
    event: Event
    lanes: Array


def written_together(tensor: Tensor, where: Addresses, write: Write | None, index: tuple[int, ...]) -> Together | None:
    """The element at `index` and others that were written with it, `MOST` at most; None if that was not recorded."""
    if write is None or write.event is None:
        return None
    shape = tuple(tensor.shape)
    numbers = np.arange(tensor.numel())
    worst = int(np.ravel_multi_index(index, shape)) if index else 0
    lanes = write.find(where.at(numbers))
    others = numbers[(lanes >= 0) & (numbers != worst)]
    chosen = np.concatenate([[worst], others[:: max(1, -(-len(others) // MOST))]])
    columns = np.stack(np.unravel_index(chosen, shape)) if shape else np.zeros((0, 1), np.int64)
    return Together(tensor, columns, write.event, lanes[chosen])


def matches(
    problem: Problem, log: Log, stage: str, together: Together | None, *, failing: bool
) -> tuple[dict[int, StageMatch], tuple[str, ...]]:
    """Number of an event → the stage that it agrees with, over elements of `stage` that were written together; and the
    stages with which none does.

    Which event leaves the contract is said of a kernel that is `failing` only: another one may compute otherwise. It
    explains and judges nothing: small tensors and plain values can make an operation agree by chance.
    """
    if together is None or problem.main.numel() > _LARGEST:
        return {}, ()
    stages = list(_stages(problem, stage, together))
    values = [
        (event, event.at(lanes).astype(np.float64))
        for event, lanes in aligned(log, together.event, together.lanes)
        if event.is_float and event.places
    ]
    found = [c for s in stages for event, value in values if (c := _candidate(event, value, s))]
    return _marked(stages, found, failing), tuple(s.name for s in stages if not any(c.stage is s for c in found))


def _stages(problem: Problem, last: str, together: Together) -> Iterator[_Stage]:
    """The stages of numbers up to one of them, that have an element for each of these."""
    tensor = together.tensor
    for name, expected in problem.trace.stages.items():
        at = None if expected.of_all_rows or not isinstance(expected, Numbers) else _index(expected, together)
        if at is not None:
            stored = expected.stored_as(tensor.dtype) if name == last and tensor.is_floating_point() else expected
            assert isinstance(stored, Numbers)
            e = stored.enclosure
            parts = (part.expand(expected.shape)[at].numpy() for part in (e.exact, e.lo, e.hi))
            yield _Stage(name, *parts)
        if name == last:
            return


def _index(expected: Expected, together: Together) -> tuple[Tensor, ...] | None:
    """Where a stage has what belongs to elements of a tensor; None if it is not of the same rows."""
    shape, columns = tuple(expected.shape), together.columns
    pairs = list(zip(shape, tuple(together.tensor.shape), strict=False))
    if len(shape) > together.tensor.ndim or any(a not in (1, b) for a, b in pairs):
        return None
    return tuple(torch.from_numpy(columns[axis] if size > 1 else columns[axis] * 0) for axis, size in enumerate(shape))


def _candidate(event: Event, value: Array, stage: _Stage) -> _Candidate | None:
    finite = np.isfinite(value) & np.isfinite(stage.exact)
    size = np.linalg.norm(stage.exact[finite])
    error = float(np.linalg.norm((value - stage.exact)[finite]) / size) if size else np.inf
    if error > NEAR:
        return None
    allowed = (value >= stage.lo) & (value <= stage.hi) | np.isnan(value) & np.isnan(stage.lo)
    return _Candidate(event, stage, int((~allowed).sum()), error)


def _marked(stages: Sequence[_Stage], found: Sequence[_Candidate], failing: bool) -> dict[int, StageMatch]:
    """For each stage the first event that the contract allows for it, up to where the contract excludes one.

    It does so where no event that agrees with a stage is allowed, or where the value that is given for the last one is
    not.
    """
    marked: dict[int, StageMatch] = {}
    reached = 0
    for stage in stages:
        own = [c for c in found if c.stage is stage]
        if inside := [c for c in own if not c.outside]:
            first = min(inside, key=lambda c: c.event.number)
            marked[first.event.number] = first.match()
            reached = max(reached, *(c.event.number for c in inside))
        given = max(own, key=lambda c: c.event.number, default=None)
        if failing and given is not None and given.outside and (not inside or stage is stages[-1]):
            later = [c for c in own if c.event.number > reached] or own
            culprit = _leaving(found, reached, min(later, key=lambda c: c.error))
            marked[culprit.event.number] = culprit.match(leaves=True)
            break
    return marked


def _leaving(found: Sequence[_Candidate], reached: int, seen: _Candidate) -> _Candidate:
    """The first event after the last that was allowed which agrees with a stage, and which no such stage allows."""
    after = [c for c in found if reached < c.event.number <= seen.event.number]
    allowed = {c.event.number for c in after if not c.outside}
    return min((c for c in after if c.event.number not in allowed), key=lambda c: c.event.number, default=seen)
