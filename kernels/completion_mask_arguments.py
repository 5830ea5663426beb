"""Checks of the arguments of a completion mask, with an error for each that is not allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit import UnsupportedCase

STAGES = ("is_eos", "eos_index")
DTYPES = (torch.int64, torch.int32)
LONGEST = 2**30  # column numbers are 32-bit


def check_arguments(ids: Tensor, eos_ids: Tensor, stages: tuple[str, ...] = ()) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for arguments that have no mask."""
    for name, tensor in (("ids", ids), ("eos_ids", eos_ids)):
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} is {tensor.dtype}; token ids are {' or '.join(map(str, DTYPES))}: convert it")
    if ids.dim() == 0:
        raise ValueError("ids has shape (); it must be [..., L]: unsqueeze it")
    if eos_ids.dim() != 1 or eos_ids.numel() == 0:
        raise ValueError(f"eos_ids has shape {tuple(eos_ids.shape)}; it must be [K], with the K ≥ 1 ids that end a row")
    if eos_ids.device != ids.device:
        raise ValueError(f"eos_ids is on {eos_ids.device}, but ids is on {ids.device}: move it there")
    if ids.shape[-1] > LONGEST:
        raise UnsupportedCase(f"the last dimension of ids is {ids.shape[-1]}; rows of up to {LONGEST} are supported")
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"stages: {stage!r} is not one of {', '.join(map(repr, STAGES))}")
