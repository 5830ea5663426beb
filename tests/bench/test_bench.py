"""`lastbit bench`: what it measures, on which cases and kernels, and what it says about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from lastbit.bench import own_cost
from lastbit.bench.own_cost import (
    Plain,
    comparing,
    cost,
    open_without_interpreter,
    plain,
    plain_by_name,
    plain_test,
    seconds_of,
)
from lastbit.bench.samples import Effort, in_turn, peak_memory, wall
from lastbit.bench.subjects import bench_cases, case_lines, eager_for, ops_of, subject_for
from lastbit.case import Group, parse_case
from lastbit.cli import main
from lastbit.config import Config
from lastbit.errors import LastbitError, UsageError
from lastbit.interpret import install
from lastbit.kernel import Kernel
from lastbit.reports.bench import (
    MEMORY,
    OPERATIONS,
    PARTS,
    RATE,
    VERIFIED,
    Costs,
    Measurement,
    Sample,
    amount,
)
from lastbit.verify.check import Subject, unsupported
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import Project, open_project
from lastbit.verify.worker import Workplace, unwatched

install()

CPU = torch.device("cpu")
LINE = "completion_mask ids=int64[2,3]:sequences_1 eos_ids=int64[1]:counting seed=0"
LEAST = Effort(seconds=1e-4, groups=1, cases=2, rounds=1)
ENVIRONMENT = {"devices": "cuda:0", "accelerators": "NVIDIA X", "torch": "2.11.0", "options": "", "lastbit": "0.1.0"}


def toy_mask(ids: Tensor, eos_ids: Tensor) -> Tensor:
    ended = torch.isin(ids, eos_ids).cumsum(-1)
    return (torch.nn.functional.pad(ended, (1, 0))[..., :-1] == 0).int()


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


@pytest.fixture
def place(project: Project) -> Workplace:
    """Make a workplace with one quick kernel."""
    return place_of(project, Kernel("toy", "completion_mask", "", toy_mask, source="toy.py:1"))


def place_of(project: Project, kernel: Kernel) -> Workplace:
    item = Item(Subject(kernel, project.op(kernel.op), CPU), Group("g"))
    return Workplace(Config(folder=""), project, Plan((item,), (), 0))


def test_a_sample_has_the_quartiles_of_what_was_measured() -> None:
    assert Sample.of([5.0]) == Sample(5.0, 5.0, 5.0, 1)
    assert Sample.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Sample(2.0, 3.0, 4.0, 5)
    assert Sample(2.0, 4.0, 8.0, 3).rate(16) == Sample(2.0, 4.0, 8.0, 3)


def test_a_ratio_is_of_medians_and_stays_away_without_a_base() -> None:
    value, base = Sample(1.0, 6.0, 9.0, 3), Sample(1.0, 2.0, 9.0, 3)
    assert Measurement(VERIFIED, LINE, "k", "s", value, "one call", base).ratio == 3.0
    assert Measurement(OPERATIONS, LINE, "k", "operations", value).ratio is None


@pytest.mark.parametrize("file", ["verified.txt", "asserted.txt"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_case_that_is_measured_by_default_is_taken_by_a_kernel(project: Project, device: str, file: str) -> None:
    cases = list(bench_cases(project, torch.device(device), file))
    kernels = project.kernels()
    for case in cases:
        assert any(k.op == case.op and not unsupported(k, case) for k in kernels), str(case)
    sizes = [sum(1 for case in cases if case.op == op) for op in project.ops]
    assert min(sizes) >= 2 if file == "verified.txt" else cases


def test_case_files_of_a_project_are_read_and_checked(place: Workplace, tmp_path: Path) -> None:
    folder = tmp_path / "cases" / "bench" / "cpu"
    folder.mkdir(parents=True)
    (folder / "verified.txt").write_text("# one\nno_op x=bf16[1,2] seed=1\n")
    own = Project(place.project.ops, {}, (tmp_path,), (), {})
    with pytest.raises(UsageError, match="no_op"):
        list(bench_cases(own, CPU, "verified.txt"))
    assert list(bench_cases(own, CPU, "asserted.txt")) == []


def test_lines_that_were_given_take_the_place_of_the_files_and_ops_restrict_them(place: Workplace) -> None:
    lines = (LINE, "rms_norm x=bf16[4,8] eps=1e-06 seed=0")
    given = Workplace(Config(folder="", lines=lines), place.project, place.plan)
    assert case_lines(given, "verified.txt") == list(lines)
    restricted = Workplace(Config(folder="", ops=("completion_mask",)), place.project, place.plan)
    chosen = case_lines(restricted, "verified.txt")
    assert chosen and all(line.startswith("completion_mask ") for line in chosen)
    assert ops_of(place) == ["completion_mask"]


def test_a_kernel_is_compared_with_one_of_the_same_contract_in_another_file(project: Project) -> None:
    case = parse_case("rms_norm x=bf16[4,8] weight=bf16[8] eps=1e-06 seed=0")
    own = next(k for k in project.kernels() if k.name == "triton[fp32_multiply+rounded_sum]")
    other = eager_for(place_of(project, own), Subject(own, project.op("rms_norm"), CPU), case)
    assert other is not None and other.kernel.name == "eager[fp32_multiply+rounded_sum]"


def test_a_case_that_no_kernel_takes_is_said(place: Workplace) -> None:
    with pytest.raises(UsageError, match=r"no kernel takes rms_norm x=bf16\[4,8\]"):
        subject_for(place, parse_case("rms_norm x=bf16[4,8] eps=1e-06 seed=0"))


def test_each_repetition_is_told_its_number() -> None:
    told: list[int] = []
    sample = wall(told.append, LEAST)
    assert told == list(range(len(told))) and len(told) > 1
    assert 0 < sample.low <= sample.median <= sample.high


def test_inputs_on_the_cpu_take_turns_and_exceed_the_cache() -> None:
    made = [{"x": torch.zeros(1 << 20, dtype=torch.uint8)} for _ in range(64)]
    turns = in_turn(lambda number: made[number], CPU)
    seen = [id(next(turns)) for _ in range(7)]
    assert len(set(seen)) == 6  # five of 1 MiB exceed 4 MiB, and the first is back when five others were used
    assert seen[0] == seen[6]


def test_memory_is_not_taken_on_the_cpu_but_the_call_is_made() -> None:
    called: list[int] = []
    assert peak_memory(lambda: called.append(1), CPU) is None
    assert called == [1]


def test_a_plain_test_calls_both_kernels_on_the_same_tensors_and_the_integers_of_the_case() -> None:
    seen: list[dict[str, Tensor]] = []

    def keeps(**tensors: Tensor) -> Tensor:
        seen.append(tensors)
        return tensors["x"] + len(seen)  # that results differ is no error

    case = parse_case("toy x=bf16[2,3] codes=e4m3[2,3] ids=int64[2,3]:counting seed=0")
    kernel = Kernel("a", "toy", "", keeps)
    plain_test(kernel, kernel, case, CPU)()
    assert [t["ids"].tolist() for t in seen] == [[[0, 1, 2], [0, 1, 2]]] * 2
    assert torch.equal(seen[0]["x"], seen[1]["x"])
    assert seen[0]["codes"].dtype is torch.float8_e4m3fn


def test_plain_tests_that_raise_are_left_out_and_told() -> None:
    def declines(x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ValueError("too long")
        return x

    cases = [parse_case(f"toy x=bf16[{rows},3] seed=0") for rows in (1, 2, 1)]
    kernel = Kernel("a", "toy", "", declines)
    seconds, count, raised = plain(kernel, kernel, cases, CPU, rounds=2)
    assert (count, len(seconds)) == (2, 2)
    assert raised == ("ValueError: too long",)


def test_rounds_are_timed_one_by_one() -> None:
    clock = iter([0.0, 1.0, 5.0, 8.0])
    assert seconds_of([lambda: None], 2, lambda: next(clock)) == (1.0, 3.0)


def test_the_process_of_the_stock_interpreter_answers_with_kernels_by_name() -> None:
    place = open_without_interpreter(Config(folder=""), unwatched, lambda result: None)
    seconds, count, raised = plain_by_name(place, "eager[completion_mask]", "eager[completion_mask]", (LINE,), 1)
    assert (count, len(seconds), raised) == (1, 1, ())


def test_the_cost_of_a_case_is_measured_and_broken_down(place: Workplace) -> None:
    found = cost(place, LINE, LEAST)
    whole = [m for m in found if m.figure == VERIFIED]
    assert [m.what for m in whole] == ["toy, four calls", "toy, two calls"]
    assert all(m.ratio is not None and m.ratio > 1 for m in whole)
    parts = {m.what: m.ratio or 0.0 for m in found if m.figure == PARTS}
    assert {"kernel calls", "references", "guards"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(1.0)
    assert not [m for m in found if m.figure in (MEMORY, OPERATIONS)], "of an accelerator only"


def test_a_case_that_cannot_be_verified_has_no_cost(project: Project) -> None:
    def raises(ids: Tensor, eos_ids: Tensor) -> Tensor:
        raise RuntimeError("lost")

    with pytest.raises(LastbitError, match="toy on cpu: RuntimeError: lost"):
        cost(place_of(project, Kernel("toy", "completion_mask", "", raises)), LINE, LEAST)


def test_comparing_is_set_against_a_copy_and_assert_close(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_cost, "_ROWS_ON_CPU", 1)
    speed, close, seconds = comparing(place, "", LEAST)
    assert speed.unit == close.unit == "GB/s" and seconds.unit == "s"
    assert seconds.value.median * speed.value.median == pytest.approx(34 * 8192 / 1e9)  # 2 + 4 · 8 bytes each


def test_a_result_is_judged_beside_assert_close(place: Workplace) -> None:
    [found] = own_cost.asserting(place, LINE, LEAST)
    assert found.ratio is not None and found.ratio > 0
    assert found.what == "assert_contract, triton[completion_mask]", "of another file than the kernel of the plan"


def test_rates_are_those_of_the_same_cases(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def stock(config: Config, kernel: str, eager: str, lines: Sequence[str], rounds: int) -> Plain:
        asked.append(lines)
        return (0.5,), 1, ("AttributeError: tl",)

    def groups(*_: object, **__: object) -> list[Group]:
        lines = st.integers(0, 99).map(lambda seed: LINE.replace("seed=0", f"seed={seed}"))
        return [Group("g", lines.map(parse_case))]

    monkeypatch.setattr(own_cost, "plain_under_stock_interpreter", stock)
    monkeypatch.setattr(Project, "groups", groups)
    plain_tests, stocked = own_cost.rate(place, "completion_mask", LEAST)
    assert plain_tests.figure == RATE and plain_tests.value == stocked.value
    assert len(asked[0]) == 2
    assert stocked.against == "plain test, stock interpreter (1 of 2 raise)"
    assert stocked.base == Sample(2.0, 2.0, 2.0, 1)


MEASUREMENTS = (
    Measurement(VERIFIED, LINE, "triton[a]", "s", Sample(1.3, 1.4, 1.5, 5), "one call", Sample.of([4e-4])),
    Measurement(MEMORY, LINE, "verify_case", "B", Sample.of([3 * 2**30]), "the inputs", Sample.of([2**30])),
    Measurement(OPERATIONS, LINE, "verify_case", "operations", Sample.of([5186])),
    Measurement(PARTS, LINE, "kernel calls", "s", Sample.of([0.5]), "verify_case", Sample.of([2.0])),
    Measurement(PARTS, LINE, "references", "s", Sample.of([1.5]), "verify_case", Sample.of([2.0])),
)


def test_the_page_has_the_ratios_first() -> None:
    shown = Costs(MEASUREMENTS, ("rate, x: no [luck]",), "lastbit bench", ENVIRONMENT).page
    assert "device NVIDIA X, lastbit 0.1.0, torch 2.11.0" in shown
    label = "`completion_mask ids=int64[2,3]:sequences_1`"
    assert rf"| **3,500** | {label} | triton\[a\] | 1.4 s [1.3, 1.5] | one call | 400 µs |" in shown
    assert f"| **3** | {label} | verify\\_case | 3 GiB | the inputs | 1 GiB |" in shown
    assert f"| {label} | verify\\_case | 5,186 operations |" in shown
    assert "| of | seconds | kernel calls | references |" in shown
    assert f"| {label} | 2 s | 25% | 75% |" in shown
    assert shown.index("Verified case") < shown.index("Peak memory") < shown.index("Not measured")
    assert r"rate, x: no \[luck\]" in shown


def test_each_line_of_json_says_where_it_was_measured() -> None:
    lines = Costs(MEASUREMENTS, (), "lastbit bench --quick", ENVIRONMENT).jsonl.splitlines()
    first = json.loads(lines[0])
    assert first["ratio"] == pytest.approx(3500) and first["of"] == LINE
    assert (first["value"]["median"], first["base"]["median"]) == (1.4, 4e-4)
    assert (first["device"], first["command"], first["torch"]) == ("NVIDIA X", "lastbit bench --quick", "2.11.0")
    assert json.loads(lines[2])["ratio"] is None
    assert len(lines) == len(MEASUREMENTS)


@pytest.mark.parametrize(
    ("median", "unit", "expected"),
    [
        (1234.5, "s", "1,234 s"),
        (0.0123, "s", "12.3 ms"),
        (2e-8, "s", "0.02 µs"),
        (512.0, "B", "0.5 KiB"),
    ],
)
def test_amounts_are_shown_in_a_unit_that_suits_them(median: float, unit: str, expected: str) -> None:
    assert amount(Sample.of([median]), unit) == expected


class Canned:
    """A worker that measures nothing: the first figure is there, the next raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, config: Config) -> Canned:
        return self

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def do(self, work: Callable[..., Any], *args: object) -> Any:
        answers = {"case_lines": [LINE], "ops_of": ["completion_mask"], "comparing": [MEASUREMENTS[1]]}
        if work.__name__ not in answers:
            raise self.error
        return answers[work.__name__]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(LastbitError("no luck"), 2, "cost, completion"), (KeyboardInterrupt(), 130, "the rest: interrupted")],
)
def test_what_was_measured_is_kept_whatever_comes_after(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("lastbit.verify.worker.Worker", Canned(error))
    assert main(["bench", "--quick", "--out", str(tmp_path / "new")]) == code
    assert "3 GiB" in (shown := capsys.readouterr().out)
    assert "Not measured" in shown and said in shown.replace("\\", "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["bench_cpu.jsonl", "bench_cpu.md"]
