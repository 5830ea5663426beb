"""Gradients of gated LayerNorm and RMSNorm from saved statistics; without a gate, of LayerNorm and RMSNorm themselves.

Formulas as in the backward pass of `layernorm_gated` in mamba-ssm, which flash-linear-attention shares; the tests check
them against automatic differentiation of the forward pass in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastbit import Contract, Latent, ProbedSum, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    Tensor,
    divide,
    hull,
    mean_of_products,
    multiply_add,
    product_in_any_order,
    sum_of_row_products,
    sum_of_rows,
    total_of_products,
)
from lastbit.numerics import mean as mean_of
from lastbit.references._groups import shards
from lastbit.references._silu import times_silu_slope
from lastbit.references.layer_norm_gated import activated, check, fused_with_gate, times_gate
from lastbit.relations import scaled


def _rows(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    """Place terms in dy with rows that are normalized already, all ones: dw and db are sums of the columns of dy."""
    sums, rows = terms.shape
    dy = terms.mT.contiguous()
    ones = terms.new_ones(rows, 1).float()
    columns = {"weight": terms.new_ones(sums), "bias": terms.new_zeros(sums)}
    return {"x": dy.new_ones(rows, sums), "dy": dy, **columns, "rstd": ones, "mean": 0 * ones}


@op(
    rows=("x", "dy", "rstd", "mean", "z"),
    axes={"rounding": {"single_rounding": {}}, "scaling": {"": {}, "scaled_sums": {}}},
    rounds={"dx": "x", "dz": "z", "dw": "weight", "db": "bias", "output": "x"},
    latent=Latent("c1", through=("dgated_input", "dx", "dz"), instead={"scaled_sums": "s1"}, also=("c2",)),
    returns=("dx", "dw", "db", "dz", "output"),
    torch_ops=("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward"),
    relations=(shards, scaled(("dy",), dict.fromkeys(("dx", "dz", "dw", "db"), 1))),
    sums={
        "dw": ProbedSum(_rows, {"dw": 0}, about="dy · normalized of a column, over all rows"),
        "db": ProbedSum(_rows, {"db": 0}, about="dy of a column, over all rows"),
    },
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
        ValueError: parameters that have no meaning together, or tensors whose shapes do not fit.
    """
    if mean is not None and contract.has("scaled_sums"):
        raise ValueError("scaled_sums is the form of gradients of RMS norms; they have no mean")
    check(x, {"dy": dy, "z": z}, {"weight": weight, "bias": bias}, activation)
    width = _group_width(x, rstd, mean)
    gating = () if z is None else activated(z, activation)
    gate = stage("gate", product_in_any_order(*gating)) if gating else None
    after, before = (gate, None) if norm_before_gate else (None, gate)

    value = x if before is None else stage("gated_input", times_gate(x, before, gating))
    if mean is None:
        centered = value.in_groups(width)
    else:  # where x is a product, a compiler may fuse it into the difference
        fused = value if before is None else fused_with_gate(value, x, before, gating)
        centered = fused.in_groups(width) - mean[..., None]
    normalized = stage("normalized", (centered * rstd[..., None]).joined())

    daffine = terms = dy
    if after is not None or recompute_output:
        y = normalized * weight if bias is None else multiply_add(normalized, weight, bias)
        affine = stage("affine", y)
        if recompute_output:
            stage("output", affine if after is None else times_gate(affine, after, gating), result=True)
    if after is not None:
        daffine = stage("daffine", times_gate(dy, after, gating))
        terms = fused_with_gate(daffine, dy, after, gating)
        stage("dz", times_slope(dy, affine, gating), result=True)
    stage("dw", sum_of_row_products(daffine, normalized), result=True)
    if bias is not None:
        stage("db", sum_of_rows(terms), result=True)

    if contract.has("scaled_sums"):
        dx = _through_scaled_sums(daffine, weight, normalized, rstd, stage)
    else:
        dx = _through_norm(daffine, weight, normalized, rstd, centered=mean is not None, stage=stage)
    if before is not None:
        dvalue = stage("dgated_input", dx)
        stage("dz", times_slope(dvalue, x, gating), result=True)
        dx = times_gate(dvalue, before, gating)
    stage("dx", dx, result=True)


def _group_width(x: Enclosure, rstd: Enclosure, mean: Enclosure | None) -> int:
    """Return the columns per group, from the shape of the statistics."""
    for name, statistic in {"rstd": rstd, "mean": mean}.items():
        if statistic is None:
            continue
        if not statistic.shape or statistic.shape[:-1] != x.shape[:-1] or statistic.shape != rstd.shape:
            expected = (*x.shape[:-1], rstd.shape[-1] if rstd.shape else "G")
            raise ValueError(
                f"{name} has shape {tuple(statistic.shape)}; with x {tuple(x.shape)} it must be {expected}"
            )
    groups = rstd.shape[-1]
    if not groups or x.shape[-1] % groups:
        raise ValueError(f"rstd has {groups} groups, which do not divide {x.shape[-1]}, the width of x")
    return x.shape[-1] // groups


def times_slope(a: Enclosure, b: Enclosure, gating: tuple[Enclosure, ...]) -> Enclosure:
    """Compute a · b · act'(z) in any order, with the derivative in every form that is in use.

    sigmoid: s · (1 - s), where s = sigmoid(z). `gating` are the factors of act(z): z and s, or s alone.
    """
    *factors, s = gating
    if not factors:
        return product_in_any_order(a, b, s, 1.0 + -s)
    (z,) = factors
    return times_silu_slope((a, b), z, s)


def _through_scaled_sums(
    daffine: Enclosure, weight: Enclosure, normalized: Enclosure, rstd: Enclosure, stage: StageRecorder
) -> Enclosure:
    """Compute the gradient without a mean as (rstd / n) · (n · d - normalized · s), s the sum of normalized · d."""
    width = daffine.shape[-1] // rstd.shape[-1]
    d, normalized = stage("dnormalized", daffine * weight).in_groups(width), normalized.in_groups(width)
    s1 = stage("s1", total_of_products(normalized, d)[..., 0])[..., None]
    difference = hull(multiply_add(-normalized, s1, d * width), multiply_add(d, width, -(normalized * s1)))
    return (difference * divide(rstd, width)[..., None]).joined()


def _through_norm(
    daffine: Enclosure,
    weight: Enclosure,
    normalized: Enclosure,
    rstd: Enclosure,
    *,
    centered: bool,
    stage: StageRecorder,
) -> Enclosure:
    """Compute the norm's input gradient: (d - (normalized · c1 + c2)) · rstd with d = weight · daffine."""
    width = daffine.shape[-1] // rstd.shape[-1]
    d = stage("dnormalized", daffine * weight).in_groups(width)
    factors = daffine.in_groups(width), weight.in_groups(width)
    normalized = normalized.in_groups(width)
    c1 = stage("c1", mean_of_products(normalized, d)[..., 0])[..., None]
    if centered:
        c2 = stage("c2", hull(mean_of(d), mean_of_products(*factors))[..., 0])[..., None]
        shift = multiply_add(normalized, c1, c2)
        difference = hull(d - shift, multiply_add(*factors, -shift))
    else:
        difference = hull(multiply_add(-normalized, c1, d), multiply_add(*factors, -(normalized * c1)))
    return (difference * rstd[..., None]).joined()
