"""The time of a kernel of a file in its document: which case is timed, and what comes of what goes wrong meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from lastbit.config import Config
from lastbit.errors import LastbitError, UnsupportedCase, UsageError
from lastbit.judges import call_time
from lastbit.judges.judge_file import unjudged
from lastbit.judges.question import JudgeQuestion
from lastbit.kernel import Kernel
from lastbit.reports.bench import Sample, SpeedBound
from lastbit.reports.judged import Contracts, FileVerdict, print_judged
from lastbit.result import Verdict
from lastbit.verify.project import open_project
from lastbit.verify.worker import unwatched
from tests.commands.test_bench_file import ROOF, kernel_of, measured

CONFIG = Config("")
PASSED = replace(
    unjudged("mine.py", JudgeQuestion(op="rms_norm"), "cpu"), verdict=Verdict.PASSED, contracts=Contracts(keeps=("c",))
)


class Kernels:
    server = None

    def declared(self, folder: object) -> tuple[Kernel, ...]:
        return kernel_of("other", "fp32_multiply"), kernel_of("same")

    @contextmanager
    def pair(self, kernel: Kernel, timeout: float) -> Iterator[None]:
        yield None


@dataclass
class Timing:
    """Times kernels without running any: what becomes of a kernel is in `of`, by its name."""

    of: dict[str, Any]
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, **question: Any) -> FileVerdict:
        seen = []

        def bound_of(subject: Any, case: Any, *rest: object) -> SpeedBound:
            seen.append(str(case))
            told = self.of.get(subject.kernel.name, {})
            if isinstance(told, list):
                told = told.pop(0)
            if isinstance(told, Exception):
                raise told
            return measured(subject.kernel.name, of=str(case), **told)

        self.monkeypatch.setattr(call_time, "bound_of", bound_of)
        self.seen = seen
        project = open_project(CONFIG)
        desk: Any = SimpleNamespace(
            config=CONFIG, project=project, device=torch.device("cpu"), kernels=Kernels(), watch=unwatched, roof=ROOF
        )
        asked = JudgeQuestion(op="rms_norm", speed=True, **question)
        subject: Any = SimpleNamespace(kernel=kernel_of("mine"))
        return call_time.with_speed(PASSED, desk, subject, asked, lambda line: asked.repro("mine.py", line, "cpu"))


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Timing:
    return Timing({}, monkeypatch)


def test_the_first_measured_case_that_the_kernel_takes(timing: Timing) -> None:
    found = timing()
    assert found.speed is not None and found.verdict is Verdict.PASSED and not found.speed_reason
    assert found.speed.case == timing.seen[0] == "rms_norm x=bf16[64,256] weight=bf16[256]:near_one eps=1e-06 seed=1"
    assert (found.speed.seconds, found.speed.overhead, found.speed.calls) == (4e-3, 1e-4, 1)
    assert found.speed.roof == 0.25 and not found.speed.beside


def test_the_lines_of_the_caller_until_one_can_be_timed(timing: Timing) -> None:
    lines = [f"rms_norm x=bf16[{rows},8] weight=bf16[8] eps=0.001 seed=5" for rows in (1, 2, 3, 4)]
    timing.of["mine"] = [UnsupportedCase("declined"), UsageError("values are given"), {}]
    found = timing(lines=(lines[0].replace("weight", "residual"), *lines[1:]))
    assert found.speed is not None and found.speed.case == lines[3] and timing.seen == lines[1:]


def test_results_that_are_wrong_when_it_is_timed_fail_it(timing: Timing) -> None:
    timing.of = {"mine": {"verdict": "FAILED", "why": "2 of 3 wrong."}, "same": LastbitError("lost")}
    found = timing(beside=True)
    [finding] = found.findings
    assert found.verdict is Verdict.FAILED and found.exit_code == 1 and found.contracts.keeps == ()
    assert finding.sentence == "in calls that were timed: 2 of 3 wrong." and "--speed" in finding.repro
    assert found.speed is not None and found.speed_reason == "beside it: lost"


@pytest.mark.parametrize(
    ("error", "question", "reason"),
    [
        (LastbitError("its process ended"), {}, "its process ended"),
        (UsageError("values are given"), {"lines": ("rms_norm x=bf16[2,8] weight=bf16[8] eps=0.1 seed=5",)}, "values"),
        (None, {"lines": ("rms_norm x=bf16[2,8] residual=bf16[2,8] eps=0.1 seed=5",)}, "give a 'CASE'"),
    ],
)
def test_a_kernel_that_cannot_be_timed_has_passed(
    timing: Timing, error: Exception, question: dict[str, Any], reason: str
) -> None:
    timing.of["mine"] = error
    found = timing(**question)
    assert found.verdict is Verdict.PASSED and found.speed is None and reason in found.speed_reason


def test_a_kernel_of_the_project_that_keeps_the_contract_stands_beside_it(timing: Timing) -> None:
    timing.of["same"] = {"time": Sample.of([1e-3])}
    found = timing(beside=True)
    assert found.speed is not None and found.speed.beside == {"same": 1e-3}
    output = StringIO()
    print_judged(found, Console(file=output, width=200))
    assert (
        "at most 4 ms on rms_norm x=bf16[64,256], of which nothing takes 100 µs; "
        "at least 25% of the roof; same: 1 ms" in output.getvalue()
    )
    missing = timing(beside=True, contract="native_multiply+divided")
    assert missing.speed is not None and "no kernel of the project keeps" in missing.speed_reason


def test_nothing_stands_beside_what_is_not_timed() -> None:
    with pytest.raises(UsageError, match="ask for speed as well"):
        JudgeQuestion(op="rms_norm", beside=True)
