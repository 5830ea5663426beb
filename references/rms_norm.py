"""RMSNorm with fused residual add and FP8 output (Zhang & Sennrich 2019, arXiv 1910.07467).

Rounding rules as found in vLLM, SGLang, FlashInfer, xformers and Transformers; docs/contracts/rms_norm.md lists who
keeps which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastbit import Contract, Latent, ProbedSum, StageRecorder, op
from lastbit.numerics import (
    Enclosure,
    Tensor,
    at_least,
    divide,
    divide_rn,
    hull,
    largest_magnitude,
    mean_of_squares,
    product_in_any_order,
    rsqrt,
    sqrt,
)
from lastbit.references._codes import LARGEST, limited
from lastbit.references._shapes import check_shapes, width_of

SMALLEST_SCALE = 1 / (448.0 * 512.0)


def _squares(terms: Tensor, tuning: float) -> Mapping[str, Any]:
    return {"x": terms, "weight": terms.new_ones(terms.shape[1]), "eps": tuning}


@op(
    rows=("x", "residual"),
    axes={
        "weight_rule": {
            "native_multiply": {"normalized": "weight", "product": "weight"},
            "fp32_multiply": {},
            "input_multiply": {"normalized": "x", "product": "x"},
        },
        "residual_rule": {"rounded_sum": {}, "unrounded_sum": {}, "rounded_value": {}},
        "inverse": {"": {}, "rounded_inverse": {"inv_rms": "x"}, "divided": {}},
    },
    rounds={"residual_sum": "x", "output": "x", "quantized": "e4m3"},
    latent=Latent("inv_rms", through=("normalized", "product", "output"), instead={"divided": "rms"}),
    returns=("output", "quantized", "scale", "residual_sum"),
    torch_ops=("aten::rms_norm", "aten::_fused_rms_norm"),
    sums={
        "squares": ProbedSum(
            _squares, {"output": 0, "inv_rms": 0, "rms": 0, "variance": 0}, squares=True, about="x² of a row"
        )
    },
)
def rms_norm(
    x: Enclosure,
    weight: Enclosure | None = None,
    residual: Enclosure | None = None,
    scale: Enclosure | None = None,
    *,
    eps: float,
    variance_size: int | None = None,
    weight_offset: float = 0.0,
    quant: str | None = None,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """y = x / sqrt(mean(x²) + eps) · weight over the last dimension, after x + residual where there is one.

    x, residual: [..., N]; weight: [N]; scale: [1], fp32. `quant` is `static` (codes of y · (1 / scale)) or `dynamic`
    (per row, codes of y / scale with scale = max|y| / 448). A NaN of y gives a NaN code and is ignored by the scale.

    Raises:
        ValueError: parameters that have no meaning together, or tensors whose shapes do not fit.
    """
    width = width_of("x", x)
    check_shapes({"residual": (residual, tuple(x.shape)), "weight": (weight, (width,)), "scale": (scale, (1,))})
    if quant not in (None, "static", "dynamic"):
        raise ValueError(f"quant={quant!r} is neither static nor dynamic")
    if (quant == "static") != (scale is not None):
        raise ValueError(f"a scale goes with quant=static, but quant={quant} and scale is {'not ' * (not scale)}given")
    if variance_size is not None and not 1 <= variance_size <= width:
        raise ValueError(f"variance_size={variance_size} is not from 1 to {width}, the width of x")
    if weight_offset and not contract.has("fp32_multiply"):
        raise ValueError(f"weight_offset={weight_offset} has a meaning under fp32_multiply only")

    value = squared = x
    if residual is not None:
        unrounded = x + residual
        rounded = stage("residual_sum", unrounded, result=True)
        value = unrounded if contract.has("unrounded_sum") else rounded
        squared = rounded if contract.has("rounded_sum") else unrounded

    variance = stage("variance", mean_of_squares(squared[..., :variance_size]))
    divided = contract.has("divided")
    root = stage("rms", sqrt(variance + eps)) if divided else stage("inv_rms", rsqrt(variance + eps))
    y = normalized = stage("normalized", divide(value, root) if divided else value * root)
    if weight is not None:
        gain = weight + weight_offset if weight_offset else weight
        if contract.has("fp32_multiply"):
            product = _quotient_in_any_order if divided else product_in_any_order
            y = stage("product", product(value, root, gain))
        else:
            y = stage("product", normalized * gain)
    y = stage("output", y, result=quant is None)

    if scale is not None:
        reciprocal = divide_rn(1.0, scale)
        stage("quantized", limited(y * reciprocal, "e4m3"), result=True)
    if quant == "dynamic":
        row_scale = at_least(divide_rn(largest_magnitude(y), LARGEST["e4m3"]), SMALLEST_SCALE)
        row_scale = stage("scale", row_scale, result=True)
        stage("quantized", limited(divide_rn(y, row_scale), "e4m3"), result=True)


def _quotient_in_any_order(value: Enclosure, root: Enclosure, gain: Enclosure) -> Enclosure:
    """Compute value / root · gain, with the division first, last, or that of the gain."""
    return hull(divide(value, root) * gain, divide(value * gain, root), value * divide(gain, root))
