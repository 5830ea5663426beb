"""RMSNorm and LayerNorm of flash-linear-attention (fla-core), with and without a residual; identified for 0.6.0.

One Triton kernel computes both; `layer_norm_fwd` is what its autograd function calls.
"""

from __future__ import annotations

from norm_packages import as_rows, refuse_elsewhere, upstream

from lastbit import UnsupportedCase, kernel

FEATURE_BYTES = 65536


def forward(x, weight, bias, residual, eps, *, is_rms_norm):
    """Return output, mean, inverse deviation and x + residual; statistics are [M]."""
    refuse_elsewhere(x, weight=weight, bias=bias, residual=residual)
    if x.shape[-1] * x.element_size() > FEATURE_BYTES:
        raise UnsupportedCase(f"rows of {x.shape[-1]} elements exceed 64 KiB; upstream raises RuntimeError")
    weight, bias = (None if t is None else t.contiguous() for t in (weight, bias))
    return upstream("fla.modules.norm.layernorm", "fla-core einops").layer_norm_fwd(
        as_rows(x), weight, bias, eps, None if residual is None else as_rows(residual), is_rms_norm=is_rms_norm
    )


def per_row(statistic, x):
    """Reshape statistics [M] to [..., 1], with the leading dimensions of x."""
    return statistic.reshape(*x.shape[:-1], 1)


@kernel("rms_norm", contract="fp32_multiply+unrounded_sum", name="fla[rms_norm]", stages=("inv_rms",))
def rms_norm(x, weight=None, residual=None, *, eps, stages=()):
    output, _, rstd, total = forward(x, weight, None, residual, eps, is_rms_norm=True)
    results = {"output": output.reshape(x.shape)}
    if residual is not None:
        results["residual_sum"] = total.reshape(x.shape)
    return {**results, "inv_rms": per_row(rstd, x)} if stages else results


@kernel("layer_norm_gated", contract="single_rounding", name="fla[layer_norm]", stages=("mean", "rstd"))
def layer_norm(x, weight, bias=None, *, eps, is_rms_norm=False, stages=()):
    output, mean, rstd, _ = forward(x, weight, bias, None, eps, is_rms_norm=is_rms_norm)
    saved = {"mean": mean, "rstd": rstd}
    exposed = {name: per_row(saved[name], x) for name in stages if saved[name] is not None}
    return {"output": output.reshape(x.shape), **exposed}
