"""Launches of small Triton kernels, and whether two ways to run one leave the same bytes and raise the same error.

The kernels are those that `triton_texts` draws. A program here is text and numbers alone, so its `repr` is enough to
run it again:

    TRITON_INTERPRET=1 python -c 'from tests.triton_programs import *; print(differences(Program(...)))'
"""

from __future__ import annotations

import contextlib
import io
import itertools
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
import triton.language as tl

from lastbit.interpret import descending, install, launch, one_by_one

install()

__all__ = ["Launch", "Outcome", "Program", "Tensor", "differences", "outcome_of"]

ARENA = torch.zeros(1 << 16, dtype=torch.uint8)
"""The memory of every tensor of every program, so that addresses are the same in two runs."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of one dimension; `start` is its first byte in the arena, so that tensors can share bytes."""

    name: str
    dtype: str
    size: int
    start: int

    @property
    def itemsize(self) -> int:
        return torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()

    def view(self) -> torch.Tensor:
        return ARENA[self.start : self.start + self.size * self.itemsize].view(getattr(torch, self.dtype))

    def fill(self, rng: np.random.Generator) -> None:
        """Small numbers, so that equal values and indices in bounds are frequent, and a few that are special."""
        if self.dtype.startswith("int") or self.dtype == "bool":
            low, high = (0, 2) if self.dtype == "bool" else (-3, 12)
            values = torch.from_numpy(rng.integers(low, high, self.size))
        else:
            drawn = rng.integers(-24, 40, self.size) / 8
            special = rng.choice(SPECIAL, self.size)
            values = torch.from_numpy(np.where(rng.random(self.size) < 0.06, special, drawn))
        self.view().copy_(values)


SPECIAL = (float("nan"), float("inf"), float("-inf"), -0.0, 1e30, 1e-40)


@dataclass(frozen=True)
class Launch:
    """One launch of a program's kernel: what may differ from one to the next."""

    grid: tuple[int, ...]
    n: int
    m: int
    s: float
    seed: int
    down: bool = False


@dataclass(frozen=True)
class Program:
    """A kernel named `kernel`, its tensors, the constant K, and launches, one after the other, each on fresh bytes.

    A batch of programs may take `batch_bytes`, so that a small number makes several batches of a launch.
    """

    text: str
    tensors: tuple[Tensor, ...]
    constant: int
    launches: tuple[Launch, ...]
    batch_bytes: int = launch.BATCH_BYTES

    def __repr__(self) -> str:
        parts = (f"{name}={getattr(self, name)!r}" for name in ("tensors", "constant", "launches", "batch_bytes"))
        return f"Program('''\n{self.text}''', {', '.join(parts)})"


@dataclass(frozen=True)
class Outcome:
    """What a launch left behind: the bytes of all memory, the error and its cause, what was printed."""

    memory: bytes
    error: tuple[str, ...]
    printed: str

    def differs_from(self, other: Outcome) -> str:
        """Describe in one line what is not the same; empty if nothing."""
        if self.error != other.error:
            return f"raises {self.error or 'nothing'}, not {other.error or 'nothing'}"
        if self.printed != other.printed:
            return f"prints {self.printed!r}, not {other.printed!r}"
        here, there = (np.frombuffer(x.memory, dtype=np.uint8) for x in (self, other))
        if not (bytes_ := np.flatnonzero(here != there)).size:
            return ""
        return f"{bytes_.size} bytes differ, the first at {bytes_[0]}: {here[bytes_[0]]}, not {there[bytes_[0]]}"


_numbers = itertools.count()


@contextlib.contextmanager
def loaded(text: str) -> Iterator[Any]:
    """Load the function `kernel` of a source text, which `inspect` finds as it finds that of a file."""
    name = f"<kernel {next(_numbers)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"triton": triton, "tl": tl, "__name__": name}
    exec(compile(text, name, "exec"), namespace)
    try:
        yield namespace["kernel"]
    finally:
        del linecache.cache[name]


def outcome_of(kernel: Any, program: Program, given: Launch) -> Outcome:
    """Launch on fresh bytes, in the way that is in force."""
    rng = np.random.Generator(np.random.Philox(given.seed))
    ARENA.zero_()
    for tensor in program.tensors:
        tensor.fill(rng)
    arguments = {tensor.name: tensor.view() for tensor in program.tensors}
    error: tuple[str, ...] = ()
    with contextlib.redirect_stdout(io.StringIO()) as printed, _direction(given):
        try:
            kernel[given.grid](**arguments, n=given.n, m=given.m, s=given.s, K=program.constant)
        except Exception as raised:
            error = tuple(f"{type(x).__name__}: {x}" for x in (raised, raised.__cause__) if x is not None)
    return Outcome(ARENA.numpy().tobytes(), error, printed.getvalue())


def _direction(given: Launch) -> contextlib.AbstractContextManager[Any]:
    return descending() if given.down else contextlib.nullcontext()


def differences(program: Program, seen: Callable[[Launch, Outcome], None] = lambda *_: None) -> list[str]:
    """Describe what the launches do otherwise than one by one, a line each; `seen` gets what each does one by one.

    All launches run the default way first, one after the other, so that later ones find what earlier ones left.
    """
    with loaded(program.text) as kernel:
        with mock.patch.object(launch, "BATCH_BYTES", program.batch_bytes):
            default = [outcome_of(kernel, program, each) for each in program.launches]
        with one_by_one():
            expected = {each: outcome_of(kernel, program, each) for each in dict.fromkeys(program.launches)}
    for each, outcome in expected.items():
        seen(each, outcome)
    found = [outcome.differs_from(expected[each]) for each, outcome in zip(program.launches, default, strict=True)]
    return [f"launch {i + 1}, {program.launches[i]}: {text}" for i, text in enumerate(found) if text]
