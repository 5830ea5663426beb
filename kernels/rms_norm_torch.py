"""RMSNorm in PyTorch: written out for each contract, the library function, and the first, compiled.

rms_norm.py says what the contracts mean.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit import UnsupportedCase, kernel

FP8_MAX = 448.0
SMALLEST_SCALE = 1 / (448.0 * 512.0)
RESIDUAL_RULES = ("rounded_sum", "unrounded_sum", "rounded_value")
MOST_GRAPHS = 64


def add_residual(x: Tensor, residual: Tensor | None, rule: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return in fp32 the numbers to square and those to normalize; and with a residual the rounded sum as a result."""
    if residual is None:
        return x.float(), x.float(), {}
    total = x.float() + residual.float()
    residual_sum = total.to(x.dtype)
    rounded = residual_sum.float()
    squared = rounded if rule == "rounded_sum" else total
    value = total if rule == "unrounded_sum" else rounded
    return squared, value, {"residual_sum": residual_sum}


def normalize(squared: Tensor, value: Tensor, eps: float | Tensor, variance_size: int | None) -> Tensor:
    """Return value / sqrt(mean(squared²) + eps), the mean over the first `variance_size` columns; all fp32."""
    variance = squared[..., :variance_size].square().mean(-1, keepdim=True)
    return value * torch.rsqrt(variance + eps)


def multiply_native(normalized: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Round to the weight's dtype, multiply in it, then round to `dtype`."""
    if weight is None:
        return normalized.to(dtype)
    return (normalized.to(weight.dtype) * weight).to(dtype)


def multiply_fp32(normalized: Tensor, weight: Tensor | None, dtype: torch.dtype, offset: float) -> Tensor:
    """Multiply by weight + offset in fp32, then round once to `dtype`."""
    if weight is None:
        return normalized.to(dtype)
    factor = weight.float() + offset if offset else weight.float()
    return (normalized * factor).to(dtype)


def encode(output: Tensor, quant: str | None, scale: Tensor | None) -> dict[str, Tensor]:
    """Return the output as the op's results: as it is, or as e4m3 codes.

    It is clamped before the cast, whose results beyond ±448 depend on the version; clamp keeps a NaN.
    """
    y = output.float()
    if quant is None:
        return {"output": output}
    if quant == "static":
        if scale is None:
            raise ValueError("scale is missing, but quant='static'")
        return {"quantized": (y * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)}
    if quant != "dynamic":
        raise ValueError(f"quant={quant!r} is not one of None, 'static', 'dynamic'")
    amax = torch.where(y.isnan(), 0.0, y.abs()).amax(-1, keepdim=True)
    # Divided by a tensor: CUDA multiplies by the reciprocal of a number, which rounds twice.
    row_scale = (amax / torch.full_like(amax, FP8_MAX)).clamp(min=SMALLEST_SCALE)
    return {"quantized": (y / row_scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), "scale": row_scale}


def _declare_eager(rule: str) -> None:
    """Register the two weight rules with one residual rule."""

    @kernel(
        "rms_norm", contract=f"native_multiply+{rule}", name=f"eager[native_multiply+{rule}]", invariant=("run to run",)
    )
    def native_multiply(x, weight=None, residual=None, scale=None, *, eps, variance_size=None, quant=None):
        squared, value, results = add_residual(x, residual, rule)
        output = multiply_native(normalize(squared, value, eps, variance_size), weight, x.dtype)
        return encode(output, quant, scale) | results

    @kernel(
        "rms_norm", contract=f"fp32_multiply+{rule}", name=f"eager[fp32_multiply+{rule}]", invariant=("run to run",)
    )
    def fp32_multiply(
        x, weight=None, residual=None, scale=None, *, eps, variance_size=None, weight_offset=0.0, quant=None
    ):
        squared, value, results = add_residual(x, residual, rule)
        output = multiply_fp32(normalize(squared, value, eps, variance_size), weight, x.dtype, weight_offset)
        return encode(output, quant, scale) | results


for _rule in RESIDUAL_RULES:
    _declare_eager(_rule)


@kernel("rms_norm", contract="fp32_multiply", name="F.rms_norm", invariant=("run to run",))
def library_rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """Call the library; a weight of another dtype is multiplied in fp32, too, and torch warns of an unfused kernel.

    On CUDA, for some N, a row whose sum of squares is infinite becomes NaN as a whole: docs/measurements/findings.md.
    """
    if x.is_cuda and x.float().square().sum(-1).isinf().any():
        raise UnsupportedCase("for some N, torch's CUDA kernel turns a row whose sum of squares is infinite into NaN")
    return F.rms_norm(x, x.shape[-1:], weight, eps)


@functools.cache
def _compiled():
    """Compile the native-multiply source, once per process, at its first call."""

    def native_rms_norm(x: Tensor, weight: Tensor | None, eps: Tensor) -> Tensor:
        return multiply_native(normalize(x.float(), x.float(), eps, None), weight, x.dtype)

    return torch.compile(native_rms_norm, dynamic=True, fullgraph=True)


def _at_the_start(x: Tensor) -> Tensor:
    """Copy a tensor unless it is contiguous and begins where its memory does: another place makes another graph."""
    return x.clone(memory_format=torch.contiguous_format) if x.storage_offset() else x.contiguous()


@kernel("rms_norm", contract="fp32_multiply", name="torch.compile[native_multiply]")
def compiled_rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """Claim fp32_multiply: Inductor drops the rounding to the weight's dtype that the source asks for.

    x and the weight are copied to contiguous tensors that begin where their memory does, and eps is a tensor. Still
    dtypes, sizes of 1 and more than 4,096 columns make other graphs. Reaching the limit of graphs is an error, where
    the default is to run the source eagerly, in silence and under another contract. On an H200 its bits were seen to
    change with the calls before: docs/measurements/invariance_h200.md.
    """
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = _at_the_start(x.reshape(-1, x.shape[-1]))
    weight = weight if weight is None else _at_the_start(weight)
    with torch._dynamo.config.patch(recompile_limit=MOST_GRAPHS, fail_on_recompile_limit_hit=True):
        return _compiled()(rows, weight, torch.tensor(eps, dtype=torch.float32, device=x.device)).view(x.shape)
