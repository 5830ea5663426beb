"""Stages that were found in kernels which declare none: rows of the table of stages that decide nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lastbit.reports.summary import error
from lastbit.reports.why import StageMatch, Step
from lastbit.run import Run

if TYPE_CHECKING:
    import pandas as pd

MEANING = "the line of a kernel that shows no stages whose values agree best with one, on the CPU; it decides nothing"


@dataclass(frozen=True)
class TracedStage:
    """A stage at a line of a kernel, over the cases in which it was found there.

    Attributes:
        dtype: what the line holds it in; that of the contract is `format`.
        error, contract_error: relative L2 error of the line's values and of the contract's, in the worst of the cases.
        outside, of: elements that the contract excludes, of those compared.
        code: the whole line.
    """

    kernel: str
    stage: str
    dtype: str
    format: str
    file: str
    line: int
    code: str
    cases: int
    error: float
    contract_error: float
    outside: int
    of: int

    @property
    def name(self) -> str:
        """`(variance) line 9`."""
        return f"({self.stage}) line {self.line}"


def traced_stages(run: Run, kernel: str, device: str) -> list[TracedStage]:
    """List the stages found in a kernel on a device, or else on the CPU for it, in the order of the reference."""
    alone = (kernel, "cpu") not in run.subjects()
    traces = [t for t in run.traces if t.kernel == kernel and (t.device == device or (alone and t.device == "cpu"))]
    found: dict[tuple[str, str, int, str], list[tuple[Step, StageMatch]]] = {}
    for trace in traces:
        for step in trace.stages:
            if step.match is not None:
                found.setdefault((step.match.stage, step.file, step.line, step.dtype), []).append((step, step.match))
    return [_traced(kernel, seen) for seen in found.values()]


def _traced(kernel: str, seen: Sequence[tuple[Step, StageMatch]]) -> TracedStage:
    step, match = max(seen, key=lambda pair: -1.0 if math.isnan(pair[1].error) else pair[1].error)
    return TracedStage(
        kernel=kernel,
        stage=match.stage,
        dtype=step.dtype,
        format=match.format,
        file=step.file,
        line=step.line,
        code=step.code,
        cases=len(seen),
        error=match.error,
        contract_error=match.contract_error,
        outside=sum(m.outside for _, m in seen),
        of=sum(m.of for _, m in seen),
    )


def traced_cells(stage: TracedStage) -> tuple[str, ...]:
    """Format the cells of such a stage, under `lastbit.reports.stage_summary.STAGE_HEADERS`."""
    of = f"{stage.outside:,} of {stage.of:,}" if stage.outside else "0"
    return (
        stage.name,
        stage.dtype,
        f"{stage.cases:,}",
        "–",
        error(stage.error),
        error(stage.contract_error),
        "–",
        "–",
        of,
        "–",
        "–",
    )


def frame(run: Run) -> pd.DataFrame:
    """Make a table with a row for each kernel, stage and line, and the attributes of `TracedStage` as columns."""
    import pandas as pd

    kernels = dict.fromkeys(trace.kernel for trace in run.traces)
    rows = [asdict(stage) for kernel in kernels for stage in traced_stages(run, kernel, "cpu")]
    return pd.DataFrame(rows, columns=list(TracedStage.__dataclass_fields__))
