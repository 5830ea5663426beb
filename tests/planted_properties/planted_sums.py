"""Sums whose order is written out, so that a planted kernel differs in that order alone, on every device."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def striped(values, lanes):
    """Add the last dimension in fp32: lane l adds values l, l + lanes, … in order, then halves are added.

    `lanes` is a power of two.
    """
    values = F.pad(values.float(), (0, -values.shape[-1] % lanes)).unflatten(-1, (-1, lanes))
    total = values[..., 0, :]
    for i in range(1, values.shape[-2]):
        total = total + values[..., i, :]
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total


def normalized(value, total, weight, eps):
    """value / sqrt(total / width + eps) · weight in fp32, rounded once; `total` is the sum of squares [..., 1]."""
    inverse = torch.rsqrt(total / value.shape[-1] + eps)
    return (value.float() * inverse * weight.float()).to(value.dtype)


def rms_norm(x, weight, eps, lanes):
    """RMSNorm with squares added in so many lanes."""
    return normalized(x, striped(x.float().square(), lanes), weight, eps)
