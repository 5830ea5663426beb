"""Quantization per token of torch.ao, as exported programs call it (`torch.ops.quantized_decomposed`).

It computes in the dtype of x where that is bf16: the scale is rounded to bf16, and so is x · (1 / scale) before it is
rounded to an integer. No contract here does that; docs/contracts/quantize.md says how many codes it changes.
"""

from __future__ import annotations

import functools
import importlib

import torch

from lastbit import UnsupportedCase, kernel

LEAST_AMAX = 1e-5
LARGEST = 127


@functools.cache
def operators():
    """Return the operators, which are registered by an import."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")
    return torch.ops.quantized_decomposed


@kernel("quantize", contract="reciprocal+scaled_amax", name="torch.ao[per_token,cuda]", devices=("cuda",))
def per_token_on_cuda(x, *, dtype, least_amax, group_size=None):
    """Quantize per token on a GPU, where torch multiplies by the inverse of the largest code in place of a division."""
    return per_token(x, dtype=dtype, least_amax=least_amax, group_size=group_size)


@kernel("quantize", contract="reciprocal", name="torch.ao[per_token]", devices=("cpu",))
def per_token(x, *, dtype, least_amax, group_size=None):
    """Quantize per token; groups are rows of a view."""
    if dtype != "int8" or least_amax != LEAST_AMAX:
        raise UnsupportedCase(f"dtype={dtype!r} and least_amax={least_amax}: torch.ao has int8 and {LEAST_AMAX}")
    if x.dtype == torch.bfloat16:
        raise UnsupportedCase("torch.ao computes in bf16 there")
    if not x.numel() or bool(x.isnan().any()):
        raise UnsupportedCase("torch.ao has no amax of no elements, and NaN makes its scale NaN")
    rows = x if group_size is None else x.unflatten(-1, (-1, group_size))
    scale, zero = operators().choose_qparams_per_token(rows, torch.int8)
    codes = operators().quantize_per_token(rows, scale, zero, -LARGEST - 1, LARGEST, torch.int8)
    if group_size is None:
        return {"int8_codes": codes, "scale": scale}
    return {"int8_codes": codes.flatten(-2), "scale": scale[..., 0]}
