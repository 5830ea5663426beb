"""A run as data: which kernels passed, what was left open, and the exit code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lastbit.result import CaseResult, Comparison, StageResult, Verdict
from lastbit.run import Decided, NotRun, Power, Run, Spent, Undecidable, Unreached

PASSED, SKIPPED, UNSUPPORTED, INCONCLUSIVE, FAILED, ERRORED = Verdict


def of(verdict: Verdict, kernel: str = "k", **rest: Any) -> CaseResult:
    fields = {"case": "", "op": "", "contract": "", "device": "cpu", "dtypes": "", **rest}
    return CaseResult(verdict, kernel=kernel, **fields)


def output(numel: int, decided: int, *, name: str = "output", result: bool = True, **rest: Any) -> StageResult:
    return StageResult(name, "bf16", result, Comparison(numel=numel, decided=decided), Comparison(), **rest)


@pytest.mark.parametrize(
    ("numel", "decided", "few"), [(1000, 10, False), (1000, 9, True), (0, 0, False), (100, 1, False), (101, 1, True)]
)
def test_a_hundredth_must_be_decided(numel: int, decided: int, few: bool) -> None:
    found = Decided("k", "cpu", "output", "bf16", numel, decided)
    assert found.few == found.missing == few
    assert not replace(found, by_formula=True).few and not replace(found, decidable=False).missing


@pytest.mark.parametrize(("ruled_out", "separable", "missing"), [(0, True, True), (1, True, False), (0, False, False)])
def test_an_alternative_that_was_never_ruled_out(ruled_out: int, separable: bool, missing: bool) -> None:
    power = Power("k", "cpu", "bf16", "other", 3, ruled_out, separable)
    assert power.missing == missing
    run = Run((of(PASSED),), power=(power,))
    assert run.verdict("k", "cpu") is (INCONCLUSIVE if missing else PASSED)
    assert Run((of(PASSED),), power=(replace(power, kernel="l"),)).verdict("k", "cpu") is PASSED


def test_times_add_up() -> None:
    assert Spent({"a": 1.0, "b": 2.0}, 2) + Spent({"b": 3.0, "c": 4.0}, 3) == Spent({"a": 1.0, "b": 5.0, "c": 4.0}, 5)


def test_revisions_follow_their_kernel() -> None:
    run = Run(tuple(of(PASSED, kernel) for kernel in ("b", "a@2", "b@1", "a", "b@0")))
    assert [kernel for kernel, _ in run.subjects()] == ["b", "b@0", "b@1", "a", "a@2"]


def test_results_that_count() -> None:
    run = Run((of(PASSED), of(FAILED, counted=False), of(PASSED, "l"), of(PASSED, device="cuda"), of(SKIPPED)))
    assert run.of("k", "cpu") == (of(PASSED), of(SKIPPED))
    assert run.judged_cases(["k"]) == 2 and run.judged_cases(["k", "l"]) == 3
    assert run.judged("k", "cpu") == (1, 1) and Run((of(PASSED), of(UNSUPPORTED, declined=True))).judged(
        "k", "cpu"
    ) == (1, 2)


def test_what_was_decided_of_each_result() -> None:
    stages = (
        (output(100, 40, constant=10), output(5, 5, name="mean", result=False)),
        (output(50, 1), output(7, 0, name="dw")),
    )
    run = Run(tuple(of(PASSED, stages=own) for own in stages), undecidable=(Undecidable("k", "cpu", "dw", "bf16"),))
    assert run.decided("k", "cpu") == (
        Decided("k", "cpu", "output", "bf16", 140, 31),
        Decided("k", "cpu", "dw", "bf16", 7, 0, decidable=False),
    )


@pytest.mark.parametrize(
    ("equal", "by_formula"), [((0, 0), False), ((4, 0), True), ((4, 4), True), ((4, 3), False), ((0, 4), True)]
)
def test_what_a_formula_decides(equal: tuple[int, int], by_formula: bool) -> None:
    run = Run(tuple(of(PASSED, stages=(output(4, 0, equal=count),)) for count in equal))
    assert run.decided("k", "cpu")[0].by_formula == by_formula


@pytest.mark.parametrize(
    ("results", "verdict"),
    [
        ([of(PASSED), of(FAILED), of(PASSED)], FAILED),
        ([of(FAILED), of(ERRORED)], ERRORED),
        ([of(PASSED), of(FAILED, counted=False)], FAILED),
        ([of(PASSED), of(INCONCLUSIVE), of(SKIPPED)], PASSED),
        ([of(INCONCLUSIVE), of(SKIPPED)], INCONCLUSIVE),
        ([of(SKIPPED), of(UNSUPPORTED)], UNSUPPORTED),
        ([of(PASSED), of(FAILED, "l")], PASSED),
        ([of(PASSED, stages=(output(1000, 9),))], INCONCLUSIVE),
        ([of(PASSED, stages=(output(1000, 10),))], PASSED),
        ([of(PASSED), of(UNSUPPORTED, declined=True)], PASSED),
        ([of(PASSED), *[of(UNSUPPORTED, declined=True)] * 2], INCONCLUSIVE),
        ([of(UNSUPPORTED, declined=True)], UNSUPPORTED),
    ],
)
def test_the_verdict_on_a_kernel(results: list[CaseResult], verdict: Verdict) -> None:
    assert Run(tuple(results)).verdict("k", "cpu") is verdict


def test_branches_that_decide() -> None:
    branch = Unreached("f.py", 3, "f", "if x", "true", ("k",), 5, decides=True)
    others = replace(branch, decides=False), replace(branch, kernels=("l",))
    run = Run((of(PASSED),), unreached=(branch, *others))
    assert run.left_out("k") == (branch,) and run.verdict("k", "cpu") is INCONCLUSIVE
    assert Run((of(PASSED),), unreached=others).verdict("k", "cpu") is PASSED
    assert Run((of(PASSED),)).left_out("k") == ()


@pytest.mark.parametrize(
    ("results", "rest", "overall", "code"),
    [
        ([], {}, None, 3),
        ([PASSED], {}, PASSED, 0),
        ([INCONCLUSIVE, PASSED], {}, INCONCLUSIVE, 1),
        ([FAILED, INCONCLUSIVE], {}, FAILED, 1),
        ([FAILED, ERRORED], {}, ERRORED, 2),
        ([PASSED], {"broken": "died"}, ERRORED, 2),
        ([PASSED, SKIPPED], {}, SKIPPED, 3),
        ([SKIPPED], {}, None, 3),
        ([INCONCLUSIVE, SKIPPED], {}, INCONCLUSIVE, 1),
        ([PASSED], {"not_run": (NotRun("x", "why", "other", "cpu"),)}, SKIPPED, 3),
        ([PASSED], {"not_run": (NotRun("x", "why"),)}, PASSED, 0),
        ([PASSED], {"not_run": (NotRun("x", "why", "k0", "cpu"),)}, PASSED, 0),
    ],
)
def test_the_verdict_on_a_run(results: list[Verdict], rest: dict[str, Any], overall: Verdict | None, code: int) -> None:
    run = Run(tuple(of(verdict, f"k{number}") for number, verdict in enumerate(results)), **rest)
    assert (run.overall, run.exit_code) == (overall, code)


def test_subjects_that_were_not_verified() -> None:
    run = Run((of(PASSED), of(UNSUPPORTED, "l")), not_run=(NotRun("x", "y", "m", "cuda"), NotRun("x", "y")))
    assert run.unverified == (("l", "cpu"), ("m", "cuda"))
