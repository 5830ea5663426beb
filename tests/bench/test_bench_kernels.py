"""`lastbit bench kernels`: what it measures of kernels, on which tensors, and what it says about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.bench import kernel_speed
from lastbit.bench.case_lines import bench_cases
from lastbit.bench.kernel_speed import device_seconds, host_seconds
from lastbit.bench.samples import Effort
from lastbit.case import Group, parse_case
from lastbit.cli import main
from lastbit.config import Config
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.kernel import Kernel
from lastbit.reports.bench import CLOCK, Sample, Speed
from lastbit.verify.check import Subject, unsupported, verify_case
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import Workplace
from tests.reports.test_speed_report import OF, ROOF, measured

CPU = torch.device("cpu")
LINE = "completion_mask ids=int64[2,3]:sequences_1 eos_ids=int64[1]:counting seed=0"
LEAST = Effort(seconds=1e-4, rounds=1)


def toy_mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
    ended = torch.isin(ids, eos_ids).cumsum(-1)
    return (torch.nn.functional.pad(ended, (1, 0))[..., :-1] == 0).int()


def wrong_mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
    return 1 - toy_mask(ids, eos_ids)


def lost_mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
    raise RuntimeError("lost")


def choosy_mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
    raise UnsupportedCase("not today")


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


@pytest.fixture
def place(project: Project) -> Workplace:
    op = project.op("completion_mask")
    functions = {"toy": toy_mask, "wrong": wrong_mask, "lost": lost_mask, "choosy": choosy_mask}
    subjects = [Subject(Kernel(name, op.name, "", call), op, CPU) for name, call in functions.items()]
    return Workplace(Config(folder=""), project, Plan(tuple(Item(s, Group("g")) for s in subjects), (), 0))


@pytest.fixture(autouse=True)
def no_case() -> None:
    kernel_speed._kept.clear()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_case_is_taken_by_a_kernel_and_can_be_judged(project: Project, device: str) -> None:
    cases, kernels = list(bench_cases(project, torch.device(device), "kernels.txt")), project.kernels()
    assert {case.op for case in cases} == set(project.ops)
    for case in cases:
        [subject, *_] = (
            Subject(k, project.op(k.op), torch.device(device)) for k in kernels
            if k.op == case.op and not unsupported(k, case)
        )  # fmt: skip
        place = Workplace(Config(folder=""), project, Plan((), (), 0))
        judged = kernel_speed._judged(place, subject, case)
        assert sum(t.numel for t in judged.tensors) <= kernel_speed._LARGEST


def test_a_case_without_a_smaller_one_is_not_judged(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "_LARGEST", 1)
    with pytest.raises(LastbitError, match=r"too large to be judged, and no case of judged\.txt"):
        kernel_speed.speed(place, LINE, "toy", LEAST)


def test_a_kernel_is_judged_and_timed(place: Workplace) -> None:
    found = kernel_speed.speed(place, LINE, "toy", LEAST)
    assert (found.of, found.kernel, found.contract, found.verdict) == (LINE, "toy", "default", "PASSED")
    assert (found.how, found.judged, found.apart, found.flops) == (CLOCK, "", None, 0)
    assert found.traffic == 6 * 8 + 8 + 6 * 4, "ids, ends, mask"
    assert min(found.time.median, found.host.median, found.launch.median) > 0


def test_a_fast_wrong_kernel_is_seen(place: Workplace) -> None:
    found = kernel_speed.speed(place, LINE, "wrong", LEAST)
    assert found.verdict == "FAILED" and "elements" in found.why


def test_a_kernel_that_raises_or_declines_is_not_timed(place: Workplace) -> None:
    with pytest.raises(LastbitError, match="RuntimeError: lost, in completion_mask"):
        kernel_speed.speed(place, LINE, "lost", LEAST)
    with pytest.raises(UnsupportedCase, match="not today"):
        kernel_speed.speed(place, LINE, "choosy", LEAST)


def test_on_a_large_case_results_are_held_against_the_first(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = LINE.replace("[2,3]", "[1,2]")
    monkeypatch.setattr(kernel_speed, "_LARGEST", 4)
    monkeypatch.setattr(kernel_speed, "bench_cases", lambda *_: [parse_case(smaller)])
    first, same, other = (kernel_speed.speed(place, LINE, name, LEAST) for name in ("toy", "toy", "wrong"))
    assert first.judged == smaller
    assert (first.apart, same.apart) == (None, 0.0)
    assert other.apart is not None and other.apart > 0.5


@pytest.mark.parametrize(
    ("own", "first", "expected"),
    [
        ([3.0, 4.0], [0.0, 0.0], 5.0),
        ([3.0, 4.0], [3.0, 2.0], 2 / 13**0.5),
        ([float("nan"), 4.0], [3.0, 4.0], float("inf")),
    ],
)
def test_the_distance_of_results_is_a_number_or_infinite(own: list[float], first: list[float], expected: float) -> None:
    assert kernel_speed._distance(torch.tensor(own), torch.tensor(first)) == pytest.approx(expected)


def test_sets_of_tensors_exceed_the_cache_and_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_speed, "_CACHE", 64)
    case = parse_case("rms_norm x=bf16[4,8]@16,1 eps=1e-06 seed=1")
    sets = kernel_speed._sets(case, CPU)
    assert len(sets) == 4, "of 64 bytes; three more fill the cache three times"
    assert len({s["x"].data_ptr() for s in sets}) == 4
    assert all(s["x"].stride() == (16, 1) and torch.equal(s["x"], sets[0]["x"]) for s in sets)
    monkeypatch.setattr(kernel_speed, "_COPY", 1)
    assert len(kernel_speed._sets(case, CPU)) == 1, "of what is huge there is one"


def test_a_kernel_that_overwrites_inputs_leaves_those_of_others(place: Workplace, project: Project) -> None:
    def in_place(ids: Tensor, eos_ids: Tensor) -> Tensor:
        mask = toy_mask(ids, eos_ids)
        ids.zero_()
        return mask

    op = project.op("completion_mask")
    ready = kernel_speed._Ready(parse_case(LINE), kernel_speed._sets(parse_case(LINE), CPU))
    before = ready.sets[0]["ids"].clone()
    subject = Subject(Kernel("k", op.name, "", in_place, mutates=("ids",)), op, CPU)
    kernel_speed._timed(subject, ready, LEAST, verify_case(subject, ready.case, repeat=True, settled=None), "")
    assert torch.equal(ready.sets[0]["ids"], before)


def test_flop_are_those_that_the_op_declares_of_the_pairs_that_are_here(project: Project) -> None:
    tensors = {
        "x": torch.empty(2, 8),
        "expert_ids": torch.tensor([[0, 5], [1, -1]]),
        "gate_proj": torch.empty(2, 4, 8),
        "gate_lora_a": torch.empty(2, 3, 8),
    }
    forward, backward = project.op("moe_lora").flops, project.op("moe_lora_backward").flops
    assert forward is not None and backward is not None
    assert forward(tensors, {}) == 2 * 2 * 3 * (8 * 4 + 3 * (8 + 4))
    assert forward(tensors, {"first_expert": 5}) == 2 * 1 * 3 * (8 * 4 + 3 * (8 + 4))
    products = 4 * 8 * 4 + 7 * 3 * (8 + 4) + 2 * 3 * 8
    assert backward(tensors, {}) == 2 * 2 * products
    del tensors["gate_lora_a"]
    assert forward(tensors, {}) == 2 * 2 * 3 * 8 * 4


def test_calls_take_turns() -> None:
    seen: list[int] = []
    how, sample = device_seconds([lambda: seen.append(0), lambda: seen.append(1)], CPU, LEAST)
    assert how == CLOCK and sample.median > 0
    assert seen[:4] == [0, 1, 0, 1]


def test_the_host_is_timed_in_bursts_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    clock = iter(range(1000))
    monkeypatch.setattr(kernel_speed, "now", lambda device: lambda: waits.append(1) or float(next(clock)))
    monkeypatch.setattr(kernel_speed.time, "perf_counter", lambda: float(next(clock)))
    made: list[int] = []
    sample = host_seconds([lambda: made.append(1)], CPU, Effort(seconds=30.0))
    assert sample == Sample(1 / 3, 1 / 3, 1 / 3, 5), "a call seems to take a second, and a burst may take three"
    assert (len(made), len(waits)) == (1 + 5 * 3, 2 + 5 + 1)


class Canned:
    """A worker that measures nothing: of three kernels one is there, one declines, and the last raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, config: Config) -> Canned:
        return self

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def do(self, work: Callable[..., Any], *args: Any) -> Any:
        if work.__name__ == "speed":
            return self.speed(args[1])
        return {"roof": ROOF, "case_lines": [OF], "takers": ["there", "declines", "raises"]}[work.__name__]

    def speed(self, kernel: str) -> Speed:
        if kernel == "there":
            return measured(kernel, 1e-3)
        raise UnsupportedCase("not today") if kernel == "declines" else self.error


@pytest.mark.parametrize(
    ("words", "error", "code", "said"),
    [
        (["kernels"], LastbitError("no luck"), 2, "raises, moe x"),
        ([], KeyboardInterrupt(), 130, "the rest: interrupted"),
    ],
)
def test_what_was_measured_is_kept_whatever_comes_after(
    words: list[str],
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lastbit.verify.worker.Worker", Canned(error))
    assert main(["bench", *words, "--quick", "--out", str(tmp_path / "new")]) == code
    shown = capsys.readouterr().out.replace("\\", "")
    assert "| there | a | PASSED |" in shown and "declines: not today" in shown and said in shown
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["kernels_cpu.jsonl", "kernels_cpu.md"]
