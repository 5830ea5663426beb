"""Runs put together from what their processes left behind: everything planned is there, with a result or a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lastbit.commands.running import kept
from lastbit.config import Config
from lastbit.inputs.combinations import pairs_of
from lastbit.reports import markdown
from lastbit.reports.records import dump
from lastbit.result import CaseResult, Verdict
from lastbit.run import NotRun, Run, Spent
from lastbit.verify.assemble import assembled, combined
from lastbit.verify.notes import INTERRUPTED, STOPPED, Ended, Planned, UnderWay
from lastbit.verify.power import Separable
from lastbit.verify.result_recorder import CaseRecorder

LINE = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1"
CONTRACT = "native_multiply+rounded_sum"


def planned(kernel: str, group: str = "g", cases: int = 1) -> Planned:
    return Planned(f"rms_norm-{kernel}-cpu-{group}", kernel, "rms_norm", CONTRACT, "cpu", group, "k.py:1", cases)


def result(kernel: str, group: str = "g", verdict: Verdict = Verdict.PASSED, reason: str = "") -> CaseResult:
    other = {"fp32_multiply+rounded_sum": 3}
    names = {"case": LINE, "op": "rms_norm", "kernel": kernel, "contract": CONTRACT, "device": "cpu", "dtypes": "bf16"}
    return CaseResult(verdict, ruled_out=other, group=group, reason=reason, **names)


class Left:
    """What the processes of a run have left behind for one type of device."""

    def __init__(self) -> None:
        self.ended = Ended("cpu", Path("workers.log"), (), ())

    def plan(self, *items: Planned, **others: Any) -> None:
        self.ended = replace(self.ended, items=items, **others)

    def select(self, *items: Planned) -> None:
        self.ended = replace(self.ended, selected=frozenset(item.id for item in items))

    def under_way(self, kernel: str, *, counted: bool = True, **how: Any) -> None:
        names = {"kernel": kernel, "contract": CONTRACT, "device": "cpu", "group": "g", "source": ""}
        case = UnderWay({**names, "counted": counted, "case": LINE, "limit": 3.0}, **how)
        self.ended = replace(self.ended, under_way=(*self.ended.under_way, case))

    def run(self, stop: str, *results: CaseResult, **known: Any) -> Run:
        ended = [replace(self.ended, stop=stop)]
        interrupted = stop == INTERRUPTED
        return assembled(Config(""), ended, results, environment={}, spent=Spent(), interrupted=interrupted, **known)


@pytest.fixture
def left() -> Left:
    return Left()


def reasons(run: Run) -> dict[str, str]:
    """Return what was planned and not run → reason."""
    return {n.what: n.reason for n in run.not_run if n.kernel}


@pytest.mark.parametrize(("stop", "code"), [("", 0), ("every actor for cpu was lost", 2)])
def test_actors_that_are_gone_before_the_end_break_the_run(left: Left, stop: str, code: int) -> None:
    left.plan(planned("k"))
    run = left.run(stop, result("k"))
    assert run.exit_code == code
    assert ("every actor for cpu was lost; see workers.log" in run.broken) is (code == 2)


# Kernels that vanish


def test_a_kernel_that_pytest_left_out_is_no_success(left: Left) -> None:
    left.plan(planned("here"), *(planned("gone", f"g{n}") for n in range(14)))
    left.select(planned("here"))
    run = left.run("", result("here"))
    assert (run.exit_code, run.overall, run.unverified) == (3, Verdict.SKIPPED, (("gone", "cpu"),))
    assert reasons(run) == {"gone on cpu": "left out by -k, --deselect or another option or plugin of pytest"}
    assert "1 kernel was not verified: gone on cpu. " in markdown.page(run)


def test_a_group_that_pytest_left_out_is_listed(left: Left) -> None:
    left.plan(planned("k", "a"), planned("k", "b"))
    left.select(planned("k", "a"))
    run = left.run("", result("k", "a"))
    assert run.exit_code == 0
    assert list(reasons(run)) == ["k on cpu, group b"]


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.SKIPPED])
def test_a_kernel_that_took_no_case_is_no_success(left: Left, verdict: Verdict) -> None:
    left.plan(planned("k"), planned("picky"))
    run = left.run("", result("k"), result("picky", verdict=verdict))
    assert (run.exit_code, run.unverified) == (3, (("picky", "cpu"),))


def test_worse_than_a_kernel_that_was_not_run_is_a_failure(left: Left) -> None:
    left.plan(planned("wrong"), planned("gone"))
    left.select(planned("wrong"))
    assert left.run("", result("wrong", verdict=Verdict.FAILED)).exit_code == 1


def test_groups_without_a_case_are_told(left: Left) -> None:
    left.plan(planned("k", cases=0))
    run = left.run("")
    assert run.exit_code == 3
    assert "no case was to be generated" in reasons(run)["k on cpu"]


def test_what_a_failure_stopped_is_listed(left: Left) -> None:
    left.plan(planned("wrong"), planned("later"))
    run = left.run(STOPPED, result("wrong", verdict=Verdict.FAILED))
    assert (run.exit_code, run.broken) == (1, "")
    assert reasons(run) == {"later on cpu": "-x or --maxfail stopped pytest"}


def test_what_a_failed_kernel_left_is_a_line_with_the_number_of_cases(left: Left) -> None:
    """Of the group in which it failed, and of those that have begun none."""
    items = planned("wrong", "a", 5), *(planned("wrong", f"g{n}", 8) for n in range(9)), planned("right", "a")
    rest = {("wrong", "cpu", "a"): 4, **{("wrong", "cpu", f"g{n}"): 8 for n in range(9)}}
    left.plan(*items, not_run=(NotRun("strided cases of right", "declares takes='contiguous'"),), rest=rest)
    run = left.run("", result("wrong", "a", Verdict.FAILED), result("right", "a"))
    assert (run.exit_code, run.broken, run.unverified) == (1, "", ())
    reason = "stopped after its first failure; --keep-going runs the rest"
    assert reasons(run) == {"wrong on cpu, 76 more cases": reason}
    assert [note.reason for note in run.not_run[:2]] == [reason, "declares takes='contiguous'"]


def test_workers_know_of_failures_unless_they_keep_going(tmp_path: Path) -> None:
    recorders = [CaseRecorder(Config(str(tmp_path), keep_going=on), dump, tmp_path) for on in (False, True)]
    for recorder in recorders:
        recorder.begin([("k", "cpu")])
    known = recorders[0].failures  # of the item that is under way
    for recorder in recorders:
        recorder.learn([("another", "cpu")])
    assert [known, recorders[1].failures] == [{("k", "cpu"), ("another", "cpu")}, None]


def test_a_try_that_ends_its_worker_is_no_case(left: Left) -> None:
    left.plan(planned("k"))
    left.under_way("k", counted=False, died=True)
    run = left.run("", replace(result("k"), verdict=Verdict.FAILED))
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
    items[0] = replace(items[0], left=({"x dtype": "fp32", "up": "as x"},))
    entries = list(combined(items, [result("a", "g0"), turned_down, result("b", "g3")], lambda op: every))
    assert entries[0].missing == ("x=bf16 × alpha", "x=fp32 × up=as x")


def test_cases_that_could_not_be_made_have_no_coverage(left: Left) -> None:
    left.plan(planned("k"))
    run = left.run("", replace(result("k"), verdict=Verdict.ERRORED, case="op (group g)", reason="KeyError: 'x'"))
    assert (run.exit_code, run.coverage) == (2, ())


def test_an_item_that_ran_and_left_no_result_breaks_the_run(left: Left) -> None:
    left.plan(planned("k"), planned("silent"))
    run = left.run("", result("k"))
    assert run.exit_code == 2
    assert "no result of silent on cpu" in run.broken


def test_records_that_cannot_bekept_break_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = kept(Run((result("k"),)), tmp_path / "file" / "run")
    assert run.exit_code == 2
    assert "the records cannot be written" in run.broken


# Cases that were under way


def test_an_interrupt_blames_no_kernel(left: Left) -> None:
    left.plan(planned("k"), planned("later"))
    left.under_way("k", died=False)
    run = left.run(INTERRUPTED, result("k", "before"))
    assert not any(r.verdict is Verdict.ERRORED for r in run.results)
    assert reasons(run) == dict.fromkeys(
        [f"k on cpu from this case on: {LINE}", "k on cpu", "later on cpu"], "interrupted"
    )


@pytest.mark.parametrize("stop", ["", INTERRUPTED])
def test_a_worker_that_died_by_itself_is_an_error_of_the_kernel(left: Left, stop: str) -> None:
    left.plan(planned("k"))
    left.under_way("k", died=True)
    assert [(r.kernel, r.verdict) for r in left.run(stop).results] == [("k", Verdict.ERRORED)]


def test_a_hang_is_an_error_of_the_kernel_even_in_an_interrupted_run(left: Left) -> None:
    left.plan(planned("k"))
    left.under_way("k", died=True, hung=True, trace="cpu-1.trace")
    [found] = left.run(INTERRUPTED).results
    assert found.reason.startswith("no result after 3 s (--timeout)") and found.reason.endswith("see cpu-1.trace")


def test_a_case_that_a_failure_elsewhere_stopped_blames_no_kernel(left: Left) -> None:
    left.plan(planned("wrong"), planned("slow"))
    left.under_way("slow", died=False)
    run = left.run(STOPPED, result("wrong", verdict=Verdict.FAILED))
    assert (run.exit_code, len(run.results)) == (1, 1)
    assert f"slow on cpu from this case on: {LINE}" in reasons(run)


def test_results_are_in_the_order_of_the_plan_whoever_had_them_when(left: Left) -> None:
    left.plan(planned("a", "g1"), planned("a", "g2"), planned("b", "g1"))
    run = left.run("", result("b", "g1"), result("a", "g2", reason="1"), result("a", "g1"), result("a", "g2"))
    assert [(r.kernel, r.group, r.reason) for r in run.results] == [
        ("a", "g1", ""), ("a", "g2", "1"), ("a", "g2", ""), ("b", "g1", ""),
    ]  # fmt: skip


def test_branches_are_of_kernels_in_the_order_of_the_plan(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("lastbit.verify.assemble.unreached", lambda taken, *_, **__: seen.extend(taken))
    left.plan(planned("b"), planned("a"))
    left.run("", result("a"), result("b"), taken=[("a", []), ("b", [])])
    assert seen == ["b", "a"]


def test_nobody_waits_for_the_power_of_an_interrupted_run(left: Left) -> None:
    left.plan(planned("k"))
    assert left.run("", result("k")).power
    assert not left.run(INTERRUPTED, result("k")).power


def test_what_workers_know_of_contracts_is_not_asked_again(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    never = replace(result("k"), ruled_out={"fp32_multiply+rounded_sum": 0})
    asked = list[str]()
    monkeypatch.setattr(Separable, "_apart", lambda *question: bool(asked.append(str(question[-1]))))
    left.plan(planned("k"))
    assert not left.run("", never).power[0].missing and len(asked) == 1
    known = {("rms_norm", "fp32_multiply+rounded_sum", CONTRACT, asked[0]): True}
    assert left.run("", never, known=known).power[0].missing and len(asked) == 1


def test_an_interrupt_while_power_is_found_out_keeps_the_run(left: Left, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lastbit.verify.assemble.power_of", interrupted)
    left.plan(planned("k"))
    run = left.run("", result("k"))
    assert (len(run.results), run.broken, run.power) == (1, "interrupted", ())
