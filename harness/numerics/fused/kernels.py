"""The definitions of `harness.numerics.parts` and `primitives` as functions of one element, and the kernel around them.

An element is a tuple (exact, value, lo, hi) of fp64 blocks. A function below has the name of its definition and gives
what that gives for four parts; with fewer parts the tuple holds a number several times, and what is not stored is not
computed. `F` is the position of a format in `FORMATS`.

Error-free sums and exact products must not be contracted: the launch says enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl

from harness.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, WIDE_FP32

FORMATS = (FP32, BF16, FP16, E4M3, E5M2, FP64, WIDE_FP32)
PRECISION = tl.constexpr(tuple(f.precision for f in FORMATS))
SMALLEST = tl.constexpr(tuple(2.0**f.min_exponent for f in FORMATS))
QUANTUM = tl.constexpr(tuple(f.quantum for f in FORMATS))
MAX = tl.constexpr(tuple(f.max for f in FORMATS))
OVERFLOWS_TO_NAN = tl.constexpr(tuple(f.overflow == "nan" for f in FORMATS))
FP32_MAX = tl.constexpr(FP32.max)

INF = tl.constexpr(float("inf"))
SIGN = tl.constexpr(-(2**63))
U = tl.constexpr(2.0**-24)
EXTRA = tl.constexpr(2.0**-50)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SATURATED = tl.constexpr(17.33)
RECIPROCAL_ERROR = tl.constexpr(2.0**-150)
EXPONENTIAL_ERROR = tl.constexpr(2.0**-148)


@triton.jit
def like(x, NUMBER: tl.constexpr):
    return tl.full(x.shape, NUMBER, tl.float64)


@triton.jit
def bits_of(x):
    return x.to(tl.int64, bitcast=True)


@triton.jit
def number_of(bits):
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def magnitude(x):
    return number_of(bits_of(x) & ~SIGN)


@triton.jit
def negative(x):
    return number_of(bits_of(x) ^ SIGN)


@triton.jit
def is_finite(x):
    return magnitude(x) < like(x, INF)


@triton.jit
def least(a, b):
    """The smaller one, NaN if either is."""
    return tl.where(a != a, a, tl.where(a < b, a, b))


@triton.jit
def most(a, b):
    """The larger one, NaN if either is."""
    return tl.where(a != a, a, tl.where(a > b, a, b))


@triton.jit
def is_unknown(x):
    return (x[2] == like(x[2], -INF)) & (x[3] == like(x[3], INF))


@triton.jit
def unknown_where(x, lost):
    lost = lost | ((x[2] != x[2]) ^ (x[3] != x[3]))
    return x[0], x[1], tl.where(lost, like(x[2], -INF), x[2]), tl.where(lost, like(x[3], INF), x[3])


@triton.jit
def extremes_of_two(a, b):
    lo, hi = least(a, b), most(a, b)
    lost = (lo != lo) & ((a == a) | (b == b))
    return tl.where(lost, like(lo, -INF), lo), tl.where(lost, like(hi, INF), hi)


@triton.jit
def extremes(a, b, c, d):
    lo, hi = least(least(least(a, b), c), d), most(most(most(a, b), c), d)
    lost = (lo != lo) & ((a == a) | (b == b) | (c == c) | (d == d))
    return tl.where(lost, like(lo, -INF), lo), tl.where(lost, like(hi, INF), hi)


@triton.jit
def round_to(x, F: tl.constexpr):
    """`formats.round_to`, to nearest."""
    if PRECISION[F] == 53:
        return x
    elif MAX[F] == FP32_MAX:
        return x.to(tl.float32).to(tl.float64)
    else:
        size = magnitude(x)
        dropped: tl.constexpr = 53 - PRECISION[F]
        bits = bits_of(size)
        bits = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
        normal = number_of((bits >> dropped) << dropped)
        shift = like(x, QUANTUM[F] * 2.0**52)
        subnormal = (size + shift) - shift
        result = tl.where(size < like(x, SMALLEST[F]), subnormal, normal)
        beyond = like(x, float("nan") if OVERFLOWS_TO_NAN[F] else INF)
        result = tl.where((result > like(x, MAX[F])) | (size == like(x, INF)), beyond, result)
        result = number_of(bits_of(result) | (bits_of(x) & SIGN))
        return tl.where(x != x, x, result)


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
def sum_to_odd(x, y):
    """`formats.sum_to_odd`: the neighbour on the side of the error is one step of the bits away."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = bits_of(total)
    step = ((bits ^ bits_of(error)) >> 63) | 1
    inexact = ((bits & 1) == 0) & (error != 0) & is_finite(error)
    return number_of(tl.where(inexact, bits + step, bits))


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
def product_in_any_order(x, y, z, F: tl.constexpr):
    first = multiplied(multiplied(x, y, F), z, F)
    return hull(hull(first, multiplied(y, multiplied(x, z, F), F)), multiplied(x, multiplied(y, z, F), F))


@triton.jit
def clamped_number(x, low, high):
    limited = tl.where(x < low, low, x)
    return tl.where(limited > high, high, limited)


@triton.jit
def clamped(x, low, high):
    result = clamped_number(x[0], low, high), clamped_number(x[1], low, high), clamped_number(x[2], low, high), clamped_number(x[3], low, high)  # fmt: skip
    return unknown_where(result, is_unknown(x))


@triton.jit
def magnitudes(x):
    lo, hi = magnitude(x[2]), magnitude(x[3])
    near = tl.where((x[2] <= 0) & (x[3] >= 0), like(lo, 0.0), least(lo, hi))
    return magnitude(x[0]), magnitude(x[1]), near, most(lo, hi)


@triton.jit
def widened_end(x, margin):
    return tl.where(is_finite(x), x + margin, x)


@triton.jit
def widened(x, relative_lo, relative_hi, absolute):
    lo = widened_end(x[2], negative(magnitude(x[2]) * (relative_lo + EXTRA) + absolute))
    hi = widened_end(x[3], magnitude(x[3]) * (relative_hi + EXTRA) + absolute)
    return x[0], x[1], lo, hi


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
def exponential(x, power, relative, F: tl.constexpr):
    parts = widened(power, growth(x[2]) + relative, growth(x[3]) + relative, EXPONENTIAL_ERROR)
    return unknown_where(rounded(parts, F), is_unknown(x))


@triton.jit
def logistic_end(x, gate, rest, sign, relative, division):
    """One end; `sign` is 1 for the upper one."""
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


@triton.jit
def load(pointer, contract, end, offset, mask):
    """An element from 1, 2 or 4 parts: `contract` and `end` are how far value is from exact, and lo and hi from it."""
    exact, value = pointer + offset, pointer + offset + contract
    return (
        tl.load(exact, mask=mask), tl.load(value, mask=mask),
        tl.load(value + end, mask=mask), tl.load(value + 2 * end, mask=mask),
    )  # fmt: skip


ARGUMENTS = (
    "out x y z size rows columns x_contract x_end x0 x1 x2 y_contract y_end y0 y1 y2 z_contract z_end z0 z1 z2"
).split()  # one compiled kernel serves all of their values


@triton.jit(do_not_specialize=ARGUMENTS)
def elementwise(
    out, x, y, z, size: tl.int32, rows: tl.int32, columns: tl.int32,
    x_contract: tl.int64, x_end: tl.int64, x0: tl.int64, x1: tl.int64, x2: tl.int64,
    y_contract: tl.int64, y_end: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64,
    z_contract: tl.int64, z_end: tl.int64, z0: tl.int64, z1: tl.int64, z2: tl.int64,
    first: tl.float64, second: tl.float64,
    FUNCTION: tl.constexpr, OPERANDS: tl.constexpr, FLAT: tl.constexpr, PARTS: tl.constexpr,
    F: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`FUNCTION` of the elements of up to three operands, whose indices have three dimensions [..., rows, columns]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    if FLAT:
        i, j, k = index * 0, index * 0, index
    else:
        row = index // columns
        i, j, k = row // rows, row % rows, index % columns
    a = load(x, x_contract, x_end, i * x0 + j * x1 + k * x2, mask)
    operands = (a,)
    if OPERANDS > 1:
        operands = operands + (load(y, y_contract, y_end, i * y0 + j * y1 + k * y2, mask),)
    if OPERANDS > 2:
        operands = operands + (load(z, z_contract, z_end, i * z0 + j * z1 + k * z2, mask),)
    if NUMBERS > 0:
        operands = operands + (first,)
    if NUMBERS > 1:
        operands = operands + (second,)
    if F is None:
        result = FUNCTION(*operands)
    else:
        result = FUNCTION(*operands, F=F)
    step = size.to(tl.int64)
    tl.store(out + index, result[0], mask=mask)
    if PARTS > 1:
        tl.store(out + step + index, result[1], mask=mask)
    if PARTS > 2:
        tl.store(out + 2 * step + index, result[2], mask=mask)
        tl.store(out + 3 * step + index, result[3], mask=mask)
