"""The table of stages: the contract's error beside the kernel's, extreme cases apart, stages found in kernels."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lastbit.judging.expected import Steps
from lastbit.numerics.formats import BF16, FP32
from lastbit.reports import html, markdown, records, stage_summary, wording
from lastbit.reports.changes import cells, compare
from lastbit.reports.stage_summary import extremes, stage_summaries
from lastbit.reports.why import KernelTrace, StageMatch, Step
from lastbit.result import CaseResult, Comparison, StageResult, Verdict, Worst
from lastbit.run import Run
from tests.reports.test_html import Page
from tests.reports.test_reports import comparison, passed, shown

U = 2.0**-8
LOST = comparison(squared_error=1.0, squared_contract=1.0)
ORDINARY = comparison(squared_error=4 * U**2, squared_contract=U**2)


def seen(
    comparison: Comparison, *, roundoff: float = U, case: str = "op x=bf16[4] seed=1", **changes: object
) -> CaseResult:
    stage = StageResult("output", "bf16", True, comparison, comparison, "bits", roundoff=roundoff)
    return passed(stages=(stage,), case=case, **changes)


# What is extreme


@pytest.mark.parametrize(
    ("figures", "extreme"),
    [
        ({"squared_contract": U**2, "squared_error": U**2}, False),
        ({"squared_contract": (2.1 * U) ** 2}, True),
        ({"squared_contract": (1.9 * U) ** 2, "squared_error": (15 * U) ** 2}, False),
        ({"squared_contract": 0.0, "squared_error": (17 * U) ** 2}, True),
        ({"squared_contract": 0.0, "squared_error": (17 * U) ** 2, "outside": 1}, False),
        ({"squared_contract": 0.0, "squared_error": 1.0, "squared_exact": 0.0}, True),
        ({"squared_contract": 1.0, "squared_error": 1.0, "squared_exact": 0.0}, True),
        ({"squared_contract": 0.0, "squared_error": 0.0, "squared_exact": 0.0}, False),
    ],
)
def test_extreme_is_what_roundings_do_not_explain(figures: dict[str, float], extreme: bool) -> None:
    [stage] = seen(comparison(**figures)).stages  # type: ignore[arg-type]
    assert stage.extreme == extreme


def test_of_older_records_nothing_is_extreme() -> None:
    known = json.loads(records.dump(seen(LOST)))
    for stage in known["stages"]:
        del stage["roundoff"], stage["cumulative"]["squared_contract"], stage["isolated"]["squared_contract"]
    old = records.parse(json.dumps(known).encode(), "here")
    [row] = [line.split() for line in shown(Run((old,))).splitlines() if line.startswith("  output")]
    assert row[2:6] == ["1", "0", "1.0e+00", "–"]
    assert not extremes([old])


def test_the_roundings_up_to_a_stage_add_up() -> None:
    steps = Steps(formats={"a": FP32, "b": BF16, "c": FP32})
    assert [steps.roundoff(name) for name in "abc"] == [2.0**-24, 2.0**-24 + U, 2.0**-23 + U]


@pytest.mark.parametrize(
    ("changes", "near"),
    [
        ({"max_ulp": 3.0, "ulp_histogram": (500, 9, 0, 3, 0, 0)}, 3),
        ({"max_ulp": 4e7, "ulp_histogram": (500, 9, 0, 2, 0, 1)}, 4),
        ({"max_ulp": 4e7, "ulp_histogram": (0, 0, 0, 0, 0, 512)}, 0),
        ({"outside": 1, "worst": Worst((0,), 2.0, 1.0, 1.0, 1.0, 1.0, 128.0), "max_ulp": 4e7}, 128),
    ],
)
def test_the_distance_that_a_reader_sees_is_near_or_of_an_element_outside(
    changes: dict[str, object], near: float
) -> None:
    assert comparison(**changes).near_ulp == near  # type: ignore[arg-type]


# The table


def test_extreme_cases_count_in_no_figure_of_ordinary_ones() -> None:
    lost = replace(LOST, bias_sum=-5e9, max_ulp=4e7, ulp_histogram=(511, 0, 0, 0, 0, 1))
    [only] = stage_summaries([seen(ORDINARY), seen(lost)], ["output"])
    assert (only.cases, len(only.ordinary), len(only.extreme), only.near_ulp) == (2, 1, 1, 1.0)
    assert (only.worst_error, only.contract_error) == pytest.approx((2 * U, U))
    assert only.typical_bias == ORDINARY.bias


def test_the_error_of_the_contract_is_that_of_the_same_case() -> None:
    other = comparison(squared_error=U**2, squared_contract=2 * U**2)
    [only] = stage_summaries([seen(other), seen(ORDINARY)], ["output"])
    assert only.contract_error == pytest.approx(U)


def test_a_stage_of_extreme_cases_alone_has_no_error() -> None:
    [row] = [line.split() for line in shown(Run((seen(LOST),))).splitlines() if line.startswith("  output")]
    assert row[:7] == ["output", "bf16", "1", "1", "–", "–", "–"]


def test_what_is_extreme_has_a_line_in_every_form() -> None:
    lines = ["x=bf16[4]:huge", "x=bf16[4]@2:huge", "x=bf16[4]:huge(2,3) w=bf16[4]:ones", "x=bf16[4]:plain", "x=bf16[4]"]
    cases = [seen(LOST, case=f"op {line} seed=1") for line in lines]
    cases += [seen(ORDINARY, case="op x=bf16[4]:plain w=bf16[4]:ones seed=2")] * 3
    said = "5 of 8 cases (x huge 3, 2 others): contract up to 1.0e+00, kernel up to 1.0e+00"
    assert extremes(cases) == said
    run = Run(tuple(cases))
    assert f"extreme: {said}" in " ".join(shown(run).split())
    assert f"extreme: {said}" in markdown.page(run)
    assert f"extreme: {said}" in html.page(run)
    assert "extreme:" not in shown(Run((seen(ORDINARY),)))


def test_elements_that_are_far_and_allowed_are_counted_apart() -> None:
    far = replace(ORDINARY, max_ulp=4.5e7, ulp_histogram=(508, 0, 0, 0, 2, 2))
    assert extremes([seen(far)]) == "0.39 % of elements beyond 16 ulp, up to 4.5e+07"
    [row] = [line.split() for line in shown(Run((seen(far),))).splitlines() if line.startswith("  output")]
    assert row[6] == "16"


def test_diffs_compare_like_with_like() -> None:
    """A case that either run calls extreme counts in neither: an older lastbit cannot say so."""
    old = [
        seen(replace(c, squared_contract=None), case=f"op x=bf16[4] seed={n}") for n, c in enumerate((LOST, ORDINARY))
    ]
    now = [seen(c, case=f"op x=bf16[4] seed={n}") for n, c in enumerate((LOST, ORDINARY))]
    for before, after in ((old, now), (now, old)):
        [kernel] = compare(Run(tuple(before)), Run(tuple(after))).kernels
        [stage] = kernel.stages
        assert stage.drifts == ()
        assert cells(stage)[6] == "7.8e-03"


# Stages that were found in a kernel


def found(stage: str, line: int, *, outside: int = 0, case: str = "c", error: float = 2e-3) -> KernelTrace:
    match = StageMatch(
        stage, 1.0, 1.0, 1.0, outside, 300, expected=1.0, format="bf16", error=error, contract_error=1e-3
    )
    step = Step("x", "fp32", "k.py", line, match=match, code="var = tl.sum(x * x) / n")
    kernel = passed().kernel
    return KernelTrace(kernel, "rms_norm", "native", case, "cpu", Verdict.PASSED, stages=(step,))


def test_stages_of_a_kernel_that_shows_none_have_rows_that_decide_nothing() -> None:
    run = Run((passed(),), traces=(found("variance", 9), found("variance", 9, outside=3, error=4e-3)))
    row = ["(variance) line 9", "fp32", "2", "–", "4.0e-03", "1.0e-03", "–", "–", "3 of 600", "–", "–"]
    [stage] = stage_summary.traced_stages(run, passed().kernel, "cpu")
    assert [cell.text for cell in stage_summary.traced_cells(stage).values()] == row
    [printed] = [line for line in shown(run, 120).splitlines() if "(variance) line 9" in line]
    assert printed.split() == " ".join(row).split()
    assert f"| {' | '.join(row)} |" in markdown.page(run)
    page = Page()
    page.feed(html.page(run))
    [of_page] = [row for row in page.tables["Stages of rms_norm"] if any("(variance) line 9" in c for c in row)]
    assert of_page[2:8] == ["fp32", "–", "2", "–", "4.0e-03", "1.0e-03"]
    assert run.verdict(passed().kernel, "cpu") is Verdict.PASSED
    assert run.exit_code == 0


def test_what_was_found_on_the_cpu_is_shown_where_the_kernel_ran_if_that_was_elsewhere() -> None:
    elsewhere = Run((passed(device="cuda:0"),), traces=(found("variance", 9),))
    both = replace(elsewhere, results=(passed(), *elsewhere.results))
    kernel = passed().kernel
    assert [len(stage_summary.traced_stages(elsewhere, kernel, device)) for device in ("cpu", "cuda:0")] == [1, 1]
    assert [len(stage_summary.traced_stages(both, kernel, device)) for device in ("cpu", "cuda:0")] == [1, 0]
    assert not stage_summary.traced_stages(both, "another", "cpu")


def test_a_table_of_what_was_found_can_be_queried() -> None:
    table = stage_summary.frame(Run((passed(),), traces=(found("variance", 9), found("output", 12))))
    assert list(table["stage"]) == ["variance", "output"]
    assert list(table["line"]) == [9, 12]
    assert stage_summary.frame(Run((passed(),))).empty


def test_records_have_the_figures() -> None:
    table = records.frame([seen(LOST), seen(ORDINARY)])
    assert list(table["extreme"]) == [True, False]
    assert table["contract_l2"][1] == pytest.approx(U)
    assert list(table["roundoff"]) == [U, U]


def test_an_unknown_error_of_the_contract_stays_unknown() -> None:
    known, unknown = Comparison(numel=1, squared_contract=1.0), Comparison(numel=1)
    assert (known + unknown).squared_contract == 1.0
    assert (unknown + unknown).squared_contract is None
    assert math.isnan(unknown.contract_l2)


def test_the_legend_names_what_there_is() -> None:
    names = dict(wording.legend(Run((passed(),))))
    assert "rel. error" in names and not names.keys() & {"extreme", "(stage) line"}
    inner = replace(passed(), stages=(replace(seen(LOST).stages[0], result=False),))
    assert dict(wording.legend(Run((inner,), traces=(found("variance", 9),)))) == dict(wording.LEGEND)
