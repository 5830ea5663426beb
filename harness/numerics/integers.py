"""Rounding to integers and powers of two: exact operations that rise with their argument, so that they keep intervals.

A stage that is rounded to one of the formats `int8`, `int4` and `uint8` is converted to integers, to nearest with ties
to even; what a kernel rounds otherwise is rounded by one of these functions before. Conversions saturate on some
devices and wrap around on others, so that a reference clamps first: nothing is known of a number that is out of range.

Powers of two are those next to a number, as E8M0 scales are. Exponents are those of normal numbers of fp32, -126 to
127; what needs a larger one is infinite. Zero stays zero, and a negative number gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.numerics.algebraic import chosen_by_value
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.parts import unknown, unknown_where
from lastbit.numerics.quantized import power_of_two
from lastbit.numerics.remembered import remembered


@chosen_by_value
@remembered
def round_half_even(x: Enclosure) -> Enclosure:
    """Round to the nearest integer, ties to even: `rint`, `torch.round`, `cvt.rni`.

    >>> round_half_even(Enclosure.point(torch.tensor([0.5, 1.5, 2.5]))).value.tolist()
    [0.0, 2.0, 2.0]
    """
    return Enclosure(x.parts.round())


@chosen_by_value
@remembered
def round_half_away(x: Enclosure) -> Enclosure:
    """Round to the nearest integer, ties away from zero: `roundf`, `libdevice.round`.

    >>> round_half_away(Enclosure.point(torch.tensor([0.5, 1.5, 2.5]))).value.tolist()
    [1.0, 2.0, 3.0]
    """
    size = x.parts.abs()
    whole = torch.copysign((size + 0.5).floor(), x.parts)
    return Enclosure(torch.where(size < 2.0**52, whole, x.parts))  # from 2**52 on every number of fp64 is an integer


@chosen_by_value
@remembered
def floor(x: Enclosure) -> Enclosure:
    """Round down to the largest integer that is not larger."""
    return Enclosure(x.parts.floor())


@chosen_by_value
@remembered
def ceil(x: Enclosure) -> Enclosure:
    """Round up to the smallest integer that is not smaller."""
    return Enclosure(x.parts.ceil())


@chosen_by_value
@remembered
def trunc(x: Enclosure) -> Enclosure:
    """Return the integer part, as a conversion to integers in C gives it: toward zero."""
    return Enclosure(x.parts.trunc())


_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
_FRACTION = (1 << 52) - 1  # bits of fp64 below the exponent


@chosen_by_value
@remembered
def power_of_two_from(x: Enclosure) -> Enclosure:
    """Return the smallest power of two that is not less than x, 2**-126 at least; 0 of zero."""
    bits = (x.parts.abs().view(torch.int64) + _FRACTION) & ~_FRACTION
    return _limited(x, bits.view(torch.float64), least=_SMALLEST)


@chosen_by_value
@remembered
def power_of_two_to(x: Enclosure) -> Enclosure:
    """Return the largest power of two that is not larger than x; 0 below 2**-126."""
    bits = x.parts.abs().view(torch.int64) & ~_FRACTION
    return _limited(x, bits.view(torch.float64), least=0.0)


@chosen_by_value
@remembered
def two_to_the(exponent: Enclosure) -> Enclosure:
    """Return 2**n of whole numbers n, 2**-126 at least, exact as a power of two has to be; 0 of -inf."""
    n = exponent.parts
    powers = power_of_two(torch.nan_to_num(n, nan=0.0).clamp(-1000, 1000))
    powers = torch.where(torch.isnan(n), n, torch.where(torch.isneginf(n), 0.0, powers))
    lost = unknown(n)
    found = _limited(Enclosure(powers), powers, _SMALLEST)
    return found if lost is None else Enclosure(unknown_where(found.parts, lost))


def _limited(x: Enclosure, powers: Tensor, least: float) -> Enclosure:
    """Limit powers to the exponents of fp32, with `least` for smaller ones; nothing is known where nothing is of x."""
    limited = torch.where(powers < _SMALLEST, torch.where(powers > 0, least, 0.0), powers)
    limited = torch.where(limited > _LARGEST, torch.inf, limited)
    defined = x.parts >= 0
    return Enclosure(unknown_where(torch.where(defined, limited, torch.nan), unknown(x.parts)))
