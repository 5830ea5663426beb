"""Arithmetic of norms that costs few instructions and registers: no call of a slow path, which a division has."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(2.0**-64)
NEAR_TIE = tl.constexpr(2.0**-43)


@triton.jit
def quotient(total, count):
    """total / count, correctly rounded, for a whole count of at most 2**15."""
    inverse = 1.0 / count
    approximate = total * inverse
    excess = tl.fma(approximate, -count, total)
    return tl.where(excess == excess, tl.fma(excess, inverse, approximate), approximate)


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), root and quotient correctly rounded, for x >= 0."""
    tiny = x < TINY
    x = tl.where(tiny, x * 2.0**64, x)  # exact, and normal
    approximate = tl.rsqrt(x)
    root = x * approximate
    root = tl.fma(tl.fma(root, -root, x), 0.5 * approximate, root)
    inverse = tl.fma(tl.fma(root, -approximate, 1.0) + NEAR_TIE, approximate, approximate)
    inverse = tl.fma(tl.fma(root, -inverse, 1.0), inverse, inverse)
    inverse = tl.where(inverse == inverse, inverse, approximate)  # of zero and infinity
    return tl.where(tiny, inverse * 2.0**32, inverse)


@triton.jit
def sigmoid_of(z):
    """1 / (1 + exp(-z)), as `tl.sigmoid`, with exponentials and quotients below 2**-126 taken for zero."""
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.exp2(z * -LOG2_E))
