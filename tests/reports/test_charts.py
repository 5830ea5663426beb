"""Charts of a report: every case and element is in one of their rows, and Vega-Lite takes their specifications."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest
import vl_convert

from lastbit.reports import charts, stage_summary
from lastbit.result import CaseResult
from tests.reports.test_html import failed, full_run, measured, passed, stage


def rows_of(*results: CaseResult) -> dict[str, charts.Rows]:
    found = stage_summary.stage_summaries(results, stage_summary.stage_order(results))
    return charts.rows(results, [("good", "cpu")], {("good", "cpu"): found})


def named(chart: str, rows: Mapping[str, charts.Rows]) -> list[dict[str, object]]:
    return [dict(zip(charts.COLUMNS[chart], row, strict=True)) for row in rows[chart]]


def test_cases_of_like_shape_are_one_row() -> None:
    shapes = ("4,128", "3,65", "2,2,100", "0,7", "")
    results = [passed(case=f"rms_norm x=bf16[{shape}] seed={seed}") for shape in shapes for seed in (1, 2)]
    found = {(row["rows"], row["columns"]): row["cases"] for row in named("shapes", rows_of(*results))}
    assert found == {(2, 7): 6, (-1, 3): 2, (0, 0): 2}
    [row] = named("shapes", rows_of(passed()))
    assert row["units"] == pytest.approx(2e-3 * 2**8, rel=1e-2), "the median of results only, in units of bf16"


def test_errors_without_a_logarithm_have_a_place() -> None:
    errors = (0.0, 1e-6, 4e-6, math.inf, math.nan)
    seen = [replace(stage(), cumulative=measured(squared_error=error)) for error in errors]
    rows = rows_of(*(passed(stages=(one,)) for one in seen))
    found = {row["error"]: row["cases"] for row in named("sizes", rows)}
    assert found == {charts.ZERO: 1, -3.0: 1, -2.75: 1, charts.NOT_FINITE: 2}
    json.dumps(rows, allow_nan=False)
    assert {row["size"] for row in named("sizes", rows)} == {9}


def test_histogram_counts_every_element() -> None:
    rows = named("ulps", rows_of(passed(), failed(kernel="good")))
    assert sum(int(str(row["elements"])) for row in rows if row["stage"] == "output") == 1024
    assert {row["ulp"]: row["elements"] for row in rows if row["stage"] == "output"} == {"0": 1017, "1": 7}


def test_specifications_are_what_vega_lite_takes() -> None:
    rows = rows_of(*full_run().of("good", "cpu"))
    specifications = charts.specifications("rms_norm", ["inv_rms", "output"], rows)
    assert list(specifications) == list(charts.TITLES) == list(charts.COLUMNS)
    for name, specification in specifications.items():
        compiled = json.dumps(vl_convert.vegalite_to_vega(specification))
        used = set(re.findall(r"datum(?:\.|\[\\\")(\w+)(?<!_sort_index)\b", compiled))
        added = {"kernel", "device", "subjectName", "row", "share", "base", "all", "place", "value"}
        assert used <= set(charts.COLUMNS[name]) | added, name
