"""Gated LayerNorm and RMSNorm, in groups, as in Mamba-2 (Dao & Gu 2024, arXiv 2405.21060) and Qwen3-Next.

LayerNorm: Ba, Kiros & Hinton 2016, arXiv 1607.06450. Options and formulas are those of `layernorm_gated` in mamba-ssm,
which flash-linear-attention, SGLang and vLLM share; docs/contracts/layer_norm_gated.md says who keeps which contract.
"""

from __future__ import annotations

import itertools

from harness.numerics import (
    Enclosure,
    hull,
    mean,
    mean_of_products,
    mean_of_squares,
    multiply_add,
    product_in_any_order,
    rsqrt,
    sigmoid,
    variance_about,
)
from harness.op import Contract, Latent, StageRecorder, op


@op(
    rows=("x", "z"),
    axes={"rounding": {"single_rounding": {}, "stepwise": {"normalized": "x", "affine": "weight"}}},
    rounds={"output": "x"},
    latent=Latent("rstd", through=("normalized", "affine", "output")),
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
    computed in two passes: the mean of (x - mean)².

    Raises:
        ValueError: parameters that have no meaning together.
    """
    _check(x, bias, group_size, is_rms_norm=is_rms_norm, activation=activation, contract=contract)
    width = x.shape[-1] if group_size is None else group_size
    gating = () if z is None else (sigmoid(z),) if activation == "sigmoid" else (z, sigmoid(z))
    gate = None if z is None else stage("gate", product_in_any_order(*gating))
    value = x
    products: tuple[tuple[Enclosure, Enclosure], ...] = ()
    if gate is not None and not norm_before_gate:
        value = stage("gated_input", hull(x * gate, product_in_any_order(x, *gating)))
        products = _groups_of_pairs(x, gate, gating, width)

    centered = grouped = value.in_groups(width)
    variance = mean_of_squares(grouped)
    if not is_rms_norm:  # where x is a product, a compiler may fuse it into what follows
        center = hull(mean(grouped), *(mean_of_products(a, b) for a, b in products))
        center = stage("mean", center[..., 0])[..., None]
        variance = variance_about(grouped, center)
        centered = hull(grouped - center, *(multiply_add(a, b, -center) for a, b in products))
    rstd = stage("rstd", rsqrt(stage("variance", variance[..., 0]) + eps))[..., None]
    normalized = stage("normalized", (centered * rstd).joined())

    if contract.has("stepwise"):
        y = normalized * weight
    else:
        factors = normalized.in_groups(width), weight.in_groups(width)
        y = _scaled(factors, (centered, rstd, factors[1]), None if bias is None else bias.in_groups(width)).joined()
    y = stage("affine", y)
    if gate is not None and norm_before_gate:
        y = hull(y * gate, product_in_any_order(y, *gating))
    stage("output", y, result=True)


def _groups_of_pairs(
    x: Enclosure, gate: Enclosure, gating: tuple[Enclosure, ...], width: int
) -> tuple[tuple[Enclosure, Enclosure], ...]:
    """The last multiplication of x · act(z), in every order."""
    pairs = [(x, gate)] + [(x * a, b) for a, b in itertools.permutations(gating, 2)]
    return tuple((a.in_groups(width), b.in_groups(width)) for a, b in pairs)


def _scaled(
    factors: tuple[Enclosure, Enclosure], all_factors: tuple[Enclosure, Enclosure, Enclosure], bias: Enclosure | None
) -> Enclosure:
    """normalized · weight + bias, where (x - mean) · rstd · weight may be multiplied in any order, or fused."""
    centered, rstd, weight = all_factors
    if bias is None:
        return hull(factors[0] * factors[1], product_in_any_order(*all_factors))
    pairs = factors, (centered, rstd * weight), (centered * weight, rstd)
    return hull(*(multiply_add(a, b, bias) for a, b in pairs))


def _check(
    x: Enclosure,
    bias: Enclosure | None,
    group_size: int | None,
    *,
    is_rms_norm: bool,
    activation: str,
    contract: Contract,
) -> None:
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation={activation!r} is neither silu nor sigmoid")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size={group_size} does not divide {x.shape[-1]}, the width of x")
    if contract.has("stepwise") and (bias is not None or not is_rms_norm or activation != "silu"):
        raise ValueError("stepwise is the rounding of RMS norms gated by silu without bias; no other module has it")
