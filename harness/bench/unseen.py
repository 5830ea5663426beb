"""Inputs that a kernel process has not seen, and its results, both in memory of the judge.

Each call has inputs of its own: other values, drawn by seeds that nobody knows before, in other memory. The process
gets that memory with the message to go, when all of it is written, and after the call before is over. Its results are
to lie in memory of the judge when it answers. The judge then reads words that it has drawn before out of all results,
and the clock stops when it has them; after that it copies everything. What is written later shows, because those words
are compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lastbit.case import Case, contiguous_strides
from lastbit.inputs import build
from lastbit.inputs.guards import extent

ALIGNMENT = 512
"""Bytes, of which the starts of tensors are multiples, as torch allocates them on CUDA."""

WITNESSES = 1024
"""Words of a result that are read when the process answers: 1 in 1000 that is missing shows in 64 of 100 calls."""


@dataclass(frozen=True)
class Shaped:
    """The name, dtype, shape and strides, in elements, of a tensor that every call has."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The elements from the tensor's first to the end of its last one."""
        return extent(self.shape, self.strides)

    @property
    def room(self) -> int:
        """Bytes that it takes, up to where the next one may start."""
        return -(-max(1, self.elements * self.dtype.itemsize) // ALIGNMENT) * ALIGNMENT


def contiguous(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Shaped:
    """Describe a tensor whose elements lie one after the other."""
    return Shaped(name, dtype, tuple(shape), contiguous_strides(tuple(shape)))


@dataclass(frozen=True)
class MemoryMap:
    """The places of a call's tensors in memory: name → first byte."""

    tensors: tuple[Shaped, ...]
    starts: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Shaped]) -> MemoryMap:
        starts, free = dict[str, int](), 0
        for tensor in tensors:
            starts[tensor.name] = free
            free += tensor.room
        return cls(tuple(tensors), starts, free)

    def tensors_in(self, words: Tensor) -> dict[str, Tensor]:
        """Return all tensors, in memory that is laid out like this."""
        return {t.name: self._from(words, t).as_strided(t.shape, t.strides) for t in self.tensors}

    def flat(self, words: Tensor, tensor: Shaped) -> Tensor:
        """Return the memory of a tensor, from its first element to its last."""
        return self._from(words, tensor)[: tensor.elements]

    def _from(self, words: Tensor, tensor: Shaped) -> Tensor:
        return words.view(tensor.dtype)[self.starts[tensor.name] // tensor.dtype.itemsize :]

    @property
    def as_json(self) -> list[dict[str, Any]]:
        """The tensors' places and types, for a kernel process to find them."""
        return [
            {
                "name": t.name,
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": list(t.shape),
                "strides": list(t.strides),
                "at": self.starts[t.name] // t.dtype.itemsize,
            }
            for t in self.tensors
        ]


def shapes_of(case: Case) -> tuple[Shaped, ...]:
    """Describe the inputs of a case."""
    return tuple(Shaped(t.name, t.torch_dtype, t.shape, t.element_strides) for t in case.tensors)


def drawn(case: Case) -> Case:
    """Return a case like this one with a seed that nobody can know."""
    return replace(case, seed=secrets.randbits(48))


def write(case: Case, layout: MemoryMap, words: Tensor) -> None:
    """Write the inputs of a case where its call will find them."""
    guards = {guarded.name: guarded.tensor for guarded in build(case, words.device).guards}
    for tensor in layout.tensors:
        source = guards[tensor.name]
        layout.flat(words, tensor).copy_(source.as_strided((tensor.elements,), (1,), source.storage_offset()))


@dataclass(frozen=True)
class Witness:
    """Places of words in the memory of results that the judge reads first, and what it found there."""

    places: Tensor
    found: Tensor

    def late(self, words: Tensor) -> int:
        """Count the words that differ in a later copy."""
        return int((words[self.places] != self.found).sum())


def places_in(layout: MemoryMap, device: torch.device) -> Tensor:
    """Return places of words of the results, drawn anew."""
    source, found = torch.Generator().manual_seed(secrets.randbits(63)), [torch.zeros(1, dtype=torch.int64)]
    for tensor in layout.tensors:
        if size := tensor.elements * tensor.dtype.itemsize // 8:
            places = torch.randint(size, (min(size, WITNESSES),), generator=source)
            found.append(layout.starts[tensor.name] // 8 + places)
    return torch.cat(found).to(device)


@dataclass(frozen=True)
class Taken:
    """The outcome of a call.

    Attributes:
        seconds: from the message to go until the judge had drawn words of the results.
        words: a copy of the memory of results, made right after.
        late: how many of the drawn words were others in that copy.
        copied: how many results the process says it had to copy to the judge's memory, within that time.
    """

    seconds: float
    words: Tensor
    late: int
    copied: int


def take(go: Callable[[], Mapping[str, Any]], results: Tensor, places: Tensor, clock: Callable[[], float]) -> Taken:
    """Let a call be made, and take its results from memory that the process writes to."""
    start = clock()
    answer = go()
    witness = Witness(places, results[places])
    settle(results.device)
    seconds = clock() - start
    words = results.clone()
    return Taken(seconds, words, witness.late(words), int(answer["copied"]))


def settle(device: torch.device) -> None:
    """Wait until the device has done what this process asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
