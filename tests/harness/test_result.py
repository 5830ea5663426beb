"""Results as data: statistics that are combined, what follows from them, and verdicts of cases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from lastbit.result import (
    CaseResult,
    Comparison,
    Finding,
    Judgement,
    Need,
    Needs,
    RowCheck,
    StageResult,
    Verdict,
    Worst,
    idle_in,
    simplest,
    told,
)

INF, NAN = math.inf, math.nan


def worst(ulp: float = 1.0, actual: float = 1.0, lo: float = 0.5, hi: float = 1.5) -> Worst:
    return Worst((0,), actual, 1.0, 1.0, lo, hi, ulp)


def stage(name: str = "output", **numbers: Any) -> StageResult:
    cumulative = Comparison(**{k: v for k, v in numbers.items() if k in Comparison.__dataclass_fields__})
    rest = {k: v for k, v in numbers.items() if k not in Comparison.__dataclass_fields__}
    return StageResult(name, "bf16", rest.pop("result", True), cumulative, rest.pop("isolated", Comparison()), **rest)


def case(verdict: Verdict = Verdict.PASSED, **rest: Any) -> CaseResult:
    known = dict.fromkeys(("case", "op", "kernel", "contract", "device", "dtypes"), "")
    return CaseResult(verdict, **{**known, **rest})


def test_the_worst_verdict() -> None:
    order = ["PASSED", "SKIPPED", "UNSUPPORTED", "INCONCLUSIVE", "FAILED", "ERRORED"]
    assert [*Verdict] == order and Verdict.worst() is Verdict.SKIPPED
    for number, verdict in enumerate(Verdict):
        assert Verdict.worst(*list(Verdict)[: number + 1]) is verdict


@pytest.mark.parametrize(
    ("actual", "lo", "hi", "allowed"),
    [(1.0, 1.0, 1.0, True), (0.99, 1.0, 2.0, False), (2.01, 1.0, 2.0, False), (NAN, NAN, NAN, True),
     (NAN, 1.0, 2.0, False),
     (1.0, NAN, NAN, False)],
)  # fmt: skip
def test_whether_an_element_is_allowed(actual: float, lo: float, hi: float, allowed: bool) -> None:
    assert worst(1.0, actual, lo, hi).is_allowed == allowed


def test_statistics_of_two_sets_of_elements_add_up() -> None:
    a = Comparison(10, 1, 2, 3, 4, 5.0, 6.0, 7.0, 8.0, 9, 10.0, (1, 2, 3, 4, 5, 6), 0.5, worst(3.0), 2.0)
    b = Comparison(
        100, 10, 20, 0, 40, 50.0, 60.0, 6.5, 80.0, 90, 11.0, (10, 20, 30, 40, 50, 60), 0.25, worst(9.0), None
    )
    both = Comparison(
        110, 11, 22, 3, 44, 55.0, 66.0, 7.0, 88.0, 99, 11.0, (11, 22, 33, 44, 55, 66), 0.5, worst(3.0), 2.0
    )
    assert a + b == b + a == both  # an element outside is worse than one that is farther off, and allowed
    assert (replace(b, outside=1) + a).worst == (a + replace(b, outside=1)).worst == worst(9.0)
    assert (a + replace(a, worst=worst(3.0, 2.0))).worst == worst(3.0)
    assert (Comparison() + replace(a, outside=0)).worst == worst(3.0)
    assert (a + replace(a, squared_contract=0.5)).squared_contract == 2.5
    assert (Comparison() + Comparison()).squared_contract is None


@pytest.mark.parametrize(
    ("error", "exact", "relative"), [(1.0, 4.0, 0.5), (0.0, 0.0, 0.0), (1.0, 0.0, INF), (0.0, 4.0, 0.0)]
)
def test_relative_errors(error: float, exact: float, relative: float) -> None:
    assert Comparison(squared_error=error, squared_exact=exact).rel_l2 == relative
    assert Comparison(squared_contract=error, squared_exact=exact).contract_l2 == relative
    assert math.isnan(Comparison(squared_exact=exact).contract_l2)


@pytest.mark.parametrize(("numel", "count", "bias"), [(8, 4, 0.5), (9, 4, NAN), (8, 8, 0.25), (0, 0, NAN)])
def test_a_bias_is_shown_where_half_of_the_elements_have_one(numel: int, count: int, bias: float) -> None:
    assert Comparison(numel=numel, bias_sum=2.0, bias_count=count).bias == pytest.approx(bias, nan_ok=True)


@pytest.mark.parametrize(
    ("numbers", "ulp"),
    [
        ({"max_ulp": 16.0}, 16.0),
        ({"max_ulp": 17.0}, 0),
        ({"max_ulp": 17.0, "ulp_histogram": (5, 0, 3, 0, 0, 1)}, 2),
        ({"max_ulp": 17.0, "ulp_histogram": (5, 0, 3, 0, 2, 1)}, 16),
        ({"max_ulp": 5.0, "outside": 1, "worst": worst(99.0)}, 99.0),
        ({"max_ulp": 5.0, "outside": 0, "worst": worst(99.0)}, 5.0),
        ({"max_ulp": 5.0, "outside": 1}, 5.0),
    ],
)
def test_the_distance_that_is_told(numbers: dict[str, Any], ulp: float) -> None:
    assert Comparison(**numbers).near_ulp == ulp


@pytest.mark.parametrize(
    ("own", "contract", "outside", "extreme"),
    [
        (0.0, 2.0, 0, False), (0.0, 2.01, 0, True), (0.0, 2.01, 1, True),
        (16.0, 0.0, 0, False), (16.1, 0.0, 0, True), (16.1, 0.0, 1, False),
    ],
)  # fmt: skip
def test_extreme_values(own: float, contract: float, outside: int, extreme: bool) -> None:
    numbers = {"squared_error": own**2, "squared_contract": contract**2, "squared_exact": 1.0, "roundoff": 1.0}
    assert stage(**numbers, outside=outside).extreme == extreme
    assert stage(**numbers, isolated=Comparison(outside=outside)).extreme == extreme
    assert not stage(**{**numbers, "roundoff": INF}).extreme


def test_elements_that_could_not_have_been_otherwise() -> None:
    isolated = Comparison(decided=7)
    assert stage(decided=5, isolated=isolated, in_rows=3, equal=2).decided == 7
    assert stage(decided=5, isolated=isolated, in_rows=9, equal=2, constant=4).decided == 5
    assert stage(decided=5, isolated=isolated, in_rows=9, equal=11).decided == 11
    assert stage(decided=8, constant=9).decided == 0 == stage().decided


def test_what_a_judgement_says() -> None:
    fault, notice = Finding("outside", "b", "x"), Finding("lanes", "a", "y", notice=True)
    stages = stage("a", outside=1), stage("b", isolated=Comparison(outside=2)), stage("c", result=False)
    judged = Judgement(Verdict.FAILED, stages, (notice, fault), ruled_out={"other": 0, "apart": 3})
    assert judged.faults == (fault,) and judged.notices == (notice,)
    assert judged.results == ("a", "b") and judged.not_ruled_out == ("other",)
    assert judged.failing_stage is stages[1]
    assert Judgement(Verdict.FAILED, stages[:1]).failing_stage is stages[0]
    assert Judgement(Verdict.PASSED, stages[2:]).failing_stage is None


def test_the_way_a_case_failed() -> None:
    assert case(Verdict.ERRORED, reason="at 0x7f3 of 1,024 in f2").way == ("ERRORED", "at # of # in f2")
    findings = Finding("lanes", "", "", notice=True), Finding("special", "", ""), Finding("outside", "", "")
    failed = case(Verdict.FAILED, stages=(stage("y", outside=1),), findings=findings)
    assert failed.way == ("FAILED", "y", "special")
    assert case(Verdict.FAILED).way == ("FAILED", "")


@pytest.mark.parametrize(
    ("verdict", "strict"),
    [(Verdict.PASSED, Verdict.FAILED), (Verdict.ERRORED, Verdict.ERRORED), (Verdict.INCONCLUSIVE, Verdict.FAILED)],
)
def test_strict_results(verdict: Verdict, strict: Verdict) -> None:
    noticed = case(verdict, findings=(Finding("lanes", "", "", notice=True),))
    assert noticed.strict.verdict is strict and noticed.strict.faults == (Finding("lanes", "", ""),)
    assert case(verdict).strict == case(verdict)
    judged = case(verdict, op="rms_norm").judged(Judgement(Verdict.SKIPPED, reason="why"))
    assert (judged.verdict, judged.reason, judged.op) == (Verdict.SKIPPED, "why", "rms_norm")


def test_words_of_contracts() -> None:
    assert told("a+b+c", ["b"]) == "a+c" and told("a+b", ["a", "b"]) == "a+b" and told("a", []) == "a"
    some = [case(stages=(stage(),), idle=idle) for idle in (("a", "b"), ("b", "c"), ("b",))]
    assert idle_in([*some, case(idle=())]) == ("b",) and idle_in([case(idle=("a",))]) == ()
    assert simplest(["a+b", "a+c", "c+d", "a+c+e"], "a") == ("a+b", "a+c")
    assert simplest(["c+b", "c"], "a+b") == ("c+b", "c")[:1]


def test_needs_and_row_checks_add_up() -> None:
    small, large, middle = Need(1.0, 4.0), Need(3.0, 2.0), Need(1.0, 1.0)
    assert (small.ratio, Need(1.0, 0.0).ratio) == (0.25, INF)
    both = Needs(3, 1, middle, large) + Needs(5, 2, small, middle)
    assert both == Needs(8, 3, small, large) and Needs(1) + Needs(2) == Needs(3)
    check = RowCheck("rstd", 10, 6, 3, Needs(1), ("mean",))
    assert check.stages == "rstd and mean" and check.unexplained == 1
    assert check + RowCheck("rstd", 5, 2, 1, Needs(2)) == RowCheck("rstd", 15, 8, 4, Needs(3), ("mean",))
