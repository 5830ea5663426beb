"""Tensors that a kernel allocates and hands from launch to launch, and the stages of the reference that they may be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lastbit.interpret.formats import Array
from lastbit.judging.expected import Expected, Numbers, RowSum
from lastbit.judging.trace import Trace
from lastbit.tracing import Log
from lastbit.tracing.memory import Addresses
from lastbit.tracing.of_torch import addresses_of

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


def agreeing(trace: Trace, buffer: Buffer, returned: Collection[str]) -> Iterator[Held]:
    """The stages that a buffer may be: the result that it was returned as, or those with which its values agree."""
    if buffer.result:
        shape = tuple(trace.stages[buffer.result].shape)
        yield Held(buffer.result, buffer, torch.arange(buffer.tensor.numel()), 0.0, shape)
        return
    for name in alike(trace, buffer, returned):
        shape, exact = tuple(trace.stages[name].shape), _parts(trace.stages[name].finished)[0]
        for part in parts_of(shape, tuple(buffer.tensor.shape)):
            error = distance(buffer.tensor.reshape(-1).to(torch.float64), exact[part])
            if error <= NEAR:
                yield Held(name, buffer, part, error, shape)


def alike(trace: Trace, buffer: Buffer, returned: Collection[str]) -> Iterator[str]:
    """The stages of numbers that a buffer has the shape of, or of a part; not those that others were `returned` as."""
    for name, expected in trace.stages.items():
        numbers = isinstance(expected, Numbers | RowSum) and name not in returned
        if numbers and any(True for _ in parts_of(tuple(expected.shape), tuple(buffer.tensor.shape))):
            yield name


def distance(values: Tensor, wanted: Tensor) -> float:
    """Relative L2 error over the elements in which both are finite."""
    both = values.isfinite() & wanted.isfinite()
    apart, size = float((values - wanted)[both].norm()), float(wanted[both].norm())
    return apart / size if size else 0.0 if not apart else float("inf")


def worst_outside(trace: Trace, held: Held) -> int | None:
    """The element of a buffer that is farthest off, of those that its stage cannot have; None if there is none."""
    exact, lo, hi = (part[held.part] for part in _parts(trace.stages[held.name].finished))
    value = held.buffer.tensor.reshape(-1).to(torch.float64)
    free = lo.isneginf() & hi.isposinf() | lo.isnan()
    outside = ~((value >= lo) & (value <= hi)) & ~(value.isnan() & free)
    if not outside.any():
        return None
    return int(torch.where(outside, (value - exact).abs().nan_to_num(torch.inf), -1.0).argmax())


def parts_of(stage: Sequence[int], own: Sequence[int]) -> Iterator[Tensor]:
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
