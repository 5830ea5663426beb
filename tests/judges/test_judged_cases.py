"""Which cases a file is judged on, and what their results say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.judges.judge_file import concluded, contracts_of, failure_of, unjudged
from lastbit.judges.opening import CaseOrder
from lastbit.judges.question import JudgeQuestion
from lastbit.reports.judged import FileVerdict
from lastbit.result import CaseResult, Comparison, Finding, StageResult, Verdict
from lastbit.run import Power, Run
from lastbit.verify.project import Project, open_project

PLAIN = frozenset({"x", "weight", "eps"})
LINE = "rms_norm x=bf16[1,3]:values(1.5,-2,0.5) eps=1e-06 seed=0"
ASKED = JudgeQuestion(op="rms_norm", contract="fp32_multiply", profile="smoke")


@pytest.fixture(scope="module")
def project() -> Project:
    return open_project(Config(folder=""))


@pytest.fixture(scope="module")
def order(project: Project) -> CaseOrder:
    return CaseOrder(project, small=True)


def test_the_cheapest_cases_come_first_and_all_that_verify_has(order: CaseOrder, project: Project) -> None:
    chosen = order.of(ASKED, PLAIN)
    sizes = [one.case.numel for one in chosen]
    assert sizes == sorted(sizes) and sizes[0] < 10 < 10_000 < sizes[-1]
    groups = project.groups("rms_norm", PLAIN, small=True)
    assert {one.group for one in chosen} == {group.name for group in groups}
    for one in chosen:
        assert one.case.names <= PLAIN
        assert any(replace(other, seed=one.case.seed) == one.case for other in one.alike)


def test_seeds_are_nobodys_until_the_call(order: CaseOrder) -> None:
    first, second = (order.of(ASKED, PLAIN) for _ in range(2))
    assert [replace(a.case, seed=0) for a in first] == [replace(b.case, seed=0) for b in second]
    assert len({one.case.seed for one in (*first, *second)}) > 1.9 * len(first)


@pytest.mark.parametrize("kind", ["", "random:"])
def test_a_seed_makes_the_same_cases(order: CaseOrder, kind: str) -> None:
    asked = [order.of(replace(ASKED, seed=kind + seed), PLAIN) for seed in ("7", "7", "8")]
    assert asked[0] == asked[1] != asked[2]


def test_lines_of_a_reader_are_run_as_they_are(order: CaseOrder) -> None:
    [one] = order.of(replace(ASKED, lines=(LINE,)), PLAIN)
    assert str(one.case) == LINE
    with pytest.raises(UsageError, match="nromal"):
        order.of(replace(ASKED, lines=("rms_norm x=bf16[3]:nromal eps=1e-06 seed=0",)), PLAIN)


# What results say together

STAGE = StageResult("output", "bf16", True, Comparison(numel=100, decided=90), Comparison(numel=100, decided=90))
WRONG = replace(STAGE, cumulative=Comparison(numel=100, decided=90, outside=3))
OUTSIDE, WROTE = Finding("outside", "output", "3 are."), Finding("wrote_outside", "x", "It did.")


def result(verdict: Verdict, rows: int = 1, **fields: object) -> CaseResult:
    case = f"rms_norm x=bf16[{rows},8] eps=1e-06 seed=1"
    names = {"op": "rms_norm", "kernel": "mine", "contract": "a+b", "device": "cpu", "dtypes": "bf16"}
    made = CaseResult(verdict, case=case, stages=(STAGE,), **names)  # type: ignore[arg-type]
    return replace(made, **fields)  # type: ignore[arg-type]


def found(results: Sequence[CaseResult], power: Sequence[Power] = ()) -> FileVerdict:
    empty = replace(unjudged("kernel.py", ASKED, "cpu"), contract="a+b")
    return concluded(empty, Run(tuple(results), tuple(power)), planned=9, repro=lambda line: f"judge {line}")


def failed(rows: int, *findings: Finding, **fields: object) -> CaseResult:
    return result(Verdict.FAILED, rows, findings=findings, **{"stages": (WRONG,), **fields})


def test_one_finding_of_each_kind_from_the_cheapest_case_that_shows_it() -> None:
    smallest = failed(2, OUTSIDE, counted=False)
    made = found([result(Verdict.PASSED), failed(8, OUTSIDE, WROTE), failed(4, OUTSIDE), smallest])
    assert [(f.kind, f.stage, f.case) for f in made.findings] == [
        ("outside", "output", smallest.case),
        ("wrote_outside", "x", failed(8).case),
    ]
    assert made.findings[0].repro == f"judge {smallest.case}"
    assert made.verdict is Verdict.FAILED and made.planned == 9 and not made.reason
    assert {name: count for name, count in made.cases.items() if count} == {"PASSED": 1, "FAILED": 2}
    assert failure_of([failed(8), smallest]) == smallest


def test_a_kernel_that_raises_has_a_reason_and_a_finding() -> None:
    made = found([result(Verdict.PASSED), result(Verdict.ERRORED, stages=(), reason="ValueError: no")])
    assert made.verdict is Verdict.ERRORED and made.reason == "ValueError: no"
    assert [(f.kind, f.sentence) for f in made.findings] == [("errored", "ValueError: no")]


def test_what_was_decided() -> None:
    [share] = found([result(Verdict.PASSED), result(Verdict.PASSED)]).decided
    assert (share.result, share.dtype, share.elements, share.decided, share.share) == ("output", "bf16", 200, 180, 0.9)


def test_cases_that_could_not_tell_are_no_success() -> None:
    little = replace(STAGE, cumulative=Comparison(numel=1000, decided=1), isolated=Comparison(numel=1000))
    made = found([result(Verdict.PASSED, stages=(little,))])
    assert made.verdict is Verdict.INCONCLUSIVE and made.reason == "too little was decided of output (bf16)"
    power = Power("mine", "cpu", "bf16", "a+c", cases=3, ruled_out=0, separable=True)
    made = found([result(Verdict.PASSED, ruled_out={"a+c": 0})], [power])
    assert made.verdict is Verdict.INCONCLUSIVE and made.reason == "no case told the contract from a+c (bf16)"
    assert not made.contracts.keeps and made.contracts.open == ("a+c",)


def test_a_kernel_of_which_nothing_was_run_is_no_success() -> None:
    assert found([]).exit_code == 3
    made = found([result(Verdict.UNSUPPORTED, stages=(), reason="it needs weight")])
    assert (made.verdict, made.reason, made.exit_code) == ("UNSUPPORTED", "it needs weight", 3)


def test_contracts() -> None:
    passed = [result(Verdict.PASSED, ruled_out={"a+c": 0, "d+b": 4}), result(Verdict.PASSED, ruled_out={"a+c": 2})]
    assert vars(contracts_of(passed, Verdict.PASSED, "a+b")) == {
        "keeps": ("a+b",),
        "open": (),
        "ruled_out": ("a+c", "d+b"),
    }
    cases = [failed(1, OUTSIDE, explained_by=("a+c", "d+c"), ruled_out={"d+b": 1}), failed(2, explained_by=("a+c",))]
    made = contracts_of(cases, Verdict.FAILED, "a+b")
    assert (made.keeps, made.ruled_out) == (("a+c",), ("d+b", "a+b"))
    own = [failed(1, OUTSIDE, explained_by=("a+b",))]
    assert not contracts_of(own, Verdict.FAILED, "a+b").keeps, "it breaks the one that it is held to"
    writes = [result(Verdict.FAILED, findings=(WROTE,), ruled_out={"a+c": 1})]
    assert contracts_of(writes, Verdict.FAILED, "a+b").keeps == ("a+b",), "its values are right"
    formula = [result(Verdict.FAILED, findings=(replace(WROTE, kind="formula"),))]
    assert not contracts_of(formula, Verdict.FAILED, "a+b").keeps, "its values are those of another formula"


def test_a_repro_line_asks_the_same_again() -> None:
    asked = replace(ASKED, function="mine", mutates={"x": "output", "residual": ""}, unordered=("output",))
    command = replace(asked, strict=True, forbid_torch_op=True).repro("a folder/k.py", LINE, "cuda:0")
    assert command == (
        f"lastbit judge 'a folder/k.py' '{parse_case(LINE)}' "
        "--op rms_norm --contract fp32_multiply --function mine --mutates x=output "
        "--mutates residual --unordered output --strict --forbid-torch-op --device cuda:0"
    )


def test_a_file_that_cannot_be_read_has_no_hash(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text("")
    assert unjudged(str(tmp_path / "k.py"), ASKED, "cpu").sha256.startswith("e3b0c442")
    assert unjudged(str(tmp_path / "none.py"), ASKED, "cpu").sha256 == ""
