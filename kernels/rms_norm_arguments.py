"""Checks of the arguments of RMSNorm, with an error for each that is not allowed."""

from __future__ import annotations

import torch
from described import Described

from lastbit import UnsupportedCase

WEIGHT_RULES = ("native_multiply", "fp32_multiply")
RESIDUAL_RULES = ("rounded_sum", "unrounded_sum", "rounded_value")
STAGES = ("variance", "inv_rms", "normalized", "product", "output")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_ROW = 2**30  # column numbers are 32-bit


def check_options(
    scale: Described | None,
    weight_offset: float,
    quant: str | None,
    weight_rule: str,
    residual_rule: str,
    stages: tuple[str, ...],
) -> None:
    """Raise ValueError for an unknown rule, mode or stage, or for an argument that they do not go with."""
    named = [
        ("weight_rule", weight_rule, WEIGHT_RULES),
        ("residual_rule", residual_rule, RESIDUAL_RULES),
        ("quant", quant, (None, "static", "dynamic")),
        *(("stages", stage, STAGES) for stage in stages),
    ]
    for name, value, known in named:
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, known))}")
    if weight_offset and weight_rule == "native_multiply":
        raise ValueError(f"weight_offset={weight_offset} has a meaning only with fp32_multiply")
    if (scale is not None) != (quant == "static"):
        state = "missing" if scale is None else "given"
        raise ValueError(f"scale is {state}, but quant={quant!r}; scale belongs to quant='static'")


def check_tensors(
    x: Described,
    weight: Described | None,
    residual: Described | None,
    scale: Described | None,
    variance_size: int | None,
) -> None:
    """Raise ValueError, TypeError or UnsupportedCase for tensors that do not fit x."""
    if not x.shape:
        raise ValueError("x has no dimension to normalize over")
    n = x.shape[-1]
    if not 0 < n <= LARGEST_ROW:
        raise UnsupportedCase(f"the last dimension of x is {n}; rows of 1 to {LARGEST_ROW} elements are supported")
    if variance_size is not None and not 0 < variance_size <= n:
        raise ValueError(f"variance_size={variance_size} is not between 1 and the {n} columns of x")
    expected = {
        "x": (x, x.shape, DTYPES),
        "weight": (weight, (n,), DTYPES),
        "residual": (residual, x.shape, (x.dtype,)),
        "scale": (scale, (1,), (torch.float32,)),
    }
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with x {tuple(x.shape)} it must be {tuple(shape)}"
            )
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}; with x {x.dtype} it must be {' or '.join(map(str, dtypes))}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}")
