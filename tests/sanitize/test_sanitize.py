"""A tool of compute-sanitizer on the cases of a run: whose fault a report is, and what becomes of the run.

No GPU is here: a stand-in for the worker process calls nothing, and writes what the tool would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import MappingProxyType, TracebackType
from typing import ClassVar

import pytest

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import UsageError
from lastbit.reports.summary import problems, repro_line
from lastbit.result import CaseResult, Finding, Verdict
from lastbit.run import Run
from lastbit.sanitize import looking, tool
from lastbit.sanitize.looking import (
    AFTER,
    MOST_ELEMENTS,
    Called,
    Looking,
    NamedAllocation,
    ToolReport,
    chosen_of,
    sanitized,
    with_seen,
)
from lastbit.sanitize.tool import TOOLS, Sanitizer, sanitizer_for
from lastbit.verify.assemble import INTERRUPTED
from lastbit.verify.worker import WorkerEnded
from tests.reports.test_reports import passed, shown

SANITIZER = Sanitizer("true")
REPORT = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at copy_kernel+0x1d0 in norms.py:12
=========     by thread (104,0,0) in block (3,0,0)
=========     Access to 0x1fa0 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x1000 of size 4,000 bytes
"""
X = NamedAllocation("x", 0x1000, 4000)


def case(rows: int) -> str:
    return f"rms_norm x=bf16[{rows},128] eps=1e-06 seed=17"


def result(kernel: str = "k", rows: int = 4, **changes: object) -> CaseResult:
    return passed(**{"kernel": kernel, "device": "cuda:0", "case": case(rows), **changes})


class StandIn:
    """A worker process for which `SAID` has what becomes of each case; `started` counts them."""

    SAID: ClassVar[Mapping[str, Called | str | WorkerEnded]] = MappingProxyType({})
    started: ClassVar[int] = 0
    late: ClassVar[str] = ""
    asked: ClassVar[list[tuple[str, str]]]

    def __init__(self, config: Config, *, launcher: Sequence[str], environ: Mapping[str, str]) -> None:
        assert environ == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} and len(config.devices) == 1
        self.log = Path(launcher[launcher.index("--log-file") + 1])
        type(self).started += 1

    def __enter__(self) -> StandIn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.late:
            self.log.write_text(self.late)

    def do(self, work: object, kernel: str, line: str) -> Called:
        self.asked.append((kernel, line))
        said = self.SAID.get(kernel, Called())
        if isinstance(said, str):
            self.log.write_text(said)
            return Called((X,))
        if isinstance(said, WorkerEnded):
            raise said
        return said


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class Fresh(StandIn):
        asked: ClassVar[list[tuple[str, str]]] = []

    monkeypatch.setattr(looking, "Worker", Fresh)
    return Fresh


@dataclass(frozen=True)
class Here:
    """A tool at work in a folder."""

    folder: Path

    def look(self, *results: CaseResult) -> list[ToolReport]:
        return list(Looking(Config(str(self.folder)), SANITIZER, "memcheck").at(results, Event()))


def test_a_report_belongs_to_the_case_after_which_it_is_there(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.SAID = {"bad": REPORT}
    clean, bad, later, last = result("a"), result("bad"), result("bad", 8), result("z")
    seen = Here(tmp_path).look(clean, bad, later, last)
    assert [(s.result, len(s.findings), s.reason) for s in seen] == [
        (clean, 0, ""),
        (bad, 1, ""),
        (later, 0, AFTER),
        (last, 0, ""),
    ]
    assert stand_in.asked == [("a", case(4)), ("bad", case(4)), ("z", case(4))]
    assert stand_in.started == 2, "what a process says after a report means nothing"


def test_a_process_that_ends_in_a_case_is_followed_by_another(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.SAID = {"dies": WorkerEnded("the process died without an exception", case(4)), "r": Called(raised="Oops")}
    seen = Here(tmp_path).look(result("dies"), result("dies", 8), result("r"), result("z"))
    died = f"the process died without an exception, in {case(4)}"
    assert [s.reason for s in seen] == [died, died, "Oops", ""] and stand_in.started == 3


def test_a_tool_that_does_not_start_breaks_the_run(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.SAID = {"k": WorkerEnded("the process that ran kernels ended outside of a case, with exit code 1")}
    run = sanitized(Config(str(tmp_path)), SANITIZER, Run((result(),)), lambda result: None)
    assert all(f"{name}: the process that ran kernels ended outside" in run.broken for name in TOOLS)
    assert run.exit_code == 2


def test_a_report_that_no_case_can_be_blamed_for_breaks_the_run(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.late = REPORT
    run = sanitized(Config(str(tmp_path)), SANITIZER, Run((result(),)), lambda result: None)
    assert "after the last case" in run.broken and run.results == (result(),) and run.exit_code == 2


def test_an_interruption_keeps_what_was_found(
    stand_in: type[StandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(under_way: Sequence[Future[object]]) -> None:
        wait(under_way)
        raise KeyboardInterrupt

    monkeypatch.setattr("lastbit.sanitize.looking.wait", interrupted)
    stand_in.SAID = {"k": REPORT}
    run = sanitized(Config(str(tmp_path)), SANITIZER, Run((result(),)), lambda result: None)
    assert run.broken == INTERRUPTED and run.results[0].verdict is Verdict.FAILED


def test_a_device_at_a_time(stand_in: type[StandIn], tmp_path: Path) -> None:
    assert len(Here(tmp_path).look(result("a"), result("b", device="cuda:1"))) == 2
    assert stand_in.started == 2


def test_who_is_told_to_stop_stops(stand_in: type[StandIn], tmp_path: Path) -> None:
    stop = Event()
    seen = []
    for one in Looking(Config(str(tmp_path)), SANITIZER, "memcheck").at([result("a"), result("b")], stop):
        seen.append(one)
        stop.set()
    assert [one.result.kernel for one in seen] == ["a"]


def test_a_finding_fails_its_case_and_no_other(stand_in: type[StandIn], tmp_path: Path) -> None:
    stand_in.SAID = {"bad": REPORT}
    before = Run((result("good"), result("bad"), result("bad", 8), passed()))
    ticks: list[CaseResult] = []
    run = sanitized(Config(str(tmp_path)), SANITIZER, before, ticks.append)
    assert [r.verdict for r in run.results] == [Verdict.PASSED, Verdict.FAILED, Verdict.PASSED, Verdict.PASSED]
    assert (run.verdict("bad", "cuda:0"), run.verdict("good", "cuda:0")) == (Verdict.FAILED, Verdict.PASSED)
    assert run.exit_code == 1 and len(ticks) == 3 * len(TOOLS)
    [problem] = problems(run)
    assert repro_line(problem.smallest).endswith("--device cuda:0 --sanitize")
    assert "--sanitize" not in repro_line(run.results[0])
    assert all(f"{name} 2 cases in 0 s" in run.environment["sanitized"] for name in TOOLS)
    text = " ".join(shown(run).split())
    assert "memcheck: Invalid __global__ read of size 4 bytes in copy_kernel (norms.py:12)" in text
    assert "1 byte after x, an allocation of 4,000 bytes" in text
    assert "memcheck on 1 case of bad on cuda:0, " in text and AFTER in text


def test_a_warning_is_a_notice_unless_the_run_is_strict() -> None:
    warning = Finding("racecheck", "", "racecheck: perhaps.", notice=True)
    seen = [ToolReport("racecheck", result(), (warning,))]
    lenient, strict = (with_seen(Run((result(),)), seen, strict=strict) for strict in (False, True))
    assert (lenient.exit_code, strict.exit_code) == (0, 1) and lenient.results[0].notices == (warning,)


def test_a_case_that_raised_says_what_was_found_as_well() -> None:
    raised = result(verdict=Verdict.ERRORED, reason="RuntimeError: an illegal memory access", stages=())
    seen = [ToolReport("memcheck", raised, (Finding("memcheck", "x", "memcheck: beyond x."),))]
    run = with_seen(Run((raised,)), seen)
    assert run.results[0].verdict is Verdict.ERRORED
    text = " ".join(shown(run).split())
    assert "an illegal memory access" in text and "memcheck: beyond x." in text


def test_which_cases_are_looked_at() -> None:
    chosen = [
        result("k", 2, verdict=Verdict.FAILED),
        result("k", 1),
        result("k", 4),
    ]
    others = [
        passed(kernel="k"),
        result("k", 3, counted=False, verdict=Verdict.FAILED),
        result("k", 5, verdict=Verdict.UNSUPPORTED),
        replace(result("k"), case="rms_norm (group plain)", dtypes="", verdict=Verdict.ERRORED),
        result("k", MOST_ELEMENTS // 128 + 1),
    ]
    run = Run((*chosen[::-1], chosen[0], *others))
    assert chosen_of(run) == chosen
    assert [n.what for n in with_seen(run, ()).not_run] == ["compute-sanitizer on 1 case"]


def on(*devices: str, sanitize: bool = True) -> Config:
    return Config("", device_plan=DevicePlan(devices, ("",) * len(devices)), sanitize=sanitize)


def test_where_the_tool_is_looked_for(tmp_path: Path) -> None:
    paths = {name: tmp_path / name / "bin" / "compute-sanitizer" for name in ("home", "path")}
    for path in paths.values():
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    path = {"PATH": str(paths["path"].parent)}
    assert sanitizer_for(on("cpu", "cuda:0"), path) == Sanitizer(str(paths["path"]))
    assert sanitizer_for(on("cuda:1"), {**path, "CUDA_HOME": str(tmp_path / "home")}) == Sanitizer(str(paths["home"]))
    assert sanitizer_for(on("cuda:0", sanitize=False), {}) is None and sanitizer_for(on("cpu"), {}) is None


def test_a_machine_without_the_tool_says_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "USUAL_PLACE", str(tmp_path))
    with pytest.raises(UsageError, match=r"comes with NVIDIA's CUDA toolkit.* set CUDA_HOME to its folder"):
        sanitizer_for(on("cuda:0"), {"PATH": str(tmp_path)})
    with pytest.raises(UsageError, match="--sanitize on xpu: there is no tool"):
        sanitizer_for(on("cpu", "xpu:0"), {"PATH": str(tmp_path)})
