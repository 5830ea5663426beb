"""Launching the kernel of an operation: where its operands lie in memory, with little work on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from lastbit.numerics.formats import Format
from lastbit.numerics.fused import cuda_sums, elements
from lastbit.numerics.fused.compiled import Start, collapsed, launcher
from lastbit.numerics.fused.fp64 import FORMATS

# Four elements for each of 128 threads.
BLOCK = 512
WIDENING = frozenset(
    ("hull", "hull_of_three", "fusible_product", "multiply_add", "product_in_any_order", "spread", "averaged")
    + ("inverse_root", "approximate_root", "approximate_quotient", "exponential", "logistic", "spans", "limiting")
)
"""Operations whose results have four parts, most of them because they have freedom."""

_OF_ONE_PART = frozenset(("straying",))
_MOST_OPERANDS = _MOST_NUMBERS = 4
# Each number is a kernel of its own to compile; more are joined in several launches.
_OPTIONS = 3  # of which the hull is made at once
# Each number is a kernel of its own to compile; torch does others.
_FACTORS = (3, 4)  # of a product in any order that is made at once
# After dimensions that follow one another in memory are joined; torch does others.
_MOST_DIMENSIONS = 3
_LARGEST = 2**31 - BLOCK  # elements that are counted in int32

Where = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of stacked parts."""


@dataclass(frozen=True)
class OperandLayout:
    """The addresses of the elements of the operands, as arguments of a kernel.

    Attributes:
        shape: of the result, without parts.
        arguments: of the kernel, from `size` to `w2`.
        flat: the index of an element is one number.
        parts: the most that an operand has.
    """

    shape: tuple[int, ...]
    arguments: tuple[int, ...]
    flat: bool
    parts: int


def run(
    name: str, operands: tuple[Tensor, ...], numbers: tuple[float, ...], fmt: Format | None, *, large: bool
) -> Tensor | None:
    """Run an operation on one device; None where its kernel does not take such operands.

    `large` asks for the kernel that is compiled for operands like these.
    """
    if name in cuda_sums.OPERATIONS:
        return cuda_sums.run(name, operands[0], numbers, fmt)
    if name == "hull":
        return _hull(operands, large)
    if name == "product_in_any_order" and len(operands) not in _FACTORS:
        return None
    return _launched(name, operands, numbers, fmt, large)


def _hull(options: tuple[Tensor, ...], large: bool) -> Tensor | None:
    """Return the hull of any number of options, by three at a time."""
    if len(options) < _OPTIONS:
        return _launched("hull", (*options, options[0])[:2], (), None, large)
    first = _launched("hull_of_three", options[:_OPTIONS], (), None, large)
    rest = options[_OPTIONS:]
    return first if first is None or not rest else _hull((first, *rest), large)


def _launched(
    name: str, operands: tuple[Tensor, ...], numbers: tuple[float, ...], fmt: Format | None, large: bool
) -> Tensor | None:
    layout = layout_of(tuple((x.shape, x.stride()) for x in operands))
    if layout is None:
        return None
    parts = 4 if name in WIDENING else 1 if name in _OF_ONE_PART else max(layout.parts, 1 if fmt is None else 2)
    first = operands[0]
    out = first.new_empty((parts, *layout.shape))
    if size := layout.arguments[0]:
        flat, most = large and layout.flat, parts if large or name in _OF_ONE_PART else 4
        launch = _launcher(name, len(operands), flat, most, fmt, len(numbers), first.device)
        pointers = out, *operands, *[first] * (_MOST_OPERANDS - len(operands))
        constants = *numbers, *[0.0] * (_MOST_NUMBERS - len(numbers))
        launch((-(-size // BLOCK), 1), (*pointers, parts, *layout.arguments, *constants))
    return out


@cache
def _launcher(
    name: str, operands: int, flat: bool, most: int, fmt: Format | None, numbers: int, device: torch.device
) -> Start:
    function, position = vars(elements)[name], None if fmt is None else FORMATS.index(fmt)
    return launcher(elements.elementwise, (function, operands, flat, most, position, numbers, BLOCK), device)


@lru_cache(maxsize=4096)
def layout_of(operands: tuple[Where, ...]) -> OperandLayout | None:
    """Return the layout of operands that broadcast; None if their dimensions do not collapse to three."""
    shape = torch.broadcast_shapes(*(shape[1:] for shape, _ in operands))
    size = math.prod(shape)
    spread = []  # the strides of each operand, broadcast to the shape
    for own, strides in operands:
        ahead = len(shape) - len(own) + 1
        pairs = zip(own[1:], shape[ahead:], strides[1:], strict=True)
        spread.append([0] * ahead + [stride if n == m else 0 for n, m, stride in pairs])
    dimensions = collapsed(shape, *spread)
    if size > _LARGEST or len(dimensions) > _MOST_DIMENSIONS:
        return None
    padded = [(1, *(0,) * len(operands))] * (_MOST_DIMENSIONS - len(dimensions)) + dimensions
    arguments = [size, padded[-2][0], padded[-1][0]]
    for position, (own_shape, strides) in enumerate(operands):
        contract = strides[0] if own_shape[0] > 1 else 0
        end = strides[0] if own_shape[0] > 2 else 0
        arguments += [contract, end, *(steps[position] for _, *steps in padded)]
    arguments += [0] * (3 + 5 * _MOST_OPERANDS - len(arguments))
    return OperandLayout(tuple(shape), tuple(arguments), len(dimensions) < 2, max(own[0] for own, _ in operands))
