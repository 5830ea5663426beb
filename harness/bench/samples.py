"""Samples of a time, and how much is measured.

A wall time is that of `torch.utils.benchmark.Timer`, which warms up, repeats, and waits for the device. A time on an
accelerator is that of `triton.testing.do_bench`: events of the device around a call, with its L2 cache flushed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from lastbit.reports.bench import Sample


@dataclass(frozen=True)
class Effort:
    """The amount of measuring: repetitions and rounds.

    Attributes:
        seconds: that repetitions of one call take, at least; on an accelerator a tenth.
        rounds: over what is measured in rounds.
    """

    seconds: float = 2.0
    rounds: int = 3


# Arbitrary: little enough to stand beside a verdict, as a judge's --speed does.
QUICK = Effort(seconds=0.1, rounds=1)


def wall(call: Callable[[int], object], effort: Effort) -> Sample:
    """Time `call(number)` in seconds until the device has finished; `number` counts up, so that calls may differ."""
    known, threads = {"call": call, "numbers": count()}, torch.get_num_threads()
    timer = Timer("call(next(numbers))", globals=known, num_threads=threads)
    return Sample.of(timer.blocked_autorange(min_run_time=effort.seconds).times)


def on_device(call: Callable[[], object], device: torch.device, effort: Effort) -> Sample:
    """Time `call()` in seconds on an accelerator, with a cold L2 cache; its wall time on the CPU."""
    if device.type == "cpu":
        return wall(lambda number: call(), effort)
    from triton.testing import do_bench

    times: list[float] = do_bench(call, warmup=10, rep=round(effort.seconds * 100), return_mode="all")
    return Sample.of([milliseconds / 1e3 for milliseconds in times])


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of all elements."""
    return sum(tensor.nbytes for tensor in tensors.values())


def now(device: torch.device) -> Callable[[], float]:
    """Make a clock that waits until the device has finished its work."""

    def settled() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return settled
