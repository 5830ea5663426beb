"""Quantization in PyTorch, written out for the contracts of shipped kernels, which quantize.py explains."""

from __future__ import annotations

import torch
from quantize_arguments import CODES, LARGEST, STAGES, check_arguments
from torch import Tensor

from lastbit import kernel

FRACTION = (1 << 23) - 1
EXPONENT = 0xFF << 23


def divided(a: Tensor | float, b: Tensor) -> Tensor:
    """Return a / b with tensors on both sides: CUDA multiplies by the reciprocal of a number, which rounds twice."""
    return (torch.full_like(b, a) if isinstance(a, float) else a) / b


def power_from(x: Tensor) -> Tensor:
    """Return the smallest power of two that is not less than x > 0 (fp32), by its bits."""
    return ((x.view(torch.int32) + FRACTION) & EXPONENT).view(torch.float32)


def power_to(x: Tensor) -> Tensor:
    """Return the largest power of two that is not larger than x > 0 (fp32), by its bits."""
    return (x.view(torch.int32) & EXPONENT).view(torch.float32)


def encode(values: Tensor, dtype: str, integers: str = "") -> Tensor:
    """Encode fp32 numbers. They are clamped first, because casts of numbers out of range depend on the version."""
    limited = values.clamp(-128.0 if dtype == "int8" else -LARGEST[dtype], LARGEST[dtype])
    if dtype == "int8" and integers == "half_away":
        limited = torch.copysign((limited.abs() + 0.5).floor(), limited)
    elif dtype == "int8" and not integers:
        limited = limited.round()
    return limited.to(CODES[dtype])


def quantized(
    x: Tensor,
    scale: Tensor | None,
    *,
    dtype: str,
    group_size: int | None,
    ue8m0: bool,
    least_amax: float,
    least_scale: float,
    codes: str,
    scale_rule: str = "",
    exponent: str = "",
    integers: str = "",
) -> dict[str, Tensor]:
    """Return codes, the scale where none is given, and the stages; the last four arguments say the contract."""
    check_arguments(x, scale, dtype, group_size, ue8m0, least_amax, least_scale)
    if scale is not None:
        values = x.float()
        scaled = values / scale if codes == "quotient" else values * scale.reciprocal()
        return {f"{dtype}_codes": encode(scaled, dtype, integers), "scaled": scaled}
    groups = x.float() if group_size is None else x.float().unflatten(-1, (-1, group_size))
    amax = largest_magnitude(groups).clamp(min=least_amax)
    factor = torch.where(amax > 0, divided(LARGEST[dtype], amax), 1.0)
    if scale_rule == "reciprocal_scale":
        factor = power_to(factor) if ue8m0 else factor
        own = factor.reciprocal().clamp(min=least_scale)
    else:
        largest = torch.full_like(amax, LARGEST[dtype])
        own = (amax * largest.reciprocal() if scale_rule == "scaled_amax" else amax / largest).clamp(min=least_scale)
        if ue8m0:
            own = torch.exp2(own.log2().ceil()) if exponent == "logarithm" else power_from(own)
    follows = codes == "reciprocal" or (ue8m0 and scale_rule != "reciprocal_scale")
    scaled = groups / own if codes == "quotient" else groups * (own.reciprocal() if follows else factor)
    if group_size is not None:
        scaled, own, amax = scaled.flatten(-2), own[..., 0], amax[..., 0]
    return {f"{dtype}_codes": encode(scaled, dtype, integers), "scale": own, "amax": amax, "scaled": scaled}


def largest_magnitude(groups: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [..., 1]; NaN elements are ignored, 0 where there is no other."""
    if groups.shape[-1] == 0:
        return groups.new_zeros((*groups.shape[:-1], 1))
    return torch.where(groups.isnan(), 0.0, groups.abs()).amax(-1, keepdim=True)


def _declare(contract: str, **rules: str) -> None:
    @kernel(
        "quantize",
        contract=contract,
        name=f"eager[{contract}]",
        stages=STAGES,
        invariant=("rows", "permutation", "padding", "layout", "shards", "run to run"),
    )
    def eager(x, scale=None, *, dtype, group_size=None, ue8m0=False, least_amax=0.0, least_scale=0.0, stages=()):
        options = {"group_size": group_size, "ue8m0": ue8m0, "least_amax": least_amax, "least_scale": least_scale}
        found = quantized(x, scale, dtype=dtype, **options, **rules)
        return {name: tensor for name, tensor in found.items() if name not in STAGES or name in stages}


_declare("quotient", codes="quotient")
_declare("inverted+scaled_amax", codes="inverted", scale_rule="scaled_amax")
_declare("inverted+reciprocal_scale", codes="inverted", scale_rule="reciprocal_scale")
_declare("quotient+logarithm+truncated", codes="quotient", exponent="logarithm", integers="truncated")
