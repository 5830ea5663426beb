"""Sums of products of fp32 in several ways, over the last dimension, which is dropped; the factors are broadcast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from summation import Sum
from torch import Tensor

from harness.numerics.formats import FP32, round_to

Dot = Callable[[Tensor, Tensor], Tensor]

BLOCK, GUARD_BITS = 16, 2  # of a tensor core: products per step, and bits beyond 24 that are kept while they are added


def separately(total: Sum) -> Dot:
    """Every product rounded, then added."""
    return lambda a, b: total(a * b)[..., 0]


def fused(a: Tensor, b: Tensor) -> Tensor:
    """One product after the other, each added with one rounding, but for the rare double rounding of a sum in fp64."""
    total = torch.zeros(torch.broadcast_shapes(a.shape, b.shape)[:-1])
    for x, y in zip(a.double().unbind(-1), b.double().unbind(-1), strict=True):
        total = (total.double() + x * y).float()
    return total


def truncated(a: Tensor, b: Tensor) -> Tensor:
    """As a tensor core of an H200 adds: 16 products and the sum so far are aligned to the largest and cut off there.

    So a small product is lost bit by bit, whatever the others add up to, and the sum is cut to 24 bits. Sums of 64 to
    2048 products, all but the first of them small, were off by just as much on an H200.
    """
    terms = torch.nn.functional.pad(a.double() * b.double(), (0, -a.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    total = torch.zeros_like(terms[..., 0, :1])
    for block in terms.unbind(-2):
        together = torch.cat([total, block], -1)
        exponent = torch.frexp(together.abs().amax(-1, keepdim=True)).exponent
        unit = torch.ldexp(torch.ones_like(total), exponent - 24 - GUARD_BITS)
        cut = round_to(((together / unit).trunc() * unit).sum(-1, keepdim=True), FP32, mode="zero")
        total = torch.where(together.isfinite().all(-1, keepdim=True), cut, together.sum(-1, keepdim=True))
    return total[..., 0].float()
