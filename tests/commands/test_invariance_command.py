"""What the bits of a kernel depend on, asked by `lastbit invariance` and by `lastbit verify`."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from in_this_process import InThisProcess

from lastbit.case import Case, Group
from lastbit.commands import invariance as command
from lastbit.commands import parsers
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.invariance import Invariance, print_invariance
from lastbit.reports.paper import make_console
from lastbit.result import CaseResult, Verdict
from lastbit.verify import asking
from lastbit.verify.item_run import Explorer
from lastbit.verify.plan import Item, make_plan
from lastbit.verify.worker import WorkerEnded
from tests.verify.test_property_checks import CASE, by_number_of_rows, in_one_sum, subject

LINE = "rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1"
PLANTED = """
import torch
from lastbit.kernel import kernel

@kernel("rms_norm", contract="fp32_multiply", invariant=("rows",))
def by_number_of_rows(x, weight, *, eps):
    squares = x.float().square()
    halves = squares[..., ::2].sum(-1) + squares[..., 1::2].sum(-1)
    total = squares.sum(-1) if x.numel() // x.shape[-1] < 19 else halves
    return (x.float() * torch.rsqrt(total / x.shape[-1] + eps)[..., None] * weight.float()).to(x.dtype)

@kernel("rms_norm", contract="fp32_multiply")
def undeclared(x, weight, *, eps):
    return by_number_of_rows(x, weight, eps=eps)
"""


def explored(group: Group) -> tuple[Explorer, CaseResult]:
    item = Item(subject(by_number_of_rows, invariant=("rows",)), group, properties=("rows",))
    explorer = Explorer(item, lambda result: None, lambda item, case, counted: None)
    return explorer, explorer.run(CASE)


def test_only_groups_that_say_so_are_asked_and_a_broken_property_is_not_made_smaller() -> None:
    _, plain = explored(Group("plain", examples=(CASE,)))
    explorer, failed = explored(Group("properties", examples=(CASE,), properties=True))
    assert plain.verdict is Verdict.PASSED and not plain.properties
    assert explorer.shrunk(CASE, failed, [CASE]) is failed


def test_the_time_of_a_case_begins_anew_with_each_property() -> None:
    started: list[Case] = []
    names, group = ("rows", "run to run"), Group("properties", examples=(CASE,), properties=True)
    item = Item(subject(in_one_sum), group, properties=names)
    Explorer(item, lambda result: None, lambda item, case, counted: started.append(case)).run(CASE)
    assert started == [CASE] * (1 + len(names))


# Cases


def groups_of(folder: Path, **settings: object) -> dict[str, list[Group]]:
    plan = DevicePlan(("cpu",), ("asked for",))
    config = Config(folder="", device_plan=plan, kernel_folders=(str(folder),), cases=0, **settings)  # type: ignore[arg-type]
    found: dict[str, list[Group]] = {}
    for item in make_plan(config, "cpu").items:
        found.setdefault(item.subject.kernel.name, []).append(item.group)
    return found


def test_a_plan_asks_kernels_that_declare_something_also_of_an_op_without_cases_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PLANTED)
    monkeypatch.setattr("lastbit.verify.project.Project.groups", lambda *_, **__: [Group("some", examples=(CASE,))])
    groups = groups_of(tmp_path)
    assert [(g.name, g.properties, g.examples) for g in groups["by_number_of_rows"]] == [
        ("some", False, (CASE,)),
        ("properties", True, (CASE,)),
    ]
    assert [group.name for group in groups["undeclared"]] == ["some"]


def test_lines_are_asked_about_the_properties_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLANTED)
    assert [g.properties for g in groups_of(tmp_path, lines=(LINE,))["undeclared"]] == [False]
    assert [g.properties for g in groups_of(tmp_path, lines=(LINE,), properties=("rows",))["undeclared"]] == [True]


# The command


def found(*results: PropertyResult, errors: tuple[str, ...] = (), cases: tuple[str, ...] = (LINE,)) -> Invariance:
    return Invariance("k", "op", "once", "cpu", cases, results, errors)


HOLDS = PropertyResult("rows", PropertyOutcome.HOLDS, declared=True, pairs=3)
BROKEN = PropertyResult("rows", PropertyOutcome.BROKEN, pairs=4, elements=7, legal=True)


def test_the_exit_code() -> None:
    assert found(HOLDS, BROKEN).exit_code == 0
    assert found(replace(BROKEN, declared=True)).exit_code == 1
    assert found(replace(BROKEN, legal=False)).exit_code == 1
    assert found(replace(HOLDS, outcome=PropertyOutcome.ERRORED)).exit_code == 2
    assert found(HOLDS, errors=("rows: it died",)).exit_code == 2
    assert found(cases=()).exit_code == 3


def test_several_cases_say_the_worst_with_the_pairs_of_all() -> None:
    nothing = PropertyResult("rows", PropertyOutcome.NOT_APPLICABLE)
    assert together([HOLDS, nothing])["rows"].outcome is PropertyOutcome.HOLDS
    worst = together([HOLDS, BROKEN, replace(BROKEN, elements=9), nothing])["rows"]
    assert (worst.outcome, worst.elements, worst.pairs) == (PropertyOutcome.BROKEN, 9, 11)
    errored = replace(HOLDS, outcome=PropertyOutcome.ERRORED)
    assert together([errored, BROKEN])["rows"] == replace(errored, pairs=7), "what fails the kernel"


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of the command for the planted kernels and one line, run in this process."""
    monkeypatch.setattr(command, "Worker", InThisProcess)
    (tmp_path / "mine.py").write_text(PLANTED)
    (tmp_path / "cases.txt").write_text(LINE)
    return [str(tmp_path), "--cases", str(tmp_path / "cases.txt"), "--property", "rows"]


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_invariance(parser)
    options = parser.parse_args(arguments)
    return int(command.run(options, []))


def test_tables_and_a_pair_to_paste(
    planted: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert run("undeclared", "by_number_of_rows", *planted, "--quick") == 1
    shown = capsys.readouterr().out
    assert "broken (declared)" in shown and "changes between 18 and 19 rows" in shown and "legal" in shown
    assert f"    {LINE}\n" in shown, "the first call of a pair is a line of its own"
    assert f"lastbit verify {planted[0]}::undeclared '{LINE}' --device cpu --property rows" in shown
    _, table = shown.split("Properties of kernels of rms_norm\n")
    header, *rows = [line.split() for line in table.splitlines()[:3]]
    assert header == ["kernel", "device", "rows"]
    assert rows == [["by_number_of_rows", "cpu", "BROKEN"], ["undeclared", "cpu", "broken"]]


def test_a_call_that_no_line_gives_is_in_words_and_its_case_runs_again(capsys: pytest.CaptureFixture[str]) -> None:
    one = replace(BROKEN, first=f"{LINE}, its tensors contiguous", second="row 0 alone")
    print_invariance(found(one), make_console())
    assert f" '{LINE}' --device" in capsys.readouterr().out


def test_what_is_declared_and_not_applicable_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    print_invariance(
        found(PropertyResult("graph", PropertyOutcome.NOT_APPLICABLE, True, reason="no graphs")), make_console()
    )
    assert "not applicable: graph (declared): no graphs" in capsys.readouterr().out


def test_json(planted: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("undeclared", *planted, "--quick", "--json") == 0
    [kernel] = json.loads(capsys.readouterr().out)["kernels"]
    [rows] = kernel["properties"]
    assert (kernel["kernel"], kernel["cases"], kernel["exit_code"]) == ("undeclared", [LINE], 0)
    assert (rows["outcome"], rows["fails"], rows["legal"]) == ("broken", False, True)
    assert rows["where"] == "changes between 18 and 19 rows"


def test_a_question_that_ends_the_process_costs_its_own_answer_alone(
    planted: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one_ends(place: object, kernel: str, question: asking.Asking, *, thorough: bool) -> PropertyResult:
        if question.property == "rows":
            raise WorkerEnded("the process died without an exception", question.case)
        return PropertyResult(question.property, PropertyOutcome.HOLDS, pairs=3)

    monkeypatch.setattr(command, "answer", one_ends)
    assert run("undeclared", *planted, "--property", "run to run") == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "errored: rows: the process died without an exception" in shown
    assert "run to run holds 3" in shown
