"""Time of calls on the device, without the host, and time of calls on the host.

Calls come in a sequence, each with tensors of its own, so that what one has left in a cache is no use to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle

import torch

from lastbit.bench.samples import Effort, now, on_device
from lastbit.calling.capture import captured, why_it_waits
from lastbit.reports.bench import Sample
from lastbit.reports.speed import CLOCK, EVENTS, GRAPH

Call = Callable[[], object]

_SHARE = 0.1  # of the effort's seconds, as in `on_device`
_FEWEST, _MOST = 5, 200  # replays
_BURSTS, _BURST = 5, 50  # times that the host is looked at, and most calls then: fewer launches than a queue takes


def device_seconds(calls: Sequence[Call], device: torch.device, effort: Effort) -> tuple[str, Sample]:
    """Time a call without the host; return the method, and the seconds. Every call was made once before.

    On CUDA all calls are captured in one graph, which is replayed. Those that cannot be captured, because they wait for
    the device, are timed one by one by `on_device`.
    """
    turns = cycle(calls)
    if device.type == "cuda" and not why_it_waits(calls[0]) and (graph := _captured(calls)) is not None:
        return GRAPH, _replayed(graph, len(calls), effort)
    return CLOCK if device.type == "cpu" else EVENTS, on_device(lambda: next(turns)(), device, effort)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    """Capture all calls in one graph, whose results have their own memory; None if something cannot be captured."""
    with suppress(RuntimeError):
        return captured(lambda: [call() for call in calls])[0]
    return None


def _replayed(graph: torch.cuda.CUDAGraph, calls: int, effort: Effort) -> Sample:
    first = _seconds_of(graph)
    rounds = max(_FEWEST, min(_MOST, int(_SHARE * effort.seconds / max(first, 1e-6))))
    for _ in range(2):
        graph.replay()
    return Sample.of([_seconds_of(graph) / calls for _ in range(rounds)])


def _seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def host_seconds(calls: Sequence[Call], device: torch.device, effort: Effort) -> Sample:
    """Time a call until it returns, without waiting for the device between calls; each was made once before."""
    turns, settled = cycle(calls), now(device)
    start = settled()
    next(turns)()
    once = settled() - start
    burst = max(1, min(_BURST, int(_SHARE * effort.seconds / once)))
    taken = []
    for _ in range(_BURSTS):
        start = settled()
        for _ in range(burst):
            next(turns)()
        taken.append((time.perf_counter() - start) / burst)
    settled()
    return Sample.of(taken)
