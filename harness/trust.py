"""Trust in fused kernels: where one may do the work of its definition in torch.

Whether a compiler keeps every rounding cannot be read off a kernel. So each one runs beside its definition before its
first use on a device, on numbers that its own module chooses. It is trusted there if nothing differs.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Hashable
from functools import cache

import torch
from torch import Tensor

_trusted: dict[tuple[torch.device, Hashable], bool] = {}


def fuses(tensor: Tensor) -> bool:
    """Check whether kernels are compiled for `tensor`: it is on a GPU, and Triton is there and does not interpret."""
    return tensor.is_cuda and _compiles()


@cache
def _compiles() -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


def trusted(device: torch.device, key: Hashable, work: str, difference: Callable[[], str]) -> bool:
    """Check whether the kernel of `key` may be used on `device`: proven once, or refused once with a RuntimeWarning.

    `difference` runs the kernel and its definition, and says what differs; empty if nothing does. `work` is what the
    kernel does, in words.
    """
    known = _trusted.get((device, key))
    if known is not None:
        return known
    found = _found(difference)
    _trusted[device, key] = not found
    if found:
        warnings.warn(f"no fused kernel is used for {work} on {device}: {found}", RuntimeWarning, stacklevel=2)
    return not found


def _found(difference: Callable[[], str]) -> str:
    """Describe the difference, or why it cannot be known; empty if there is none."""
    try:
        return difference()
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # whatever a compiler raises: torch says the same where the device itself is at fault
        return f"{type(error).__name__}: {error}"
