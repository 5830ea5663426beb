"""What the plan of a launch depends on: everything of a tensor but its elements and its address.

A launcher checks its arguments and works out grid, strides and variant once for each set of descriptions, in a function
under `functools.lru_cache`; what raises there is not kept, so that bad arguments raise every time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

VECTOR_BYTES = 16
_UNCHANGED: AbstractContextManager[None] = nullcontext()


class Described(NamedTuple):
    """A tensor as a plan sees it; checks take it in place of the tensor.

    Attributes:
        shape, dtype, device: of the tensor.
        strides: in elements.
        aligned: whether its address is a multiple of 16 bytes.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool


def described(tensor: Tensor | None) -> Described | None:
    """The description of a tensor; None for one that is not given."""
    if tensor is None:
        return None
    aligned = tensor.data_ptr() % VECTOR_BYTES == 0
    return Described(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned)


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is the current one, as a launch needs it; entering it costs nothing where it is."""
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return _UNCHANGED
    return torch.accelerator.device_index(device.index)
