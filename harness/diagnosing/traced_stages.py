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
from harness.tracing.follow import Aligned, aligned
from harness.tracing.memory import Addresses, Write

NEAR = 2.0**-6
"""Relative L2 error up to which an operation agrees with a stage: the coarsest rounding that a stage may have here."""
BETTER = 2.0
"""Factor between the errors of two operations from which on one of them is the stage and the other is not."""
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
    """An event that agrees with a stage, with `outside` elements that the contract excludes for it."""

    step: Aligned
    stage: _Stage
    outside: int
    error: float

    @property
    def number(self) -> int:
        return self.step.event.number

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
    way = aligned(log, together.event, together.lanes)
    found = [c for step in way for s in stages if (c := _candidate(step, s))]
    given = {step.numbers.tobytes() for step in way if not step.event.places}
    found = [c for c in found if c.step.numbers.tobytes() not in given]  # an input, not a stage
    marked = {c.number: c.match() for c in _first_allowed(stages, found)}
    if failing and (culprit := _leaving(way, found)) is not None:
        marked[culprit.number] = culprit.match(leaves=True)
    return marked, tuple(s.name for s in stages if not any(c.stage is s for c in found))


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


def _candidate(step: Aligned, stage: _Stage) -> _Candidate | None:
    if not step.event.is_float or not step.event.places:
        return None
    value = step.numbers
    finite = np.isfinite(value) & np.isfinite(stage.exact)
    size = np.linalg.norm(stage.exact[finite])
    error = float(np.linalg.norm((value - stage.exact)[finite]) / size) if size else np.inf
    if error > NEAR:
        return None
    allowed = (value >= stage.lo) & (value <= stage.hi) | np.isnan(value) & np.isnan(stage.lo)
    return _Candidate(step, stage, int((~allowed).sum()), error)


def _first_allowed(stages: Sequence[_Stage], found: Sequence[_Candidate]) -> Iterator[_Candidate]:
    """For each stage the first event that the contract allows for it."""
    for stage in stages:
        inside = [c for c in found if c.stage is stage and not c.outside]
        if inside:
            yield min(inside, key=lambda c: c.number)


def _leaving(way: Sequence[Aligned], found: Sequence[_Candidate]) -> _Candidate | None:
    """The first event with which the value is out of the contract for good.

    It agrees with a stage and is not allowed. Nothing that follows from it is allowed for any stage, and nothing later
    agrees with that one so much better that it would be the stage.
    """
    well = {c.number for c in found if not c.outside}
    for step in way:  # the last first
        if step.event.number in well:
            well.update(step.before)
    best: dict[str, float] = {}
    bad: list[_Candidate] = []
    for c in sorted(found, key=lambda c: -c.number):
        if c.number not in well and c.error <= BETTER * best.get(c.stage.name, np.inf):
            bad.append(c)
        best[c.stage.name] = min(c.error, best.get(c.stage.name, np.inf))
    return min(bad, key=lambda c: (c.number, c.error), default=None)
