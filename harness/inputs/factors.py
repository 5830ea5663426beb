"""Regimes of the factors of dots: sums of their products keep a scale of one, or are exact in fp32 in any order.

With x `few`, gate weights `fractions`, their adapters `fractions` and `quarters`, up weights `integers` or `signs` and
down weights `sparse_signs`, a whole mixture of experts is exact up to its roundings, which all are visible in bf16 and
fp16: from a width of about 64 on, nearly all gates lie above 17.33, where the sigmoid is 1, and they need more bits
than the format has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastbit.inputs.draws import DrawnBlock

_FEW = 8


def fan_in(block: DrawnBlock) -> Tensor:
    """Draw normal values divided by the root of the width: dots of such rows with normal ones have variance 1."""
    return block.normal(block.elements) / torch.full_like(block.elements, math.sqrt(block.width), dtype=torch.float64)


def few(block: DrawnBlock) -> Tensor:
    """Draw integers from 1 to 4 in about eight columns of each row, whatever the width, and zeros."""
    kept = block.integers(block.elements, 0, max(1, block.width // _FEW) - 1, "kept") == 0
    return torch.where(kept, block.integers(block.elements, 1, 4), 0).to(torch.float64)


def fractions(block: DrawnBlock) -> Tensor:
    """Draw multiples of 2**-8 between 0 and 1, both excluded."""
    return block.integers(block.elements, 1, 255).to(torch.float64) * 2.0**-8


def quarters(block: DrawnBlock) -> Tensor:
    """Draw 0, 0.25, 0.5 or 0.75."""
    return block.integers(block.elements, 0, 3).to(torch.float64) * 0.25


def sparse_signs(block: DrawnBlock) -> Tensor:
    """Draw 1 or -1 in one column of sixteen, but about four per row at least, and zeros."""
    kept = block.integers(block.elements, 0, max(1, min(16, block.width // 4)) - 1, "kept") == 0
    return torch.where(kept, block.signs(block.elements), 0.0)
