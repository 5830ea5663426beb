"""Gated LayerNorm and RMSNorm, in groups, as in Mamba-2 (Dao & Gu 2024, arXiv 2405.21060) and Qwen3-Next.

LayerNorm: Ba, Kiros & Hinton 2016, arXiv 1607.06450. Options and formulas are those of `layernorm_gated` in mamba-ssm,
which flash-linear-attention, SGLang and vLLM share; docs/contracts/layer_norm_gated.md says who keeps which contract.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lastbit import Contract, Latent, ProbedSum, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    Tensor,
    difference_of_products,
    fusible_product,
    hull,
    mean,
    mean_and_variance,
    mean_of_squares,
    multiply_add,
    product_in_any_order,
    rsqrt,
    sigmoid,
    variance_about,
)
from lastbit.references._groups import shards
from lastbit.references._shapes import width_of
from lastbit.relations import scaled

_GAIN = 2.0**15
"""A weight that lifts the trace of a small mean above the smallest number of fp16."""


def _mean(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    return {"x": terms, "weight": terms.new_full((terms.shape[1],), _GAIN), "eps": tuning}


def _squares(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    return {"x": terms, "weight": terms.new_ones(terms.shape[1]), "eps": tuning, "is_rms_norm": True}


@op(
    rows=("x", "z"),
    returns=("output",),
    axes={
        "rounding": {"single_rounding": {}, "stepwise": {"normalized": "x", "affine": "weight"}},
        "variance": {"": {}, "welford": {}},
        "centering": {"": {}, "distributed": {}},
    },
    rounds={"output": "x"},
    latent=Latent("rstd", through=("normalized", "affine", "output")),
    torch_ops=("aten::layer_norm", "aten::native_layer_norm", "aten::rms_norm", "aten::_fused_rms_norm"),
    relations=(shards, scaled(("weight", "bias"), {"output": 1})),
    sums={
        "mean": ProbedSum(_mean, {"output": 0, "mean": 0}, about="x of a row, for the mean"),
        "squares": ProbedSum(_squares, {"output": 0, "rstd": 0}, squares=True, about="x² of a row, with is_rms_norm"),
    },
)
def layer_norm_gated(
    x: Enclosure,
    weight: Enclosure,
    bias: Enclosure | None = None,
    z: Enclosure | None = None,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "silu",
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """y = (x - mean) / sqrt(variance + eps) · weight + bias over each group, times act(z); or of x · act(z).

    x, z: [..., N], of one dtype; weight, bias: [N]. With N / `group_size` = G groups, `mean`, `variance` and `rstd` are
    [..., G]. `is_rms_norm` leaves out the mean. `activation` is `silu` (z · sigmoid(z)) or `sigmoid`. The variance is
    computed in two passes, as the mean of (x - mean)², or with the mean by Welford's or Chan's updates (`welford`).
    `distributed` normalizes by x · rstd - mean · rstd.

    Raises:
        ValueError: parameters that have no meaning together, or tensors whose shapes do not fit.
    """
    check(x, {"z": z}, {"weight": weight, "bias": bias}, activation)
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size={group_size} does not divide {x.shape[-1]}, the width of x")
    if contract.has("stepwise") and (bias is not None or not is_rms_norm or activation != "silu"):
        raise ValueError("stepwise is the rounding of RMS norms gated by silu without bias; no other module has it")
    width = x.shape[-1] if group_size is None else group_size

    gating = () if z is None else activated(z, activation)
    gate = stage("gate", product_in_any_order(*gating)) if gating else None
    value = x
    if gate is not None and not norm_before_gate:
        value = stage("gated_input", times_gate(x, gate, gating))

    centered = value.in_groups(width)
    if is_rms_norm:
        variance = mean_of_squares(centered)
    else:
        fused = value if value is x or gate is None else fused_with_gate(value, x, gate, gating)
        grouped = fused.in_groups(width)
        in_one_pass = mean_and_variance(grouped) if contract.has("welford") else None
        center = stage("mean", (in_one_pass[0] if in_one_pass else mean(grouped))[..., 0])[..., None]
        variance = in_one_pass[1] if in_one_pass else variance_about(grouped, center)
        centered = grouped - center
    rstd = stage("rstd", rsqrt(stage("variance", variance[..., 0]) + eps))[..., None]
    distributed = not is_rms_norm and contract.has("distributed")
    parts = difference_of_products(grouped, center, rstd) if distributed else centered * rstd
    normalized = stage("normalized", parts.joined())

    if contract.has("stepwise"):
        y = normalized * weight
    elif distributed:
        y = normalized * weight if bias is None else multiply_add(normalized, weight, bias)
    else:
        y = _scaled(normalized, centered, rstd, weight, bias)
    y = stage("affine", y)
    if gate is not None and norm_before_gate:
        y = times_gate(y, gate, gating)
    stage("output", y, result=True)


def activated(z: Enclosure, activation: str) -> tuple[Enclosure, ...]:
    """Return the factors of the activation: z · sigmoid(z), or sigmoid(z)."""
    return (sigmoid(z),) if activation == "sigmoid" else (z, sigmoid(z))


def times_gate(x: Enclosure, gate: Enclosure, gating: tuple[Enclosure, ...]) -> Enclosure:
    """Compute x · act(z), in any order of x and the factors of the activation."""
    return hull(x * gate, product_in_any_order(x, *gating))


def fused_with_gate(value: Enclosure, x: Enclosure, gate: Enclosure, gating: tuple[Enclosure, ...]) -> Enclosure:
    """Enclose `value`, x · act(z), as a compiler may have it that fuses its last product into the next operation."""
    pairs = [(x, gate), *((x * a, b) for a, b in itertools.permutations(gating, 2))]
    return hull(value, *(fusible_product(a, b) for a, b in pairs))


def check(
    x: Enclosure, like_x: Mapping[str, Enclosure | None], columns: Mapping[str, Enclosure | None], activation: str
) -> None:
    """Raise ValueError unless `like_x` have the shape of x, `columns` its width, and the activation is known."""
    expected = {name: (t, tuple(x.shape)) for name, t in like_x.items()}
    expected |= {name: (t, (width_of("x", x),)) for name, t in columns.items()}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with x {tuple(x.shape)} it must be {shape}")
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation={activation!r} is neither silu nor sigmoid")


def _scaled(
    normalized: Enclosure, centered: Enclosure, rstd: Enclosure, weight: Enclosure, bias: Enclosure | None
) -> Enclosure:
    """Compute normalized · weight + bias, with (x - mean) · rstd · weight multiplied in any order, or fused."""
    width = centered.shape[-1]
    value, gain = normalized.in_groups(width), weight.in_groups(width)
    if bias is None:
        return hull(value * gain, product_in_any_order(centered, rstd, gain)).joined()
    pairs = (value, gain), (centered, rstd * gain), (centered * gain, rstd)
    return hull(*(multiply_add(a, b, bias.in_groups(width)) for a, b in pairs)).joined()
