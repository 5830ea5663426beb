"""On CUDA, an operation on stacked parts is one kernel. This is the one place that decides it.

A function marked `one_kernel_on_cuda` is the definition, and what runs on the CPU. For CUDA tensors a Triton kernel
does the same in one launch and one pass over memory, where the definition makes 10 to 40; its arithmetic is the
function of that name in `elements` or `primitives`. It gives the same bits, with two exceptions that the definition
leaves open: the sign of a zero that is an end of an interval, and to which side the exact part of a sum is rounded.

Before a kernel is used on a device, `selftest` compares it there with the definition on the CPU. If it differs, or
cannot be compiled, the definition runs on the device, and a warning says so once.

Triton is imported when the first CUDA tensor comes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec

import torch
from torch import Tensor

from harness.numerics.formats import Format

P = ParamSpec("P")


def one_kernel_on_cuda(definition: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """The definition, which on CUDA tensors is replaced by the kernel of its name.

    It takes tensors, then numbers, then a format.
    """
    name = definition.__name__

    @wraps(definition)
    def operation(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if args[0].is_cuda:  # type: ignore[attr-defined]
            result = _fused(name, definition, (*args, *kwargs.values()))
            if result is not None:
                return result
        return definition(*args, **kwargs)

    return operation


def _fused(name: str, definition: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor | None:
    """What the kernel gives; None where it cannot be used."""
    operands = tuple(arg for arg in args if isinstance(arg, Tensor))
    numbers = tuple(arg for arg in args if isinstance(arg, float))
    fmt = next((arg for arg in args if isinstance(arg, Format)), None)
    if not _trusted(name, definition, len(operands), len(numbers), fmt, operands[0].device):
        return None
    from harness.numerics.fused.launch import run

    return run(name, operands, numbers, fmt)


@cache
def _trusted(
    name: str,
    definition: Callable[..., Tensor],
    operands: int,
    numbers: int,
    fmt: Format | None,
    device: torch.device,
) -> bool:
    """Whether the kernel gives on the device what the definition gives on the CPU."""
    try:
        from harness.numerics.fused.selftest import difference

        found = difference(name, definition, operands, numbers, fmt, device)
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # no Triton, or one that cannot compile for this device, each in its own way
        found = f"{type(error).__name__}: {error}"
    if found:
        warnings.warn(f"{name} on {device} is computed without its fused kernel: {found}", RuntimeWarning, stacklevel=4)
    return not found
