"""Gated norms of flash-linear-attention (fla-core) and mamba-ssm, and their gradients; read for 0.6.0 and 2.3.2.

`layernorm_gated` of both has the same functions; those of mamba-ssm begin with an underscore. It keeps statistics group
by group. `fused_norm_gate` of fla has no groups, and gates after the norm.
"""

from __future__ import annotations

from norm_packages import as_rows, refuse_elsewhere, upstream, whole_blocks

from lastbit import UnsupportedCase, kernel

FEATURE_BYTES = 65536
FLA = ("fla.modules.norm.layernorm_gated", "fla-core einops", "")
MAMBA = ("mamba_ssm.ops.triton.layernorm_gated", "mamba-ssm", "_")
FUSED = ("fla.modules.norm.fused_norm_gate", "fla-core einops")


def check(x, weight, tensors, group_size=None):
    """Raise for arguments that upstream does not check, or cannot take; return the size of a group."""
    refuse_elsewhere(x, weight=weight, **tensors)
    size = group_size or x.shape[-1]
    if size * x.element_size() > FEATURE_BYTES:
        raise UnsupportedCase(f"groups of {size} elements exceed 64 KiB; upstream raises RuntimeError")
    return size


def rows_of(*tensors):
    return [None if tensor is None else as_rows(tensor) for tensor in tensors]


def vectors(*tensors):
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def by_group(statistic):
    """Reshape statistics [..., G] to [G · M], as upstream keeps them."""
    return None if statistic is None else statistic.reshape(-1, statistic.shape[-1]).t().contiguous().view(-1)


def per_row(statistic, x, groups):
    """Reshape statistics [G · M] to [..., G]."""
    return statistic.view(groups, -1).t().reshape(*x.shape[:-1], groups)


def named(x, z, dx, dw, db, dz, output=None):
    """Name the results of a backward pass, and give them the shapes of x and z."""
    found = {"dx": dx.reshape(x.shape), "dw": dw, "db": db}
    found |= {"dz": None if dz is None else dz.reshape(z.shape)}
    found |= {"output": None if output is None else output.reshape(x.shape)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def declare(prefix, package):
    """Register forward and backward of one package's `layernorm_gated`."""
    module, requirement, underscore = package

    def function(name):
        return getattr(upstream(module, requirement), f"{underscore}{name}")

    @kernel("layer_norm_gated", contract="single_rounding", name=f"{prefix}[layernorm_gated]", stages=("mean", "rstd"))
    def forward(
        x, weight, bias=None, z=None, *, eps, group_size=None, norm_before_gate=True, is_rms_norm=False, stages=()
    ):
        size = check(x, weight, {"bias": bias, "z": z}, group_size)
        if z is not None and not norm_before_gate and not is_rms_norm and size & (size - 1) and not x.is_cuda:
            raise UnsupportedCase("a LayerNorm that gates first adds up lanes beyond a group, NaN in the interpreter")
        rows, gate = rows_of(x, z)
        options = {"group_size": size, "norm_before_gate": norm_before_gate, "is_rms_norm": is_rms_norm}
        weight, bias = vectors(weight, bias)
        output, mean, rstd = function("layer_norm_fwd")(rows, weight, bias, eps, z=gate, **options)
        saved = {"mean": mean, "rstd": rstd}
        groups = x.shape[-1] // size
        exposed = {name: per_row(saved[name], x, groups) for name in stages if saved[name] is not None}
        return {"output": output.reshape(x.shape), **exposed}

    takes = {"activation": ("silu", None), **whole_blocks("x")}

    @kernel("layer_norm_gated_backward", name=f"{prefix}[layernorm_gated_backward]", takes=takes)
    def backward(
        x, dy, weight, rstd, mean=None, bias=None, z=None,
        *, norm_before_gate=True, activation="silu", recompute_output=False,
    ):  # fmt: skip
        size = check(x, weight, {"dy": dy, "rstd": rstd, "mean": mean, "bias": bias, "z": z})
        size //= rstd.shape[-1]
        rows, upper, gate = rows_of(x, dy, z)
        weight, bias = vectors(weight, bias)
        found = function("layer_norm_bwd")(
            upper, rows, weight, bias, 0.0, by_group(mean), by_group(rstd), z=gate, group_size=size,
            norm_before_gate=norm_before_gate, is_rms_norm=mean is None, recompute_output=recompute_output,
        )  # fmt: skip
        return named(x, z, *found)


declare("fla", FLA)
declare("mamba", MAMBA)


GATES_LAST = {"norm_before_gate": (True, None)}


@kernel(
    "layer_norm_gated", contract="single_rounding", name="fla[fused_norm_gate]", stages=("mean", "rstd"),
    takes=GATES_LAST,
)  # fmt: skip
def fused_norm_gate(
    x, weight, z, bias=None, *, eps, norm_before_gate=True, is_rms_norm=False, activation="silu", stages=()
):
    check(x, weight, {"bias": bias, "z": z})
    rows, gate = rows_of(x, z)
    weight, bias = vectors(weight, bias)
    function = upstream(*FUSED).layer_norm_gated_fwd
    output, mean, rstd, _ = function(rows, gate, weight, bias, activation, eps, is_rms_norm=is_rms_norm)
    saved = {"mean": mean, "rstd": rstd}
    exposed = {name: per_row(saved[name], x, 1) for name in stages if saved[name] is not None}
    return {"output": output.reshape(x.shape), **exposed}


@kernel(
    "layer_norm_gated_backward", name="fla[fused_norm_gate_backward]",
    takes={**GATES_LAST, "rstd columns": 1, **whole_blocks("x")},
)  # fmt: skip
def fused_norm_gate_backward(
    x, dy, weight, rstd, z, mean=None, bias=None,
    *, norm_before_gate=True, activation="silu", recompute_output=False,
):  # fmt: skip
    check(x, weight, {"dy": dy, "rstd": rstd, "mean": mean, "bias": bias, "z": z})
    rows, upper, gate = rows_of(x, dy, z)
    weight, bias = vectors(weight, bias)
    statistics = {"mean": by_group(mean), "rstd": by_group(rstd), "is_rms_norm": mean is None}
    found = upstream(*FUSED).layer_norm_gated_bwd(
        upper, rows, gate, weight, bias, activation, 0.0, recompute_output=recompute_output, **statistics
    )
    dx, dz, dw, db, _, *output = found
    return named(x, z, dx, dw, db, dz, *output)
