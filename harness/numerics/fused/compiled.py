"""Launching a kernel with as little work on the host as there can be, on few dimensions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch

# Triton's own default.
WARPS = 4

Start = Callable[[tuple[int, int], tuple[Any, ...]], None]
"""Takes the numbers of programs along two axes, and all arguments of the kernel but its constants."""


@cache
def launcher(
    function: Any,
    constants: tuple[Any, ...],
    device: torch.device,
    dtypes: Hashable = torch.float64,
    warps: int = WARPS,
) -> Start:
    """Return a function that launches a kernel with given constants, compiled at the first launch for these `dtypes`.

    `function[grid]` would look the compiled kernel up at each launch, for which it reads all arguments. So a function
    must be `unspecialized`, and say of every integer how many bits it has. On the CPU it is interpreted.
    """
    compiled: list[Any] = []

    def interpret(programs: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        function[programs](*arguments, *constants)

    def launch(programs: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        if not compiled:
            options = {"num_warps": warps, "enable_fp_fusion": False}
            compiled.append(function.warmup(*arguments, *constants, grid=(1,), **options))
        compiled[0][*programs, 1](*arguments, *constants)

    def launch_on_device(programs: tuple[int, int], arguments: tuple[Any, ...]) -> None:
        if torch.cuda.current_device() == device.index:
            launch(programs, arguments)
        else:
            with torch.cuda.device(device):
                launch(programs, arguments)

    return launch_on_device if device.type == "cuda" else interpret


@cache
def unspecialized(function: Any) -> Any:
    """Make a Triton kernel of a Python function or kernel that is specialized for the values of its constants alone."""
    import triton

    plain = getattr(function, "fn", function)
    names = plain.__code__.co_varnames[: plain.__code__.co_argcount]
    return triton.jit(plain, do_not_specialize=[name for name in names if not name.isupper()])


def collapsed(shape: Sequence[int], *strides: Sequence[int]) -> list[tuple[int, ...]]:
    """Return size and strides of as few dimensions as reach the same elements in the same order."""
    dimensions: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if dimensions and all(outer == size * inner for outer, inner in zip(dimensions[-1][1:], steps, strict=True)):
            dimensions[-1] = dimensions[-1][0] * size, *steps
        else:
            dimensions.append((size, *steps))
    return dimensions
