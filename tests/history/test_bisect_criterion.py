"""When a commit or version counts as bad."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bisect_histories import result

from lastbit.errors import UsageError
from lastbit.history.bisection import BisectQuestion, criterion_of, objection
from lastbit.result import CaseResult, Comparison, StageResult, Verdict


def of_error(rel_l2: float) -> CaseResult:
    return result(failed=False, squared_error=rel_l2**2)


def marked(question: BisectQuestion, good: CaseResult, bad: CaseResult, others: list[CaseResult]) -> list[bool]:
    criterion = criterion_of(question, good, bad)
    assert not criterion.is_bad(good) and criterion.is_bad(bad)
    return [criterion.is_bad(other) for other in others]


def test_without_a_metric_the_verdict_decides() -> None:
    good, bad = result(failed=False, mismatched=300), result(failed=True)
    assert marked(BisectQuestion(), good, bad, [good, bad]) == [False, True]


@pytest.mark.parametrize(("good", "bad"), [(False, False), (True, True), (True, False)])
def test_ends_with_verdicts_that_tell_nothing_show_both(good: bool, bad: bool) -> None:
    words = {True: "FAILED", False: "PASSED"}
    with pytest.raises(UsageError, match=f"{words[good]} at the good end and {words[bad]} at the bad") as error:
        criterion_of(BisectQuestion(), result(failed=good, outside=3), result(failed=bad, outside=5))
    assert "outside 3 at the good end and 5 at the bad end" in str(error.value)


def test_a_metric_is_bad_nearer_to_the_bad_end_in_ratio() -> None:
    others = [of_error(e) for e in (1e-4, 2.9e-4, 3.3e-4, 1e-3, 1e-2, 0.0)]
    assert marked(BisectQuestion(metric="rel_l2"), of_error(1e-4), of_error(1e-3), others) == [
        *(False, False, True, True, True, False)
    ]


def test_a_metric_may_fall() -> None:
    others = [of_error(e) for e in (1e-4, 2.9e-4, 3.3e-4, 1e-3, 0.0)]
    assert marked(BisectQuestion(metric="rel_l2"), of_error(1e-3), of_error(1e-4), others) == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_ends_of_zero() -> None:
    some = [result(failed=False, mismatched=m) for m in (0, 1, 500)]
    assert marked(BisectQuestion(metric="mismatch"), some[0], some[2], some) == [False, False, True]
    assert marked(BisectQuestion(metric="mismatch"), some[2], some[0], some) == [True, True, False]
    assert marked(BisectQuestion(metric="mismatch", drift=1.3), some[0], some[2], some) == [False, True, True]


def test_from_zero_half_the_figure_of_the_other_end_divides() -> None:
    some = [result(failed=False, mismatched=m) for m in (2, 249, 251)]
    good, bad = result(failed=False), result(failed=False, mismatched=500)
    assert marked(BisectQuestion(metric="mismatch"), good, bad, some) == [False, False, True]
    assert marked(BisectQuestion(metric="mismatch"), bad, good, some) == [True, True, False]
    some = [result(failed=True, outside=n) for n in (1, 499)]
    assert marked(BisectQuestion(metric="outside"), good, result(failed=True, outside=500), some) == [True, True]


def all_nan() -> CaseResult:
    """Make a result whose elements are all NaN: sums over finite elements see nothing of it."""
    return result(failed=True, mismatched=1000, outside=1000, special=1000, squared_exact=0.0)


@pytest.mark.parametrize("metric", ["rel_l2", "bias", "mismatch"])
def test_values_that_must_not_be_nan_are_worse_than_any_finite_figure(metric: str) -> None:
    def figure(size: float) -> CaseResult:
        return result(
            failed=False, squared_error=size**2, bias_sum=size * 1000, bias_count=1000, mismatched=int(size * 1000)
        )

    good, bad, others = figure(0.1), figure(0.4), [figure(0.11), all_nan()]
    assert marked(BisectQuestion(metric=metric, drift=1.3), good, bad, others) == [False, True]
    assert marked(BisectQuestion(metric=metric, drift=1.3), good, all_nan(), [figure(0.4)]) == [True]
    assert marked(BisectQuestion(metric=metric), good, bad, others) == [False, True]
    assert marked(BisectQuestion(metric=metric), good, all_nan(), [figure(0.0), bad]) == [False, False]
    assert marked(BisectQuestion(metric=metric), figure(0.0), all_nan(), [good, bad]) == [False, False]
    assert marked(BisectQuestion(metric=metric), all_nan(), good, [bad, all_nan()]) == [True, False]


@pytest.mark.parametrize("drift", [None, 1.3])
def test_nan_at_both_ends_tells_nothing(drift: float | None) -> None:
    with pytest.raises(UsageError, match="inf at the good end and inf at the bad end"):
        criterion_of(BisectQuestion(metric="rel_l2", drift=drift), all_nan(), all_nan())


def test_bias_counts_by_its_size() -> None:
    def biased(bias: float) -> CaseResult:
        return result(failed=False, bias_sum=bias * 1000, bias_count=1000)

    others = [biased(b) for b in (-0.01, 0.01, -0.4, 0.4)]
    assert marked(BisectQuestion(metric="bias"), biased(0.01), biased(-0.4), others) == [False, False, True, True]


def test_drift_is_a_factor_of_the_good_end() -> None:
    others = [of_error(e) for e in (1e-4, 1.29e-4, 1.31e-4)]
    assert marked(BisectQuestion(drift=1.3), of_error(1e-4), of_error(9e-4), others) == [False, False, True]


def test_ends_that_do_not_differ_are_an_error_that_shows_both() -> None:
    with pytest.raises(UsageError, match=r"no clear difference.*0\.0001 at the good end and 0\.000105 at the bad end"):
        criterion_of(BisectQuestion(metric="rel_l2"), of_error(1e-4), of_error(1.05e-4))
    with pytest.raises(UsageError, match=r"--drift 1\.3.*0\.0001 at the good end and 0\.00012 at the bad end"):
        criterion_of(BisectQuestion(drift=1.3), of_error(1e-4), of_error(1.2e-4))
    with pytest.raises(UsageError, match=r"outside of stage output is 0 at the good end and 0 at the bad end"):
        criterion_of(BisectQuestion(metric="outside"), of_error(1e-4), of_error(1e-3))


@pytest.mark.parametrize("drift", [1.0, 0.5, -2.0, float("inf"), float("nan")])
def test_a_drift_must_be_a_factor_above_one(drift: float) -> None:
    with pytest.raises(UsageError, match="must be a factor above 1"):
        BisectQuestion(drift=drift)


def test_an_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="did you mean 'mismatch'"):
        BisectQuestion(metric="mismatches")


def staged(**mismatched: int) -> CaseResult:
    """Make a result whose stages, all but the first of which are results, have these mismatched elements of 1,000."""
    stages = []
    for number, (name, count) in enumerate(mismatched.items()):
        seen = Comparison(numel=1000, mismatched=count, squared_exact=1.0)
        stages.append(StageResult(name, "bf16", number > 0, seen, seen))
    return replace(result(failed=False), stages=tuple(stages))


def test_of_several_results_the_one_that_changed_most_is_followed() -> None:
    good, bad = staged(variance=1, dx=100, dw=10), staged(variance=900, dx=110, dw=40)
    criterion = criterion_of(BisectQuestion(metric="mismatch"), good, bad)
    assert (criterion.stage, criterion.choice) == ("dw", "of the results dx, dw it changed most")
    assert criterion_of(BisectQuestion(metric="mismatch", stage="variance"), good, bad).stage == "variance"


def test_a_stage_that_is_not_seen_names_those_that_are() -> None:
    with pytest.raises(UsageError, match=r"unknown stage 'product'.*Known: output\. A stage that is no result"):
        criterion_of(BisectQuestion(metric="rel_l2", stage="product"), of_error(1e-4), of_error(1e-3))


def test_the_stage_that_fails_is_shown_where_the_verdict_decides() -> None:
    wrong = Comparison(numel=1000, outside=5)
    bad = staged(variance=1, dx=100, dw=10)
    bad = replace(bad, verdict=Verdict.FAILED, stages=(*bad.stages[:2], replace(bad.stages[2], cumulative=wrong)))
    assert criterion_of(BisectQuestion(), staged(variance=1, dx=100, dw=10), bad).stage == "dw"


def test_results_without_figures_are_objected_to() -> None:
    for verdict in (Verdict.ERRORED, Verdict.UNSUPPORTED):
        assert objection(replace(of_error(0.1), verdict=verdict, reason="no tile"), "output") == f"{verdict}: no tile"
    assert objection(of_error(0.1), "product") == "stage product is not seen; seen are output"
    assert objection(of_error(0.1), "output") == objection(of_error(0.1), "") == ""
