"""Checks of the arguments of the gated LayerNorm and of its gradient, with an error for each that is not allowed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from described import Described
from torch import Tensor

from lastbit import UnsupportedCase

ACTIVATIONS = ("silu", "sigmoid")
STATISTICS = ("mean", "variance", "rstd")
STAGES = ("gate", "gated_input", *STATISTICS, "normalized", "affine")
BACKWARD_STAGES = (
    *("gate", "gated_input", "normalized", "affine", "daffine", "dnormalized", "c1", "c2", "dgated_input"),
)  # fmt: skip
PER_GROUP = (*STATISTICS, "c1", "c2")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_ROW = 2**30  # column numbers are 32-bit
LARGEST_GROUP = 1 << 16  # bytes


def check_forward(
    x: Described | Tensor,
    weight: Described | Tensor,
    bias: Described | Tensor | None,
    z: Described | Tensor | None,
    group_size: int | None,
    activation: str,
    stages: tuple[str, ...],
) -> int:
    """Check the arguments of a forward pass, and return the number of columns in a group.

    Raises:
        ValueError, TypeError: arguments that do not fit together.
        UnsupportedCase: rows or groups of a size that no block covers.
    """
    _check_options(activation, stages, STAGES)
    _check_tensors(x, {"z": z}, {"weight": weight, "bias": bias})
    return _checked_group_size(x, group_size)


def check_backward(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    activation: str,
    stages: tuple[str, ...],
) -> int:
    """Return the number of columns in a group; raise as `check_forward` does."""
    _check_options(activation, stages, BACKWARD_STAGES)
    _check_tensors(x, {"dy": dy, "z": z}, {"weight": weight, "bias": bias})
    _check_statistics(x, rstd, mean)
    return _checked_group_size(x, x.shape[-1] // rstd.shape[-1])


def _check_options(activation: str, stages: tuple[str, ...], known_stages: tuple[str, ...]) -> None:
    """Raise ValueError for an unknown activation or stage."""
    known = {"activation": ([activation], ACTIVATIONS), "stages": (stages, known_stages)}
    for name, (values, allowed) in known.items():
        for value in values:
            if value not in allowed:
                raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(repr, allowed))}")


def _checked_group_size(x: Described | Tensor, group_size: int | None) -> int:
    """Return the number of columns in a group.

    Raises:
        ValueError: x has no columns to normalize over, or groups of this size do not fill its rows.
        UnsupportedCase: rows or groups of a size that no block covers.
    """
    columns = x.shape[-1]
    if not 0 < columns <= LARGEST_ROW:
        raise UnsupportedCase(
            f"the last dimension of x is {columns}; rows of 1 to {LARGEST_ROW} elements are supported"
        )
    size = columns if group_size is None else group_size
    if size < 1 or columns % size:
        raise ValueError(
            f"group_size={group_size} does not divide the {columns} columns of x; "
            "pass a divisor, or None to normalize over whole rows"
        )
    if size * x.dtype.itemsize > LARGEST_GROUP:
        raise UnsupportedCase(
            f"group_size={size} of {x.dtype} takes {size * x.dtype.itemsize} bytes, but a program holds a whole group: "
            f"at most {LARGEST_GROUP} bytes, which is group_size={LARGEST_GROUP // x.dtype.itemsize} in this dtype"
        )
    return size


def _check_tensors(
    x: Described | Tensor,
    others: Mapping[str, Described | Tensor | None],
    vectors: Mapping[str, Described | Tensor | None],
) -> None:
    """Raise ValueError or TypeError unless `others` have the rows and dtype of x, and `vectors` one value per column.

    The rows may have other leading dimensions than those of x, in the same order.
    """
    if not x.shape:
        raise ValueError("x has no dimension to normalize over")
    _check_dtype("x", x, DTYPES, "")
    for name, tensor in others.items():
        if tensor is None:
            continue
        if tensor.shape[-1:] != x.shape[-1:] or tensor.shape[:-1].numel() != x.shape[:-1].numel():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but x has {tuple(x.shape)}; rows and columns must agree"
            )
        _check_dtype(name, tensor, (x.dtype,), f" with x {x.dtype}")
    for name, tensor in vectors.items():
        if tensor is None:
            continue
        if tensor.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; with x {tuple(x.shape)} it must be {tuple(x.shape[-1:])}"
            )
        _check_dtype(name, tensor, DTYPES, "")


def check_stepwise(x: Described | Tensor, weight: Described | Tensor, *, is_rms_norm: bool) -> None:
    """Raise UnsupportedCase where no module rounds after every step."""
    if not is_rms_norm:
        raise UnsupportedCase("is_rms_norm=False; the stepwise contract is one of RMS norms, pass is_rms_norm=True")
    if weight.dtype not in (x.dtype, torch.float32):
        raise UnsupportedCase(f"weight is {weight.dtype}; with x {x.dtype} the stepwise contract has {x.dtype} or fp32")


def _check_statistics(x: Tensor, rstd: Tensor, mean: Tensor | None) -> None:
    """Raise ValueError or TypeError unless rstd and mean are fp32, one value for each group of each row of x."""
    rows = x.shape[:-1].numel()
    if not rstd.shape or rstd.shape[-1] == 0 or rstd.shape[:-1].numel() != rows:
        raise ValueError(
            f"rstd has shape {tuple(rstd.shape)}; with x {tuple(x.shape)} it must be [..., groups], {rows} rows"
        )
    if x.shape[-1] % rstd.shape[-1]:
        raise ValueError(f"rstd has {rstd.shape[-1]} groups, which do not divide the {x.shape[-1]} columns of x")
    if mean is not None and mean.shape != rstd.shape:
        raise ValueError(f"mean has shape {tuple(mean.shape)}, but rstd has {tuple(rstd.shape)}; they must agree")
    for name, tensor in {"rstd": rstd, "mean": mean}.items():
        if tensor is not None:
            _check_dtype(name, tensor, (torch.float32,), "")


def _check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], given: str) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype};{given} it must be {' or '.join(map(str, dtypes))}")
