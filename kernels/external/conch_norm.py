"""RMSNorm of conch-triton-kernels, plain, with a residual, and Gemma's; read and identified for 1.3.

Its kernels take contiguous rows. `fused_add_rms_norm` and `gemma_rms_norm` write over their inputs. Triton rounds a
product of bf16 and fp16 to fp16, whichever of them x is: no contract does that.
"""

from __future__ import annotations

from norm_packages import refuse_elsewhere, upstream, whole_blocks

from lastbit import kernel

REQUIREMENT = "conch-triton-kernels"
TAKES = {"tensors": ("packed rows", "non-empty"), "weight dtype": ("x dtype", "fp32"), **whole_blocks("x")}


def package(name):
    return upstream(f"conch.ops.normalization.{name}", REQUIREMENT)


@kernel("rms_norm", contract="input_multiply", name="conch[rms_norm]", takes=TAKES)
def rms_norm(x, weight, *, eps):
    refuse_elsewhere(x, weight=weight)
    return package("rms_norm").rms_norm(x, weight, eps)


@kernel(
    "rms_norm", contract="input_multiply+rounded_sum", name="conch[fused_add_rms_norm]",
    mutates={"x": "output", "residual": "residual_sum"}, takes=TAKES,
)  # fmt: skip
def fused_add_rms_norm(x, weight, residual, *, eps):
    refuse_elsewhere(x, weight=weight, residual=residual)
    package("rms_norm").fused_add_rms_norm(x, residual, weight, eps)


@kernel(
    "rms_norm", contract="fp32_multiply", name="conch[gemma_rms_norm]", mutates={"x": "output"},
    takes={**TAKES, "weight_offset": 1.0},
)  # fmt: skip
def gemma_rms_norm(x, weight, *, eps, weight_offset):
    """Call upstream, which adds 1 to the weight."""
    refuse_elsewhere(x, weight=weight)
    package("gemma_rms_norm").gemma_rms_norm(x, weight, eps)
