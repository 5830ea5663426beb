"""Sources of PyTorch's operations: which elements of the operands the elements of a written tensor came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lastbit.interpret.numpy_formats import Array
from lastbit.tracing import lanes
from lastbit.tracing.lanes import Source, swapped

# Operations by what they do, where a tag of torch does not say it: element by element; along dimensions; along one of
# them and of the same shape.
POINTWISE = ("_to_copy", "copy_", "clone", "fill_", "zero_", "lift_fresh_copy", "contiguous")
REDUCTIONS = ("var_mean", "std_mean", "linalg_vector_norm", "logsumexp", "argmax", "argmin", "median", "cummax")
WITHIN = ("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "logcumsumexp")
MOVERS = {
    "cat": ("tensors",),
    "stack": ("tensors",),
    "index": ("self",),
    "index_select": ("self",),
    "gather": ("self",),
    "take": ("self",),
    "embedding": ("weight",),
    "flip": ("self",),
    "roll": ("self",),
    "repeat": ("self",),
    "constant_pad_nd": ("self",),
    "tril": ("self",),
    "triu": ("self",),
    "masked_select": ("self",),
    "index_put": ("self", "values"),
    "index_copy": ("self", "source"),
    "slice_scatter": ("self", "src"),
    "select_scatter": ("self", "src"),
    "scatter": ("self", "src"),
    "slice_backward": ("grad_output",),
    "select_backward": ("grad_output",),
}
"""Operations that only move elements → their arguments whose elements those are."""

DOTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


def source_of(func: Any, given: Mapping[str, Any], operand: Tensor, result: Tensor, part: int) -> Source | None:
    """Return the source of a result in an operand; None if nothing came from it, as from the target of a copy."""
    name = func.overloadpacket.__name__
    shape, made = tuple(operand.shape), tuple(result.shape)
    if name == "copy_" and operand is given["self"]:
        return None
    if given.get("accumulate"):
        return lanes.pointwise(shape, made) if operand is given["self"] else lanes.everything(shape)
    if (moved := name.removesuffix("_")) in MOVERS and not name.startswith("_"):
        return _of_mover(moved, func, given, operand, part)
    if name in DOTS:
        return _of_dot(DOTS[name], given, operand, made)
    if torch.Tag.pointwise in func.tags or name in POINTWISE:
        return lanes.pointwise(shape, made)
    axes = _axes(given, len(shape))
    if "normalized_shape" in given:
        return _of_rows(shape, made, tuple(range(len(shape) - len(given["normalized_shape"]), len(shape))))
    if name in WITHIN and shape == made and axes:
        return lanes.within(shape, axes)
    if torch.Tag.reduction in func.tags or name in REDUCTIONS:
        kept = [side for axis, side in enumerate(shape) if axes and axis not in axes]
        if np.prod(kept, dtype=np.int64) == np.prod(made, dtype=np.int64):
            return lanes.along(shape, axes)
    return lanes.everything(shape)


def _axes(given: Mapping[str, Any], ndim: int) -> tuple[int, ...]:
    """Return the dimensions given to an operation, nonnegative and sorted; empty if none is given."""
    dim = given.get("dim")
    if not ndim or dim is None:
        return ()
    return tuple(sorted(d % ndim for d in (dim if isinstance(dim, (list, tuple)) else [dim])))


def _of_rows(shape: lanes.Shape, made: lanes.Shape, axes: tuple[int, ...]) -> Source:
    """Return the source of a normalisation: an input's row for an element or statistic, a weight's element."""
    if len(shape) < len(made) or not axes:
        return lanes.pointwise(shape, made)
    return lanes.within(shape, axes) if shape == made else lanes.along(shape, axes)


def _of_dot(names: tuple[str, str], given: Mapping[str, Any], operand: Tensor, made: lanes.Shape) -> Source:
    a, b = (given[name] for name in names)
    sides = tuple(a.shape), tuple(b.shape)
    if operand is a:
        return lanes.left_of_dot(*sides)
    return lanes.right_of_dot(*sides) if operand is b else lanes.pointwise(tuple(operand.shape), made)


def _of_mover(name: str, func: Any, given: Mapping[str, Any], operand: Tensor, part: int) -> Source | None:
    """Return the source of an operation that moves elements, by repeating it on their indices.

    Indices count from 1, so that a zero that the operation fills in is no element.
    """
    data = [x for argument in MOVERS[name] for x in tree_leaves(given.get(argument)) if isinstance(x, Tensor)]
    if not any(x is operand for x in data):
        return lanes.everything(tuple(operand.shape))
    again: Callable[..., Any] = getattr(getattr(torch.ops, func.namespace), name)
    indices = [x for x in tree_leaves(dict(given)) if isinstance(x, Tensor) and not any(x is y for y in data)]
    kept = {id(x): x.detach().clone().cpu() for x in indices if not x.is_floating_point()}  # they may change later
    arguments = swapped({key: value for key, value in given.items() if key != "out"}, kept)

    def index() -> Array:
        result = again(**swapped(arguments, {id(x): _numbers(x, x is operand) for x in data}))
        return np.asarray(tree_leaves(result)[part].numpy() - 1)

    return lanes.moved(index)


def _numbers(tensor: Tensor, own: bool) -> Tensor:
    if own:
        return torch.arange(1, tensor.numel() + 1).reshape(tensor.shape)
    return torch.zeros(tensor.shape, dtype=torch.int64)
