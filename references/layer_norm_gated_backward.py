"""Gradients of gated LayerNorm and RMSNorm from saved statistics; without a gate, of LayerNorm and RMSNorm themselves.

Formulas as in the backward pass of `layernorm_gated` in mamba-ssm, which flash-linear-attention shares; the tests check
them against automatic differentiation of the forward pass in fp64.
"""

from __future__ import annotations

from harness.numerics import (
    Enclosure,
    hull,
    mean,
    mean_of_products,
    multiply_add,
    product_in_any_order,
    sigmoid,
    sum_of_row_products,
    sum_of_rows,
)
from harness.op import Contract, StageRecorder, op

Factors = tuple[Enclosure, ...]


@op(
    rows=("x", "dy", "rstd", "mean", "z"),
    axes={"rounding": {"single_rounding": {}}},
    rounds={"dx": "x", "dz": "z", "dw": "weight", "db": "bias", "output": "x"},
)
def layer_norm_gated_backward(
    x: Enclosure,
    dy: Enclosure,
    weight: Enclosure,
    rstd: Enclosure,
    mean: Enclosure | None = None,
    bias: Enclosure | None = None,
    z: Enclosure | None = None,
    *,
    norm_before_gate: bool = True,
    activation: str = "silu",
    recompute_output: bool = False,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """dx, dz, dw and db for the gradient dy of the output of `layer_norm_gated`, all in fp32, rounded once.

    x, dy, z: [..., N]; weight, bias: [N]; rstd, mean: [..., G], fp32, one per group of N / G, as the forward pass saved
    them. No mean stands for RMS normalization. dw and db are sums over all rows in any order. `recompute_output` asks
    for the output as well, gated if the gate comes after the normalization.

    Raises:
        ValueError: parameters that have no meaning together.
    """
    groups = rstd.shape[-1]
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation={activation!r} is neither silu nor sigmoid")
    if not groups or x.shape[-1] % groups:
        raise ValueError(f"rstd has {groups} groups, which do not divide {x.shape[-1]}, the width of x")
    width = x.shape[-1] // groups

    gating, slopes = ((), ()) if z is None else _activation(z, activation)
    gate = stage("gate", product_in_any_order(*gating)) if gating else None
    after, before = gate is not None and norm_before_gate, gate is not None and not norm_before_gate
    value = x
    if gate is not None and before:
        value = stage("gated_input", hull(x * gate, product_in_any_order(x, *gating)))
    centered = value.in_groups(width)
    if mean is not None:
        centered = centered - mean[..., None]
    normalized = stage("normalized", (centered * rstd[..., None]).joined())

    affine = None
    if after or recompute_output:
        affine = stage("affine", normalized * weight if bias is None else multiply_add(normalized, weight, bias))
    if affine is not None and recompute_output:
        output = hull(affine * gate, product_in_any_order(affine, *gating)) if gate is not None and after else affine
        stage("output", output, result=True)
    daffine = dy
    if gate is not None and affine is not None and after:
        daffine = stage("daffine", hull(dy * gate, product_in_any_order(dy, *gating)))
        stage("dz", _times_slope(dy, affine, slopes), result=True)
        stage("dw", sum_of_row_products(daffine, normalized), result=True)
        if bias is not None:
            stage("db", sum_of_row_products(dy, gate), result=True)
    else:
        stage("dw", sum_of_row_products(dy, normalized), result=True)
        if bias is not None:
            stage("db", sum_of_rows(dy), result=True)

    dvalue = _through_norm(daffine, weight, normalized, rstd, width, centered=mean is not None, stage=stage)
    if gate is not None and before:
        dvalue = stage("dgated_input", dvalue)
        stage("dz", _times_slope(dvalue, x, slopes), result=True)
        dvalue = hull(dvalue * gate, product_in_any_order(dvalue, *gating))
    stage("dx", dvalue, result=True)


def _activation(z: Enclosure, activation: str) -> tuple[Factors, tuple[Factors, ...]]:
    """Factors of the activation of z, and of its derivative in every form that is in use.

    silu: z · s, and s · (1 + z · (1 - s)) or s + z · s · (1 - s); sigmoid: s, and s · (1 - s).
    """
    s = sigmoid(z)
    rest = 1.0 + -s
    if activation == "sigmoid":
        return (s,), ((s, rest),)
    expanded = hull(multiply_add(z * s, rest, s), multiply_add(z, s * rest, s))
    return (z, s), ((s, multiply_add(z, rest, 1.0)), (expanded,))


def _times_slope(a: Enclosure, b: Enclosure, slopes: tuple[Factors, ...]) -> Enclosure:
    """a · b · act'(z) in any order."""
    return hull(*(product_in_any_order(a, b, *slope) for slope in slopes))


def _through_norm(
    daffine: Enclosure,
    weight: Enclosure,
    normalized: Enclosure,
    rstd: Enclosure,
    width: int,
    *,
    centered: bool,
    stage: StageRecorder,
) -> Enclosure:
    """The gradient of what was normalized: (d - (normalized · c1 + c2)) · rstd with d = weight · daffine."""
    d = stage("dnormalized", daffine * weight).in_groups(width)
    factors = daffine.in_groups(width), weight.in_groups(width)
    normalized = normalized.in_groups(width)
    c1 = stage("c1", mean_of_products(normalized, d)[..., 0])[..., None]
    if centered:
        c2 = stage("c2", hull(mean(d), mean_of_products(*factors))[..., 0])[..., None]
        shift = multiply_add(normalized, c1, c2)
        difference = hull(d - shift, multiply_add(*factors, -shift))
    else:
        difference = hull(multiply_add(-normalized, c1, d), multiply_add(*factors, -(normalized * c1)))
    return (difference * rstd[..., None]).joined()
