"""What `lastbit bench kernels` says: shares of the roof, tables, titles of cases, records."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lastbit.reports.bench import EVENTS, GRAPH, Roof, Sample, Speed, Speeds, title

ROOF = Roof(Sample.of([1e12]), Sample.of([5e14]))
OF = "moe x=bf16[2,3] seed=1"


def measured(kernel: str, seconds: float, **changes: Any) -> Speed:
    given = {"contract": "a", "verdict": "PASSED", "how": GRAPH, "traffic": 10**9}
    times = {"time": Sample.of([seconds]), "host": Sample.of([3e-5]), "launch": Sample.of([2e-5])}
    return Speed(OF, kernel, **{**given, **times, **changes})


def test_the_roof_is_the_greater_of_bytes_and_flop() -> None:
    assert ROOF.bounds(10**9, 10**12) == pytest.approx((1e-3, 2e-3))
    assert measured("k", 4e-3).share(ROOF) == pytest.approx(0.25)
    assert measured("k", 4e-3, flops=10**12).share(ROOF) == pytest.approx(0.5)


def test_the_page_has_a_table_per_case_with_the_fastest_first() -> None:
    speeds = [
        measured("slow", 4e-3, flops=10**12),
        measured("other", 2e-3, contract="b", flops=10**12, how=EVENTS, judged="moe small", apart=0.0123),
        measured("quick", 2.5e-3, verdict="FAILED", why="2 of 3 wrong", flops=10**12),
    ]
    left_out, failed = ["gone: no package"], ["k, x: lost"]
    shown = Speeds(speeds, failed, "lastbit bench kernels", {"devices": "cuda:0"}, ROOF, left_out).page
    assert "a copy 1,000 GB/s" in shown and "500 TFLOP/s" in shown
    bounds = "954 MiB, 1 ms at the rate of a copy; 1 TFLOP, 2 ms at the rate of a matrix product"
    assert f"`{OF}`: {bounds}. Judged on `moe small`." in shown
    rows = [line.rpartition(" | 30 µs")[0] for line in shown.splitlines() if "FLOP/s |" in line]
    assert "| 400 TFLOP/s | 80% | 30 µs | 1.50 |" in shown
    assert rows == [
        "| other | b | PASSED (smaller), 1.2e-02 apart | 2 ms (events) | 1.00 | 1.00 | 500 TFLOP/s | 100%",
        "| quick | a | FAILED | 2.5 ms | 1.00 | 1.25 | 400 TFLOP/s | 80%",
        "| slow | a | PASSED | 4 ms | 1.60 | 2.00 | 250 TFLOP/s | 50%",
    ]
    assert shown.index("CUDA graph") < shown.index("flush of the L2 cache") < shown.index("Left out")
    assert f"- quick, {title(OF, [OF])}: 2 of 3 wrong".replace("[", "\\[").replace("]", "\\]") in shown
    assert "gone: no package" in shown and "k, x: lost" in shown
    assert speeds[0].sentence(ROOF) == "moe x=bf16[2,3]: slow PASSED, 4 ms by graph, 50% of the roof, host 30 µs"


def test_the_title_of_a_case_tells_it_from_the_others() -> None:
    cases = [
        "rms x=bf16[4,8] weight=bf16[8]:near_one eps=1e-06 seed=1",
        "rms x=bf16[4,8] weight=bf16[8]:ones scale=fp32[1]@2:scale_odd eps=1e-06 quant=static seed=2",
        "rms x=bf16[2,4] weight=bf16[4] eps=1e-06 seed=3",
        "moe x=bf16[2,4] ids=int64[2,2]:below_4 gate=bf16[4,2,4] up=bf16[4,2,4] seed=1",
        "moe x=bf16[2,4] ids=int64[2,2]:below_8 gate=bf16[8,2,4] up=bf16[8,2,4] seed=2",
    ]
    assert [title(case, cases) for case in cases] == [
        "rms x=bf16[4,8]",
        "rms x=bf16[4,8] scale=fp32[1] quant=static",
        "rms x=bf16[2,4]",
        "moe x=bf16[2,4] gate=bf16[4,2,4]",
        "moe x=bf16[2,4] gate=bf16[8,2,4]",
    ]


def test_without_a_roof_times_are_shown_alone() -> None:
    shown = Speeds([measured("k", 1e-3)], [], "lastbit bench kernels", {}).page
    assert "| k | a | PASSED | 1 ms | 1.00 | 1.00 | 1,000 GB/s |  | 30 µs | 1.50 |" in shown
    assert json.loads(Speeds([measured("k", 1e-3)], [], "c", {}).jsonl)["share"] is None


def test_each_line_of_json_says_what_it_was_measured_beside() -> None:
    environment = {"accelerators": "NVIDIA X", "torch": "2.11.0"}
    [line] = Speeds([measured("k", 4e-3)], [], "lastbit bench kernels", environment, ROOF).jsonl.splitlines()
    record = json.loads(line)
    assert (record["of"], record["kernel"], record["share"]) == (OF, "k", pytest.approx(0.25))
    assert (record["time"]["median"], record["roof"]["copy"]["median"]) == (4e-3, 1e12)
    assert (record["device"], record["command"], record["torch"]) == ("NVIDIA X", "lastbit bench kernels", "2.11.0")


def test_an_infinite_distance_can_be_written() -> None:
    speed = measured("k", 1.0, judged="x", apart=float("inf"))
    [line] = Speeds([speed], [], "c", {}, ROOF).jsonl.splitlines()
    assert json.loads(line)["apart"] == "inf"
