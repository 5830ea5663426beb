"""Gated norms of flash-linear-attention (fla-core) and mamba-ssm, and their gradients; read for 0.6.0 and 2.3.2.

`layernorm_gated` of both has the same functions; those of mamba-ssm begin with an underscore. It keeps statistics group
by group. `fused_norm_gate` of fla has no groups, and gates after the norm.
"""

from __future__ import annotations

from norm_packages import refuse_elsewhere, upstream, whole_blocks

from lastbit import UnsupportedCase, kernel

FLA = ("fla.modules.norm.layernorm_gated", "fla-core einops", "")
MAMBA = ("mamba_ssm.ops.triton.layernorm_gated", "mamba-ssm", "_")
FUSED = ("fla.modules.norm.fused_norm_gate", "fla-core einops")
ROWS = {"tensors": ("packed rows", "non-empty")}
DECLARED = {"contract": "single_rounding", "stages": ("mean", "rstd"), "refuses": (RuntimeError,)}
"""Rows, or groups of a row, of over 64 KiB are refused."""


def by_group(statistic):
    """Reshape statistics [M, G] to [G · M], as upstream keeps them."""
    return None if statistic is None else statistic.t().reshape(-1)


def results(output, mean, rstd, stages):
    """Name the results, and of the statistics [G · M] those that are asked for: [M, G]."""
    saved = {name: t for name, t in {"mean": mean, "rstd": rstd}.items() if name in stages and t is not None}
    return {"output": output, **{name: t.view(-1, len(output)).t() for name, t in saved.items()}}


def gradients(dx, dw, db, dz, output=None):
    found = {"dx": dx, "dw": dw, "db": db, "dz": dz, "output": output}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def declare(prefix, package):
    """Register forward and backward of one package's `layernorm_gated`."""
    module, requirement, underscore = package

    def function(name):
        return getattr(upstream(module, requirement), f"{underscore}{name}")

    @kernel("layer_norm_gated", name=f"{prefix}[layernorm_gated]", takes=ROWS, **DECLARED)
    def forward(
        x, weight, bias=None, z=None, *, eps, group_size=None, norm_before_gate=True, is_rms_norm=False, stages=()
    ):
        refuse_elsewhere(x, weight=weight, bias=bias, z=z)
        size = group_size or x.shape[-1]
        if z is not None and not norm_before_gate and not is_rms_norm and size & (size - 1) and not x.is_cuda:
            raise UnsupportedCase("a LayerNorm that gates first adds up lanes beyond a group, NaN in the interpreter")
        options = {"group_size": size, "norm_before_gate": norm_before_gate, "is_rms_norm": is_rms_norm}
        return results(*function("layer_norm_fwd")(x, weight, bias, eps, z=z, **options), stages)

    takes = {**ROWS, "activation": ("silu", None), **whole_blocks("x")}

    @kernel(
        "layer_norm_gated_backward", name=f"{prefix}[layernorm_gated_backward]", takes=takes, refuses=(RuntimeError,)
    )
    def backward(
        x, dy, weight, rstd, mean=None, bias=None, z=None,
        *, norm_before_gate=True, activation="silu", recompute_output=False,
    ):  # fmt: skip
        refuse_elsewhere(x, weight=weight, dy=dy, rstd=rstd, mean=mean, bias=bias, z=z)
        found = function("layer_norm_bwd")(
            dy, x, weight, bias, 0.0, by_group(mean), by_group(rstd), z=z, group_size=x.shape[1] // rstd.shape[1],
            norm_before_gate=norm_before_gate, is_rms_norm=mean is None, recompute_output=recompute_output,
        )  # fmt: skip
        return gradients(*found)


declare("fla", FLA)
declare("mamba", MAMBA)


GATES_LAST = {**ROWS, "norm_before_gate": (True, None)}


@kernel("layer_norm_gated", name="fla[fused_norm_gate]", takes=GATES_LAST, **DECLARED)
def fused_norm_gate(
    x, weight, z, bias=None, *, eps, norm_before_gate=True, is_rms_norm=False, activation="silu", stages=()
):
    refuse_elsewhere(x, weight=weight, bias=bias, z=z)
    function = upstream(*FUSED).layer_norm_gated_fwd
    return results(*function(x, z, weight, bias, activation, eps, is_rms_norm=is_rms_norm)[:3], stages)


@kernel(
    "layer_norm_gated_backward", name="fla[fused_norm_gate_backward]", refuses=(RuntimeError,),
    takes={**GATES_LAST, "rstd columns": 1, **whole_blocks("x")},
)  # fmt: skip
def fused_norm_gate_backward(
    x, dy, weight, rstd, z, mean=None, bias=None,
    *, norm_before_gate=True, activation="silu", recompute_output=False,
):  # fmt: skip
    refuse_elsewhere(x, weight=weight, dy=dy, rstd=rstd, mean=mean, bias=bias, z=z)
    statistics = {"mean": by_group(mean), "rstd": by_group(rstd), "is_rms_norm": mean is None}
    dx, dz, dw, db, _, *output = upstream(*FUSED).layer_norm_gated_bwd(
        dy, x, z, weight, bias, activation, 0.0, recompute_output=recompute_output, **statistics
    )
    return gradients(dx, dw, db, dz, *output)
