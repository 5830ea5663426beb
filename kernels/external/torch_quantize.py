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


TAKES = {"tensors": "non-empty", "x dtype": ("fp32", "fp16"), "dtype": "int8", "least_amax": LEAST_AMAX}


def per_token(x, *, dtype, least_amax, group_size=None):
    """Quantize per token; groups are rows of a view."""
    if bool(x.isnan().any()):
        raise UnsupportedCase("NaN makes the scale of torch.ao NaN")
    rows = x if group_size is None else x.unflatten(-1, (-1, group_size))
    scale, zero = operators().choose_qparams_per_token(rows, torch.int8)
    codes = operators().quantize_per_token(rows, scale, zero, -LARGEST - 1, LARGEST, torch.int8)
    return {"int8_codes": codes.reshape(x.shape), "scale": scale.flatten(x.dim() - 1)}


kernel("quantize", contract="reciprocal", name="torch.ao[per_token]", devices=("cpu",), takes=TAKES)(per_token)
kernel(  # on a GPU torch multiplies by the inverse of the largest code in place of a division
    "quantize", contract="reciprocal+scaled_amax", name="torch.ao[per_token,cuda]", devices=("cuda",), takes=TAKES
)(per_token)
