"""RMSNorm in PyTorch with sums in many orders: all keep the contract, and no two need give the same bits.

What is summed is fp32 (in `fp64` and `fma` wider, which only makes it more accurate); a bound on rounding errors that
any of these exceeds is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from harness.kernel import kernel

Sum = Callable[[Tensor], Tensor]  # [..., N] values to be squared → [..., 1] sum of squares in fp32
Finish = Callable[[Tensor, int, float], Tensor]  # sum, number of terms, eps → inverse rms
Depth = Callable[[int], int]  # number of terms → most additions between a square and the sum


def _padded(terms: Tensor, multiple: int) -> Tensor:
    """Zeros added behind, up to a multiple."""
    return torch.nn.functional.pad(terms, (0, -terms.shape[-1] % multiple))


def _in_turn(terms: Tensor) -> Tensor:
    """One term after the other, along the last dimension. (torch.cumsum adds fp32 in fp64 on the CPU.)"""
    first, *rest = terms.movedim(-1, 0).contiguous().unbind(0)
    total = first.clone()
    for term in rest:
        total += term
    return total.unsqueeze(-1)


def _halves(terms: Tensor) -> Tensor:
    """The second half added to the first, until one term is left."""
    size = terms.shape[-1]
    terms = _padded(terms, 1 << (size - 1).bit_length()) if size else terms
    while terms.shape[-1] > 1:
        first, second = terms.chunk(2, dim=-1)
        terms = first + second
    return terms


def _neighbours(terms: Tensor) -> Tensor:
    """Each term added to the one beside it, until one is left."""
    while terms.shape[-1] > 1:
        terms = _padded(terms, 2)
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms


def library(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def running(x: Tensor) -> Tensor:
    return _in_turn(x.square())


def reversed_(x: Tensor) -> Tensor:
    return _in_turn(x.square().flip(-1))


def halves(x: Tensor) -> Tensor:
    return _halves(x.square())


def neighbours(x: Tensor) -> Tensor:
    return _neighbours(x.square())


def lanes(width: int) -> Sum:
    """`width` lanes, each adding every `width`-th square in turn, then a tree over the lanes."""

    def total(x: Tensor) -> Tensor:
        squares = _padded(x.square(), width).unflatten(-1, (-1, width))
        return _halves(_in_turn(squares.transpose(-2, -1)).squeeze(-1))

    return total


def chunks(size: int) -> Sum:
    """Chunks of `size` neighbours, each by torch, then the chunks in turn, as atomic additions make it."""

    def total(x: Tensor) -> Tensor:
        parts = _padded(x.square(), size).unflatten(-1, (-1, size)).sum(-1)
        return _in_turn(parts)

    return total


def sorted_(descending: bool) -> Sum:
    """By size: the most and the least accurate order for terms of one sign."""

    def total(x: Tensor) -> Tensor:
        return _in_turn(x.square().sort(-1, descending=descending).values)

    return total


def fma(x: Tensor) -> Tensor:
    """64 lanes in which a square is added with one rounding: the exact square in fp64, and the sum rounded to fp32.

    The sum in fp64 is exact in most steps; where it is not, this rounds twice, within an ulp of 2**-29 of one rounding.
    """
    terms = _padded(x.double(), 64).unflatten(-1, (-1, 64))
    total = torch.zeros_like(terms[..., 0, :], dtype=torch.float32)
    for row in terms.unbind(-2):
        total = (total.double() + row * row).float()
    return _halves(total)


def fp64(x: Tensor) -> Tensor:
    return x.double().square().sum(-1, keepdim=True).float()


def divided(total: Tensor, count: int, eps: float) -> Tensor:
    return torch.rsqrt(total / count + eps)


def multiplied(total: Tensor, count: int, eps: float) -> Tensor:
    """The mean by the reciprocal of the count, which rounds twice."""
    return torch.rsqrt(total * (1.0 / torch.tensor(count, dtype=torch.float32, device=total.device)) + eps)


def root_then_reciprocal(total: Tensor, count: int, eps: float) -> Tensor:
    return 1.0 / torch.sqrt(total / count + eps)


def _tree(n: int) -> int:
    return (n - 1).bit_length()


ORDERS: dict[str, tuple[Sum, Finish, Depth | None]] = {
    "library": (library, divided, None),
    "running": (running, divided, None),
    "reversed": (reversed_, root_then_reciprocal, None),
    "halves": (halves, multiplied, _tree),
    "neighbours": (neighbours, divided, _tree),
    "lanes32": (lanes(32), root_then_reciprocal, lambda n: math.ceil(n / 32) + 5),
    "lanes128": (lanes(128), multiplied, lambda n: math.ceil(n / 128) + 7),
    "chunks256": (chunks(256), divided, lambda n: math.ceil(n / 256) + 256),
    "chunks37": (chunks(37), multiplied, lambda n: math.ceil(n / 37) + 37),
    "ascending": (sorted_(False), divided, None),
    "descending": (sorted_(True), root_then_reciprocal, None),
    "fma": (fma, divided, lambda n: math.ceil(n / 64) + 6),
    "fp64": (fp64, divided, lambda n: 1),
}
"""Name → sum, what is made of it, and the height of its tree where it is less than the number of terms."""


def _declare(order: str, total: Sum, finish: Finish, depth: Depth | None) -> None:
    """Register native_multiply with one order of summation, without quantisation."""

    @kernel("rms_norm", contract="native_multiply+rounded_sum", name=f"order[{order}]", depth=depth)
    def native_multiply(x, weight=None, residual=None, *, eps, variance_size=None):
        value, results = _summed(x, residual)
        normalized = value * _inv_rms(value, total, finish, eps, variance_size)
        return {"output": _times_native(normalized, weight, x.dtype)} | results


def _declare_fp32(order: str, total: Sum, finish: Finish, depth: Depth | None) -> None:
    """Register fp32_multiply with one order of summation, and the weight multiplied by the inverse rms first."""

    @kernel("rms_norm", contract="fp32_multiply+rounded_sum", name=f"order[fp32_multiply, {order}]", depth=depth)
    def fp32_multiply(x, weight=None, residual=None, *, eps, variance_size=None, weight_offset=0.0):
        value, results = _summed(x, residual)
        inv_rms = _inv_rms(value, total, finish, eps, variance_size)
        gain = inv_rms if weight is None else inv_rms * (weight.float() + weight_offset)
        return {"output": (value * gain).to(x.dtype)} | results


def _summed(x: Tensor, residual: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    if residual is None:
        return x.float(), {}
    rounded = (x.float() + residual.float()).to(x.dtype)
    return rounded.float(), {"residual_sum": rounded}


def _inv_rms(value: Tensor, total: Sum, finish: Finish, eps: float, variance_size: int | None) -> Tensor:
    squared = value[..., :variance_size]
    return finish(total(squared), squared.shape[-1], eps)


def _times_native(normalized: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    return normalized.to(dtype) if weight is None else (normalized.to(weight.dtype) * weight).to(dtype)


for _name, _parts in ORDERS.items():
    _declare(_name, *_parts)
_declare_fp32("lanes128", *ORDERS["lanes128"])
_declare_fp32("chunks256", *ORDERS["chunks256"])
