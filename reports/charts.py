"""The charts of a run: rows that each sum up many cases, so that a page of any run stays small, and how they are drawn.

A specification names its data after its chart and holds none, and names no colour: the page gives it both, so that one
specification serves every filter and every colour scheme.

The columns are those of `COLUMNS`. A row begins with the number of its subject, a kernel on a device, so that
a reader's filter can choose among them.

| chart | a row is |
|---|---|
| `stages` | a stage in a format: the median error of ordinary cases, and what a tooltip says |
| `shapes` | cases of like dtypes and shape: their median error |
| `ulps` | a bin of the ulp histogram of a stage in a format: how many elements |
| `sizes` | cases of like size and error at a stage in a format: how many |

An error is the relative L2 error, divided by the unit roundoff of the format where it is a colour: then a correctly
rounded result is near 0.4 in every format. Sizes are powers of two: 2^k stands for more than 2^(k-1) up to 2^k.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lastbit.reports.stage_summary import StageSummary
from lastbit.reports.summary import distance, error, share, ulp_names
from lastbit.result import CaseResult

if TYPE_CHECKING:
    import altair as alt
    import pandas as pd

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "stages": (
        *("subject", "stage", "dtype", "units", "median", "worst", "contract"),
        *("ulp", "mismatch", "outside", "cases"),
    ),
    "shapes": ("subject", "dtype", "rows", "columns", "units", "outside", "cases"),
    "ulps": ("subject", "stage", "dtype", "ulp", "elements"),
    "sizes": ("subject", "stage", "dtype", "size", "error", "outside", "cases"),
}

UNIT_ROUNDOFF: Mapping[str, float] = {
    "fp64": 2.0**-53,
    "fp32": 2.0**-24,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "e4m3": 2.0**-4,
    "e5m2": 2.0**-3,
}
"""Half the distance from 1 to the next number of a format."""

# Finer bins show noise of the seeds, coarser ones hide a factor of two.
ERROR_STEPS = 4
"""Bins of an error per factor of ten."""

ZERO, NOT_FINITE = -99.0, 99.0
"""Stand for the logarithm of an error that has none."""

_SHAPE = re.compile(r"=\w+\[([\d,]*)\]")

Rows = list[tuple[Any, ...]]
Subject = tuple[str, str]


def rows(
    results: Sequence[CaseResult], subjects: Sequence[Subject], summaries: Mapping[Subject, Sequence[StageSummary]]
) -> dict[str, Rows]:
    """Compute the rows of every chart of one op, from its counted results and the summaries of its stages."""
    import pandas as pd  # it takes 0.3 s, and starts a thread

    numbers = {subject: number for number, subject in enumerate(subjects)}
    stages, ulps = Rows(), Rows()
    for subject, found in summaries.items():
        for stage in found:
            total, key = stage.total, (numbers[subject], stage.name, stage.dtype)
            units = _rounded(stage.typical_error / UNIT_ROUNDOFF.get(stage.dtype, 1.0))
            errors = map(error, (stage.typical_error, stage.worst_error, stage.contract_error))
            words = *errors, distance(stage.near_ulp), share(total.mismatched, total.numel)
            stages.append((*key, units, *words, stage.outside, stage.cases))
            ulps += ((*key, name, n) for name, n in zip(ulp_names(), total.ulp_histogram, strict=True) if n)
    measured = []  # one row per case and stage
    for result in results:
        match = _SHAPE.search(result.case)
        *leading, last = [int(size) for size in match[1].split(",")] if match and match[1] else [1]
        for own in result.stages:
            seen, outside = own.cumulative, bool(own.cumulative.outside or own.isolated.outside)
            about = (numbers[result.kernel, result.device], own.name, own.dtype, own.result, result.dtypes)
            measured.append((*about, math.prod(leading), last, seen.numel, seen.rel_l2, outside))
    names = "subject stage dtype result dtypes rows columns numel rel_l2 outside"
    table = pd.DataFrame(measured, columns=names.split())
    table = table[table["numel"] > 0]
    return {"stages": stages, "shapes": _shapes(table), "ulps": ulps, "sizes": _sizes(table)}


def _shapes(measured: pd.DataFrame) -> Rows:
    """Compute the median error of the results, and the number of cases, by dtypes and shape of the inputs."""
    table = measured[measured["result"].astype(bool)]  # without a row, pandas would take it for names of columns
    table = table.assign(
        dtype=table["dtypes"],
        units=table["rel_l2"] / table["dtype"].map(UNIT_ROUNDOFF).fillna(1.0),
        rows=table["rows"].map(_power),
        columns=table["columns"].map(_power),
    )
    groups = table.groupby(["subject", "dtype", "rows", "columns"], sort=False)
    found = groups.agg(units=("units", "median"), outside=("outside", "sum"), cases=("outside", "size"))
    return [(*row[:-3], _rounded(row[-3]), *row[-2:]) for row in found.reset_index().itertuples(index=False)]


def _sizes(measured: pd.DataFrame) -> Rows:
    """Count cases by size of the stage and by the error's decimal logarithm."""

    def error_bin(value: float) -> float:
        if not math.isfinite(value):
            return NOT_FINITE
        return round(math.log10(value) * ERROR_STEPS) / ERROR_STEPS if value else ZERO

    table = measured.assign(size=measured["numel"].map(_power), error=measured["rel_l2"].map(error_bin))
    groups = table.groupby(["subject", "stage", "dtype", "size", "error"], sort=False)
    found = groups.agg(outside=("outside", "sum"), cases=("outside", "size"))
    return [tuple(row) for row in found.reset_index().itertuples(index=False)]


def _power(size: int) -> int:
    """Return the least k with 2^k at least `size`; -1 for size 0."""
    return (size - 1).bit_length() if size > 0 else -1


def _rounded(value: float) -> float | None:
    """Round to three digits, which JSON can spell; None for infinity and NaN."""
    return float(f"{value:.3g}") if math.isfinite(value) else None


# Specifications

TITLES: Mapping[str, tuple[str, str]] = {
    "stages": (
        "Error by stage",
        "Relative error of the median ordinary case, from the exact value without any rounding. The colour is that "
        "error in units of the format's roundoff: what is rounded once is near 0.4 in every format, and more where the "
        "contract rounds earlier as well. A red frame: elements outside the contract.",
    ),
    "shapes": (
        "Error of the results by dtype and shape",
        "Dtypes of the inputs. The shape is that of the first input: its last dimension across, the product of the "
        "others down, each up to the power of two that is named. Colour and frame as above; kernels together, unless "
        "the filter names one.",
    ),
    "ulps": (
        "Distance from the contract's value",
        "Share of elements by distance in ulp of the stage's format, on a logarithmic scale. Elements at a distance "
        "are no fault as long as the contract allows them.",
    ),
    "sizes": (
        "Error against size",
        "Cases by relative error and by elements of the stage, up to the power of two that is named. A red ring: "
        "cases with elements outside the contract.",
    ),
}
"""Chart → its heading and how to read it, in the order of the page."""

_DTYPES = (*UNIT_ROUNDOFF, "int64", "int32", "int8", "uint8", "bool")


_POWER = (
    "datum.value < 0 ? '0' : datum.value < 10 ? pow(2, datum.value) : "
    "datum.value < 20 ? pow(2, datum.value - 10) + 'k' : "
    "datum.value < 30 ? pow(2, datum.value - 20) + 'M' : pow(2, datum.value - 30) + 'G'"
)
"""A power of two as text; k, M and G are 2^10, 2^20 and 2^30."""


def specifications(op: str, stages: Sequence[str], rows: Mapping[str, Rows]) -> dict[str, dict[str, Any]]:
    """Make a Vega-Lite specification per chart of an op; `stages` are in the order of its reference."""
    import altair as alt

    dtypes = [dtype for dtype in _DTYPES if any(row[2] == dtype for row in rows["stages"])]
    charts = {
        "stages": _stages_chart(alt.Chart(alt.NamedData("stages")), [f"{s}  {d}" for s in stages for d in dtypes]),
        "shapes": _shapes_chart(alt.Chart(alt.NamedData("shapes"))),
        "ulps": _ulps_chart(alt.Chart(alt.NamedData("ulps")), stages, dtypes),
        "sizes": _sizes_chart(alt.Chart(alt.NamedData("sizes")), stages, dtypes, [row[4] for row in rows["sizes"]]),
    }
    described = {name: chart.properties(description=f"{TITLES[name][0]}, {op}") for name, chart in charts.items()}
    return {name: chart.to_dict(validate=False) for name, chart in described.items()}


def _units(title: str) -> alt.Color:
    import altair as alt

    scale = alt.Scale(type="log", domain=[0.1, 1000], clamp=True)
    legend = alt.Legend(title=title, orient="top", gradientLength=180, values=[0.1, 1, 10, 100, 1000], format="~g")
    return alt.Color("units:Q", scale=scale, legend=legend)


def _stages_chart(chart: alt.Chart, order: Sequence[str]) -> Any:
    import altair as alt

    about = ["kernel", "device", "stage", "dtype", "cases", "median", "worst", "contract", "ulp", "mismatch", "outside"]
    base = chart.transform_calculate(row="datum.stage + '  ' + datum.dtype").encode(
        x=alt.X("subjectName:N", sort=alt.SortField("subject"), title=None).axis(orient="top", labelAngle=-35),
        y=alt.Y("row:N", sort=list(order), title=None),
        tooltip=[alt.Tooltip(f"{name}:N", title=_HEADINGS.get(name, name)) for name in about],
    )
    cells = base.mark_rect(style="map").encode(color=_units("error in units of roundoff"))
    wrong = base.transform_filter("datum.outside > 0").mark_rect(style="wrong", fillOpacity=0)
    layers = alt.layer(cells, wrong, base.mark_text(style="figure").encode(text="median:N"))
    return layers.properties(width=alt.Step(64), height=alt.Step(22))


_HEADINGS = {"median": "rel. error, median", "worst": "rel. error, worst", "contract": "of the contract there"}


def _shapes_chart(chart: alt.Chart) -> Any:
    import altair as alt

    summed = chart.transform_aggregate(
        units="median(units)",
        outside="sum(outside)",
        cases="sum(cases)",
        groupby=["dtype", "rows", "columns"],
    ).encode(
        x=alt.X("columns:O", title="last dimension").axis(labelExpr=_POWER, labelAngle=0, labelOverlap=True),
        y=alt.Y("rows:O", title="rows", sort="descending").axis(labelExpr=_POWER),
        tooltip=[
            alt.Tooltip("units:Q", title="error in units of roundoff, median", format=".2g"),
            _counted("cases"),
            _counted("outside", "cases with elements outside"),
        ],
    )
    cells = summed.mark_rect(style="map").encode(color=_units("error in units of roundoff"))
    wrong = summed.transform_filter("datum.outside > 0").mark_rect(style="wrong", fillOpacity=0)
    layers = alt.layer(cells, wrong).properties(width=alt.Step(20), height=alt.Step(18))
    return layers.facet(alt.Facet("dtype:N", title=None), columns=3)


def _ulps_chart(chart: alt.Chart, stages: Sequence[str], dtypes: Sequence[str]) -> Any:
    import altair as alt

    least = 1e-9
    bars = (
        chart.transform_aggregate(elements="sum(elements)", groupby=["stage", "dtype", "ulp"])
        .transform_joinaggregate(all="sum(elements)", groupby=["stage", "dtype"])
        .transform_calculate(share=f"max(datum.elements / datum.all, {least})", base=str(least))
        .mark_bar()
        .encode(
            x=alt.X("ulp:N", scale=alt.Scale(domain=list(ulp_names())), title="ulp").axis(labelAngle=0),
            xOffset=alt.XOffset("dtype:N", scale=alt.Scale(domain=list(dtypes))),
            y=alt.Y("share:Q", title="share of elements", scale=alt.Scale(type="log", domain=[least, 1])).axis(
                format="~%", tickCount=4
            ),
            y2="base:Q",
            color=_dtype(dtypes),
            tooltip=["stage:N", "dtype:N", "ulp:N", _counted("elements"), alt.Tooltip("share:Q", format=".3~%")],
        )
        .properties(width=200, height=120)
    )
    return bars.facet(alt.Facet("stage:N", sort=list(stages), title=None), columns=3)


def _counted(name: str, title: str | None = None) -> alt.Tooltip:
    import altair as alt

    return alt.Tooltip(f"{name}:Q", title=title or name, format=",")


def _sizes_chart(chart: alt.Chart, stages: Sequence[str], dtypes: Sequence[str], errors: Sequence[float]) -> Any:
    import altair as alt

    known = [error for error in errors if error not in (ZERO, NOT_FINITE)] or [0.0]
    low, high = math.floor(min(known)), math.ceil(max(known))
    zero, not_finite = low - 1, high + 1
    place = f"datum.error == {ZERO} ? {zero} : datum.error == {NOT_FINITE} ? {not_finite} : datum.error"
    named = f"datum.value == {zero} ? '0' : datum.value == {not_finite} ? 'inf, NaN' : '1e' + datum.value"
    ticks = [zero, *range(low, high + 1, 1 + (high - low) // 6), not_finite]
    height = alt.Y("place:Q", title="relative error", scale=alt.Scale(domain=[zero, not_finite], nice=False))
    shape = alt.Shape("dtype:N", scale=alt.Scale(domain=list(dtypes)), legend=alt.Legend(title=None, orient="top"))
    points = (
        chart.transform_aggregate(
            cases="sum(cases)", outside="sum(outside)", groupby=["stage", "dtype", "size", "error"]
        )
        .transform_calculate(place=place)
        .encode(
            x=alt.X("size:Q", title="elements").axis(labelExpr=_POWER, tickMinStep=1, tickCount=6),
            y=height.axis(labelExpr=named, values=ticks),
            size=alt.Size("cases:Q", legend=None, scale=alt.Scale(range=[16, 160])),
            shape=shape,
            tooltip=["stage:N", "dtype:N", _counted("cases"), _counted("outside", "cases with elements outside")],
        )
    )
    dots = points.mark_point(style="cases", filled=True).encode(color=_dtype(dtypes))
    wrong = alt.when("datum.outside > 0").then(alt.value(1)).otherwise(alt.value(0))
    rings = points.mark_point(style="ring", filled=False).encode(strokeOpacity=wrong)
    layers = alt.layer(dots, rings).properties(width=200, height=140)
    return layers.facet(alt.Facet("stage:N", sort=list(stages), title=None), columns=3)


def _dtype(dtypes: Sequence[str]) -> alt.Color:
    import altair as alt

    return alt.Color("dtype:N", scale=alt.Scale(domain=list(dtypes)), legend=alt.Legend(title=None, orient="top"))
