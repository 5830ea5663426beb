"""Division, square root and the exponentials: one function per primitive, its error taken from the premises in force.

A primitive that ends in `_rn` is correctly rounded (`tl.div_rn`, `tl.sqrt_rn`, torch's own division and square root)
and adds no width. The others are approximate on a GPU: their ends move outward by the bound, and the contract's value
is the correctly rounded result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.enclosure import Enclosure, aligned, extremes, settled, widened
from harness.numerics.premises import U, current

_SMALLEST_NORMAL = 2.0**-126
_SATURATED = 17.33  # above 25 ln 2: e**-x < 2**-25, so that the correctly rounded sigmoid is 1, too


def rsqrt(x: Enclosure) -> Enclosure:
    """1 / sqrt(x), also from a root and a division. A subnormal argument may give inf, as in `rsqrt.approx.ftz`."""
    parts = (1.0 / x.full.sqrt())[[0, 1, 3, 2]]
    parts = widened(parts, current().inverse_root)
    flushed = (x.lo < _SMALLEST_NORMAL) & (x.lo >= 0)
    parts[3] = torch.where(flushed, torch.inf, parts[3])
    return settled(parts).unknown_where(x.unknown)


def sqrt_rn(x: Enclosure) -> Enclosure:
    """Correctly rounded square root."""
    return settled(x.parts.sqrt()).unknown_where(x.unknown)


def sqrt(x: Enclosure) -> Enclosure:
    """Square root, approximate."""
    return settled(widened(x.parts.sqrt(), current().relative("sqrt"))).unknown_where(x.unknown)


def divide_rn(a: Enclosure | float, b: Enclosure | float) -> Enclosure:
    """Correctly rounded a / b."""
    return settled(_quotient(a, b))


def divide(a: Enclosure | float, b: Enclosure | float) -> Enclosure:
    """a / b, approximate: also covers a · (1 / b), a rounded product with an approximate reciprocal.

    A reciprocal that is subnormal errs by 2**-150 besides. Nothing is known for a subnormal divisor, whose reciprocal
    may overflow and which may be flushed to zero.
    """
    dividend, divisor = (parts.abs() for parts in aligned(a, b))
    finite = torch.where(torch.isfinite(dividend), dividend, 0.0).amax(0)
    quotient = settled(widened(_quotient(a, b), current().quotient, absolute=finite * 2.0**-150))
    return quotient.unknown_where(((divisor > 0) & (divisor < _SMALLEST_NORMAL)).any(0))


def _quotient(a: Enclosure | float, b: Enclosure | float) -> Tensor:
    """Parts of the unrounded quotient; nothing is known where the divisor's interval holds a zero but is not one."""
    x, y = aligned(a, b)
    straight = x / y
    if len(straight) < 4:
        return straight
    x, y = (p.expand(4, *p.shape[1:]) for p in (x, y))
    lo, hi = extremes([straight[2], straight[3], x[2] / y[3], x[3] / y[2]])
    through_zero = (y[2] <= 0) & (y[3] >= 0) & (y[2] != y[3])
    quotient = Enclosure(torch.stack([straight[0], straight[1], lo, hi]))
    return quotient.unknown_where(through_zero, Enclosure(x).unknown, Enclosure(y).unknown).parts


def exp(x: Enclosure) -> Enclosure:
    """e**x. The error grows with |x|, because exp(x) is computed as exp2 of a rounded product."""
    ends = x.full[2:]
    relative = current().relative("exp") + _growth(ends)
    return settled(widened(x.parts.exp(), relative, absolute=2.0**-148)).unknown_where(x.unknown)


def sigmoid(x: Enclosure) -> Enclosure:
    """1 / (1 + e**-x): the error of the exponential counts by e**-x / (1 + e**-x), then an addition and a division.

    From 17.33 on e**-x is below a quarter of an ulp of 1, so that the sum is 1 and the quotient of 1 and 1 exact. At an
    infinity the result is exact too, and it is never below zero.
    """
    ends = x.full[2:]
    exponential = (current().relative("exp") + _growth(ends)) * torch.sigmoid(-ends)
    relative = exponential + U + max(current().relative("sigmoid"), current().relative("divide"))
    absolute = torch.where(torch.isfinite(ends), _SMALLEST_NORMAL, 0.0)
    parts = widened(torch.sigmoid(x.parts), relative, absolute)
    parts[2:] = torch.where(parts[2:] < 0, 0.0, parts[2:])
    parts[2:] = torch.where(x.lo >= _SATURATED, 1.0, parts[2:])
    return settled(parts).unknown_where(x.unknown)


def _growth(x: Tensor) -> Tensor:
    """Relative error of exp(x) from rounding x · log2(e); none at an infinity, where the result is exact."""
    return torch.where(torch.isfinite(x), 2 * U * x.abs(), 0.0)
