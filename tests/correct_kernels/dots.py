"""Sums of products of fp32 in several ways, over the last dimension, which is dropped; the factors are broadcast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from summation import Sum
from torch import Tensor

from lastbit.numerics.formats import FP16, FP32, round_to

Dot = Callable[[Tensor, Tensor], Tensor]

BLOCK, LAST_BIT = 16, 25  # of a tensor core: products per step, and where all numbers end that are added in it
_NO_EXPONENT = -1000  # of zero


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
    """As a tensor core of an H200 adds: 16 products and the sum so far are cut off where the largest of them ends.

    So a small product is lost bit by bit, whatever the others add up to, and the sum is cut to 24 bits: see
    docs/measurements/tensor_cores.md. A product is as large as its exponents say, and subnormal operands have that of
    the smallest normal number; operands that are numbers of fp16 are taken to be fp16.
    """
    exact = a.double() * b.double()
    smallest = FP16.min_exponent if all(torch.equal(x.half().float(), x) for x in (a, b)) else FP32.min_exponent
    exponents = torch.where(exact == 0, _NO_EXPONENT, _exponent(a, smallest) + _exponent(b, smallest))
    padding = (0, -exact.shape[-1] % BLOCK)
    blocks = torch.nn.functional.pad(exact, padding).split(BLOCK, -1)
    sizes = torch.nn.functional.pad(exponents, padding, value=_NO_EXPONENT).split(BLOCK, -1)
    total = exact.new_zeros((*exact.shape[:-1], 1))
    for block, size in zip(blocks, sizes, strict=True):
        own = torch.where(total == 0, _NO_EXPONENT, _exponent(total, FP32.min_exponent))
        largest = torch.maximum(size.amax(-1, keepdim=True), own).clamp(min=-500)
        unit = torch.ldexp(torch.ones_like(total), largest - LAST_BIT)
        together = torch.cat([total, block], -1)
        cut = round_to(((together / unit).trunc() * unit).sum(-1, keepdim=True), FP32.toward("zero"))
        total = torch.where(together.isfinite().all(-1, keepdim=True), cut, together.sum(-1, keepdim=True))
    return total[..., 0].float()


def _exponent(x: Tensor, smallest: int) -> Tensor:
    return (torch.frexp(x).exponent - 1).clamp(min=smallest)
