"""Descriptions of tensors, on which the plan of a launch depends: everything but their elements and addresses.

A launcher checks its arguments and works out grid, strides and variant once for each set of descriptions, in a function
under `functools.lru_cache`; what raises there is not kept, so that bad arguments raise every time.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

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
    """Describe a tensor; None for one that is not given."""
    if tensor is None:
        return None
    aligned = tensor.data_ptr() % VECTOR_BYTES == 0
    return Described(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, aligned)


def contiguous(tensor: Described) -> Described:
    """Describe a contiguous copy of the tensor."""
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape)))
    return tensor._replace(strides=strides, aligned=True)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current one, as a launch needs it; it costs nothing where it is."""
    if device.index is None or device.index == torch.accelerator.current_device_index():
        return _UNCHANGED
    return torch.accelerator.device_index(device.index)


class PlannedLaunch:
    """A kernel with its grid and its last parameters, which a plan holds and calls with the first ones.

    The variant compiled for the first call runs in all of them, so that Triton need not inspect the arguments again.
    That is right where the plan depends on their descriptions and on which of them are None, and where numbers are no
    part of the key of a variant. Interpreted, a call with other kinds of arguments than the first one had raises.

    Args:
        kernel: a function of `triton.jit`.
        programs: their number.
        parameters: the last parameters of the kernel, in their order.
        options: of the compiler, as `num_warps`.
    """

    def __init__(self, kernel: Any, programs: int, parameters: dict[str, Any], **options: Any) -> None:
        self.kernel, self.grid, self.parameters, self.options = kernel, (programs, 1, 1), parameters, options
        self.compiled: Any = None
        self.kinds: list[Any] | None = None
        self.values = tuple(parameters.values())

    def __call__(self, *arguments: Any) -> None:
        if self.compiled is None:  # always where Triton interprets
            kinds = [getattr(argument, "dtype", type(argument)) for argument in arguments]
            if self.kinds not in (None, kinds):
                raise TypeError(f"a plan of {self.kernel.__name__} for {self.kinds} was used for {kinds}")
            self.kinds = kinds
            self.compiled = self.kernel[self.grid](*arguments, **self.parameters, **self.options)
        else:
            self.compiled[self.grid](*arguments, *self.values)


class CallPlan(NamedTuple):
    """The plan of a call whose tensors are copied all or none.

    Attributes:
        launch: takes the tensors of the call and its numbers; None where there is nothing to do.
        copied: whether the tensors are to be copied to contiguous memory.
    """

    launch: PlannedLaunch | None
    copied: bool
