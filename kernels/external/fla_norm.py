"""RMSNorm and LayerNorm of flash-linear-attention (fla-core), with and without a residual; identified for 0.6.0.

One Triton kernel computes both; `layer_norm_fwd` is what its autograd function calls. It refuses rows of over 64 KiB.
"""

from __future__ import annotations

from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

DECLARED = {"takes": ("packed rows", "non-empty"), "refuses": (RuntimeError,)}


def forward(x, weight, bias, residual, eps, *, is_rms_norm):
    """Return output, mean, inverse deviation and x + residual; statistics are [M]."""
    refuse_elsewhere(x, weight=weight, bias=bias, residual=residual)
    function = upstream("fla.modules.norm.layernorm", "fla-core einops").layer_norm_fwd
    return function(x, weight, bias, eps, residual, is_rms_norm=is_rms_norm)


@kernel("rms_norm", contract="fp32_multiply+unrounded_sum", name="fla[rms_norm]", stages=("inv_rms",), **DECLARED)
def rms_norm(x, weight=None, residual=None, *, eps, stages=()):
    output, _, rstd, total = forward(x, weight, None, residual, eps, is_rms_norm=True)
    results = {"output": output} if residual is None else {"output": output, "residual_sum": total}
    return {**results, "inv_rms": rstd[:, None]} if stages else results


@kernel("layer_norm_gated", contract="single_rounding", name="fla[layer_norm]", stages=("mean", "rstd"), **DECLARED)
def layer_norm(x, weight, bias=None, *, eps, is_rms_norm=False, stages=()):
    output, mean, rstd, _ = forward(x, weight, bias, None, eps, is_rms_norm=is_rms_norm)
    saved = {"mean": mean, "rstd": rstd}
    return {"output": output, **{name: saved[name][:, None] for name in stages if saved[name] is not None}}
