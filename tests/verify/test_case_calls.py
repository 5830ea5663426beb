"""What lastbit holds, copies and waits for in the calls of a case."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lastbit.case import Case, Group, parse_case
from lastbit.config import Config
from lastbit.inputs import bits, build, written
from lastbit.kernel import Kernel
from lastbit.result import Judgement, Verdict
from lastbit.verify import case_calls, check
from lastbit.verify.case_calls import Caller, Calls, make_calls
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.item_run import run_item
from lastbit.verify.plan import Item
from lastbit.verify.project import open_project
from tests.recorded import Recorded

CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
SMALL = parse_case("rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1")
LARGE = parse_case("rms_norm x=bf16[512,1024] weight=bf16[1024] eps=1e-06 seed=1")
MIB = 1 << 20


def norm(x: Tensor, weight: Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Right, in memory that nobody else has, with little else; `normalized` in fp32 where it is asked for."""
    found = {"output": torch.empty_like(x)}
    found |= {stage: torch.empty(x.shape, dtype=torch.float32) for stage in stages}
    for row in range(len(x)):
        value = x[row].float()
        value *= torch.rsqrt(value.square().mean() + eps)
        found["output"][row] = value.to(x.dtype) * weight
        for stage in stages:
            found[stage][row] = value
    return found


class Held(TorchDispatchMode):
    """Counts the bytes of all memory that torch allocates from here on, and the most that there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.device == CPU:
                storage = tensor.untyped_storage()
                self._sizes[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now)
        return found

    @property
    def now(self) -> int:
        self._sizes = {key: (ref, size) for key, (ref, size) in self._sizes.items() if not ref.expired()}
        return sum(size for _, size in self._sizes.values())


@dataclass
class Judge:
    """Stands in for `judge`; notes how many bytes are held when it is asked."""

    held: Held
    seen: list[int] = field(default_factory=list)

    def __call__(self, *_: object, **__: object) -> Judgement:
        self.seen.append(self.held.now)
        return Judgement(Verdict.PASSED, (), ())


@contextmanager
def judging(held: Held) -> Iterator[Judge]:
    with pytest.MonkeyPatch.context() as patch:
        judge = Judge(held)
        patch.setattr(check, "judge", judge)
        patch.setattr(case_calls, "judge", judge)
        yield judge


@pytest.mark.parametrize("repeat", [False, True])
def test_a_case_holds_no_more_than_it_must(repeat: bool) -> None:
    """In the last call the inputs twice, the first results and a copy, its own and the stages; other values before.

    While a call with other values is judged, the inputs that it was given stay: a later call gets their memory.
    """
    kernel = Kernel("frugal", "rms_norm", "", norm, stages=("normalized",))
    subject = Subject(kernel, RMS_NORM, CPU)
    inputs = sum(guarded.words.nbytes for guarded in build(LARGE, CPU).guards)
    result, stage, little = MIB + MIB // 4, 2 * MIB + MIB // 4, MIB // 4
    with judging(Held()) as judge, judge.held:
        assert verify_case(subject, LARGE, repeat=repeat).verdict is Verdict.PASSED
    last = 2 * inputs + 3 * result + stage
    elsewhere = 4 * inputs + 3 * result
    assert judge.held.most <= max(last, elsewhere if repeat else 0) + little
    whole = inputs + result + stage
    assert judge.seen[-1] <= whole + little, "what the kernel was given, and the same results again, are gone"
    assert len(judge.seen) == 1 + 3 * repeat
    assert judge.seen[0] <= (elsewhere if repeat else whole) + little


def called(function: Callable[..., Any], *, repeat: bool = False, case: Case = SMALL, **declared: Any) -> Calls:
    kernel = Kernel("mine", "rms_norm", "", function, **declared)
    with judging(Held()):
        caller = Caller(kernel, CPU, ("output",))
        return make_calls(caller, build(case, CPU), Subject(kernel, RMS_NORM, CPU).problem, repeat=repeat)


def test_what_the_first_call_returned_is_judged_as_it_was_then() -> None:
    """Whatever a kernel keeps of its result, if only the address, and writes there later."""
    kept: list[int] = []

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        right = norm(x, weight, eps=eps)["output"]
        if kept:
            ctypes.memmove(kept[0], right.data_ptr(), right.nbytes)
            return right
        wrong = torch.zeros_like(right)
        kept.append(wrong.data_ptr())
        return wrong

    calls = called(kernel)
    assert not calls.first.actual["output"].any()
    assert calls.apart == {"output"}


def test_results_that_are_the_same_are_held_once() -> None:
    calls = called(norm, stages=("normalized",))
    assert calls.last.actual["output"] is calls.first.actual["output"]
    assert list(calls.last.actual) == ["output", "normalized"]
    assert (calls.apart, calls.first.own) == (frozenset(), {})


def test_results_that_differ_are_both_held() -> None:
    count = iter(range(2))
    calls = called(lambda x, weight, *, eps: norm(x, weight, eps=eps)["output"] + next(count))
    assert calls.apart == {"output"}
    assert not torch.equal(calls.last.actual["output"], calls.first.actual["output"])


@pytest.mark.parametrize(("repeat", "waits"), [(False, 3), (True, 7)])
def test_a_device_is_waited_for_once_a_call_and_once_for_calls_that_are_compared(
    repeat: bool, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    numbers = bits.numbers
    for module in (bits, written):
        monkeypatch.setattr(module, "numbers", lambda flags: found.append(len(flags)) or numbers(flags))
    assert list(called(norm, repeat=repeat, stages=("normalized",)).findings()) == []
    assert len(found) == waits


def test_a_result_beyond_an_input_is_what_the_kernel_wrote_there() -> None:
    """What lastbit restores before the next call is copied before."""

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        return x.as_strided(x.shape, (64, 1), x.storage_offset() + 512).copy_(norm(x, weight, eps=eps)["output"])

    calls = called(kernel)
    expected = norm(*build(SMALL, CPU).tensors.values(), eps=1e-6)["output"]
    assert torch.equal(calls.first.actual["output"], expected)
    assert [finding.kind for finding in calls.findings()] == ["wrote_outside", "reused_memory"]


@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_result_without_memory_is_an_error(number: int) -> None:
    """In any call but that with other numbers for the parameters, which a kernel need not take."""
    count = iter(range(1, 7))

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = norm(x, weight, eps=eps)["output"]
        return output.to("meta") if next(count) == number else output

    result = verify_case(Subject(Kernel("mine", "rms_norm", "", kernel), RMS_NORM, CPU), SMALL)
    assert result.verdict is Verdict.ERRORED and "device meta" in result.reason


def test_a_kernel_need_not_take_other_numbers() -> None:
    """No case has them; what such a call leaves in an input that may be overwritten does not reach the next one."""

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        output = norm(x, weight, eps=eps)["output"]
        x.zero_()
        if eps != 1e-6:
            raise ValueError(eps)
        return output

    subject = Subject(Kernel("mine", "rms_norm", "", kernel, mutates=("x",)), RMS_NORM, CPU)
    assert verify_case(subject, SMALL).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("params", "takes", "expected"),
    [
        ({"eps": 1e-6, "scale": -2.0}, {}, {"eps": 0.25, "scale": -0.5}),
        ({"eps": 1e-6, "scale": -2.0}, {"eps": (1e-6, 1e-5)}, {"eps": 1e-6, "scale": -0.5}),
        ({"eps": 0.0, "cap": math.inf, "width": 4, "flag": True, "mode": "row"}, {}, {}),
    ],
)
def test_other_numbers(params: dict[str, Any], takes: dict[str, Any], expected: dict[str, Any]) -> None:
    kernel = Kernel("mine", "rms_norm", "", norm, takes=takes)
    case = Case("rms_norm", SMALL.tensors, params)
    assert case_calls.with_other_numbers(kernel, case).params == {**params, **expected}


def test_a_kernel_is_given_other_numbers_once() -> None:
    """In one item of a run, and in every case that a reader asks for."""
    seen: list[float] = []

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        seen.append(eps)
        return norm(x, weight, eps=eps)["output"]

    subject = Subject(Kernel("mine", "rms_norm", "", kernel), RMS_NORM, CPU)
    for asked, others in ((False, 1), (False, 1), (True, 2)):
        item = Item(subject, Group("mine", examples=(SMALL,)), asked)
        run_item(item, Recorded(cases=1))  # type: ignore[arg-type]
        assert seen.count(0.25) == others
