"""How fast a kernel is that nobody trusts: an upper bound, by the clock of the judge, of calls in a kernel process.

The time of a round is from the message to go until the judge has read results in its own memory. It has everything in
it: all calls, all streams, messages, the mapping of memory. So it can be too long, and never too short. No times are
subtracted from each other, because a kernel could be slow in one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import Any, Protocol

import torch
from torch import Tensor

from harness.bench.samples import Effort
from harness.bench.unseen import Layout, Shaped, Taken, drawn, places_in, settle, shapes_of, take, write
from harness.case import Case
from harness.inputs import build
from harness.judging.judge import judge
from harness.judging.problem import Problem
from harness.outcomes.bench import Sample
from harness.outcomes.speed import Bound
from harness.result import Finding, Judgement, Verdict
from harness.verify.check import Subject

Message = Mapping[str, Any]

_FEWEST, _MOST = 8, 512  # calls of a round
_ALONE = 5  # rounds of one call, for each round of the effort
_PILOT = 16  # calls of the round from which their number follows
_SHARE = 0.1  # of the effort's seconds that a round takes
_MEMORY, _MEMORY_ON_CPU = 16 << 30, 1 << 28  # bytes of all inputs and results of a round, with copies
_JUDGED, _JUDGED_ON_CPU = 1 << 32, 1 << 26  # elements of inputs whose results are judged, in all rounds
_MOST_JUDGED = 64  # calls of a round that are judged
_FLUSH = 3  # times that the L2 cache is written over
_POISON = -0x0101010101010102  # int64 of which each half and quarter is a NaN, or a number that nothing computes


class Memory(Protocol):
    """Memory of the judge that a kernel process can be given."""

    words: Tensor


class Process(Protocol):
    """A kernel process, as far as it is timed."""

    def ask(self, message: Message, memory: Mapping[str, Any]) -> Message:
        """What it answers; it gets the `memory` with the message, and has not had it before."""

    def memory(self, device: torch.device, size: int) -> Memory:
        """Memory of at least `size` bytes, which no kernel process ever had."""


@dataclass(frozen=True)
class Timed:
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
    process: Process
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
class Round:
    """Calls that were made, and what they gave."""

    cases: tuple[Case, ...]
    layout: Layout
    taken: Taken

    @property
    def seconds(self) -> float:
        """Of a call."""
        return self.taken.seconds / len(self.cases)


def bound(timed: Timed, empty: Process, effort: Effort) -> Bound:
    """The time of a kernel, with the verdict on what it gave meanwhile; `empty` is a process that has loaded none."""
    one_round(timed, 2)  # which compiles
    calls = _calls(timed, one_round(timed, min(_PILOT, _most_calls(timed))).seconds, effort)
    judgements = list[Judgement]()
    rounds, single = 2 * effort.rounds + 1, _ALONE * effort.rounds
    budget = (_JUDGED_ON_CPU if timed.device.type == "cpu" else _JUDGED) // (rounds + single)
    together = [_judged_round(timed, calls, budget, judgements) for _ in range(rounds)]
    alone = [_judged_round(timed, 1, budget, judgements) for _ in range(single)]
    worst = max(judgements, key=lambda j: list(Verdict).index(j.verdict))
    return Bound(
        of=str(timed.case),
        kernel=timed.subject.kernel.name,
        contract=str(timed.subject.contract),
        verdict=str(worst.verdict),
        time=Sample.of([seconds for seconds, _ in together]),
        empty=Sample.of([one_round(timed, calls, empty).seconds for _ in range(rounds)]),
        alone=Sample.of([seconds for seconds, _ in alone]),
        empty_alone=Sample.of([one_round(timed, 1, empty).seconds for _ in range(single)]),
        calls=calls,
        judged=len(judgements),
        copied=sum(copied for _, copied in together) / (rounds * calls * len(timed.results)),
        traffic=timed.traffic,
        flops=_flops(timed),
        why=next((f.sentence for f in worst.findings if not f.notice), ""),
    )


def _judged_round(timed: Timed, calls: int, budget: int, judgements: list[Judgement]) -> tuple[float, int]:
    """Seconds of a call, and results that were copied, of a round; it is judged, unless one was wrong before."""
    made = one_round(timed, calls)
    if not _failed(judgements):
        judgements += judged(timed, made, budget)
    return made.seconds, made.taken.copied


def one_round(timed: Timed, calls: int, process: Process | None = None) -> Round:
    """So many calls on inputs that the process has not seen; another process makes empty ones."""
    asked, device = process or timed.process, timed.device
    cases = drawn(timed.case, calls)
    inputs, results = Layout.of(shapes_of(timed.case), calls), Layout.of(timed.results, calls)
    asked.ask(_prepared(timed, inputs, results, empty=process is not None), {})
    given, taken = asked.memory(device, inputs.nbytes), asked.memory(device, results.nbytes)
    taken.words.fill_(_POISON)
    if process is None:
        write(cases, inputs, given.words)
    places = places_in(results, device)
    flush(device)
    memory = {"inputs": given, "into": taken}
    made = take(lambda: asked.ask({"do": "go"}, memory), taken.words, places, timed.clock)
    return Round(tuple(cases), results, made)


def _prepared(timed: Timed, inputs: Layout, results: Layout, *, empty: bool) -> dict[str, Any]:
    """The message that says everything about calls but the values."""
    return {
        "do": "prepare",
        "kernel": None if empty else timed.subject.kernel.name,
        "arguments": inputs.as_json,
        "results": results.as_json,
        "params": dict(timed.case.params),
        "device": str(timed.device),
        "calls": inputs.calls,
    }


def judged(timed: Timed, made: Round, budget: int) -> list[Judgement]:
    """Judgements of calls: all, or as many as have `budget` elements, drawn now; up to the first that fails."""
    found = [_written_late(made.taken.late)] if made.taken.late else []
    elements = max(1, sum(t.numel for t in timed.case.tensors))
    most = max(1, budget // elements)
    calls = range(len(made.cases))
    for call in SystemRandom().sample(calls, min(len(calls), most, _MOST_JUDGED)):
        if not _failed(found):
            found.append(_judged(timed, made, call))
    return found


def _failed(judgements: Sequence[Judgement]) -> bool:
    return any(judgement.verdict is Verdict.FAILED for judgement in judgements)


def _judged(timed: Timed, made: Round, call: int) -> Judgement:
    """Of one call, whose inputs are made again from its seed."""
    subject, case = timed.subject, made.cases[call]
    tensors = build(case, timed.device).tensors
    problem = Problem(subject.op, subject.contract, tensors, dict(case.params), subject.bounds)
    return judge(problem, made.layout.of_call(made.taken.words, call), alternatives=False)


def flush(device: torch.device) -> None:
    """Write over the L2 cache of an accelerator, several times its size, and wait."""
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).L2_cache_size
        torch.empty(_FLUSH * size, dtype=torch.int8, device=device).zero_()
    settle(device)


def _calls(timed: Timed, seconds: float, effort: Effort) -> int:
    """How many calls a round has: as many as take long enough, of those that fit into memory."""
    wanted = int(_SHARE * effort.seconds / max(seconds, 1e-7))
    return min(max(wanted, _FEWEST), _most_calls(timed))


def _most_calls(timed: Timed) -> int:
    """How many calls fit into memory, two at least."""
    memory = _MEMORY_ON_CPU if timed.device.type == "cpu" else _MEMORY
    room = sum(s.room for s in shapes_of(timed.case)) + 2 * sum(r.room for r in timed.results)
    return max(2, min(_MOST, memory // max(1, room)))


def _flops(timed: Timed) -> int:
    op = timed.subject.op
    return 0 if op.flops is None else int(op.flops(build(timed.case, timed.device).tensors, timed.case.params))


def _written_late(count: int) -> Judgement:
    sentence = (
        f"{count} words of results that were read when the process answered were others right after: work went on when "
        "the clock had stopped."
    )
    return Judgement(Verdict.FAILED, findings=(Finding("late", "", sentence),))
