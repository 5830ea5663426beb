"""FP8 codes of a tensor with one scale for all of it."""

from __future__ import annotations

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, clamp, divide_rn

LARGEST = 448.0


@op(rows=("x",), rounds={"codes": "e4m3"})
def e4m3_codes(x: Enclosure, scale: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """x: [..., N]; scale: [1], fp32. Codes of x · (1 / scale), clamped before they are rounded."""
    stage("codes", clamp(x * divide_rn(1.0, scale), -LARGEST, LARGEST), result=True)
