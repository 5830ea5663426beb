"""RMSNorm of liger-kernel in its three casting modes, with and without a residual; read and identified for 0.8.5.

`llama` rounds to x's dtype before it multiplies by the weight. `gemma` multiplies in fp32. `none` computes in the dtype
of x: squares, their sum and eps are rounded to it, for which the op has no contract unless that dtype is fp32. It
refuses rows of over 65,536 columns.
"""

from __future__ import annotations

from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

REQUIREMENT = "liger-kernel"
DECLARED = {"takes": "non-empty", "refuses": (RuntimeError,)}


def forward(x, weight, eps, offset, casting_mode):
    refuse_elsewhere(x, weight=weight)
    function = upstream("liger_kernel.ops.rms_norm", REQUIREMENT).LigerRMSNormFunction
    return function.apply(x, weight, eps, offset, casting_mode)


def fused_add(x, weight, residual, eps, offset, casting_mode):
    refuse_elsewhere(x, weight=weight, residual=residual)
    function = upstream("liger_kernel.ops.fused_add_rms_norm", REQUIREMENT).LigerFusedAddRMSNormFunction
    return function.apply(x, residual, weight, eps, offset, casting_mode)


@kernel("rms_norm", contract="input_multiply", name="liger[llama]", **DECLARED)
def llama(x, weight=None, *, eps):
    return forward(x, weight, eps, 0.0, "llama")


@kernel("rms_norm", contract="fp32_multiply", name="liger[gemma]", **DECLARED)
def gemma(x, weight=None, *, eps, weight_offset=0.0):
    return forward(x, weight, eps, weight_offset, "gemma")


@kernel(
    "rms_norm", contract="fp32_multiply", name="liger[none]", takes={"tensors": "non-empty", "x dtype": "fp32"},
    refuses=(RuntimeError,),
)  # fmt: skip
def none(x, weight=None, *, eps):
    return forward(x, weight, eps, 0.0, "none")


@kernel("rms_norm", contract="input_multiply+rounded_sum", name="liger_fused_add[llama]", **DECLARED)
def fused_add_llama(x, weight, residual, *, eps):
    return fused_add(x, weight, residual, eps, 0.0, "llama")


@kernel("rms_norm", contract="fp32_multiply+rounded_sum", name="liger_fused_add[gemma]", **DECLARED)
def fused_add_gemma(x, weight, residual, *, eps, weight_offset=0.0):
    return fused_add(x, weight, residual, eps, weight_offset, "gemma")
