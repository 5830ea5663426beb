"""Two tensors of one dtype, bit by bit: which elements differ, and how far apart they are. No contract is asked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastbit.inputs.bits import bits_of
from lastbit.numerics import format_of
from lastbit.numerics.formats import ordinals


def bits_with_one_nan(x: Tensor) -> Tensor:
    """Return the bits of every element as integers, with a single pattern for all kinds of NaN."""
    bits = bits_of(x)
    if not x.is_floating_point():
        return bits
    all_ones = 255 if bits.dtype is torch.uint8 else -1
    seen = x.to(torch.float32) if x.element_size() == 1 else x  # not every device compares numbers of 8 bits
    return bits.masked_fill(seen.isnan(), all_ones)


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return the distance of two tensors of one dtype in its ulp, as fp64; infinite where one alone is NaN."""
    first, second = a.to(torch.float64), b.to(torch.float64)
    if not a.is_floating_point():
        return (first - second).abs()
    unknown = torch.isnan(first) | torch.isnan(second)
    fmt = format_of(a.dtype)
    steps = ordinals(first.nan_to_num(0.0, math.inf, -math.inf), fmt) - ordinals(
        second.nan_to_num(0.0, math.inf, -math.inf), fmt
    )
    return torch.where(unknown, math.inf, steps.abs().to(torch.float64))
