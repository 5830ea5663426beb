"""Cases that run out of memory: alone they may fit, and otherwise it is said whose memory it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.judges.opening import Desk
from lastbit.kernel import Kernel
from lastbit.reports.records import dump
from lastbit.result import CaseResult, Verdict
from lastbit.verify import check, device_memory
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.device_memory import Attempt, SharedDevice, directly
from lastbit.verify.plan import Plan
from lastbit.verify.project import open_project
from lastbit.verify.result_recorder import CaseRecorder

CPU = torch.device("cpu")  # the turns that workers take do not depend on the device
CASE = parse_case("rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.19 GiB is free."
)


def subject(is_full: Callable[[], bool]) -> Subject:
    """Make a right kernel, for which there is no memory where `is_full`."""

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        if is_full():
            raise torch.OutOfMemoryError(FULL)
        xf = x.float()
        return (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    return Subject(Kernel("hungry", "rms_norm", "fp32_multiply", kernel), RMS_NORM, CPU)


def attempt(one: Subject, started: Callable[[], object]) -> Attempt:
    def verified() -> CaseResult:
        started()
        return verify_case(one, CASE)

    return verified


def test_a_kernel_that_asks_for_too_much_is_errored() -> None:
    result = verify_case(subject(lambda: True), CASE)
    assert result.verdict is Verdict.ERRORED
    assert result.reason == "out of memory on cpu: the kernel asked for 2.00 GiB with 1.19 GiB of 79.25 GiB free"


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError(FULL), RuntimeError("Triton Error [CUDA]: out of memory"), MemoryError()],
    ids=["torch", "triton", "python"],
)
def test_a_reference_that_needs_too_much_is_no_error_of_the_kernel(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(check, "judge", judge)
    result = verify_case(subject(lambda: False), CASE)
    assert result.verdict is Verdict.SKIPPED
    assert result.reason.startswith("out of memory on cpu: the inputs and the reference of lastbit need more")
    assert "another device, or one with fewer rows" in result.reason


def test_memory_that_lacks_in_a_later_call_is_not_the_kernels() -> None:
    """By then lastbit holds the results of the calls before."""
    calls = [0]

    def is_full() -> bool:
        calls[0] += 1
        return calls[0] > 1

    assert verify_case(subject(is_full), CASE).verdict is Verdict.SKIPPED


@pytest.mark.parametrize(("failures", "verdict"), [(0, Verdict.PASSED), (1, Verdict.PASSED), (2, Verdict.ERRORED)])
def test_a_case_without_memory_runs_again_alone(tmp_path: Path, failures: int, verdict: Verdict) -> None:
    started: list[int] = []
    hungry = subject(lambda: len(started) <= failures)
    result = SharedDevice(tmp_path, CPU).verify(attempt(hungry, lambda: started.append(1)))
    assert result.verdict is verdict
    assert len(started) == min(failures + 1, 2), "its time begins anew"
    assert result.reason.endswith("free; no other case was running") is (verdict is Verdict.ERRORED)


def test_judges_of_one_accelerator_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_give_back", lambda device: None)  # there is no accelerator
    config = Config(folder="", device_plan=DevicePlan(("cuda:0",), ("of the test",)))
    desk = Desk(config, open_project(config), Plan((), (), 0), turns=str(tmp_path))
    started: list[int] = []
    result = desk.verify(attempt(subject(lambda: len(started) <= 1), lambda: started.append(1)))
    assert (result.verdict, len(started)) == (Verdict.PASSED, 2)


def test_alone_means_that_no_other_case_runs_or_begins(tmp_path: Path) -> None:
    """One worker has a case under way, another one runs out of memory beside it, a third wants to begin."""
    others = ExitStack()
    others.enter_context(SharedDevice(tmp_path, CPU).beside_others())
    running, order = [True], list[str]()
    first = threading.Event()

    def ended() -> None:
        running[0] = False
        order.append("other ended")
        others.close()

    def third() -> None:
        first.wait(10)
        while _can_lock(tmp_path / "cpu.gate", alone=False):  # until the gate is closed
            pass
        late = threading.Thread(target=lambda: SharedDevice(tmp_path, CPU).verify(attempt(right, began)))
        late.start()
        ended()
        late.join(10)

    right = subject(lambda: False)
    began = lambda: order.append("third began")  # noqa: E731
    hungry = subject(lambda: running[0])
    thread = threading.Thread(target=third)
    thread.start()

    def started() -> None:
        order.append("hungry")
        first.set()

    result = SharedDevice(tmp_path, CPU).verify(attempt(hungry, started))
    order.append("hungry ended")
    thread.join(10)
    assert result.verdict is Verdict.PASSED
    assert order.index("other ended") < order.index("hungry", 1), "the second time it is alone"
    assert order.index("hungry", 1) < order.index("third began")


def _can_lock(path: Path, *, alone: bool) -> bool:
    """Return whether nobody holds a lock that excludes one for oneself alone, or one shared with others."""
    import fcntl

    with path.open("w") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def test_memory_is_given_back_before_a_worker_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has a case under way while another one wants to be alone gives back what it holds after it."""
    given: list[bool] = []
    monkeypatch.setattr(
        device_memory, "_give_back", lambda device: given.append(_can_lock(tmp_path / "cpu.cases", alone=True))
    )
    alone = threading.Thread(target=lambda: SharedDevice(tmp_path, CPU).verify(attempt(hungry, lambda: None)))
    first = [True]

    def is_full() -> bool:
        return first.pop() if first else False

    hungry = subject(is_full)
    with SharedDevice(tmp_path, CPU).beside_others():
        alone.start()
        while _can_lock(tmp_path / "cpu.gate", alone=False):
            pass
        assert given == [False], "that of the case that ran out of memory, whose turn is not over"
    alone.join(10)
    assert given == [False, False]


def test_workers_share_accelerators_only(tmp_path: Path) -> None:
    recorder = CaseRecorder(Config(folder=str(tmp_path)), dump, tmp_path)
    assert recorder.verify_on(CPU) is directly
    cuda = torch.device("cuda:1")
    assert recorder.verify_on(cuda) == recorder.verify_on(cuda)
    assert (tmp_path / "cuda-1.gate").is_file()
