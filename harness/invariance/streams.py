"""Streams: a kernel on a side stream, and beside other work of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.inputs import Inputs
from lastbit.invariance.basis import Basis
from lastbit.invariance.direct import called, elsewhere, require_accelerator, require_direct
from lastbit.invariance.property import Pairs, Property
from lastbit.relations import same

# Arbitrary: what depends on timing shows in some calls only; `verify` makes one.
_MANY = 10  # calls beside each kind of work where calls may cost seconds


@dataclass(frozen=True)
class BusyWork:
    """Matrix products that keep a device busy for milliseconds.

    Attributes:
        what: in words that follow "beside".
        buffers: makes the tensors that it works on.
        step: one launch.
        steps: launches, which take longer than the host needs to call a kernel.
    """

    what: str
    buffers: Callable[[torch.device], tuple[Tensor, Tensor]]
    step: Callable[[Tensor, Tensor], object]
    steps: int


def _square(size: int, dtype: torch.dtype) -> Callable[[torch.device], tuple[Tensor, Tensor]]:
    return lambda device: (torch.ones(size, size, dtype=dtype, device=device),) * 2


def _bytes(device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.zeros(2, 128 << 20, dtype=torch.uint8, device=device)
    return words[0], words[1]


# About 5 ms each on an H200. A product of 1024 rows has 64 tiles or fewer, on 132 multiprocessors.
PRODUCTS = BusyWork("matrix products on all multiprocessors", _square(4096, torch.bfloat16), torch.mm, 25)
SMALL_PRODUCTS = BusyWork("matrix products on some multiprocessors", _square(1024, torch.float32), torch.mm, 80)
COPIES = BusyWork("copies of memory", _bytes, lambda a, b: a.copy_(b), 60)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one of its device."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@contextmanager
def busy(work: BusyWork, stream: torch.Stream) -> Iterator[None]:
    """Queue work on a stream, and wait for it at the end."""
    a, b = work.buffers(stream.device)
    torch.accelerator.synchronize(stream.device)
    with on(stream):
        for _ in range(work.steps):
            work.step(a, b)
    try:
        yield
    finally:
        torch.accelerator.synchronize(stream.device)


def show_stream(basis: Basis, pairs: Pairs) -> None:
    """Compare calls on a side stream, whose inputs are written there shortly before, or while the usual one is busy."""
    require_direct(basis, "called on another stream")
    require_accelerator(basis, "streams")
    usual, side, inputs = torch.accelerator.current_stream(basis.device), torch.Stream(basis.device), elsewhere(basis)
    torch.accelerator.synchronize(basis.device)
    with on(side):
        _compare(basis, pairs, "a call on a side stream", inputs)
        with busy(PRODUCTS, usual):
            _compare(basis, pairs, "a call on a side stream, with the default stream busy", inputs)
        with _late(inputs, side):
            _compare(basis, pairs, "a call on a side stream that has written the inputs just before", inputs)


def show_contention(basis: Basis, pairs: Pairs) -> None:
    """Compare calls beside other work."""
    require_direct(basis, "called beside other work of the device")
    require_accelerator(basis, "other work beside a call")
    side, inputs = torch.Stream(basis.device), elsewhere(basis)
    for _ in range(_MANY if basis.thorough else 1):
        for work in (PRODUCTS, SMALL_PRODUCTS, COPIES):
            with busy(work, side):
                _compare(basis, pairs, f"a call beside {work.what}", inputs)


def _compare(basis: Basis, pairs: Pairs, what: str, inputs: Inputs) -> None:
    results = called(basis, inputs)
    pairs.compare(basis, what, same(basis.results, results), basis.inputs, results)


@contextmanager
def _late(inputs: Inputs, stream: torch.Stream) -> Iterator[None]:
    """Fill the inputs with zeros, and restore their values only after work that is queued on a stream."""
    for guarded in inputs.guards:
        guarded.words.zero_()
    with busy(PRODUCTS, stream):
        inputs.restore()
        yield


STREAM = Property("stream", "a call on another stream gives the same bits", show_stream)
CONTENTION = Property("contention", "a call beside other work of the device gives the same bits", show_contention)
