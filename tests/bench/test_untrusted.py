"""The time of a kernel that nobody trusts: what is in it, what is judged, and that planted cheats gain nothing."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.bench import untrusted
from lastbit.bench.samples import Effort
from lastbit.bench.untrusted import (
    ALIGNMENT,
    MemoryMap,
    Shaped,
    TimedKernel,
    bound,
    contiguous,
    drawn,
    one_call,
    places_in,
    shapes_of,
    take,
    write,
)
from lastbit.case import parse_case
from lastbit.inputs import build
from lastbit.isolation.runner import Prepared, nothing
from lastbit.kernel import Kernel
from lastbit.references.rms_norm import rms_norm
from lastbit.reports.bench import Roof, Sample
from lastbit.result import Judgement, Verdict
from lastbit.verify.check import Subject
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the kernels are for the CPU")

CPU = torch.device("cpu")
CASE = parse_case("rms_norm x=bf16[6,64]@72,1 weight=bf16[64] eps=1e-06 seed=3")
OUTPUT = (contiguous("output", torch.bfloat16, (6, 64)),)
LEAST = Effort(seconds=0.001, rounds=1)


def norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    y = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return y * weight


@dataclass
class Words:
    words: Tensor


@dataclass
class Here:
    """A kernel process that is none: it makes the calls in this process, and `after` the answer whatever it likes."""

    call: Callable[..., Any] = norm
    log: list[str] = field(default_factory=list)
    after: Callable[[Tensor], object] = lambda into: None
    prepared: Prepared | None = None
    given: list[Words] = field(default_factory=list)

    def ask(self, message: Mapping[str, Any], memory: Mapping[str, Words]) -> Mapping[str, Any]:
        self.log.append(message["do"])
        if message["do"] == "prepare":
            assert set(memory) == {"into"}, "no values before the clock starts"
            call = nothing if message["kernel"] is None else self.call
            self.prepared = Prepared(message, call, memory["into"].words)
            return {}
        assert self.prepared is not None and set(memory) == {"inputs"}
        answer = self.prepared.called(memory["inputs"].words)
        self.log.append("done")
        return answer

    def memory(self, device: torch.device, size: int) -> Words:
        self.given.append(Words(torch.zeros(-(-size // 8), dtype=torch.int64)))
        return self.given[-1]


class Clock:
    """Counts how often it is asked, and notes that in a log."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.now = log, 0.0

    def __call__(self) -> float:
        self.log.append("clock")
        self.now += 1.0
        return self.now


def timed(process: Here) -> TimedKernel:
    return TimedKernel(
        Subject(Kernel("k", "rms_norm", "", norm), rms_norm, CPU), CASE, OUTPUT, process, Clock(process.log)
    )


def verdict_of(call: Callable[..., Any]) -> tuple[str, str]:
    found = bound(timed(Here(call)), Here(nothing), LEAST)
    return found.verdict, found.why


def test_everything_is_written_before_the_clock_starts_and_taken_before_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Here()
    for name in ("write", "flush"):
        original = getattr(untrusted, name)
        monkeypatch.setattr(untrusted, name, lambda *a, n=name, f=original: (process.log.append(n), f(*a)))
    for _ in range(2):
        process.log.clear()
        made = one_call(timed(process))
        assert process.log == ["write", "prepare", "flush", "clock", "go", "done", "clock"]
        assert made.taken.seconds == 1.0, "everything between the two looks at the clock"


def test_each_call_has_values_and_memory_of_its_own() -> None:
    seen: list[tuple[int, bytes]] = []

    def watching(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        seen.append((x.data_ptr(), x.float().numpy().tobytes()))
        assert x.stride() == (72, 1) and not x.data_ptr() % 2
        return norm(x, weight, eps=eps)

    process = Here(watching)
    for _ in range(8):
        one_call(timed(process))
    assert len({values for _, values in seen}) == 8
    assert len({pointer for pointer, _ in seen}) == 8
    assert len({memory.words.data_ptr() for memory in process.given}) == 16, "no memory is given twice"


def test_a_right_kernel_passes_and_its_calls_are_judged() -> None:
    found = bound(timed(Here()), Here(nothing), LEAST)
    assert (found.verdict, found.why, found.judged) == ("PASSED", "", 26)
    assert (found.copied, found.traffic) == (1.0, 6 * 64 * 2 * 2 + 128)
    assert found.time == found.empty == Sample.of([1.0] * 24) and found.overhead == 1.0
    assert found.share(Roof(Sample.of([1e6]), Sample.of([1e9]))) == pytest.approx(found.traffic / 1e6)


def test_results_in_memory_that_was_offered_are_not_copied() -> None:
    def allocating(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(norm(x, weight, eps=eps))

    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    found = bound(timed(Here(allocating)), Here(nothing), LEAST)
    assert (found.verdict, found.copied) == ("PASSED", 0.0)
    assert before == (torch.empty, torch.empty_like, torch.Tensor.new_empty)


@pytest.mark.parametrize("allocate", [torch.empty_like, lambda x: x.new_empty(x.shape), lambda x: torch.empty((6, 64))])
def test_other_memory_is_torch_s_own(allocate: Callable[[Tensor], Tensor]) -> None:
    scratch: list[Tensor] = []

    def twice(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        scratch.append(allocate(x.contiguous()).fill_(1))
        scratch.append(allocate(x.contiguous()).fill_(2))
        return norm(x, weight, eps=eps)

    assert bound(timed(Here(twice)), Here(nothing), LEAST).verdict == "PASSED"
    assert scratch[0].data_ptr() != scratch[1].data_ptr() and scratch[1].float().eq(2).all()


# Cheats


def test_a_cached_output_fails() -> None:
    known: dict[torch.Size, Tensor] = {}
    verdict, why = verdict_of(lambda x, weight, *, eps: known.setdefault(x.shape, norm(x, weight, eps=eps)))
    assert verdict == "FAILED" and "elements" in why


def test_right_at_first_and_then_nothing_fails() -> None:
    made: list[int] = []

    def once(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        made.append(1)
        return norm(x, weight, eps=eps) if len(made) <= 20 else torch.zeros_like(x)

    assert verdict_of(once)[0] == "FAILED"


def test_one_wrong_call_of_many_fails_where_all_are_judged() -> None:
    made: list[int] = []

    def once(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        made.append(1)
        return norm(x, weight, eps=eps) if len(made) != 20 else torch.zeros_like(x)

    assert verdict_of(once)[0] == "FAILED"


def test_a_result_that_is_not_there_when_the_clock_stops_fails() -> None:
    pending: list[Callable[[], object]] = []

    def later(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype)
        pending.append(lambda: y.copy_(norm(x, weight, eps=eps)))
        return y

    process = Here(later)

    class Stopped(Clock):
        def __call__(self) -> float:
            if self.log[-1] == "done":  # the clock stops; what was put off is done now, before everything is copied
                while pending:
                    pending.pop()()
            return super().__call__()

    late = TimedKernel(timed(process).subject, CASE, OUTPUT, process, Stopped(process.log))
    found = bound(late, Here(nothing), LEAST)
    assert found.verdict == "FAILED" and "work went on when the clock had stopped" in found.why


def test_a_clock_of_the_kernel_s_own_process_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    process = Here(log=log)
    made = one_call(timed(process))
    assert log.count("clock") == 2 and made.taken.seconds == 1.0, "the judge's clock, and nothing that was answered"


def _depth() -> int:
    frame, depth = inspect.currentframe(), 0
    while frame is not None:
        frame, depth = frame.f_back, depth + 1
    return depth


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    "seen",
    [lambda: _depth() > 4, lambda: _depth() < 100, lambda: threading.active_count() == 1, torch.is_grad_enabled],
    ids=["deep", "shallow", "one thread", "gradients"],
)
def test_right_as_in_timed_calls_fails(
    seen: Callable[[], bool], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    if compiles:
        monkeypatch.setitem(sys.modules, "torch._dynamo", sys)
    known = seen is torch.is_grad_enabled and compiles  # what torch has compiled would be compiled anew for that
    verdict = verdict_of(lambda x, weight, *, eps: norm(x, weight, eps=eps) if seen() else torch.zeros_like(x))[0]
    assert verdict == ("PASSED" if known else "FAILED")


def test_a_kernel_that_raises_or_exits_in_its_thread_raises() -> None:
    def raising(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        raise ValueError("no such width") if eps else SystemExit

    process, before = Here(raising), threading.active_count()
    with pytest.raises(ValueError, match="no such width"):
        one_call(timed(process), threaded=True)
    exits = TimedKernel(timed(process).subject, parse_case(str(CASE).replace("1e-06", "0")), OUTPUT, process)
    with pytest.raises(SystemExit, match="the kernel ended its thread"):
        one_call(exits, threaded=True)
    assert torch.is_grad_enabled() and threading.active_count() == before


def test_a_kernel_that_does_nothing_fails() -> None:
    assert verdict_of(nothing)[0] == "FAILED"


def test_where_not_all_are_judged_which_is_drawn_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [one_call(timed(Here())) for _ in range(8)]
    seen: list[object] = []
    monkeypatch.setattr(untrusted, "_judged", lambda timed, one: seen.append(one) or Judgement(Verdict.PASSED))
    monkeypatch.setattr(untrusted, "_JUDGED_ON_CPU", 2 * (6 * 64 + 64))
    for _ in range(20):
        untrusted.judged(timed(Here()), made)
    assert len(seen) == 40 and len(set(map(id, seen))) > 2


def test_nothing_more_is_judged_after_a_failure() -> None:
    found = bound(timed(Here(nothing)), Here(nothing), LEAST)
    assert (found.verdict, found.judged, found.time.count) == ("FAILED", 1, 24)


# Memory


def test_tensors_lie_apart_and_keep_their_strides() -> None:
    layout = MemoryMap.of(shapes_of(CASE))
    words = torch.zeros(-(-layout.nbytes // 8), dtype=torch.int64)
    case = drawn(CASE)
    write(case, layout, words)
    assert len(set(layout.starts.values())) == 2 and not any(start % ALIGNMENT for start in layout.starts.values())
    built, found = build(case, "cpu").tensors, layout.tensors_in(words)
    assert found["x"].stride() == (72, 1)
    assert all(torch.equal(found[name], built[name]) for name in built)


def test_a_stride_of_zero_and_an_empty_tensor_have_memory() -> None:
    shaped = (Shaped("a", torch.float32, (3, 4), (0, 1)), Shaped("b", torch.int64, (0, 4), (4, 1)))
    layout = MemoryMap.of(shaped)
    assert [tensor.elements for tensor in shaped] == [4, 0] and layout.nbytes == 2 * ALIGNMENT
    words = torch.arange(layout.nbytes // 8)
    assert layout.tensors_in(words)["a"].stride() == (0, 1)
    assert layout.flat(words, shaped[0]).numel() == 4


def test_witnesses_are_words_of_all_results() -> None:
    layout = MemoryMap.of([contiguous(name, torch.bfloat16, (6, 64)) for name in ("output", "residual")])
    places = places_in(layout, CPU)[1:] * 8
    of_result = [sum(start <= place < start + 768 for place in places.tolist()) for start in layout.starts.values()]
    assert of_result == [96, 96], "as many as a result has words"
    assert not torch.equal(places_in(layout, CPU)[1:] * 8, places), "drawn anew"


def test_what_is_taken_is_a_copy() -> None:
    words = torch.zeros(8, dtype=torch.int64)
    clock = iter([0.0, 2.0])
    taken = take(lambda: {"copied": 0}, words, torch.tensor([1, 2]), lambda: next(clock))
    words.fill_(7)
    assert (taken.seconds, taken.late) == (2.0, 0) and not taken.words.any()


@pytest.mark.parametrize(
    ("device", "seconds", "rooms", "calls"),
    [
        ("cpu", 0.01, (256,), 70),  # 7 tenths of a second
        ("cpu", 1.0, (256,), 24),
        ("cpu", 0.0, (256,), 512),
        ("cpu", 0.01, (1 << 22, 1 << 22), 32),
        ("cpu", 0.01, (1 << 28,), 2),
        ("cpu", 0.01, (), 70),
        ("cuda", 0.01, (1 << 28,), 64),
        ("cuda", 0.01, (1 << 34,), 2),
    ],
)
def test_calls_are_as_many_as_last_long_and_fit_into_memory(
    device: str, seconds: float, rooms: tuple[int, ...], calls: int
) -> None:
    results = [SimpleNamespace(room=room) for room in rooms]
    timed: Any = SimpleNamespace(device=torch.device(device), results=results)
    assert untrusted._count(timed, seconds, Effort(seconds=1.0, rounds=3)) == calls


@pytest.mark.parametrize(("numel", "device", "most"), [(1, "cpu", 448), (None, "cpu", 2), (None, "cuda", 2)])
def test_as_many_calls_are_judged_as_have_few_elements(
    numel: int | None, device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = Judgement(Verdict.PASSED)
    monkeypatch.setattr(untrusted, "_judged", lambda timed, one: passed)
    own = numel or {"cpu": untrusted._JUDGED_ON_CPU, "cuda": untrusted._JUDGED}[device] // 2
    timed: Any = SimpleNamespace(device=torch.device(device), case=SimpleNamespace(numel=own))
    made: Any = [SimpleNamespace(taken=SimpleNamespace(late=0)) for _ in range(500)]
    assert len(untrusted.judged(timed, made)) == most
    assert len(untrusted.judged(timed, made[:1], made[1:3])) == 3
    failed = Judgement(Verdict.FAILED)
    monkeypatch.setattr(untrusted, "_judged", lambda timed, one: failed)
    assert untrusted.judged(timed, made) == [failed]
