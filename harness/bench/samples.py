"""Samples of a time, and peaks of memory.

A wall time is that of `torch.utils.benchmark.Timer`, which warms up, repeats, and waits for the device. A time on an
accelerator is that of `triton.testing.do_bench`: events of the device around a call, with its L2 cache flushed before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, cycle

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from lastbit.reports.bench import Sample
from lastbit.verify.device_memory import give_back

# Arbitrary: for tiny tensors, more copies cost time to make, and a loop over fewer stays in the cache all the same.
_MOST_COPIES = 64
_CACHE = 4 << 20  # bytes, more than the L2 cache of a core holds


@dataclass(frozen=True)
class Effort:
    """The amount of measuring: repetitions, cases and rounds.

    Attributes:
        seconds: that repetitions of one call take, at least; on an accelerator a tenth.
        groups, cases: of an op, and of each of these groups, that its rate is measured on.
        rounds: over these cases.
    """

    seconds: float = 2.0
    groups: int = 3
    cases: int = 8
    rounds: int = 3


# Arbitrary: little enough to stand beside a verdict, as a judge's --speed does.
QUICK = Effort(seconds=0.1, groups=1, cases=2, rounds=1)


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


def in_turn(make: Callable[[int], Mapping[str, Tensor]], device: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """Yield tensors of `make(number)` in turn, for ever: on the CPU so many that they exceed a core's L2 cache.

    On an accelerator there is one of them, because `on_device` flushes the cache.
    """
    copies = [make(0)]
    if device.type == "cpu":
        enough = 2 + _CACHE // max(1, size_of(copies[0]))
        copies += [make(number) for number in range(1, min(enough, _MOST_COPIES))]
    return cycle(copies)


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Count the bytes of all elements."""
    return sum(tensor.nbytes for tensor in tensors.values())


def peak_memory(call: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak bytes of tensors on an accelerator during a call, with those that were there before.

    On the CPU the call is made, and the answer is None.
    """
    if device.type == "cpu":
        call()
        return None
    give_back(device)
    memory = torch.get_device_module(device)
    memory.reset_peak_memory_stats(device)
    call()
    torch.accelerator.synchronize(device)
    return int(memory.max_memory_allocated(device))


def now(device: torch.device) -> Callable[[], float]:
    """Make a clock that waits until the device has finished its work."""

    def settled() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return settled
