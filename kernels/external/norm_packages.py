"""Functions that adapters of other packages share: import of the package, and what it does not look at."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from lastbit import UnsupportedCase


@functools.cache
def upstream(module: str, requirement: str) -> ModuleType:
    """Import the module of a package.

    Raises:
        UnsupportedCase: it cannot be imported; the text says what to install.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise UnsupportedCase(f"{module} cannot be imported ({error}); pip install {requirement}") from error


def refuse_elsewhere(x: Tensor, **tensors: Tensor | None) -> None:
    """Raise ValueError for a tensor on another device than x: the packages do not look, and Triton names no device."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}: move it there")


def whole_blocks(*names: str) -> dict[str, tuple[int, ...]]:
    """Return `takes` of a kernel that adds up lanes beyond a row, which are NaN in the interpreter and 0 on a GPU.

    Where kernels are interpreted, the columns of these tensors must be a power of two.
    """
    powers = tuple(1 << power for power in range(16))
    return {} if torch.cuda.is_available() else {f"{name} columns": powers for name in names}
