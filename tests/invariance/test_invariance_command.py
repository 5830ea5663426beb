"""What the bits of a kernel depend on, asked by `lastbit invariance` and by `lastbit verify`."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_this_process import InThisProcess

import lastbit
from lastbit.case import Case, Group, parse_case
from lastbit.commands import invariance as command
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import UsageError
from lastbit.invariance.properties import check_names, properties_of
from lastbit.kernel import Kernel, kernel
from lastbit.ops import Op
from lastbit.property_result import PropertyOutcome, PropertyResult, together
from lastbit.reports.invariance import Invariance, print_invariance
from lastbit.reports.paper import make_console
from lastbit.result import CaseResult, Verdict
from lastbit.verify import asking
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.item_run import Explorer
from lastbit.verify.plan import Item, make_plan
from lastbit.verify.project import open_project
from lastbit.verify.property_checks import ordinary_group, with_properties
from lastbit.verify.worker import WorkerEnded

LINE = "rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1"
CASE = parse_case(LINE)
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
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


def by_number_of_rows(x, weight, *, eps):
    """Sum in halves from 19 rows on."""
    squares = x.square()
    total = squares.sum(-1) if x.shape[0] < 19 else squares[:, ::2].sum(-1) + squares[:, 1::2].sum(-1)
    return x * torch.rsqrt(total / x.shape[-1] + eps)[:, None] * weight


def in_one_sum(x, weight, *, eps):
    total = x.double().square().sum(-1).float()
    return x * torch.rsqrt(total / x.shape[-1] + eps)[:, None] * weight


def wrong_alone(x, weight, *, eps):
    """Doubles the one row of a call."""
    return in_one_sum(x, weight, eps=eps) * (2 if x.shape[0] == 1 else 1)


def raises_alone(x, weight, *, eps):
    if x.shape[0] == 1:
        raise ValueError("one row")
    return in_one_sum(x, weight, eps=eps)


def subject(function, **declared) -> Subject:
    return Subject(Kernel("planted", "rms_norm", "fp32_multiply", function, **declared), RMS_NORM, torch.device("cpu"))


def asked(of: Subject, *names: str) -> CaseResult:
    return with_properties(of, CASE, verify_case(of, CASE, repeat=False), names or ("rows",))


# In a run


def test_a_declared_property_that_is_broken_fails() -> None:
    result = asked(subject(by_number_of_rows, invariant=("rows",)))
    [finding] = result.faults
    assert result.verdict is Verdict.FAILED
    assert (finding.kind, finding.stage) == ("broken_property", "rows")
    assert "rows, which the kernel declares, is broken: changes between 18 and 19 rows" in finding.sentence
    assert "the contract allows both" in finding.sentence


def test_one_that_is_not_declared_is_data_even_where_notices_fail() -> None:
    result = asked(replace(subject(by_number_of_rows), strict=True))
    assert result.verdict is Verdict.PASSED and not result.findings
    assert [(one.name, one.outcome) for one in result.properties] == [("rows", PropertyOutcome.BROKEN)]


def test_bits_that_leave_the_contract_fail_whatever_is_declared() -> None:
    result = asked(subject(wrong_alone))
    [finding] = result.faults
    assert result.verdict is Verdict.FAILED
    assert "these are not legal: the contract excludes them" in finding.sentence


@pytest.mark.parametrize(("invariant", "verdict"), [(("rows",), Verdict.ERRORED), ((), Verdict.PASSED)])
def test_what_a_kernel_raises_counts_where_it_promised(invariant: tuple[str, ...], verdict: Verdict) -> None:
    result = asked(subject(raises_alone, invariant=invariant))
    [one] = result.properties
    assert result.verdict is verdict
    assert one.outcome is PropertyOutcome.ERRORED and "one row" in one.reason


def test_a_case_that_failed_before_is_not_asked() -> None:
    def wrong(x, weight, *, eps):
        return x

    result = asked(subject(wrong, invariant=("rows",)))
    assert result.verdict is Verdict.FAILED and not result.properties


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


# Names


def test_a_name_that_is_no_property_is_told_with_the_nearest_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown property 'row'; did you mean 'rows'\? Known: .*rows"):
        check_names(("rows", "row"), [RMS_NORM])
    (tmp_path / "mine.py").write_text(PLANTED.replace('("rows",)', '("row",)'))
    with pytest.raises(UsageError, match=r"property in invariant of kernel 'by_number_of_rows'.*did you mean 'rows'"):
        open_project(Config(folder="", kernel_folders=(str(tmp_path),))).kernels()


# Cases


def test_the_most_ordinary_case_of_each_dtype_with_most_rows() -> None:
    lines = (
        "rms_norm x=bf16[4,128] weight=bf16[128] eps=1e-06 seed=1",
        "rms_norm x=bf16[9,128] weight=bf16[128] eps=1e-06 seed=2",
        "rms_norm x=bf16[50,128]:huge weight=bf16[128] eps=1e-06 seed=3",
        "rms_norm x=bf16[60,128]@256,1 weight=bf16[128] eps=1e-06 seed=4",
        "rms_norm x=fp16[70,128] eps=1e-06 seed=5",
        "rms_norm x=fp32[2,128]:rows weight=fp32[128] eps=1e-06 seed=6",
    )
    group = ordinary_group(subject(by_number_of_rows), [Group("some", examples=tuple(map(parse_case, lines)))])
    assert group.properties
    assert [case.seed for case in group.examples] == [2, 6]


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
    command.add_invariance(parser)
    options = parser.parse_args(arguments)
    return int(options.command(options, []))


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


# In anyone's test


def test_a_kernel_that_holds_passes_and_one_that_does_not_is_told() -> None:
    own = {"op": "rms_norm", "contract": "fp32_multiply", "cases": [LINE]}
    [rows] = lastbit.assert_invariant(in_one_sum, "rows", **own)
    assert rows.outcome is PropertyOutcome.HOLDS
    with pytest.raises(lastbit.InvarianceViolation, match="changes between 18 and 19 rows") as raised:
        lastbit.assert_invariant(by_number_of_rows, "rows", **own)
    assert raised.value.results[0].outcome is PropertyOutcome.BROKEN
    with pytest.raises(
        lastbit.InvarianceViolation, match="rows cannot be asked on any of 1 cases: the case has 1 rows"
    ):
        lastbit.assert_invariant(in_one_sum, "rows", **{**own, "cases": [LINE.replace("[40,", "[1,")]})


def test_what_a_decorated_function_declares_is_asserted() -> None:
    declares = kernel("rms_norm", contract="fp32_multiply", invariant=("rows",))(by_number_of_rows)
    with pytest.raises(lastbit.InvarianceViolation, match="rows, which the kernel declares, is broken"):
        lastbit.assert_invariant(declares, cases=[LINE])
    with pytest.raises(UsageError, match="is not decorated"):
        lastbit.assert_invariant(wrong_alone, "rows")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ["layer_norm x=fp32[4,16] seed=1"]}, "is one of layer_norm, and the kernel is one of rms_norm"),
        ({"cases": ["rms_norm x=fp32[4,16] eps=1e-06 seed=1"]}, "the kernel needs weight"),
        ({"cases": [LINE], "device": "tpu"}, "device 'tpu'"),
    ],
)
def test_what_cannot_be_asserted_is_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lastbit.assert_invariant(in_one_sum, "rows", op="rms_norm", contract="fp32_multiply", **options)


# Words


def test_properties_have_promises_in_words() -> None:
    assert all(one.promise and not one.promise.endswith(".") for one in properties_of(RMS_NORM).values())


def undocumented(op: Op) -> set[str]:
    """Promises of properties of an op that its documentation lacks, whatever inputs an op scales."""
    rows = (Path(__file__).parents[2] / "docs" / "invariance.md").read_text()
    parts = [(n, part) for n, one in properties_of(op).items() for part in one.promise.split("; ")]
    said = (f"| `{name}` | {re.sub(r'^.* times a power', 'inputs times a power', part)} |" for name, part in parts)
    return {row for row in said if row not in rows}


def test_the_documentation_has_every_property_and_its_promise() -> None:
    ops = open_project(Config(folder="")).ops.values()
    assert not {row for op in ops for row in undocumented(op)}
