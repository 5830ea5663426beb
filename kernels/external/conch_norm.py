"""RMSNorm of conch-triton-kernels, plain, with a residual, and Gemma's; read and identified for 1.3.

Its kernels take contiguous rows. `fused_add_rms_norm` and `gemma_rms_norm` write over their inputs.
"""

from __future__ import annotations

import torch
from norm_packages import refuse_elsewhere, upstream, whole_blocks

from lastbit import UnsupportedCase, kernel

REQUIREMENT = "conch-triton-kernels"
TAKES = {"tensors": ("packed rows", "non-empty"), **whole_blocks("x")}


def package(name):
    return upstream(f"conch.ops.normalization.{name}", REQUIREMENT)


def refuse_two_narrow_dtypes(x, weight):
    """Raise UnsupportedCase where Triton rounds a product of bf16 and fp16 to fp16, whichever of them x is."""
    if {x.dtype, weight.dtype} == {torch.bfloat16, torch.float16}:
        raise UnsupportedCase("x and weight are bf16 and fp16: upstream multiplies them in fp16")


@kernel("rms_norm", contract="input_multiply", name="conch[rms_norm]", takes=TAKES)
def rms_norm(x, weight, *, eps):
    refuse_elsewhere(x, weight=weight)
    refuse_two_narrow_dtypes(x, weight)
    return package("rms_norm").rms_norm(x, weight, eps)


@kernel(
    "rms_norm", contract="input_multiply+rounded_sum", name="conch[fused_add_rms_norm]",
    mutates={"x": "output", "residual": "residual_sum"}, takes=TAKES,
)  # fmt: skip
def fused_add_rms_norm(x, weight, residual, *, eps):
    refuse_elsewhere(x, weight=weight, residual=residual)
    refuse_two_narrow_dtypes(x, weight)
    package("rms_norm").fused_add_rms_norm(x, residual, weight, eps)


@kernel(
    "rms_norm", contract="fp32_multiply", name="conch[gemma_rms_norm]", mutates={"x": "output"},
    takes={**TAKES, "weight_offset": 1.0},
)  # fmt: skip
def gemma_rms_norm(x, weight, *, eps, weight_offset):
    """Call upstream, which adds 1 to the weight."""
    refuse_elsewhere(x, weight=weight)
    package("gemma_rms_norm").gemma_rms_norm(x, weight, eps)
