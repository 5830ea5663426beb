"""Checks of the arguments of attention, with an error for each that is not allowed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastbit import UnsupportedCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDEST = 256  # numbers of a head: a tile of keys and one of values are held at once
MOST_KEYS = 2**30  # numbers of keys are 32-bit


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, scale: float, cap: float | None = None
) -> None:
    """Raise for arguments that have no attention.

    Raises:
        ValueError: a shape, a device or a number.
        TypeError: a dtype.
        UnsupportedCase: wider heads or more keys than kernels take.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [batch, tokens, heads, numbers]")
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, q {q.dtype}; all must be one of {', '.join(map(str, DTYPES))}")
    batch, _, heads, width = q.shape
    keys, groups = k.shape[1:3]
    expected = {"k": (batch, keys, groups, width), "v": (batch, keys, groups, v.shape[3])}
    given = {"k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    for name, tensor in given.items():
        if tuple(tensor.shape) != (shape := expected.get(name, (heads,))):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; beside q {tuple(q.shape)} it must be {shape}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, but q is on {q.device}: move it there")
    if not keys or not groups or heads % groups:
        raise ValueError(f"k has {keys} keys of {groups} heads; there must be keys, and heads that divide {heads}")
    for name, number in (("scale", scale), ("cap", 1.0 if cap is None else cap)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name}={number} must be positive and finite")
    if max(width, v.shape[3]) > WIDEST or keys > MOST_KEYS:
        raise UnsupportedCase(f"{keys} keys of {width} and {v.shape[3]} numbers; {WIDEST} numbers are supported")
