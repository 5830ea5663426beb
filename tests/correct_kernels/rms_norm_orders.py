"""RMSNorm in PyTorch with sums in many orders: all keep the contract, and no two need give the same bits.

What is summed is fp32 (in `fp64` and `fma` wider, which only makes it more accurate); a bound on rounding errors that
any of these exceeds is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from summation import SUMS, Depth, Sum, halves
from torch import Tensor

from lastbit.kernel import kernel

Finish = Callable[[Tensor, int, float], Tensor]  # sum, number of terms, eps → inverse rms


def squared(total: Sum) -> Sum:
    """Add the squares."""
    return lambda x: total(x.square())


def fma(x: Tensor) -> Tensor:
    """64 lanes in which a square is added with one rounding: the exact square in fp64, and the sum rounded to fp32.

    The sum in fp64 is exact in most steps; where it is not, this rounds twice, within an ulp of 2**-29 of one rounding.
    """
    terms = torch.nn.functional.pad(x.double(), (0, -x.shape[-1] % 64)).unflatten(-1, (-1, 64))
    total = torch.zeros_like(terms[..., 0, :], dtype=torch.float32)
    for row in terms.unbind(-2):
        total = (total.double() + row * row).float()
    return halves(total)


def fp64(x: Tensor) -> Tensor:
    return x.double().square().sum(-1, keepdim=True).float()


def divided(total: Tensor, count: int, eps: float) -> Tensor:
    return torch.rsqrt(total / count + eps)


def multiplied(total: Tensor, count: int, eps: float) -> Tensor:
    """Multiply by the reciprocal of the count, which rounds twice."""
    return torch.rsqrt(total * (1.0 / torch.tensor(count, dtype=torch.float32, device=total.device)) + eps)


def root_then_reciprocal(total: Tensor, count: int, eps: float) -> Tensor:
    return 1.0 / torch.sqrt(total / count + eps)


FINISHES = {
    "reversed": root_then_reciprocal,
    "halves": multiplied,
    "lanes32": root_then_reciprocal,
    "lanes128": multiplied,
    "chunks37": multiplied,
    "descending": root_then_reciprocal,
}
ORDERS: dict[str, tuple[Sum, Finish, Depth | None]] = {
    **{name: (squared(total), FINISHES.get(name, divided), depth) for name, (total, depth) in SUMS.items()},
    "fma": (fma, divided, lambda n: math.ceil(n / 64) + 6),
    "fp64": (fp64, divided, lambda n: 1),
}
"""Name → sum of squares, what is made of it, and the height of its tree where it is less than the number of terms."""


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
