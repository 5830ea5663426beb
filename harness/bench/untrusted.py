"""Speed of a kernel that nobody trusts: an upper bound, by the clock of the judge, of calls in a kernel process.

The time of a call is from the message to go until the judge has read results in its own memory. It has everything in
it: all streams, messages, the mapping of memory. So it can be too long, and never too short. No times are subtracted
from each other, because a kernel could be slow in one of them. Nothing of a call can be done in another one, since its
inputs come with its own message, when the call before is over.

Each call has inputs of its own: other values, drawn by seeds that nobody knows before, in other memory. The process
gets that memory with the message to go, when all of it is written, and after the call before is over. Its results are
to lie in memory of the judge when it answers. The judge then reads words that it has drawn before out of all results,
and the clock stops when it has them; after that it copies everything. What is written later shows, because those words
are compared.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import SystemRandom
from typing import Any

import torch
from torch import Tensor

from lastbit.bench.samples import Effort
from lastbit.case import Case, contiguous_strides
from lastbit.errors import LastbitError, UsageError
from lastbit.inputs import build
from lastbit.inputs.guards import extent
from lastbit.isolation import answers
from lastbit.isolation.isolated import FRAMES, Isolated
from lastbit.isolation.process import ForkServer, KernelProcess, Start
from lastbit.isolation.shared_memory import SharedBlock, fresh
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.reports.bench import Sample, SpeedBound
from lastbit.result import Finding, Judgement, Verdict
from lastbit.verify.check import Subject

_FEWEST, _MOST = 24, 512  # calls that are timed
# As that of kernel_speed.py.
_SHARE = 0.1  # of the effort's seconds that each of its rounds takes, and one more
_MEMORY, _MEMORY_ON_CPU = 16 << 30, 1 << 28  # bytes of a call, and of copies of all results
_JUDGED, _JUDGED_ON_CPU = 1 << 32, 1 << 26  # elements of inputs whose results are judged
# A bound on time: if one call in a hundred is wrong, one of so many is with 99 % (1 - 0.99^448).
_MOST_JUDGED = 448  # calls that are judged
# As _TIMES of kernel_speed.py.
_FLUSH = 3  # times that the L2 cache is written over
_POISON = -0x0101010101010102  # int64 of which each half and quarter is a NaN, or a number that nothing computes

# Memory of the judge, for inputs that a kernel process has not seen, and for its results

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
    witnesses = results[places]
    settle(results.device)
    seconds = clock() - start
    words = results.clone()
    return Taken(seconds, words, int((words[places] != witnesses).sum()), int(answer["copied"]))


def settle(device: torch.device) -> None:
    """Wait until the device has done what this process asked for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Calls


@dataclass
class TimedProcess:
    """A bare kernel process that is asked to make calls.

    Attributes:
        process: it.
        timeout: seconds that a call may take.
        given: the memory that it has been given, until it is told to let it go.
    """

    process: KernelProcess
    timeout: float
    given: list[SharedBlock] = field(default_factory=list)

    def ask(self, message: Mapping[str, Any], memory: Mapping[str, SharedBlock]) -> Mapping[str, Any]:
        gone = self.given if message["do"] == "prepare" else []  # of the call before
        self.given = [block for block in self.given if block not in gone] + list(memory.values())
        numbers = {what: block.number for what, block in memory.items()}
        shared = {"new": [block.as_json for block in memory.values()], "close": [block.number for block in gone]}
        fds = [block.descriptor for block in memory.values() if block.descriptor is not None]
        answer = self.process.ask({**message, **numbers, **shared}, self.timeout, fds)
        return {"copied": answers.integer(answer.get("copied", 0), 0, 1 << 40)}

    def memory(self, device: torch.device, size: int) -> SharedBlock:
        return fresh(device, size)


@dataclass(frozen=True)
class TimedKernel:
    """A kernel that is timed on a case.

    Attributes:
        subject: the kernel; its `call` is never used.
        case: the case; values of its calls are drawn anew.
        results: what the results of a call are like.
        process: where it runs.
        clock: seconds, as the judge counts them.
    """

    subject: Subject
    case: Case
    results: tuple[Shaped, ...]
    process: TimedProcess
    clock: Callable[[], float] = time.perf_counter

    @property
    def device(self) -> torch.device:
        return self.subject.device

    @property
    def traffic(self) -> int:
        """Bytes of the inputs and results of a call."""
        inputs = sum(t.numel * t.torch_dtype.itemsize for t in self.case.tensors)
        return inputs + sum(r.elements * r.dtype.itemsize for r in self.results)


@dataclass(frozen=True)
class MadeCall:
    """A call that was made, and what it gave."""

    case: Case
    layout: MemoryMap
    taken: Taken


def bound(timed: TimedKernel, empty: TimedProcess, effort: Effort) -> SpeedBound:
    """Time a kernel, and judge what it gave meanwhile; `empty` is a process that has loaded no kernel."""
    unlike = [one_call(timed, threaded=True), one_call(timed, frames=FRAMES)]  # the first compiles
    count = _count(timed, one_call(timed).taken.seconds, effort)
    made = [one_call(timed) for _ in range(count)]
    judgements = judged(timed, made, unlike)
    op = timed.subject.op
    worst = max(judgements, key=lambda j: list(Verdict).index(j.verdict))
    return SpeedBound(
        of=str(timed.case),
        kernel=timed.subject.kernel.name,
        contract=str(timed.subject.contract),
        verdict=str(worst.verdict),
        time=Sample.of([one.taken.seconds for one in made]),
        empty=Sample.of([one_call(timed, empty).taken.seconds for _ in range(count)]),
        judged=len(judgements),
        copied=sum(one.taken.copied for one in made) / (count * len(timed.results)),
        traffic=timed.traffic,
        flops=0 if op.flops is None else int(op.flops(build(timed.case, timed.device).tensors, timed.case.params)),
        why=next((f.sentence for f in worst.findings if not f.notice), ""),
    )


def one_call(
    timed: TimedKernel, process: TimedProcess | None = None, *, threaded: bool = False, frames: int = 0
) -> MadeCall:
    """Make a call on inputs that the process has not seen; another process makes an empty one.

    It is made in a thread of its own if it is `threaded`, or else below so many more `frames`.
    """
    asked, device = process or timed.process, timed.device
    case = drawn(timed.case)
    inputs, results = MemoryMap.of(shapes_of(timed.case)), MemoryMap.of(timed.results)
    given, taken = asked.memory(device, inputs.nbytes), asked.memory(device, results.nbytes)
    taken.words.fill_(_POISON)
    if process is None:
        write(case, inputs, given.words)
    settle(device)
    announced = {  # everything but the values
        "do": "prepare",
        "kernel": timed.subject.kernel.name if process is None else None,
        "arguments": inputs.as_json,
        "results": results.as_json,
        "params": dict(timed.case.params),
        "device": str(device),
        "threaded": threaded,
        "frames": frames,
    }
    asked.ask(announced, {"into": taken})
    places = places_in(results, device)
    flush(device)
    found = take(lambda: asked.ask({"do": "go"}, {"inputs": given}), taken.words, places, timed.clock)
    return MadeCall(case, results, found)


def judged(timed: TimedKernel, made: Sequence[MadeCall], unlike: Sequence[MadeCall] = ()) -> list[Judgement]:
    """Judge the calls: all, or as many as have few enough elements, drawn now; up to the first that fails.

    Calls that are `unlike` those that are timed are judged first.
    """
    late = sum(one.taken.late for one in [*unlike, *made])
    found = []
    if late:
        sentence = (
            f"{late} words of results that were read when the process answered were others right after: work went on "
            "when the clock had stopped."
        )
        found.append(Judgement(Verdict.FAILED, findings=(Finding("late", "", sentence),)))
    budget = _JUDGED_ON_CPU if timed.device.type == "cpu" else _JUDGED
    most = max(1, budget // max(1, timed.case.numel))
    for one in [*unlike, *SystemRandom().sample(made, min(len(made), most, _MOST_JUDGED))]:
        if any(judgement.verdict is Verdict.FAILED for judgement in found):
            break
        found.append(_judged(timed, one))
    return found


def _judged(timed: TimedKernel, made: MadeCall) -> Judgement:
    """Judge one call, whose inputs are made again from its seed."""
    subject = timed.subject
    tensors = build(made.case, timed.device).tensors
    problem = Problem(subject.op, subject.contract, tensors, dict(made.case.params), subject.bounds)
    return judge(problem, made.layout.tensors_in(made.taken.words), alternatives=False)


def flush(device: torch.device) -> None:
    """Write over the L2 cache of an accelerator, several times its size, and wait."""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).L2_cache_size
        torch.empty(_FLUSH * size, dtype=torch.int8, device=device).zero_()
    settle(device)


def _count(timed: TimedKernel, seconds: float, effort: Effort) -> int:
    """Choose the number of timed calls: enough to last long, and few enough that their results fit into memory."""
    wanted = int((2 * effort.rounds + 1) * _SHARE * effort.seconds / max(seconds, 1e-7))
    memory = _MEMORY_ON_CPU if timed.device.type == "cpu" else _MEMORY
    fitting = memory // max(1, sum(result.room for result in timed.results))
    return max(2, min(max(wanted, _FEWEST), _MOST, fitting))


def bound_of(subject: Subject, case: Case, server: ForkServer, effort: Effort) -> SpeedBound:
    """Bound from above the time of an isolated kernel on a case, with the verdict on what its calls gave.

    Raises:
        UnsupportedCase: the kernel declines the case.
        UsageError: values stand in the case line, so that they cannot be drawn anew.
        LastbitError: the kernel raises, or its process ends.
    """
    performer = subject.performer
    assert isinstance(performer, Isolated)
    if fixed := [t.name for t in case.tensors if "(" in t.regime]:
        raise UsageError(f"{case}: the values of {fixed[0]} are given; a kernel is timed on values that are drawn anew")
    pair, case = performer.pair, case.gathered()
    inputs = build(drawn(case), subject.device)
    call = subject.caller(subject.problem(inputs)).unguarded(inputs)
    if elsewhere := [name for name in call.results if call.actual[name].device != inputs.guards[0].tensor.device]:
        raise LastbitError(f"result {elsewhere[0]} lies on another device than the inputs")
    results = tuple(contiguous(name, call.actual[name].dtype, call.actual[name].shape) for name in call.results)
    del inputs, call  # a large case leaves no room for them beside those that are timed
    nothing = server.start(Start(bare=True, device_type=subject.device.type))
    try:
        asked = TimedProcess(pair.bare, pair.timeout)
        return bound(TimedKernel(subject, case, results, asked), TimedProcess(nothing, pair.timeout), effort)
    finally:
        nothing.end()
