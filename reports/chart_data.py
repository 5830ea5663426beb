"""Data of the charts of a run: rows that each sum up many cases, so that a page of any run stays small.

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
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lastbit.reports.stage_summary import StageSummary
from lastbit.reports.summary import distance, error, share
from lastbit.result import ULP_BINS, CaseResult

if TYPE_CHECKING:
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

_ULP_STARTS = (0, *(end + 1 for end in ULP_BINS))
ULP_NAMES = (
    *(str(hi) if lo == hi else f"{lo}–{hi}" for lo, hi in zip(_ULP_STARTS, ULP_BINS, strict=False)),
    f">{ULP_BINS[-1]}",
)

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
    numbers = {subject: number for number, subject in enumerate(subjects)}
    measured = _measured(results, numbers)
    return {
        "stages": [_stage_row(numbers[key], stage) for key, stages in summaries.items() for stage in stages],
        "shapes": _shapes(measured),
        "ulps": [row for key, stages in summaries.items() for stage in stages for row in _ulps(numbers[key], stage)],
        "sizes": _sizes(measured),
    }


def _stage_row(subject: int, stage: StageSummary) -> tuple[Any, ...]:
    total = stage.total
    units = stage.typical_error / UNIT_ROUNDOFF.get(stage.dtype, 1.0)
    mismatch = share(total.mismatched, total.numel)
    errors = map(error, (stage.typical_error, stage.worst_error, stage.contract_error))
    words = *errors, distance(stage.near_ulp), mismatch
    return (subject, stage.name, stage.dtype, _rounded(units), *words, stage.outside, stage.cases)


def _ulps(subject: int, stage: StageSummary) -> Rows:
    counts = zip(ULP_NAMES, stage.total.ulp_histogram, strict=True)
    return [(subject, stage.name, stage.dtype, name, count) for name, count in counts if count]


def _measured(results: Iterable[CaseResult], numbers: Mapping[Subject, int]) -> pd.DataFrame:
    """Make a table with one row per case and stage that has elements."""
    import pandas as pd  # it takes 0.3 s, and starts a thread

    found = []
    for result in results:
        subject, shape = numbers[result.kernel, result.device], _extents(result.case)
        for stage in result.stages:
            seen, outside = stage.cumulative, bool(stage.cumulative.outside or stage.isolated.outside)
            about = (stage.name, stage.dtype, stage.result, result.dtypes)
            found.append((subject, *about, *shape, seen.numel, seen.rel_l2, outside))
    names = "subject stage dtype result dtypes rows columns numel rel_l2 outside"
    table = pd.DataFrame(found, columns=names.split())
    return table[table["numel"] > 0]


def _extents(case: str) -> tuple[int, int]:
    """Return rows and columns of the first tensor of a case line: all dimensions but the last, and the last."""
    match = _SHAPE.search(case)
    *leading, last = [int(size) for size in match[1].split(",")] if match and match[1] else [1]
    return math.prod(leading), last


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
    table = measured.assign(size=measured["numel"].map(_power), error=measured["rel_l2"].map(_error_bin))
    groups = table.groupby(["subject", "stage", "dtype", "size", "error"], sort=False)
    found = groups.agg(outside=("outside", "sum"), cases=("outside", "size"))
    return [tuple(row) for row in found.reset_index().itertuples(index=False)]


def _power(size: int) -> int:
    """Return the least k with 2^k at least `size`; -1 for size 0."""
    return (size - 1).bit_length() if size > 0 else -1


def _error_bin(value: float) -> float:
    if not math.isfinite(value):
        return NOT_FINITE
    if value == 0:
        return ZERO
    return round(math.log10(value) * ERROR_STEPS) / ERROR_STEPS


def _rounded(value: float) -> float | None:
    """Round to three digits, which JSON can spell; None for infinity and NaN."""
    return float(f"{value:.3g}") if math.isfinite(value) else None
