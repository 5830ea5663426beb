"""Checks of the arguments of cross entropy and of its gradient, with an error for each that is not allowed."""

from __future__ import annotations

import torch
from described import Described
from torch import Tensor

from lastbit import UnsupportedCase

REDUCTIONS = ("none", "sum", "mean")
FORWARD_STAGES = ("lse", "losses")
BACKWARD_STAGES = ("lse", "difference", "gradient")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LABEL_DTYPES = (torch.int64, torch.int32)
LARGEST_ROW = 2**30  # column numbers are 32-bit


def check_tensors(logits: Described | Tensor, labels: Described | Tensor, **vectors: Described | Tensor | None) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for tensors that do not fit the logits."""
    if len(logits.shape) != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; it must be [T, V]: flatten the leading dimensions")
    rows, classes = logits.shape
    if not 0 < classes <= LARGEST_ROW:
        raise UnsupportedCase(f"logits has {classes} classes; 1 to {LARGEST_ROW} are supported")
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits is {logits.dtype}; it must be {' or '.join(map(str, DTYPES))}")
    known = {"labels": LABEL_DTYPES, "lse": (torch.float32,)}
    for name, tensor in {"labels": labels, **vectors}.items():
        if tensor is None:
            continue
        if tensor.shape != (rows,):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with logits [{rows}, {classes}] it must be ({rows},)"
            )
        if tensor.dtype not in (dtypes := known.get(name, DTYPES)):
            raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
        if tensor.device != logits.device:
            raise ValueError(f"{name} is on {tensor.device}, but logits is on {logits.device}: move it there")


def check_options(
    label_smoothing: float, softcap: float | None, count: int | None, reduction: str = "mean",
    stages: tuple[str, ...] = (), known: tuple[str, ...] = FORWARD_STAGES,
) -> None:  # fmt: skip
    """Raise ValueError for parameters that have no meaning, or none together."""
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must be from 0 to 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be positive, or None")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: {reduction!r} is not one of {', '.join(map(repr, REDUCTIONS))}")
    if count is not None and (reduction != "mean" or count < 1):
        raise ValueError(f"count={count} with reduction={reduction!r}; it must be 1 or more, and goes with mean")
    for stage in stages:
        if stage not in known:
            raise ValueError(f"stages: {stage!r} is not one of {', '.join(map(repr, known))}")
