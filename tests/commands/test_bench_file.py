"""`lastbit bench FILE`: what it measures on which cases, what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lastbit import cli
from lastbit.bench import kernel_speed, untrusted
from lastbit.bench.samples import QUICK
from lastbit.commands import bench
from lastbit.errors import LastbitError
from lastbit.judges import call_time, opening
from lastbit.kernel import Kernel
from lastbit.reports.bench import Bounds, Roof, Sample, SpeedBound
from lastbit.verify.project import open_project

ROOF = Roof(Sample.of([1e12]), Sample.of([5e14]))
LINE = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1"


def measured(kernel: str = "k", **changes: Any) -> SpeedBound:
    given = {
        "of": LINE,
        "contract": "c",
        "verdict": "PASSED",
        "judged": 24,
        "copied": 0.5,
        "traffic": 10**9,
    }
    return SpeedBound(kernel=kernel, **{**given, "time": Sample.of([4e-3]), "empty": Sample.of([1e-4]), **changes})


def kernel_of(name: str, contract: str = "") -> Kernel:
    return Kernel(name, "rms_norm", contract, lambda x, weight, *, eps: x)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, list[str]]:
    """Make a file, and note which kernels are timed: no process is started, and nothing takes time."""
    path, seen = tmp_path / "mine.py", list[str]()
    path.write_text("def rms_norm(x, weight, *, eps): ...\n")

    class Kernels:
        server = None

        def declared(self, folder: Path) -> tuple[Kernel, ...]:
            return kernel_of("other", "fp32_multiply"), kernel_of("same"), kernel_of("later")

        @contextmanager
        def pair(self, kernel: Kernel, timeout: float) -> Iterator[None]:
            yield None

    def open_desk(config: Any, *rest: object) -> SimpleNamespace:
        device = torch.device("cpu")
        return SimpleNamespace(config=config, project=open_project(config), kernels=Kernels(), device=device)

    @contextmanager
    def opened(desk: Any, path: Path, question: Any) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(subject=SimpleNamespace(kernel=kernel_of(path.stem, question.contract)))

    def bound_of(subject: Any, case: Any, *rest: object) -> SpeedBound:
        seen.append(subject.kernel.name)
        if subject.kernel.contract.endswith("+divided"):
            raise LastbitError("lost")
        return measured(subject.kernel.name, of=str(case))

    monkeypatch.setattr(opening, "open_desk", open_desk)
    monkeypatch.setattr(opening, "opened", opened)
    monkeypatch.setattr(untrusted, "bound_of", bound_of)
    monkeypatch.setattr(call_time, "bound_of", bound_of)
    monkeypatch.setattr(kernel_speed, "roof", lambda *_: ROOF)
    cases = tmp_path / "cases.txt"
    cases.write_text(LINE + "\n")
    return path, seen


def test_the_file_and_a_kernel_of_the_same_contract_are_timed_and_kept(
    timed: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, seen = timed
    options = ["--op", "rms_norm", "--cases", str(tmp_path / "cases.txt"), "--out", str(tmp_path / "out")]
    assert cli.main(["bench", str(path), *options]) == 0
    assert seen == ["mine", "same"]
    assert "time, at most" in capsys.readouterr().out
    found = [json.loads(line) for line in (tmp_path / "out" / "mine.jsonl").read_text().splitlines()]
    assert [row["kernel"] for row in found] == ["mine", "same"] and found[0]["of"] == LINE
    assert cli.main(["bench", str(path), *options, "later"]) == 0
    assert seen[2:] == ["mine", "later"]


def test_what_cannot_be_measured_is_said(
    timed: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = timed
    options = ["--op", "rms_norm", "--cases", str(tmp_path / "cases.txt"), "--contract", "native_multiply+divided"]
    assert cli.main(["bench", str(path), *options]) == 2
    assert "the kernel, rms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["gone.py", "--op", "rms_norm"], "'gone.py' is no file"), (["gone.py"], "--op OP")],
)
def test_a_file_needs_an_op_and_must_be_there(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_page_says_at_most_and_what_is_wrong() -> None:
    wrong = measured("w", verdict="FAILED", why="2 of 3 wrong", flops=10**12)
    bench = Bounds([measured(), wrong], ["the kernel: lost"], "lastbit bench k.py", {"devices": "cuda:0"}, ROOF)
    shown = bench.page
    assert "| k | c | PASSED | 4 ms | 100 µs | 2% | 250 GB/s | 25% | 50% | 1 | 24 |" in shown
    assert "| w | c | FAILED | 4 ms | 100 µs | 2% | 250 TFLOP/s | 50% | 50% | 1 | 24 |" in shown
    assert "w: 2 of 3 wrong" in shown and "the kernel: lost" in shown
    assert json.loads(bench.jsonl.splitlines()[0])["overhead"] == pytest.approx(0.025)


def test_triton_is_told_to_interpret_before_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def rms_norm(x, weight, *, eps): ...\n")
    program = """if True:
        import importlib.abc, os, sys
        from lastbit import cli

        class Watch(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "triton":
                    print("TRITON", os.environ.get("TRITON_INTERPRET"), flush=True)
                    os._exit(0)

        sys.meta_path.insert(0, Watch())
        cli.main(["bench", "mine.py", "--op", "rms_norm", "--device", "cpu"])
    """
    untold = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, env=untold, check=False
    )
    assert done.stdout.splitlines() == ["TRITON 1"], done.stderr


@pytest.mark.parametrize(
    ("words", "kernels"), [([], ()), (["kernels", "one"], ("one",)), (["one", "two"], ("one", "two"))]
)
def test_which_kernels_are_measured(
    words: list[str], kernels: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    began: list[Any] = []

    def steps(bench: Any, config: Any, effort: Any, *rest: Any) -> Iterator[Any]:
        began.append((config.kernels, effort == QUICK))
        yield from ()

    monkeypatch.setattr(bench, "_kernels", steps)
    assert cli.main(["bench", *words, "--quick", "--out", str(tmp_path / "new")]) == 0
    assert began == [(kernels, True)]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["kernels_cpu.jsonl", "kernels_cpu.md"]


@pytest.mark.parametrize("interrupts", [False, True])
def test_what_could_not_be_measured_is_told_and_the_rest_is_kept(
    interrupts: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> list[Any]:
        raise LastbitError("no memory")

    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    def steps(bench: Any, config: Any, effort: Any, *rest: Any) -> Iterator[Any]:
        yield "one", fails
        yield "two", interrupted if interrupts else list

    monkeypatch.setattr(bench, "_kernels", steps)
    assert cli.main(["bench"]) == (130 if interrupts else 2)
    printed = capsys.readouterr()
    assert "one: no memory" in printed.err and "one: no memory" in printed.out
    assert ("the rest: interrupted" in printed.out) is interrupts
