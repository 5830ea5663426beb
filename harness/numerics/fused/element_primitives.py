"""The definitions of `lastbit.numerics.primitives` for one element; see `elements`."""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.numerics.fused.elements import EXTRA, extremes, is_unknown, rounded, unknown_where, widened, widened_end
from lastbit.numerics.fused.fp64 import INF, is_finite, like, magnitude
from lastbit.numerics.premises import U as UNIT

U = tl.constexpr(UNIT)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SATURATED = tl.constexpr(17.33)
FLUSHED = tl.constexpr(2.0**-126 * (1 + 2.0**-6))
SUBNORMAL = tl.constexpr(2.0**-147)
LOST = tl.constexpr(2.0**-151)
RECIPROCAL_ERROR = tl.constexpr(2.0**-150)


@triton.jit
def correct_root(x, root, F: tl.constexpr):
    return unknown_where(rounded(root, F), is_unknown(x))


@triton.jit
def approximate_root(x, root, relative, F: tl.constexpr):
    return unknown_where(rounded(widened(root, relative, relative, 0.0), F), is_unknown(x))


@triton.jit
def inverse_root(x, root, relative, F: tl.constexpr):
    one = like(root[0], 1.0)
    inverse = widened((one / root[0], one / root[1], one / root[3], one / root[2]), relative, relative, 0.0)
    flushed = (x[2] < SMALLEST_NORMAL) & (x[2] >= 0)
    inverse = inverse[0], inverse[1], inverse[2], tl.where(flushed, like(one, INF), inverse[3])
    return unknown_where(rounded(inverse, F), is_unknown(x))


@triton.jit
def unrounded_quotient(x, y):
    lo, hi = extremes(x[2] / y[2], x[3] / y[3], x[2] / y[3], x[3] / y[2])
    through_zero = (y[2] <= 0) & (y[3] >= 0) & (y[2] != y[3])
    return unknown_where((x[0] / y[0], x[1] / y[1], lo, hi), through_zero | is_unknown(x) | is_unknown(y))


@triton.jit
def quotient(x, y, F: tl.constexpr):
    return rounded(unrounded_quotient(x, y), F)


@triton.jit
def finite_magnitude(x):
    return tl.where(is_finite(x), magnitude(x), like(x, 0.0))


@triton.jit
def is_subnormal(x):
    return (x != 0) & (magnitude(x) < SMALLEST_NORMAL)


@triton.jit
def approximate_quotient(x, y, relative, F: tl.constexpr):
    size = tl.maximum(finite_magnitude(x[0]), finite_magnitude(x[1]))
    size = tl.maximum(size, tl.maximum(finite_magnitude(x[2]), finite_magnitude(x[3])))
    result = widened(unrounded_quotient(x, y), relative, relative, size * RECIPROCAL_ERROR)
    lost = is_subnormal(y[0]) | is_subnormal(y[1]) | is_subnormal(y[2]) | is_subnormal(y[3])
    return unknown_where(rounded(result, F), lost)


@triton.jit
def growth(x):
    return tl.where(is_finite(x), magnitude(x) * (2.0 * U), like(x, 0.0))


@triton.jit
def exponential_end(x, power, sign, relative):
    """Return one end; `sign` is 1 for the upper one, -1 for the lower one."""
    subnormal = (power > like(power, LOST)) & (power <= like(power, FLUSHED))
    absolute = tl.where(subnormal, like(power, SUBNORMAL), like(power, 0.0))
    return widened_end(power, (magnitude(power) * (growth(x) + relative + EXTRA) + absolute) * sign)


@triton.jit
def exponential(x, power, relative, F: tl.constexpr):
    lo = exponential_end(x[2], power[2], -1.0, relative)
    hi = exponential_end(x[3], power[3], 1.0, relative)
    tiny = (power[2] > 0) & (power[2] <= like(power[2], FLUSHED))
    lo = tl.where(tiny, like(lo, 0.0), lo)
    return unknown_where(rounded((power[0], power[1], lo, hi), F), is_unknown(x))


@triton.jit
def logistic_end(x, gate, rest, sign, relative, division):
    """Return one end; `sign` is 1 for the upper one, -1 for the lower one."""
    error = (growth(x) + relative) * rest + U + division
    absolute = tl.where(is_finite(x), like(x, SMALLEST_NORMAL), like(x, 0.0))
    end = widened_end(gate, (magnitude(gate) * (error + EXTRA) + absolute) * sign)
    return tl.where(end < 0, like(x, 0.0), end)


@triton.jit
def logistic(x, gate, rest, relative, division, F: tl.constexpr):
    lo = logistic_end(x[2], gate[2], rest[0], -1.0, relative, division)
    hi = logistic_end(x[3], gate[3], rest[1], 1.0, relative, division)
    saturated = x[2] >= like(x[2], SATURATED)
    one = like(lo, 1.0)
    result = gate[0], gate[1], tl.where(saturated, one, lo), tl.where(saturated, one, hi)
    return unknown_where(rounded(result, F), is_unknown(x))
