"""Two runs side by side as JSON, for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from lastbit.reports.changes import Changes, KernelChange, RunSide
from lastbit.reports.stage_changes import StageChange
from lastbit.reports.stage_summary import StageSummary


def as_json(changes: Changes, *, strict: bool = False) -> str:
    """Write the changes as one JSON object; a float that JSON cannot spell is a string such as `NaN` or `-Infinity`."""
    data = {
        "runs": list(changes.names),
        "exit_code": changes.exit_code(strict=strict),
        "settings": {name: [before, after] for name, before, after in changes.settings},
        "across": changes.across,
        "broken": list(changes.broken),
        "kernels": [_kernel(kernel) for kernel in changes.kernels],
    }
    return json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)


def _kernel(kernel: KernelChange) -> dict[str, Any]:
    return {
        "op": kernel.op,
        "kernel": kernel.kernel,
        "change": kernel.change.value,
        "worse": kernel.worse,
        "before": _side(kernel.before),
        "after": _side(kernel.after),
        "cases_in_both": len(kernel.pairs),
        "cases_in_one": list(kernel.unpaired),
        "cases_on_other_inputs": kernel.other_inputs,
        "cases_worse": [after.case for _, after in kernel.worse_cases],
        "cases_better": [after.case for _, after in kernel.better_cases],
        "tensors": kernel.tensors,
        "tensors_equal": kernel.equal,
        "stages": [_stage(stage) for stage in kernel.stages],
        "properties": [
            {"property": one.after.name, "lost": one.lost, "worse": one.worse, "where": one.after.where}
            for one in kernel.properties
        ],
    }


def _side(side: RunSide | None) -> dict[str, str] | None:
    return {"device": side.device, "verdict": side.verdict.value, "contract": side.contract} if side else None


def _stage(stage: StageChange) -> dict[str, Any]:
    drifts = [
        {"figure": d.figure, "worse": d.worse, "before": _number(d.before), "after": _number(d.after)}
        for d in stage.drifts
    ]
    return {
        "stage": stage.shown.name,
        "dtype": stage.shown.dtype,
        "tensors": stage.tensors,
        "tensors_equal": stage.equal,
        "before": _figures(stage.before),
        "after": _figures(stage.after),
        "drifts": drifts,
    }


def _figures(stage: StageSummary | None) -> dict[str, Any] | None:
    if stage is None:
        return None
    return {
        "cases": stage.cases,
        "extreme_cases": len(stage.extreme),
        "verdict": stage.verdict.value,
        "numel": stage.total.numel,
        "outside": stage.outside,
        "mismatched": stage.total.mismatched,
        "worst_rel_l2": _number(stage.worst_error),
        "contract_rel_l2": _number(stage.contract_error),
        "median_rel_l2": _number(stage.typical_error),
        "median_bias": _number(stage.typical_bias),
        "max_ulp": _number(stage.total.max_ulp),
    }


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
