"""Quantised weights that several tests use: every scheme, with every dtype that its scale may have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lastbit.numerics.formats import BF16, Format
from lastbit.numerics.quantized import dequantized
from tests.quantizers import Quantized, encoded

# Scheme, group size in weights of 64 columns, and dtype of the scale.
STORED = {
    "int8": ("int8", None, torch.float32),
    "int4_symmetric": ("int4_symmetric", 16, torch.bfloat16),
    "int4_asymmetric": ("int4_asymmetric", 8, torch.float16),
    "int4_asymmetric in bf16": ("int4_asymmetric", 64, torch.bfloat16),
    "mxfp4": ("mxfp4", 32, torch.uint8),
    "mxfp4 in bf16": ("mxfp4", 32, torch.bfloat16),
}
every_storage = pytest.mark.parametrize("storage", STORED)


def weights(*shape: int, seed: int = 0) -> Tensor:
    """Rows of very different size, with a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[-2])[:, None]
    weight[..., 1, :] = 0
    return weight


def stored(storage: str, weight: Tensor) -> Quantized:
    scheme, size, dtype = STORED[storage]
    return encoded(weight, scheme, size, scale_dtype=dtype)


def value(quantized: Quantized, fmt: Format = BF16) -> Tensor:
    """Compute the contract's value of a weight, which leaves no freedom."""
    enclosure = dequantized(*quantized, fmt=fmt)
    assert torch.equal(enclosure.lo.nan_to_num(), enclosure.hi.nan_to_num())
    return enclosure.value
