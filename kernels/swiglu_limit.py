"""The limit of a SwiGLU: silu(min(gate, L)) · min(max(up, -L), L), and no gradient beyond it.

The limit is a number of the activations' dtype, so that rounding a value never carries it past the limit.
"""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def limited(gate, up, limit):
    """Limit gate and up before the activation; a limit of None changes nothing. NaN stays NaN."""
    if limit is not None:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up


@triton.jit
def through_limit(grad_gate, grad_up, gate, up, limit):
    """Return the gradients of gate and up from the gradients of the limited ones."""
    if limit is not None:
        grad_gate = tl.where(gate > limit, 0.0, grad_gate)
        grad_up = tl.where(tl.abs(up) > limit, 0.0, grad_up)
    return grad_gate, grad_up


def argument(limit: float) -> float | None:
    """Return the limit as the Triton functions take it."""
    return None if limit == inf else limit


def limited_in_torch(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Limit gate and up in their dtypes. Unlike with clamp, the gradient at a limit is whole in every torch."""
    if limit == inf:
        return gate, up
    return torch.where(gate > limit, limit, gate), torch.where(up.abs() > limit, limit * up.sign(), up)


def check_limit(limit: float, dtype: torch.dtype) -> None:
    """Raise ValueError unless the limit is positive, and a number of the dtype or infinity."""
    if not limit > 0 or float(torch.tensor(limit, dtype=torch.float64).to(dtype)) != limit:
        raise ValueError(f"swiglu_limit={limit} must be positive and a number of {dtype}; leave it out for no limit")
