"""softcap: logits kept between -cap and cap, as in Gemma 2 (arXiv 2408.00118, section 2).

Transformers (modeling_gemma2.py, `eager_attention_forward`) divides, takes tanh and multiplies in the dtype of the
logits, which rounds three times. Fused kernels do all of it in fp32 and round once.
"""

from __future__ import annotations

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import Enclosure, tanh


@op(
    rows=("x",),
    axes={"steps": {"fp32_steps": {}, "rounded_steps": {"scaled": "x", "squashed": "x"}}},
    rounds={"output": "x"},
)
def softcap(x: Enclosure, *, cap: float, contract: Contract, stage: StageRecorder) -> None:
    """output = cap · tanh(x / cap), elementwise. x: [..., N]; cap > 0.

    Raises:
        ValueError: cap is not a positive number.
    """
    if not cap > 0:
        raise ValueError(f"cap={cap} must be above 0")
    scaled = stage("scaled", x / cap)
    squashed = stage("squashed", tanh(scaled))
    stage("output", squashed * cap, result=True)
