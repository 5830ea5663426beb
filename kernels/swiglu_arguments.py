"""What the arguments of SwiGLU and of its gradient may be, and the errors for what they may not."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from typing import NamedTuple

import torch
from described import Described
from swiglu_limit import check_limit
from torch import Tensor

from harness.kernel import UnsupportedCase

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STAGES = ("silu",)
BACKWARD_STAGES = ("silu", "grad_silu")
LARGEST_ROW = 2**30  # column numbers are 32-bit


class Options(NamedTuple):
    """The parameters of a call."""

    interleaved: bool = False
    swiglu_limit: float = inf
    alpha: float = 1.0
    up_offset: float = 0.0


def gate_and_up(x: Tensor, up: Tensor | None, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The two tensors, or views of the two halves of one.

    Raises:
        ValueError: x does not hold two halves.
    """
    if up is not None:
        return x, up
    if not x.dim() or x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; without up it must be [..., 2I] and hold gate and up")
    width = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :width], x[..., width:])


def check_arguments(
    x: Tensor | Described,
    up: Tensor | Described | None,
    dy: Tensor | Described | None,
    options: Options,
    stages: Collection[str] = (),
    known: Collection[str] = STAGES,
) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for arguments that do not fit together."""
    if not x.shape:
        raise ValueError("x has shape (); it must be [..., I], or [..., 2I] without up")
    if up is None and x.shape[-1] % 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; without up it must be [..., 2I] and hold gate and up")
    if up is not None and options.interleaved:
        raise ValueError("interleaved=True says how x holds gate and up, but up is a tensor of its own")
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}; it must be {' or '.join(map(str, DTYPES))}")
    width = x.shape[-1] if up is not None else x.shape[-1] // 2
    if width > LARGEST_ROW:
        raise UnsupportedCase(f"the rows have {width} columns; up to {LARGEST_ROW} are supported")
    for name, tensor in {"up": up, "dy": dy}.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != (*x.shape[:-1], width):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with x {tuple(x.shape)} it must be {(*x.shape[:-1], width)}"
            )
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {x.dtype}, as x")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}: move it there")
    check_limit(options.swiglu_limit, x.dtype)
    for name, number in {"alpha": options.alpha, "up_offset": options.up_offset}.items():
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise ValueError(f"{name}={number} is no number in fp32; it must be finite")
    for stage in stages:
        if stage not in known:
            raise ValueError(f"stages: {stage!r} is not one of {', '.join(map(repr, known))}")
