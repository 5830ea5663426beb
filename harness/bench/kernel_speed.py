"""Speed and verdict of kernels on a case: every kernel of the op on the same tensors, beside the device's roof.

A call is timed on the device, without the host, and on the host. Calls come in a sequence, each with tensors of its
own, so that what one has left in a cache is no use to the next. A kernel that does next to nothing is timed, too: what
is left of the time of its call is a launch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lastbit.bench.case_lines import bench_cases
from lastbit.bench.samples import Effort, now, on_device, size_of
from lastbit.calling.capture import captured, why_it_waits
from lastbit.calling.performing import named_results
from lastbit.case import Case, parse_case
from lastbit.devices import made_current
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.inputs import build
from lastbit.inputs.guards import copied, handed_out
from lastbit.reports.bench import CLOCK, EVENTS, GRAPH, Roof, Sample, Speed
from lastbit.result import TURNED_DOWN, CaseResult, Verdict
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.device_memory import give_back
from lastbit.verify.worker import Workplace

# Small on purpose: what is timed is the launch, and not the copy.
_ELEMENTS = 256


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place, mask=place < n), mask=place < n)


def bare_launch(device: torch.device) -> Callable[[], object]:
    """Make a launch of one program with three arguments and a constant, as most people launch a kernel."""
    source = torch.zeros(_ELEMENTS, device=device)
    target = torch.empty_like(source)
    return lambda: _copy[(1,)](source, target, _ELEMENTS, BLOCK=_ELEMENTS)


Call = Callable[[], object]

# Ten rounds in the time; fewer say less of how they vary, more are short.
_SHARE = 0.1  # of the effort's seconds, as in `on_device`
_FEWEST, _MOST = 5, 200  # replays
_BURSTS, _BURST = 5, 50  # times that the host is looked at, and most calls then: fewer launches than a queue takes


def device_seconds(calls: Sequence[Call], device: torch.device, effort: Effort) -> tuple[str, Sample]:
    """Time a call without the host; return the method, and the seconds. Every call was made once before.

    On CUDA all calls are captured in one graph, which is replayed. Those that cannot be captured, because they wait for
    the device, are timed one by one by `on_device`.
    """
    turns = cycle(calls)
    graph: torch.cuda.CUDAGraph | None = None
    if device.type == "cuda" and not why_it_waits(calls[0]):
        with suppress(RuntimeError):  # something cannot be captured
            graph = captured(lambda: [call() for call in calls])[0]  # the results have memory of their own
    if graph is not None:
        first = _seconds_of(graph)
        rounds = max(_FEWEST, min(_MOST, int(_SHARE * effort.seconds / max(first, 1e-6))))
        for _ in range(2):
            graph.replay()
        return GRAPH, Sample.of([_seconds_of(graph) / len(calls) for _ in range(rounds)])
    return CLOCK if device.type == "cpu" else EVENTS, on_device(lambda: next(turns)(), device, effort)


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


Tensors = Mapping[str, Tensor]

_JUDGED = "judged.txt"
# Arbitrary: judging a larger one takes minutes, and needs many fp64 numbers for each element.
_LARGEST = 1 << 30  # elements of a case that is judged itself
_COPY, _COPY_ON_CPU = 1 << 30, 1 << 26  # bytes that are read, and as many written
_SIDE, _SIDE_ON_CPU = 8192, 256  # of the matrices of a product
# Arbitrary: of one call, the launch of the graph would be timed as well.
_CALLS = 4  # that a graph has, at least
# Arbitrary: more sets cost memory and time to fill; fewer fit the cache where tensors are tiny, as they do anyway.
_MOST_SETS = 64
# Arbitrary: of one filling, some may stay in a cache that is no perfect LRU; more costs memory and time.
_TIMES = 3  # how often all sets of tensors fill the cache
# Twice the 2 MiB of a core of Sapphire Rapids.
_CACHE = 4 << 20  # bytes of a core's L2 cache, at most


def roof(place: Workplace, effort: Effort) -> Roof:
    """Measure a copy and a matrix product in bf16 on the device of the configuration."""
    device = torch.device(*place.config.devices)
    cpu = device.type == "cpu"
    size, side = (_COPY_ON_CPU, _SIDE_ON_CPU) if cpu else (_COPY, _SIDE)
    with made_current(device):
        copied = _copied(device, size, effort)
        a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
        return Roof(copied, on_device(lambda: torch.matmul(a, b), device, effort).rate(2 * side**3))


def _copied(device: torch.device, size: int, effort: Effort) -> Sample:
    """Measure how fast bytes are copied, in memory that is free again for what is measured next."""
    source = torch.zeros(size, dtype=torch.uint8, device=device).random_().view(torch.bfloat16)
    target = torch.empty_like(source)  # which a driver may copy to without a kernel: the faster way counts
    ways: tuple[Call, ...] = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return min((on_device(way, device, effort) for way in ways), key=lambda s: s.median).rate(2 * size)


def takers(place: Workplace, line: str) -> list[str]:
    """List the kernels of the plan whose signature takes the case, in order."""
    case = parse_case(line)
    subjects = place.subjects.items()
    return [name for name, s in subjects if s.op.name == case.op and not unsupported(s.kernel, case)]


def speed(place: Workplace, line: str, name: str, effort: Effort) -> Speed:
    """Judge, then time one kernel on one case.

    Raises:
        UnsupportedCase: the kernel declines the case.
        LastbitError: it raises, or no case of the op is small enough to be judged.
    """
    case, subject = parse_case(line), place.subjects[name]
    with place.watch(line), made_current(subject.device):
        judged = _judged(place, subject, case)
        result: CaseResult = verify_case(subject, judged, repeat=True, settled=None)  # no other contract is tried
        give_back(subject.device)
        if result.verdict in TURNED_DOWN:
            raise UnsupportedCase(result.reason)
        if result.verdict is Verdict.ERRORED:
            raise LastbitError(f"{result.reason}, in {judged}")
        if not _kept or _kept[0].case != case:
            _kept.clear()  # before more memory is asked for
            give_back(subject.device)
            _kept.append(_Ready(case, _sets(case, subject.device)))
        ready = _kept[0]
        return _timed(subject, ready, effort, result, "" if judged == case else str(judged))


def _judged(place: Workplace, subject: Subject, case: Case) -> Case:
    """Return the case to judge: itself, or if it is too large a smaller one of the project with the same names."""
    if case.numel <= _LARGEST:
        return case
    for smaller in bench_cases(place.project, subject.device, _JUDGED):
        if smaller.op == case.op and smaller.names == case.names:
            return smaller
    raise LastbitError(f"{case.op}: too large to be judged, and no case of {_JUDGED} has the same tensors: {case}")


@dataclass
class _Ready:
    """A case with sets of tensors of the same values in different memory, and the results of the first kernel."""

    case: Case
    sets: list[Tensors]
    first: dict[str, Tensor] = field(default_factory=dict)


_kept: list[_Ready] = []
"""The case of the last call, whose tensors the next kernel gets, too."""


def _sets(case: Case, device: torch.device) -> list[Tensors]:
    """Make sets of tensors that exceed the L2 cache several times, at most `_MOST_SETS`; two of all but huge ones."""
    guards = build(case, device).guards
    first = handed_out(guards)
    size = max(1, size_of(first))
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else _CACHE
    more = 0 if size > _COPY else min(_MOST_SETS - 1, max(1, _TIMES * cache // size))
    return [first, *(handed_out(copied(guards)) for _ in range(more))]


def _timed(subject: Subject, ready: _Ready, effort: Effort, result: CaseResult, judged: str) -> Speed:
    kernel, case, device = subject.kernel, ready.case, subject.device
    sets = [dict(tensors) for tensors in ready.sets]
    for tensors in sets:  # the other kernels get these, too
        for name in tensors.keys() & set(kernel.mutates):  # with the same strides and offset in a copy of all memory
            own = tensors[name]
            memory = own.untyped_storage().clone()
            tensors[name] = own.new_empty(0).set_(memory, own.storage_offset(), own.shape, own.stride())
    returned = kernel.call(**sets[0], **case.params)
    results = named_results(returned, tuple(subject.op.in_order(s.name for s in result.stages if s.result)))
    apart = None
    if judged and not ready.first:
        ready.first.update({name: tensor.clone() for name, tensor in results.items()})
    elif judged:
        both = results.keys() & ready.first.keys()
        apart = max((_distance(results[name], ready.first[name]) for name in both), default=math.inf)
    traffic = size_of(sets[0]) + size_of(results)
    del returned, results
    calls: list[Callable[[], Any]] = [partial(kernel.call, **tensors, **case.params) for tensors in sets]
    for call in calls[1:]:
        call()
    how, seconds = device_seconds(calls * -(-_CALLS // len(calls)), device, effort)
    host = host_seconds(calls, device, effort)
    launch = bare_launch(device)
    launch()
    give_back(device)
    return Speed(
        of=str(case),
        kernel=kernel.name,
        contract=str(subject.contract),
        verdict=str(result.verdict),
        how=how,
        time=seconds,
        host=host,
        launch=host_seconds([launch], device, effort),
        traffic=traffic,
        flops=0 if subject.op.flops is None else int(subject.op.flops(ready.sets[0], case.params)),
        why=next((finding.sentence for finding in result.findings if not finding.notice), ""),
        judged=judged,
        apart=apart,
    )


def _distance(own: Tensor, first: Tensor) -> float:
    """Compute ‖own − first‖ / ‖first‖, or ‖own‖ if first is zero; infinite if not finite or of another shape."""
    if own.shape != first.shape:
        return math.inf
    difference, size = float((own.float() - first.float()).norm()), float(first.float().norm())
    found = difference / size if size else difference
    return found if math.isfinite(found) else math.inf
