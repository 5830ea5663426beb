"""Powers of two next to a number, as E8M0 scales are: exact operations that rise, so that they keep intervals.

Exponents are those of normal numbers of fp32, -126 to 127; what needs a larger one is infinite. Zero stays zero, and a
negative number gives NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.numerics.algebraic import chosen_by_value
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.parts import unknown, unknown_where
from lastbit.numerics.quantized import power_of_two
from lastbit.numerics.remembered import remembered

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
