"""Checks of the arguments of SwiGLU and of its gradient, with an error for each that is not allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple

import torch
from described import Described
from swiglu_limit import check_limit
from torch import Tensor

from lastbit import UnsupportedCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STAGES = ("silu",)
BACKWARD_STAGES = ("silu", "grad_silu")
LARGEST_ROW = 2**30  # column numbers are 32-bit


class SwigluParameters(NamedTuple):
    """The parameters of a call."""

    interleaved: bool = False
    swiglu_limit: float = inf
    alpha: float = 1.0
    up_offset: float = 0.0


def gate_and_up(x: Tensor, up: Tensor | None, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return gate and up: the two tensors, or views of the two halves of one.

    Raises:
        ValueError: x does not hold two halves, or `interleaved` with two tensors.
    """
    if up is not None:
        if interleaved:
            raise ValueError("interleaved=True says how x holds gate and up, but up is a tensor of its own")
        return x, up
    if not x.dim() or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; without up it must be [..., 2I] and hold gate and up")
    width = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :width], x[..., width:])


def check_arguments(
    tensors: Mapping[str, Tensor] | Mapping[str, Described],
    options: SwigluParameters,
    stages: Collection[str] = (),
    known: Collection[str] = STAGES,
) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for arguments that do not fit together; one tensor is `gate`."""
    gate = tensors["gate"]
    if not gate.shape:
        raise ValueError("x has shape (); it must be [..., I], or [..., 2I] without up")
    if gate.shape[-1] > LARGEST_ROW:
        raise UnsupportedCase(f"the rows have {gate.shape[-1]} columns; up to {LARGEST_ROW} are supported")
    if gate.dtype not in DTYPES:
        raise TypeError(f"x is {gate.dtype}; it must be {' or '.join(map(str, DTYPES))}")
    for name, tensor in tensors.items():
        if tensor.shape != gate.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; as the gate it must be {tuple(gate.shape)}")
        if tensor.dtype != gate.dtype:
            raise TypeError(f"{name} is {tensor.dtype}; as x it must be {gate.dtype}")
        if tensor.device != gate.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {gate.device}: move it there")
    check_limit(options.swiglu_limit, gate.dtype)
    for name, number in {"alpha": options.alpha, "up_offset": options.up_offset}.items():
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise ValueError(f"{name}={number} is no number in fp32; it must be finite")
    for stage in stages:
        if stage not in known:
            raise ValueError(f"stages: {stage!r} is not one of {', '.join(map(repr, known))}")
