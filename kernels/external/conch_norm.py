"""RMSNorm of conch-triton-kernels, plain, with a residual, and Gemma's; read and identified for 1.3.

Its kernels take contiguous rows. `fused_add_rms_norm` and `gemma_rms_norm` write over their inputs.
"""

from __future__ import annotations

from norm_packages import as_rows, refuse_elsewhere, refuse_lanes_without_value, upstream

from lastbit import UnsupportedCase, kernel

REQUIREMENT = "conch-triton-kernels"


def package(name):
    return upstream(f"conch.ops.normalization.{name}", REQUIREMENT)


@kernel("rms_norm", contract="input_multiply", name="conch[rms_norm]")
def rms_norm(x, weight, *, eps):
    refuse_elsewhere(x, weight=weight)
    refuse_lanes_without_value(x.shape[-1], x.device)
    return package("rms_norm").rms_norm(as_rows(x), weight.contiguous(), eps).reshape(x.shape)


@kernel("rms_norm", contract="input_multiply+rounded_sum", name="conch[fused_add_rms_norm]", mutates=("x", "residual"))
def fused_add_rms_norm(x, weight, residual, *, eps):
    refuse_elsewhere(x, weight=weight, residual=residual)
    refuse_lanes_without_value(x.shape[-1], x.device)
    output, total = package("rms_norm").fused_add_rms_norm(as_rows(x), as_rows(residual), weight.contiguous(), eps)
    return {"output": output.reshape(x.shape), "residual_sum": total.reshape(x.shape)}


@kernel("rms_norm", contract="fp32_multiply", name="conch[gemma_rms_norm]", mutates=("x",))
def gemma_rms_norm(x, weight, *, eps, weight_offset):
    refuse_elsewhere(x, weight=weight)
    if weight_offset != 1.0:
        raise UnsupportedCase(f"weight_offset={weight_offset}: upstream adds 1 to the weight")
    refuse_lanes_without_value(x.shape[-1], x.device)
    return package("gemma_rms_norm").gemma_rms_norm(as_rows(x), weight.contiguous(), eps).reshape(x.shape)
