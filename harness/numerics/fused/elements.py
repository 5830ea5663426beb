"""The definitions of `lastbit.numerics.parts` for one element, a tuple (exact, value, lo, hi) of blocks.

A function has the name of its definition and gives what that gives for four parts. Where an operand has fewer, the
tuple holds a number several times, and what is not stored in the end is not computed. `F` is the position of a format
in `FORMATS`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.numerics.fused.fp64 import (
    INF,
    OVERFLOWS_TO_NAN,
    is_finite,
    least,
    like,
    magnitude,
    most,
    negative,
    round_to,
    sum_to_odd,
)

# Eight units of fp64: the few operations that make a bound err by less.
EXTRA = tl.constexpr(2.0**-50)


@triton.jit
def is_unknown(x):
    return (x[2] == like(x[2], -INF)) & (x[3] == like(x[3], INF))


@triton.jit
def unknown_where(x, lost):
    lost = lost | ((x[2] != x[2]) ^ (x[3] != x[3]))
    return x[0], x[1], tl.where(lost, like(x[2], -INF), x[2]), tl.where(lost, like(x[3], INF), x[3])


@triton.jit
def extremes(a, b, c, d):
    lo, hi = least(least(least(a, b), c), d), most(most(most(a, b), c), d)
    lost = (lo != lo) & ((a == a) | (b == b) | (c == c) | (d == d))
    return tl.where(lost, like(lo, -INF), lo), tl.where(lost, like(hi, INF), hi)


@triton.jit
def unknown_if(x, lost):
    return unknown_where(x, lost[0] != 0)


@triton.jit
def rounded_ends(x, F: tl.constexpr):
    return x[0], round_to(x[1], F), round_to(x[2], F), round_to(x[3], F)


@triton.jit
def rounded(x, F: tl.constexpr):
    result = rounded_ends(x, F)
    lost = is_unknown(x)
    if OVERFLOWS_TO_NAN[F]:
        lost = lost | ((result[2] != result[2]) & (x[2] < 0) & (x[3] > 0))
    return unknown_where(result, lost)


@triton.jit
def negated(x):
    return negative(x[0]), negative(x[1]), negative(x[3]), negative(x[2])


@triton.jit
def unrounded_sum(x, y):
    return x[0] + y[0], sum_to_odd(x[1], y[1]), sum_to_odd(x[2], y[2]), sum_to_odd(x[3], y[3])


@triton.jit
def added(x, y, F: tl.constexpr):
    return rounded(unrounded_sum(x, y), F)


@triton.jit
def subtracted(x, y, F: tl.constexpr):
    return added(x, negated(y), F)


@triton.jit
def unrounded_product(x, y):
    lo, hi = extremes(x[2] * y[2], x[3] * y[3], x[2] * y[3], x[3] * y[2])
    return unknown_where((x[0] * y[0], x[1] * y[1], lo, hi), is_unknown(x) | is_unknown(y))


@triton.jit
def multiplied(x, y, F: tl.constexpr):
    return rounded(unrounded_product(x, y), F)


@triton.jit
def hull(x, y):
    lo, hi = extremes(x[2], x[3], y[2], y[3])
    return x[0], x[1], lo, hi


@triton.jit
def hull_of_three(x, y, z):
    return hull(hull(x, y), z)


@triton.jit
def fusible_product(x, y, F: tl.constexpr):
    product = unrounded_product(x, y)
    return hull(rounded(product, F), product)


@triton.jit
def multiply_add(x, y, z, F: tl.constexpr):
    product = unrounded_product(x, y)
    return hull(added(rounded(product, F), z, F), added(product, z, F))


@triton.jit
def product_of_three(x, y, z, F: tl.constexpr):
    first = multiplied(multiplied(x, y, F), z, F)
    return hull(hull(first, multiplied(y, multiplied(x, z, F), F)), multiplied(x, multiplied(y, z, F), F))


@triton.jit
def product_of_four(x, y, z, w, F: tl.constexpr):
    first = hull(multiplied(product_of_three(x, y, z, F), w, F), multiplied(z, product_of_three(x, y, w, F), F))
    second = hull(multiplied(y, product_of_three(x, z, w, F), F), multiplied(x, product_of_three(y, z, w, F), F))
    third = multiplied(multiplied(x, y, F), multiplied(z, w, F), F)
    fourth = multiplied(multiplied(x, z, F), multiplied(y, w, F), F)
    fifth = multiplied(multiplied(x, w, F), multiplied(y, z, F), F)
    return hull(hull(hull(first, second), third), hull(fourth, fifth))


@triton.jit
def product_in_any_order(x, y, z, w=None, F: tl.constexpr = 0):
    if w is None:
        return product_of_three(x, y, z, F)
    else:
        return product_of_four(x, y, z, w, F)


@triton.jit
def clamped_number(x, low, high):
    limited = tl.where(x < low, low, x)
    return tl.where(limited > high, high, limited)


@triton.jit
def clamped(x, low, high):
    contract = clamped_number(x[1], low, high), clamped_number(x[2], low, high), clamped_number(x[3], low, high)
    return unknown_where((clamped_number(x[0], low, high), contract[0], contract[1], contract[2]), is_unknown(x))


@triton.jit
def magnitudes(x):
    lo, hi = magnitude(x[2]), magnitude(x[3])
    near = tl.where((x[2] <= 0) & (x[3] >= 0), like(lo, 0.0), least(lo, hi))
    return magnitude(x[0]), magnitude(x[1]), near, most(lo, hi)


@triton.jit
def widened_end(x, margin):
    return tl.where(is_finite(x), x + margin, x)


@triton.jit
def averaged(x, count, relative, F: tl.constexpr):
    means = x[0] / count, x[1] / count, x[2] / count, x[3] / count
    wide = widened(means, relative, relative, 0.0)
    inexact = relative != 0
    ends = tl.where(inexact, wide[2], means[2]), tl.where(inexact, wide[3], means[3])
    return rounded((means[0], means[1], ends[0], ends[1]), F)


@triton.jit
def spread(x, relative, absolute):
    return widened(x, relative, relative, absolute)


@triton.jit
def widened(x, relative_lo, relative_hi, absolute):
    lo = widened_end(x[2], negative(magnitude(x[2]) * (relative_lo + EXTRA) + absolute))
    hi = widened_end(x[3], magnitude(x[3]) * (relative_hi + EXTRA) + absolute)
    return x[0], x[1], lo, hi
