"""Arithmetic of several ops: roundings, and functions for gated norms that take few registers.

`div_rn` and `sqrt_rn` call a slow path, and a call takes some registers.

docs/numerics.md says why quotients and roots are correctly rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(2.0**-64)
UPWARD = tl.constexpr(2.0**-43)


@triton.jit
def rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    """Round an fp32 value to `dtype` if ROUND; the result is fp32."""
    if ROUND:
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit
def quotient(total, count):
    """Return total / count, correctly rounded, for integers `count` up to 2**15 and normal quotients; -0 gives 0."""
    inverse = 1.0 / count
    approximate = total * inverse
    excess = tl.fma(approximate, -count, total)
    return tl.where(excess == excess, tl.fma(excess, inverse, approximate), approximate)  # of infinity, it is NaN


@triton.jit
def inverse_root(x):
    """Return 1 / sqrt(x) for x >= 0, both root and quotient correctly rounded."""
    tiny = x < TINY
    x = tl.where(tiny, x * 2.0**64, x)  # exact, and no subnormal
    approximate = tl.rsqrt(x)
    root = x * approximate
    root = tl.fma(tl.fma(root, -root, x), 0.5 * approximate, root)
    inverse = tl.fma(tl.fma(root, -approximate, 1.0) + UPWARD, approximate, approximate)
    inverse = tl.fma(tl.fma(root, -inverse, 1.0), inverse, inverse)
    inverse = tl.where(inverse == inverse, inverse, approximate)  # of zero and infinity, it is NaN
    return tl.where(tiny, inverse * 2.0**32, inverse)


@triton.jit
def sigmoid_of(z):
    """Return 1 / (1 + exp(-z)) as `tl.sigmoid` does, but with zero for exponentials and results below 2**-126."""
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(z * -LOG2_E))
