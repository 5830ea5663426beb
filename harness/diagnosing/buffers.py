"""What a kernel keeps in memory between its launches, as stages of the reference: where it first goes wrong.

A kernel of several launches hands on intermediate results in tensors that it allocates. Which stage such a tensor is,
its size and its values say. The reference goes on from these values, so that each next tensor is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from torch import Tensor

from harness.interpret.formats import Array
from harness.judging.expected import Expected, Numbers
from harness.judging.problem import Given, Problem
from harness.judging.trace import Trace
from harness.tracing import Log
from harness.tracing.memory import Addresses
from harness.tracing.of_torch import addresses_of

NEAR = 2.0**-6
"""Relative L2 error up to which a tensor agrees with a stage: the coarsest rounding that a stage may have here."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A tensor that a kernel wrote.

    Attributes:
        tensor: a copy of what it held when the kernel had ended.
        where: where its elements were.
        rank: how many were finished before it.
        result: the result that it is, if the kernel returned it.
    """

    tensor: Tensor
    where: Addresses
    rank: int = 0
    result: str = ""

    def laid_out_as(self, held: Held) -> tuple[Tensor, Addresses]:
        """What the buffer has of the stage, in a tensor of its shape, and where that is; NaN and 0 elsewhere."""
        whole = torch.full((held.size,), torch.nan, dtype=self.tensor.dtype)
        whole[held.part] = self.tensor.reshape(-1)
        inverse = np.full(held.size, -1)
        inverse[held.part.numpy()] = np.arange(len(held.part))

        def at(lanes: Array) -> Array:
            own = inverse[lanes]
            return np.where(own >= 0, self.where.at(np.maximum(own, 0)), 0)

        return whole.reshape(held.shape), Addresses(at, self.where.width)


@dataclass(frozen=True, eq=False)
class Held:
    """A stage in a buffer.

    Attributes:
        name: of the stage.
        part: the elements of the stage that the buffer has, by their flat index.
        error: relative L2 error.
        shape: of the stage.
    """

    name: str
    buffer: Buffer
    part: Tensor
    error: float
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True, eq=False)
class Wrong:
    """The first stage in memory that does not follow from those before it.

    Attributes:
        trace: what every stage must be, seen from what the kernel had in memory.
        held: the stage, in its buffer.
        worst: the element of the buffer that is farthest from what it must be, as flat index.
        given: the stages that the kernel had in memory, as it had them.
        all: these, in their buffers.
    """

    trace: Trace
    held: Held
    worst: int
    given: Mapping[str, Tensor]
    all: Sequence[Held]

    @property
    def before(self) -> list[Held]:
        """What was in memory before."""
        return [one for one in self.all if one.buffer.rank < self.held.buffer.rank]

    def onward(self, problem: Problem) -> Onward:
        """The problem seen from what the kernel had in memory before this stage."""
        names = list(problem.trace.stages)
        before = names[: names.index(self.held.name)]
        own = {field.name: getattr(problem, field.name) for field in fields(Problem)}
        return Onward(**own, given={name: t for name, t in self.given.items() if name in before})


@dataclass(frozen=True, eq=False)
class Onward(Problem):
    """A problem whose reference goes on from some stages."""

    given: Given = field(default_factory=dict)

    def evaluate(self, given: Given | None = None, trace: Trace | None = None) -> Trace:
        return super().evaluate({**self.given, **(given or {})}, trace)


def buffers(log: Log, tensors: Iterable[Tensor], results: Mapping[str, Tensor]) -> list[Buffer]:
    """The tensors of floating-point numbers that something wrote to, in the order in which that ended."""
    names = {result.data_ptr(): name for name, result in results.items()}
    found = []
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.numel():
            where = addresses_of(tensor)
            ends = where.at(np.array([0, tensor.numel() - 1]))
            numbers = [w.number for w in log.writes.all if _overlap(w, ends) and w.program]
            if numbers:
                name = names.get(tensor.data_ptr(), "")
                found.append((max(numbers), Buffer(tensor.detach().clone(), where, result=name)))
    ordered = [buffer for _, buffer in sorted(found, key=lambda pair: pair[0])]
    return [replace(buffer, rank=rank) for rank, buffer in enumerate(ordered)]


def _overlap(write: object, ends: Array) -> bool:
    return bool(write.first <= ends.max() and write.last >= ends.min())  # type: ignore[attr-defined]


def first_wrong(problem: Problem, found: Sequence[Buffer]) -> Wrong | None:
    """The first buffer that is a stage and has an element that cannot follow from what the ones before it have."""
    held = list(stages_held(problem.trace, found))
    given = dict(_given(problem, held))
    trace = problem.evaluate(given)
    for one in held:
        expected = trace.stages[one.name].finished
        own = one.buffer.tensor.reshape(-1)
        exact, lo, hi = (part[one.part] for part in _parts(expected))
        value = own.to(torch.float64)
        outside = ~((value >= lo) & (value <= hi)) & ~(value.isnan() & lo.isnan())
        if outside.any():
            far = torch.where(outside, (value - exact).abs().nan_to_num(torch.inf), -1.0)
            return Wrong(trace, one, int(far.argmax()), given, held)
    return None


def _given(problem: Problem, held: Sequence[Held]) -> Iterator[tuple[str, Tensor]]:
    """What the reference goes on from: stages of which all elements are known."""
    for name in dict.fromkeys(one.name for one in held):
        shape = tuple(problem.trace.stages[name].shape)
        whole = torch.zeros(shape, dtype=torch.float64).reshape(-1)
        known = 0
        for one in held:
            if one.name == name:
                whole[one.part] = one.buffer.tensor.reshape(-1).to(torch.float64)
                known += len(one.part)
        if known >= len(whole) and not problem.trace.stages[name].of_all_rows:
            yield name, whole.reshape(shape)


def stages_held(trace: Trace, found: Sequence[Buffer]) -> Iterator[Held]:
    """For each buffer the stage that it is: a result by its name, others by what agrees best, or what is left between.

    A buffer that agrees with nothing is the first stage between those of its neighbours that it has the shape of.
    """
    known: dict[int, Held] = {}
    for buffer in found:
        some = [h for name, expected in trace.stages.items() for h in _agreeing(trace, name, expected, buffer)]
        if some:
            known[buffer.rank] = min(some, key=lambda h: h.error)
    order = list(trace.stages)
    for buffer in found:
        if buffer.rank not in known:
            before = max((rank for rank in known if rank < buffer.rank), default=None)
            after = min((rank for rank in known if rank > buffer.rank), default=None)
            first = 0 if before is None else order.index(known[before].name) + 1
            last = len(order) if after is None else order.index(known[after].name)
            between = order[first : last if last > first else len(order)]
            for name in between:
                shape = tuple(trace.stages[name].shape)
                parts = list(_places(shape, tuple(buffer.tensor.shape)))
                if name not in trace.results and parts:
                    nth = sum(h.name == name for h in known.values()) % len(parts)
                    known[buffer.rank] = Held(name, buffer, parts[nth], np.inf, shape)
                    break
    yield from (known[rank] for rank in sorted(known))


def _agreeing(trace: Trace, name: str, expected: Expected, buffer: Buffer) -> Iterator[Held]:
    shape = tuple(expected.shape)
    if buffer.result:
        if name == buffer.result:
            yield Held(name, buffer, torch.arange(buffer.tensor.numel()), 0.0, shape)
        return
    if name in trace.results or not isinstance(expected.finished, Numbers):
        return
    exact = _parts(expected.finished)[0]
    for part in _places(shape, tuple(buffer.tensor.shape)):
        value, wanted = buffer.tensor.reshape(-1).to(torch.float64), exact[part]
        both = value.isfinite() & wanted.isfinite()
        size = wanted[both].norm()
        error = float((value - wanted)[both].norm() / size) if size else float("inf")
        if error <= NEAR:
            yield Held(name, buffer, part, error, shape)


def _places(stage: Sequence[int], own: Sequence[int]) -> Iterator[Tensor]:
    """The elements of a stage that a tensor of some shape may hold: all of them, or a part along one dimension."""
    whole, size = torch.arange(int(np.prod(stage))), int(np.prod(own))
    if len(whole) == size:
        yield whole
        return
    if len(stage) == len(own) + 1 and tuple(stage[:-1]) == tuple(own):
        yield from (whole.reshape(*stage)[..., i].reshape(-1) for i in range(stage[-1]))
        return
    apart = [axis for axis, (a, b) in enumerate(zip(stage, own, strict=False)) if a != b]
    if len(stage) == len(own) and len(apart) == 1 and stage[apart[0]] % own[apart[0]] == 0:
        chunks = whole.reshape(*stage).split(own[apart[0]], dim=apart[0])
        yield from (chunk.reshape(-1) for chunk in chunks)


def _parts(expected: Expected) -> tuple[Tensor, Tensor, Tensor]:
    e = expected.allowed
    assert not isinstance(e, Tensor)
    exact, lo, hi = (part.expand(expected.shape).reshape(-1) for part in (e.exact, e.lo, e.hi))
    return exact, lo, hi
