"""Checks of the arguments of a quantization, with an error for each that is not allowed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from described import Described
from torch import Tensor

from lastbit import UnsupportedCase

LARGEST: Mapping[str, float] = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
CODES: Mapping[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
STAGES = ("amax", "scaled")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_ROW = 2**30  # column numbers are 32-bit
SMALLEST_POWER = 2.0**-126


def check_arguments(
    x: Tensor | Described,
    scale: Tensor | Described | None,
    dtype: str,
    group_size: int | None,
    ue8m0: bool,
    least_amax: float,
    least_scale: float,
) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for arguments that have no codes."""
    if dtype not in CODES:
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(map(repr, CODES))}")
    if not x.shape:
        raise ValueError("x has no dimension; it must be [..., N]: unsqueeze it")
    if x.shape[-1] > LARGEST_ROW:
        raise UnsupportedCase(f"the last dimension of x is {x.shape[-1]}; rows of up to {LARGEST_ROW} are supported")
    if x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype}; it must be {' or '.join(map(str, DTYPES))}")
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size={group_size} does not divide {x.shape[-1]}, the width of x")
    for name, value in {"least_amax": least_amax, "least_scale": least_scale}.items():
        if not 0.0 <= value < float("inf"):
            raise ValueError(f"{name}={value} is no finite number from 0 on")
    if scale is not None:
        _check_scale(x, scale)
        if group_size is not None or ue8m0 or least_amax or least_scale:
            raise ValueError(
                "a scale is given, one for the whole tensor; group_size, ue8m0, least_amax and least_scale say how one "
                "is found: leave them out"
            )
    elif ue8m0 and max(least_amax / LARGEST[dtype], least_scale) < SMALLEST_POWER:
        raise ValueError(
            f"ue8m0 with least_amax={least_amax} and least_scale={least_scale}: a scale of zero is no power of two; "
            "give one of them"
        )


def _check_scale(x: Tensor | Described, scale: Tensor | Described) -> None:
    if tuple(scale.shape) != (1,):
        raise ValueError(f"scale has shape {tuple(scale.shape)}; it must be (1,), one for the whole tensor")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale is {scale.dtype}; it must be torch.float32")
    if scale.device != x.device:
        raise ValueError(f"scale is on {scale.device}, but x is on {x.device}: move it there")
