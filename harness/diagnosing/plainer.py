"""Plainer numbers in place of a tensor's: one, zero, a power of two, a short significand, a small integer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_BITS = (1, 2, 3, 4, 6, 8, 12)  # of a significand


def plainer_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Tensors of the same shape whose numbers are all plainer, the plainest first."""
    for number in (1, 0):
        yield torch.full_like(tensor, number, dtype=torch.float32).to(tensor.dtype)
    if tensor.is_floating_point():
        numbers = _numbers(tensor)
        for bits in _BITS:
            yield _like([_shortened(number, bits) for number in numbers], tensor)


def plainer_elements(tensor: Tensor, place: int) -> Iterator[Tensor]:
    """Tensors with a plainer number at one place in row-major order, the plainest first."""
    numbers = _numbers(tensor)
    number = numbers[place]
    found = dict.fromkeys(_candidates(number, floating=tensor.is_floating_point()))
    for other in found:
        if _key(other) < _key(number):
            yield _like([*numbers[:place], other, *numbers[place + 1 :]], tensor)


def _candidates(number: float, *, floating: bool) -> Iterator[float]:
    yield from (1, 0)
    if not math.isfinite(number):
        return
    if floating:
        yield from (_shortened(number, bits) for bits in _BITS)
    else:
        yield from (2, int(number) // 2)


def _key(number: float) -> tuple[float, float, bool]:
    """How plain a number is: few bits, near one, positive."""
    if not math.isfinite(number):
        return math.inf, 0.0, False
    if not number:
        return 1, 0.5, math.copysign(1, number) < 0
    fraction, exponent = math.frexp(float(abs(number)))
    bits = int(fraction * 2**53)
    return 53 - (bits & -bits).bit_length() + 1, abs(exponent - 1), number < 0


def _shortened(number: float, bits: int) -> float:
    """A number rounded to so many bits of significand."""
    if not math.isfinite(number) or not number:
        return number
    fraction, exponent = math.frexp(number)
    return math.ldexp(round(math.ldexp(fraction, bits)), exponent - bits)


def _numbers(tensor: Tensor) -> list[float]:
    """The elements in row-major order."""
    narrow = tensor.is_floating_point() and tensor.dtype is not torch.float64
    numbers: list[float] = (tensor.float() if narrow else tensor).flatten().tolist()
    return numbers


def _like(numbers: list[float], tensor: Tensor) -> Tensor:
    """A tensor of these numbers in the shape and dtype of another; numbers of its dtype are exact."""
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    return torch.tensor(numbers, dtype=wide).to(tensor.dtype).view(tensor.shape)
