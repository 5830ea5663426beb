"""Runs put together from what their processes left behind: everything planned is there, with a result or a reason."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastbit.commands.running import kept
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.inputs.combinations import pairs_of
from lastbit.plugin import _Session
from lastbit.reports import markdown
from lastbit.reports.records import dump
from lastbit.result import CaseResult, Verdict
from lastbit.run import NotRun, Run
from lastbit.trees import MixedTrees
from lastbit.verify.assemble import collect, combined
from lastbit.verify.notes import Failures, Unrecorded, write_json
from lastbit.verify.plan import Planned
from lastbit.verify.power import Separable
from lastbit.verify.processes import Child
from lastbit.verify.result_recorder import ResultRecorder

LINE = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1"
CONTRACT = "native_multiply+rounded_sum"
DONE = {"status": 0, "unrecorded": ""}
FAILED = {"status": 1, "unrecorded": ""}
STOPPED = {"status": 2, "unrecorded": ""}


def planned(kernel: str, group: str = "g", cases: int = 1) -> Planned:
    return Planned(f"rms_norm-{kernel}-cpu-{group}", kernel, "rms_norm", CONTRACT, "cpu", group, "k.py:1", cases)


def result(kernel: str, group: str = "g", verdict: Verdict = Verdict.PASSED, reason: str = "") -> CaseResult:
    other = {"fp32_multiply+rounded_sum": 3}
    names = {"case": LINE, "op": "rms_norm", "kernel": kernel, "contract": CONTRACT, "device": "cpu", "dtypes": "bf16"}
    return CaseResult(verdict, ruled_out=other, group=group, reason=reason, **names)


class Left:
    """The folder of a run whose pytest process has ended, and what it left there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.child = Child("cpu", subprocess.Popen([sys.executable, "-S", "-c", ""]), folder / "cpu.log")
        self.child.process.wait()

    def plan(self, *items: Planned, not_run: Sequence[NotRun] = ()) -> None:
        left_out = [asdict(note) for note in not_run]
        self.child.notes.write("plan", {"items": [asdict(i) for i in items], "not_run": left_out})
        self.child.notes.write("selected", [item.id for item in items])

    def started(self, kernel: str, worker: str = "gw0", trace: str = "", *, counted: bool = True) -> None:
        note = {
            "counted": counted,
            "case": LINE,
            "kernel": kernel,
            "contract": CONTRACT,
            "device": "cpu",
            "group": "g",
            "source": "",
        }
        write_json(self.folder / f"cpu-{worker}-17.started", {**note, "limit": 3.0})
        (self.folder / f"cpu-{worker}-17.trace").write_text(trace)

    def run(self, done: object, *results: CaseResult, interrupted: bool = False) -> Run:
        if done is not None:
            self.child.notes.write("done", done)
        return collect(Config(folder=str(self.folder)), [self.child], results, interrupted=interrupted)


@pytest.fixture
def left(tmp_path: Path) -> Left:
    return Left(tmp_path)


def reasons(run: Run) -> dict[str, str]:
    """Return what was planned and not run → reason."""
    return {n.what: n.reason for n in run.not_run if n.kernel}


@pytest.mark.parametrize(("done", "code"), [(DONE, 0), ({"status": 3, "unrecorded": ""}, 2), (None, 2)])
def test_a_pytest_process_that_ends_early_breaks_the_run(left: Left, done: object, code: int) -> None:
    left.plan(planned("k"))
    run = left.run(done, result("k"))
    assert run.exit_code == code
    assert ("ended early" in run.broken) is (code == 2)


# Kernels that vanish


def test_a_kernel_that_pytest_left_out_is_no_success(left: Left) -> None:
    left.plan(planned("here"), *(planned("gone", f"g{n}") for n in range(14)))
    left.child.notes.write("selected", [planned("here").id])
    run = left.run(DONE, result("here"))
    assert (run.exit_code, run.overall, run.unverified) == (3, Verdict.SKIPPED, (("gone", "cpu"),))
    assert reasons(run) == {"gone on cpu": "left out by -k, --deselect or another option or plugin of pytest"}
    assert "1 kernel was not verified: gone on cpu. " in markdown.page(run)


def test_a_group_that_pytest_left_out_is_listed(left: Left) -> None:
    left.plan(planned("k", "a"), planned("k", "b"))
    left.child.notes.write("selected", [planned("k", "a").id])
    run = left.run(DONE, result("k", "a"))
    assert run.exit_code == 0
    assert list(reasons(run)) == ["k on cpu, group b"]


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.SKIPPED])
def test_a_kernel_that_took_no_case_is_no_success(left: Left, verdict: Verdict) -> None:
    left.plan(planned("k"), planned("picky"))
    run = left.run(DONE, result("k"), result("picky", verdict=verdict))
    assert (run.exit_code, run.unverified) == (3, (("picky", "cpu"),))


def test_worse_than_a_kernel_that_was_not_run_is_a_failure(left: Left) -> None:
    left.plan(planned("wrong"), planned("gone"))
    left.child.notes.write("selected", [planned("wrong").id])
    assert left.run(FAILED, result("wrong", verdict=Verdict.FAILED)).exit_code == 1


def test_groups_without_a_case_are_told(left: Left) -> None:
    left.plan(planned("k", cases=0))
    run = left.run(DONE)
    assert run.exit_code == 3
    assert "no case was to be generated" in reasons(run)["k on cpu"]


def test_what_a_failure_stopped_is_listed(left: Left) -> None:
    left.plan(planned("wrong"), planned("later"))
    run = left.run(STOPPED, result("wrong", verdict=Verdict.FAILED))
    assert (run.exit_code, run.broken) == (1, "")
    assert reasons(run) == {"later on cpu": "-x or --maxfail stopped pytest"}


def test_what_a_failed_kernel_left_is_a_line_with_the_number_of_cases(left: Left) -> None:
    """By two workers: one in which it failed, and one that then had another group of cases and has begun none."""
    items = planned("wrong", "a", 5), *(planned("wrong", f"g{n}", 8) for n in range(9)), planned("right", "a")
    left.plan(*items, not_run=[NotRun("strided cases of right", "declares takes='contiguous'")])
    for worker, groups in (("gw0", {"a": 4, "g0": 8}), ("gw1", {f"g{n}": 8 for n in range(1, 9)})):
        recorder = ResultRecorder(Config(folder=str(left.folder)), f"cpu-{worker}", dump)
        for group, cases in groups.items():
            recorder.leave(_item("wrong", group), cases)  # type: ignore[arg-type]
    run = left.run(FAILED, result("wrong", "a", Verdict.FAILED), result("right", "a"))
    assert (run.exit_code, run.broken, run.unverified) == (1, "", ())
    reason = "stopped after its first failure; --keep-going runs the rest"
    assert reasons(run) == {"wrong on cpu, 76 more cases": reason}
    assert [note.reason for note in run.not_run[:2]] == [reason, "declares takes='contiguous'"]


def test_workers_know_of_failures_unless_they_keep_going(tmp_path: Path) -> None:
    recorders = [ResultRecorder(Config(str(tmp_path), keep_going=on), f"cpu-gw{on:d}", dump) for on in (False, True)]
    assert [recorder.failures for recorder in recorders] == [Failures(tmp_path), None]


def test_a_kernel_that_ends_its_worker_has_failed(left: Left) -> None:
    left.started("k", "gw1")
    gateway = SimpleNamespace(gateway=SimpleNamespace(id="gw1"))
    left.child.notes.write("selected", [])
    _Session(left.child.notes).pytest_testnodedown(gateway, "Not properly terminated")
    failures = Failures(left.folder)
    assert failures.has("k", "cpu") and not failures.has("another", "cpu")


def test_a_try_that_ends_its_worker_is_no_case(left: Left) -> None:
    left.plan(planned("k"))
    left.child.notes.write("crashed", ["gw0"])
    left.started("k", counted=False)
    run = left.run(DONE, replace(result("k"), verdict=Verdict.FAILED))
    assert [(r.verdict, r.counted) for r in run.results] == [(Verdict.FAILED, True), (Verdict.SKIPPED, False)]
    assert run.results[1].reason.endswith("while a failure was made smaller")
    assert run.exit_code == 1


def test_options_that_go_together_have_met_or_it_is_said_why() -> None:
    """Kernels of one function share its cases; one that needs an up never meets its absence."""
    rows = [{"x dtype": x, "up": "as x", "alpha": alpha} for x in ("bf16", "fp16") for alpha in (None, "drawn")]
    items = [replace(planned("a", f"g{n}"), combination=row) for n, row in enumerate(rows)]
    items = [*items[:3], replace(items[3], kernel="b"), planned("a", "edges")]
    turned_down = result("a", "g2", Verdict.UNSUPPORTED)
    every = [*pairs_of(rows), (("x dtype", "bf16"), ("up", None)), (("up", None), ("alpha", None))]
    entries = list(combined(items, [result("a", "g0"), turned_down, result("b", "g3")], lambda op: every))
    assert [(entry.kernel, entry.device, entry.choice) for entry in entries] == [
        ("a", "cpu", "combinations"),
        ("b", "cpu", "combinations"),
    ]
    assert entries[0].judged == entries[1].judged
    assert set(entries[0].judged) == {
        *("x=bf16 × up=as x", "x=bf16 × no alpha", "up=as x × no alpha"),
        *("x=fp16 × up=as x", "x=fp16 × alpha", "up=as x × alpha"),
    }
    assert entries[0].missing == ("x=bf16 × alpha",)
    assert entries[0].declined == ("no up", "x=fp16 × no alpha")


def test_cases_that_could_not_be_made_have_no_coverage(left: Left) -> None:
    left.plan(planned("k"))
    run = left.run(DONE, replace(result("k"), verdict=Verdict.ERRORED, case="op (group g)", reason="KeyError: 'x'"))
    assert (run.exit_code, run.coverage) == (2, ())


def test_an_item_that_ran_and_left_no_result_breaks_the_run(left: Left) -> None:
    left.plan(planned("k"), planned("silent"))
    run = left.run(DONE, result("k"))
    assert run.exit_code == 2
    assert "no result of silent on cpu" in run.broken


def test_results_that_cannot_be_written_break_the_run(left: Left) -> None:
    left.plan(planned("k"))
    run = left.run({"status": 1, "unrecorded": "cannot write r.jsonl: No space left on device"}, result("k"))
    assert run.exit_code == 2
    assert "No space left on device" in run.broken


def test_a_case_under_way_when_pytest_ended_early_blames_no_kernel(left: Left) -> None:
    left.plan(planned("k"))
    left.started("k")
    run = left.run(None)
    assert (run.exit_code, run.results) == (2, ())
    assert f"k on cpu from this case on: {LINE}" in reasons(run)


def test_a_result_that_cannot_be_written_is_not_taken_for_a_case_that_ended_the_process(tmp_path: Path) -> None:
    recorder = ResultRecorder(Config(folder=str(tmp_path)), "cpu-gw0", dump)
    recorder.started(_item(), None)  # type: ignore[arg-type]
    recorder._results = Full()  # type: ignore[assignment]
    with pytest.raises(Unrecorded, match=r"cannot write r\.jsonl: No space left on device"):
        recorder.record(result("k"))
    assert not list(tmp_path.glob("*.started"))


def test_a_worker_says_which_result_it_could_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recorder = ResultRecorder(Config(folder=str(folder)), "cpu-gw0", dump)
    shutil.rmtree(folder)
    with pytest.raises(Unrecorded, match=r"cannot write .*started: No such file"):
        recorder.started(_item(), None)  # type: ignore[arg-type]


def test_a_folder_that_is_gone_is_told(left: Left) -> None:
    left.plan(planned("k"))
    shutil.rmtree(left.folder)
    with pytest.raises(LastbitError, match="was removed while the run went on"):
        left.run(None, result("k"))


def test_records_that_cannot_bekept_break_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = kept(Run((result("k"),)), tmp_path / "file" / "run")
    assert run.exit_code == 2
    assert "the records cannot be written" in run.broken


# Cases that were under way


def test_an_interrupt_blames_no_kernel(left: Left) -> None:
    left.plan(planned("k"), planned("later"))
    left.started("k")
    run = left.run(None, result("k", "before"), interrupted=True)
    assert not any(r.verdict is Verdict.ERRORED for r in run.results)
    assert reasons(run) == dict.fromkeys(
        [f"k on cpu from this case on: {LINE}", "k on cpu", "later on cpu"], "interrupted"
    )


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_worker_that_died_by_itself_is_an_error_of_the_kernel(left: Left, interrupted: bool) -> None:
    left.plan(planned("k"))
    left.started("k")
    left.child.notes.write("crashed", ["gw0"])
    run = left.run(None if interrupted else FAILED, interrupted=interrupted)
    assert [(r.kernel, r.verdict) for r in run.results] == [("k", Verdict.ERRORED)]


def test_a_hang_is_an_error_of_the_kernel_even_in_an_interrupted_run(left: Left) -> None:
    left.plan(planned("k"))
    left.started("k", trace="Timeout (0:00:03)!")
    [found] = left.run(None, interrupted=True).results
    assert found.reason.startswith("no result after 3 s (--timeout)")


def test_a_case_that_a_failure_elsewhere_stopped_blames_no_kernel(left: Left) -> None:
    left.plan(planned("wrong"), planned("slow"))
    left.started("slow", "gw1")
    run = left.run(STOPPED, result("wrong", verdict=Verdict.FAILED))
    assert (run.exit_code, len(run.results)) == (1, 1)
    assert f"slow on cpu from this case on: {LINE}" in reasons(run)


class Full:
    """A file on a disk that is full."""

    name = "r.jsonl"

    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def _item(kernel: str = "k", group: str = "g") -> object:
    """As much of an item as the notes of a worker need."""
    subject = SimpleNamespace(kernel=SimpleNamespace(name=kernel, source=""), contract=CONTRACT, device="cpu")
    return SimpleNamespace(subject=subject, group=SimpleNamespace(name=group))


def test_the_notes_are_json_that_a_reader_of_the_folder_understands(left: Left) -> None:
    left.plan(planned("k"))
    [item] = json.loads((left.folder / "cpu.plan.json").read_text())["items"]
    assert (item["kernel"], item["contract"], item["source"]) == ("k", CONTRACT, "k.py:1")


def test_results_are_in_the_order_of_the_plan_whoever_had_them_when(left: Left) -> None:
    left.plan(planned("a", "g1"), planned("a", "g2"), planned("b", "g1"))
    run = left.run(DONE, result("b", "g1"), result("a", "g2", reason="1"), result("a", "g1"), result("a", "g2"))
    assert [(r.kernel, r.group, r.reason) for r in run.results] == [
        ("a", "g1", ""), ("a", "g2", "1"), ("a", "g2", ""), ("b", "g1", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("error", [LastbitError("unknown kernel 'wright'"), MixedTrees("engine is another's")])
def test_a_plan_that_was_refused_says_so_in_its_own_words(left: Left, error: LastbitError) -> None:
    left.child.notes.refuse(error)
    with pytest.raises(type(error), match=f"^{error}$"):
        left.run(DONE)


def test_nobody_waits_for_the_power_of_an_interrupted_run(left: Left) -> None:
    left.plan(planned("k"))
    assert left.run(DONE, result("k")).power
    assert not left.run(DONE, result("k"), interrupted=True).power


def test_what_workers_know_of_contracts_is_not_asked_again(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker notes what is new after an item; a line that was cut off when it ended is asked again."""
    never = replace(result("k"), ruled_out={"fp32_multiply+rounded_sum": 0})
    asked = list[str]()
    monkeypatch.setattr(Separable, "_apart", lambda *question: bool(asked.append(str(question[-1]))))
    left.plan(planned("k"))
    assert not left.run(DONE, never).power[0].missing and len(asked) == 1
    recorder = ResultRecorder(Config(folder=str(left.folder)), "cpu-gw0", dump)
    recorder.separable.known["rms_norm", "fp32_multiply+rounded_sum", CONTRACT, asked[0]] = True
    recorder.note_time()
    recorder.separable.known["rms_norm", "another"] = False
    recorder.note_time()
    [path] = left.folder.glob("*.answers")
    assert len(path.read_text().splitlines()) == 2
    path.write_text(path.read_text()[:-9])
    assert left.run(DONE, never).power[0].missing and len(asked) == 1


def test_an_interrupt_while_power_is_found_out_keeps_the_run(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lastbit.verify.assemble.power_of", interrupted)
    left.plan(planned("k"))
    run = left.run(DONE, result("k"))
    assert (len(run.results), run.broken, run.power) == (1, "interrupted", ())
