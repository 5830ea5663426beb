"""Findings in words: one sentence per fact, numbers first."""

from __future__ import annotations

from harness.op import Contract
from harness.result import Comparison, Finding, RowCheck, StageResult


def describe_stage(stage: StageResult, contract: Contract) -> Finding:
    """The finding for a stage that has elements outside its enclosure."""
    local = stage.isolated.outside > 0
    comparison = stage.isolated if local else stage.cumulative
    view = "" if local and stage.cumulative.outside else _VIEWS[local]
    sentence = f"{_share(comparison)} {_cannot(comparison)} under {contract}{view}; {_worst(comparison)}."
    return Finding("special" if comparison.special == comparison.outside else "outside", stage.name, sentence)


_VIEWS = {
    True: " given the kernel's own earlier stages",
    False: " given the inputs, although each stage follows from the one before: a stage is missing or out of order",
}


def describe_rows(rows: RowCheck, contract: Contract) -> Finding:
    """The finding for rows that no single latent value explains."""
    missing = rows.rows - rows.explained
    sentence = (
        f"{missing:,} of {rows.rows:,} rows cannot come from one fp32 {rows.stage} under {contract}: "
        "some elements of a row need a larger one, others a smaller."
    )
    return Finding("rows", rows.stage, sentence)


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
    return f"worst at {list(worst.index)}: {worst.actual!r}, allowed {allowed}, exact {worst.exact:.9g}{distance}"
