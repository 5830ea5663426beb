"""Findings in words: one sentence per fact, numbers first."""

from __future__ import annotations

import math

from lastbit.judging.lanes import MOST_COLUMNS
from lastbit.result import Comparison, Finding, StageResult
from lastbit.row_check import Need, Needs, RowCheck


def describe_stage(stage: StageResult, contract: str) -> Finding:
    """Return the finding for a stage that has elements outside its enclosure."""
    local = stage.isolated.outside > 0
    comparison = stage.isolated if local else stage.cumulative
    view = "" if local and stage.cumulative.outside else _VIEWS[local]
    sentence = f"{_share(comparison)} {_cannot(comparison)} under {contract}{view}; {_worst(comparison)}."
    return Finding("special" if comparison.special == comparison.outside else "outside", stage.name, sentence)


_VIEWS = {
    True: " given the kernel's own earlier stages",
    False: " given the inputs, although each stage follows from the one before: a stage is missing or out of order",
}


def describe_rows(rows: RowCheck, contract: str) -> Finding:
    """Return the finding for rows that no latent value within the enclosure explains."""
    needs = rows.needs
    said = f"{rows.unexplained:,} of {rows.rows:,} rows cannot come from one fp32 {rows.stages} under {contract}"
    said += ": " if needs.rows else ""
    searched = "" if needs.rows == rows.unexplained else f" of {needs.rows:,} that were searched"
    if needs.found:
        some = f"{needs.found:,}" if needs.found < needs.rows else "each"
        said += f"{some}{searched} would come from another one, {_needed(needs)}"
    if needs.found < needs.rows:
        said += "; in the others, s" if needs.found else "s"
        said += "ome elements of a row need a larger one, others a smaller"
    return Finding("rows", rows.stage, f"{said}.")


_ALIKE = 1.25  # what differs by less than this factor is alike: a row in bf16 leaves its latent value some room


def _needed(needs: Needs) -> str:
    """Tell the latent values that rows need beside those of the contract, and the cause that their ratio hints at."""
    least, most = needs.least, needs.most
    assert least is not None and most is not None
    if needs.found == 1:
        return _beside(most)
    nearer, farther = sorted((least, most), key=_deviation)
    growth = abs(farther.expected / nearer.expected) if nearer.expected else math.inf
    if _deviation(farther) <= _ALIKE * _deviation(nearer) and (least.ratio > 1) == (most.ratio > 1):
        eps = ", or a wrong eps, as these rows are alike" if 1 / _ALIKE < growth < _ALIKE else ""
        return f"in every row about {_beside(most)}, which hints at a wrong count of elements{eps}"
    cause = "eps" if least.ratio > 1 or most.ratio < 1 else "cancellation, as in a variance in one pass"
    hint = f"; the larger the contract's value, the farther is the ratio from 1, which hints at {cause}"
    return f"from {_beside(least)} to {_beside(most)}{hint if growth > _ALIKE else ''}"


def _deviation(need: Need) -> float:
    """Return the distance of the ratio from 1 on either side: |log ratio|."""
    return abs(math.log(need.ratio)) if 0 < need.ratio < math.inf else math.inf


def _beside(need: Need) -> str:
    return f"{need.ratio:.6g} times the contract's ({need.value:.9g} where that is {need.expected:.9g})"


def describe_split(rows: RowCheck, contract: str) -> Finding:
    """Return the notice for rows that come from two latent values, one in each half of the columns."""
    sentence = (
        f"{rows.split:,} of {rows.rows:,} rows come from two values of fp32 {rows.stages}, one in each half of the "
        f"columns, both possible under {contract}: lanes of a warp add in two ways, as Triton's default fusing makes "
        f"them in rows of at most {MOST_COLUMNS} columns; a statistic that is saved is that of one half."
    )
    return Finding("lanes", rows.stage, sentence, notice=True)


def _share(comparison: Comparison) -> str:
    percent = 100 * comparison.outside / comparison.numel
    return f"{comparison.outside:,} of {comparison.numel:,} elements ({percent:.3g} %)"


def _cannot(comparison: Comparison) -> str:
    if comparison.special == comparison.outside:
        return "are NaN or infinite where they must not be, or the reverse,"
    return "have a value that is not possible"


def _worst(comparison: Comparison) -> str:
    worst = comparison.worst
    if worst is None:
        return "no element to show"
    allowed = f"{worst.lo!r}" if worst.lo == worst.hi else f"from {worst.lo!r} to {worst.hi!r}"
    distance = f", {worst.ulp:g} ulp from the contract's value" if worst.ulp < float("inf") else ""
    exact = "" if math.isnan(worst.exact) else f", exact {worst.exact:.9g}"
    return f"worst at {list(worst.index)}: {worst.actual!r}, allowed {allowed}{exact}{distance}"
