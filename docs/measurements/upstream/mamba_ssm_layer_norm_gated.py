"""`layernorm_gated` of mamba-ssm, forward and backward; verified for 2.3.2.post1."""

from __future__ import annotations

from gated_norm import backward, forward
from packages import executed

from lastbit.kernel import kernel

UPSTREAM = executed("mamba_ssm", "ops/triton/layernorm_gated.py", "mamba-ssm")


@kernel("layer_norm_gated", contract="single_rounding", name="mamba_ssm", stages=("mean", "rstd"))
def layer_norm_gated(
    x, weight, bias=None, z=None, *, eps, group_size=None, norm_before_gate=True, is_rms_norm=False, stages=()
):
    """Apply the gate silu; there is no other."""
    return forward(
        UPSTREAM._layer_norm_fwd, x, weight, bias, z, eps=eps, group_size=group_size,
        norm_before_gate=norm_before_gate, is_rms_norm=is_rms_norm, stages=stages,
    )  # fmt: skip


@kernel("layer_norm_gated_backward", contract="single_rounding", name="mamba_ssm_backward")
def layer_norm_gated_backward(
    x, dy, weight, rstd, mean=None, bias=None, z=None, *, norm_before_gate=True, recompute_output=False
):
    """Add dw and db in fp32 over a part of the rows for each program, and by torch's sum over the programs."""
    return backward(
        UPSTREAM._layer_norm_bwd, x, dy, weight, rstd, mean, bias, z,
        norm_before_gate=norm_before_gate, recompute_output=recompute_output,
    )  # fmt: skip
