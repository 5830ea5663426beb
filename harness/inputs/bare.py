"""The tensors of a case without guards, for tools that know which bytes were allocated, and which of these written."""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.inputs.guards import extent
from lastbit.inputs.of_case import Inputs


def bare(inputs: Inputs, device: torch.device) -> dict[str, Tensor]:
    """Return name → a copy on `device`, in an allocation that ends with its last element.

    Nothing is written before its first element, or to gaps between its rows.
    """
    return {name: _bare(tensor, inputs.case[name].offset, device) for name, tensor in inputs.tensors.items()}


def _bare(tensor: Tensor, offset: int, device: torch.device) -> Tensor:
    shape, strides = tuple(tensor.shape), tensor.stride()
    storage = torch.empty(offset + extent(shape, strides), dtype=tensor.dtype, device=device)
    placed = torch.tensor([], dtype=tensor.dtype, device=device).set_(storage.untyped_storage(), offset, shape, strides)
    _once(placed).copy_(_once(tensor))
    return placed


def _once(tensor: Tensor) -> Tensor:
    """Narrow dimensions of stride 0 to their first index, so that every element of memory occurs once."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
