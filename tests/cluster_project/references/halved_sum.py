"""(x + y) / 2, with the sum in fp32 or rounded first: an op so small that a case takes milliseconds."""

from __future__ import annotations

from lastbit.numerics import Enclosure
from lastbit.ops import Contract, StageRecorder, op


@op(
    rows=("x", "y"),
    axes={"sum_rule": {"fp32_sum": {}, "rounded_sum": {"sum": "x"}}},
    rounds={"output": "x"},
)
def halved_sum(x: Enclosure, y: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """x, y: [..., N], of one dtype."""
    stage("output", stage("sum", x + y) * 0.5, result=True)
