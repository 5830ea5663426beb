"""Inputs that a kernel process has not seen, and its results, both in memory of the judge.

Each call has inputs of its own: other values, drawn by seeds that nobody knows before, in other memory. The process
gets that memory with the message to go, when all of it is written. Its results are to lie in memory of the judge when
it answers. The judge then reads words that it has drawn before, thousands out of all results, and the clock stops when
it has them; after that it copies everything. What is written later shows, because those words are compared.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from harness.case import Case, contiguous_strides
from harness.inputs import build
from harness.inputs.guards import extent

ALIGNMENT = 512
"""Bytes, of which the starts of tensors are multiples, as torch allocates them on CUDA."""

WITNESSES = 4096
"""Words of results that are read when the process answers: one in a thousand that is missing shows in 98 of 100."""


@dataclass(frozen=True)
class Shaped:
    """What a tensor of every call is like; strides are in elements."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def elements(self) -> int:
        """From its first element to the end of its last one."""
        return extent(self.shape, self.strides)

    @property
    def room(self) -> int:
        """Bytes that it takes, up to where the next one may start."""
        return -(-max(1, self.elements * self.dtype.itemsize) // ALIGNMENT) * ALIGNMENT


def contiguous(name: str, dtype: torch.dtype, shape: Sequence[int]) -> Shaped:
    """A tensor whose elements lie one after the other."""
    return Shaped(name, dtype, tuple(shape), contiguous_strides(tuple(shape)))


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a number of calls lie in memory: name → first byte, call by call.

    Each name has its tensors in an order of its own, so that what lies beside a tensor does not say which call has it.
    """

    tensors: tuple[Shaped, ...]
    calls: int
    starts: Mapping[str, tuple[int, ...]]
    nbytes: int

    @classmethod
    def of(cls, tensors: Sequence[Shaped], calls: int) -> Layout:
        starts, free = dict[str, tuple[int, ...]](), 0
        for tensor in tensors:
            order = sorted(range(calls), key=lambda _: secrets.randbits(32))
            starts[tensor.name] = tuple(free + place * tensor.room for place in order)
            free += calls * tensor.room
        return cls(tuple(tensors), calls, starts, free)

    def tensor(self, words: Tensor, tensor: Shaped, call: int) -> Tensor:
        """A tensor of a call, in memory that is laid out like this."""
        at = self.starts[tensor.name][call] // tensor.dtype.itemsize
        return words.view(tensor.dtype).as_strided(tensor.shape, tensor.strides, at)

    def flat(self, words: Tensor, tensor: Shaped, call: int) -> Tensor:
        """The memory of a tensor of a call, from its first element to its last."""
        at = self.starts[tensor.name][call] // tensor.dtype.itemsize
        return words.view(tensor.dtype)[at : at + tensor.elements]

    def of_call(self, words: Tensor, call: int) -> dict[str, Tensor]:
        """All tensors of a call."""
        return {tensor.name: self.tensor(words, tensor, call) for tensor in self.tensors}

    @property
    def as_json(self) -> list[dict[str, Any]]:
        """What a kernel process needs to find them."""
        return [
            {
                "name": t.name,
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": list(t.shape),
                "strides": list(t.strides),
                "at": [start // t.dtype.itemsize for start in self.starts[t.name]],
            }
            for t in self.tensors
        ]


def shapes_of(case: Case) -> tuple[Shaped, ...]:
    """What the inputs of a case are like."""
    return tuple(Shaped(t.name, t.torch_dtype, t.shape, t.element_strides) for t in case.tensors)


def drawn(case: Case, calls: int) -> list[Case]:
    """So many cases like this one with seeds that nobody can know."""
    return [replace(case, seed=secrets.randbits(48)) for _ in range(calls)]


def write(cases: Sequence[Case], layout: Layout, words: Tensor) -> None:
    """Write the inputs of the cases where the calls will find them."""
    for call, case in enumerate(cases):
        guards = {guarded.name: guarded.tensor for guarded in build(case, words.device).guards}
        for tensor in layout.tensors:
            source = guards[tensor.name]
            layout.flat(words, tensor, call).copy_(source.as_strided((tensor.elements,), (1,), source.storage_offset()))


@dataclass(frozen=True)
class Witness:
    """Places of words in the memory of results that the judge reads first, and what it found there."""

    places: Tensor
    found: Tensor

    def late(self, words: Tensor) -> int:
        """How many of these words are others in a later copy."""
        return int((words[self.places] != self.found).sum())


def places_in(layout: Layout, device: torch.device) -> Tensor:
    """Places of words of results, drawn anew, spread evenly over the results of all calls."""
    source = torch.Generator().manual_seed(secrets.randbits(63))
    sizes = {tensor: tensor.elements * tensor.dtype.itemsize // 8 for tensor in layout.tensors}
    found = []
    for tensor, size in sizes.items():
        if size:
            each = min(size, -(-WITNESSES // layout.calls))
            starts = torch.tensor(layout.starts[tensor.name]).repeat_interleave(each) // 8
            found.append(starts + torch.randint(size, (layout.calls * each,), generator=source))
    return torch.cat([torch.zeros(1, dtype=torch.int64), *found]).to(device)


@dataclass(frozen=True)
class Taken:
    """What came of the calls of one round.

    Attributes:
        seconds: from the message to go until the judge had the first elements of the results.
        words: a copy of the memory of results, made right after.
        late: how many of the first elements were others in that copy.
        copied: how many results the process says it had to copy to the judge's memory, within that time.
    """

    seconds: float
    words: Tensor
    late: int
    copied: int


def take(go: Callable[[], Mapping[str, Any]], results: Tensor, places: Tensor, clock: Callable[[], float]) -> Taken:
    """Let the calls be made, and take their results from memory that the process writes to."""
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
