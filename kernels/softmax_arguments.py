"""Checks of the arguments of a softmax, with an error for each that is not allowed."""

from __future__ import annotations

import torch
from described import Described

from lastbit import UnsupportedCase

STAGES = ("scaled", "masked", "total")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_ROW = 2**30  # column numbers are 32-bit


def check_arguments(x: Described, mask: Described | None, keep: Described | None, stages: tuple[str, ...]) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for tensors that do not fit x, or an unknown stage."""
    if not x.shape:
        raise ValueError("x has no dimension to take a softmax over")
    if not 0 < x.shape[-1] <= LARGEST_ROW:
        raise UnsupportedCase(f"the last dimension of x is {x.shape[-1]}; rows of 1 to {LARGEST_ROW} are supported")
    for name, tensor, dtypes in (("x", x, DTYPES), ("mask", mask, DTYPES), ("keep", keep, (torch.bool,))):
        if tensor is None:
            continue
        if tensor.shape != x.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but x {tuple(x.shape)}: expand it")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}: move it there")
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"stages: {stage!r} is not one of {', '.join(map(repr, STAGES))}")
