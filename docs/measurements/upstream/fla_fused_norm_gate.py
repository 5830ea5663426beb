"""`fused_norm_gate` of flash-linear-attention (fla-core), forward and backward; verified for 0.6.0.

It always has a gate, normalizes first, and knows no groups. Its functions take contiguous rows; the autograd function
in front of them copies other ones, as is done here.
"""

from __future__ import annotations

from gated_norm import as_rows, check_width, flat, launching_on, named, per_row
from packages import imported

from lastbit.kernel import UnsupportedCase, kernel

UPSTREAM = imported("fla.modules.fused_norm_gate", "fla-core")


@kernel("layer_norm_gated", contract="single_rounding", name="fla_fused", stages=("mean", "rstd"))
def layer_norm_gated(
    x, weight, z, bias=None, *,
    eps, group_size=None, norm_before_gate=True, is_rms_norm=False, activation="silu", stages=(),
):  # fmt: skip
    """Take many rows at once through one kernel if they have 512 elements at most, longer ones through another."""
    if group_size not in (None, x.shape[-1]):
        raise UnsupportedCase(f"group_size={group_size}: the function knows no groups")
    _check(x, norm_before_gate=norm_before_gate)
    with launching_on(x.device):
        output, mean, rstd, _ = UPSTREAM.layer_norm_gated_fwd(
            x=as_rows(x).contiguous(), g=as_rows(z).contiguous(), weight=weight.contiguous(),
            bias=None if bias is None else bias.contiguous(), activation=activation, eps=eps, is_rms_norm=is_rms_norm,
        )  # fmt: skip
    saved = {"mean": mean, "rstd": rstd}
    mapping = {name: per_row(saved[name], x) for name in stages if saved[name] is not None}
    return {"output": output.reshape(x.shape), **mapping} if stages else output.reshape(x.shape)


@kernel("layer_norm_gated_backward", contract="single_rounding", name="fla_fused_backward")
def layer_norm_gated_backward(
    x, dy, weight, rstd, z, mean=None, bias=None, *, norm_before_gate=True, activation="silu", recompute_output=False
):
    """Add dw and db in fp32 over a part of the rows for each program, and by torch's sum over the programs."""
    if rstd.shape[-1] != 1:
        raise UnsupportedCase(f"{rstd.shape[-1]} groups: the function knows no groups")
    if not x.numel():
        raise UnsupportedCase("no rows; upstream divides by their number")
    _check(x, norm_before_gate=norm_before_gate)
    with launching_on(x.device):
        dx, dz, dw, db, _, *output = UPSTREAM.layer_norm_gated_bwd(
            dy=as_rows(dy).contiguous(), x=as_rows(x).contiguous(), g=as_rows(z).contiguous(),
            weight=weight.contiguous(), bias=None if bias is None else bias.contiguous(), activation=activation,
            mean=None if mean is None else flat(mean), rstd=flat(rstd), is_rms_norm=mean is None,
            recompute_output=recompute_output,
        )  # fmt: skip
    return named((dx, dw, db, dz, *output), ("dx", "dw", "db", "dz", "output"), x)


def _check(x, *, norm_before_gate):
    check_width(x, None)
    if not norm_before_gate:
        raise UnsupportedCase("norm_before_gate=False: the function normalizes first")
