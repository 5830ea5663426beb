"""On CUDA, an operation on stacked parts is one kernel. This is the one place that decides it.

A function marked `one_kernel_on_cuda` is the definition, and what runs on the CPU. For CUDA tensors a Triton kernel
does the same in one launch and one pass over memory, where the definition makes 10 to 40; its arithmetic is the
function of that name in `elements`. It gives the same bits, with two exceptions that the definition leaves open: the
sign of a zero that is an end of an interval, and to which side the exact part of a sum is rounded.

A kernel is used on a device where it is trusted (`lastbit.trust`): `equivalence` compares it there with the definition
on the CPU. Elsewhere the definition runs on the device. Triton is imported when the first CUDA tensor comes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from torch import Tensor

from lastbit.numerics.formats import PRECISE, Format
from lastbit.trust import fuses, trusted

P = ParamSpec("P")

LARGE = 1 << 21
"""Elements of an operand from which on a kernel is compiled for how many parts there are, and how they lie in memory.

One kernel serves whatever is smaller: to compile another takes longer than it saves.
"""


def one_kernel_on_cuda(definition: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Decorate a definition, so that on CUDA tensors the kernel of its name replaces it.

    It takes tensors, then numbers, then a format. Results that are not rounded, or not to nearest, are rare, and left
    to the definition.
    """
    name = definition.__name__

    @wraps(definition)
    def operation(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if fuses(args[0]) and _is_common(args[-1]) and _is_common(kwargs.get("fmt")):  # type: ignore[arg-type]
            result = _fused(name, definition, (*args, *kwargs.values()))
            if result is not None:
                return result
        return definition(*args, **kwargs)

    return operation


def _is_common(operand: object) -> bool:
    return not isinstance(operand, Format) or (operand is not PRECISE and operand.direction == "nearest")


def _fused(name: str, definition: Callable[..., Tensor], args: tuple[object, ...]) -> Tensor | None:
    """Run the kernel; None where it cannot be used."""
    operands = tuple(arg for arg in args if isinstance(arg, Tensor))
    numbers = tuple(arg for arg in args if isinstance(arg, float))
    fmt = next((arg for arg in args if isinstance(arg, Format)), None)
    large = any(operand[0].numel() >= LARGE for operand in operands)

    def difference() -> str:
        from lastbit.numerics.fused import equivalence

        return equivalence.difference(name, definition, len(operands), len(numbers), fmt, operands[0].device, large)

    if not trusted(operands[0].device, (name, len(operands), len(numbers), fmt, large), name, difference):
        return None
    from lastbit.numerics.fused.operation_launch import run

    return run(name, operands, numbers, fmt, large=large)
