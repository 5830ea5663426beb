"""The definitions of `parts`, `primitives` and `dots` for one element, a tuple (exact, value, lo, hi) of blocks.

A function has the name of its definition and gives what that gives for four parts. Where an operand has fewer, the
tuple holds a number several times, and what is not stored in the end is not computed. `F` is the position of a format
in `FORMATS`. Around them is one kernel, `elementwise`: one launch, one pass over memory. Those of `cuda_sums` find
facts about terms in one pass, and bounds by the facts.

Sums without error and exact products must not be contracted: the launch says enable_fp_fusion=False.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.numerics import dots
from lastbit.numerics.formats import FP16, FP32
from lastbit.numerics.fused.fp64 import (
    INF,
    MAX,
    OVERFLOWS_TO_NAN,
    bits_of,
    is_finite,
    least,
    like,
    magnitude,
    most,
    negative,
    number_of,
    round_to,
    sum_to_odd,
)
from lastbit.numerics.premises import U as UNIT
from lastbit.numerics.sums import UNDERFLOW as UNDERFLOW_OF_PRODUCT

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


FRACTION = tl.constexpr((1 << 52) - 1)
HIDDEN_BIT = tl.constexpr(1 << 52)
LATTICE_UNITS = tl.constexpr(2.0**24)
SMALLEST_QUANTUM = tl.constexpr(FP32.quantum)


@triton.jit
def unit_of(x):
    """Return the largest power of two that divides a number; inf for zero, infinities and NaN."""
    bits = bits_of(magnitude(x))
    significand = (bits & FRACTION) | HIDDEN_BIT
    lowest = (significand & -significand).to(tl.float64)
    unit = number_of((bits >> 52) << 52) * 2.0**-52
    return tl.where((x == 0) | (is_finite(x) == 0), like(x, INF), lowest * unit)


@triton.jit
def finite_size(x):
    """Return the largest finite magnitude of the ends."""
    lo = tl.where(is_finite(x[2]), magnitude(x[2]), like(x[2], 0.0))
    return tl.maximum(lo, tl.where(is_finite(x[3]), magnitude(x[3]), like(x[3], 0.0)))


@triton.jit(do_not_specialize=["out", "x", "contract", "end", "outer_step", "inner_step", "outer", "inner", "share"])
def facts_kernel(
    out, x, contract: tl.int64, end: tl.int64, outer_step: tl.int64, inner_step: tl.int64, outer: tl.int32,
    inner: tl.int32, share: tl.int32,
    SQUARES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store the facts of `share` of the `inner` terms of each of `outer` sums; terms are columns of a tile, or rows."""
    OUTER: tl.constexpr = ROWS if AXIS == 1 else COLUMNS
    INNER: tl.constexpr = COLUMNS if AXIS == 1 else ROWS
    sum_index = tl.program_id(0) * OUTER + tl.arange(0, OUTER)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, inner)
    zero = tl.zeros((ROWS, COLUMNS), tl.float64)
    exact, value, lo, hi, size, of_finite = zero, zero, zero, zero, zero, zero
    quantum = tl.full((ROWS, COLUMNS), INF, tl.float64)
    known, negative, positive, unknown = zero == 0, zero != 0, zero != 0, zero != 0
    for first in range(start, stop, INNER):
        term_index = first + tl.arange(0, INNER)
        if AXIS == 1:
            place = sum_index[:, None] * outer_step + term_index[None, :] * inner_step
            mask = (sum_index < outer)[:, None] & (term_index < stop)[None, :]
        else:
            place = sum_index[None, :] * outer_step + term_index[:, None] * inner_step
            mask = (sum_index < outer)[None, :] & (term_index < stop)[:, None]
        at = x + place
        term = (
            tl.load(at, mask=mask, other=0.0), tl.load(at + contract, mask=mask, other=0.0),
            tl.load(at + contract + end, mask=mask, other=0.0), tl.load(at + contract + 2 * end, mask=mask, other=0.0),
        )  # fmt: skip
        if SQUARES:
            unknown = unknown | is_unknown(term)
            term = magnitudes(term)
            term = term[0] * term[0], term[1] * term[1], term[2] * term[2], term[3] * term[3]
        exact = exact + term[0]
        value = value + term[1]
        lo = lo + term[2]
        hi = hi + term[3]
        size = size + most(magnitude(term[2]), magnitude(term[3]))
        of_finite = of_finite + finite_size(term)
        quantum = tl.minimum(quantum, unit_of(term[2]))
        known = known & (term[2] == term[3])
        negative = negative | (term[2] < 0)
        positive = positive | (term[3] > 0)
    mask = sum_index < outer
    step = outer.to(tl.int64)
    at = out + tl.program_id(1) * (11 if SQUARES else 10) * step + sum_index
    tl.store(at, tl.sum(exact, AXIS), mask=mask)
    tl.store(at + step, tl.sum(value, AXIS), mask=mask)
    tl.store(at + 2 * step, tl.sum(lo, AXIS), mask=mask)
    tl.store(at + 3 * step, tl.sum(hi, AXIS), mask=mask)
    tl.store(at + 4 * step, tl.sum(size, AXIS), mask=mask)
    tl.store(at + 5 * step, tl.sum(of_finite, AXIS), mask=mask)
    tl.store(at + 6 * step, tl.min(quantum, AXIS), mask=mask)
    tl.store(at + 7 * step, tl.min(known.to(tl.int32), AXIS).to(tl.float64), mask=mask)
    tl.store(at + 8 * step, tl.max(negative.to(tl.int32), AXIS).to(tl.float64), mask=mask)
    tl.store(at + 9 * step, tl.max(positive.to(tl.int32), AXIS).to(tl.float64), mask=mask)
    if SQUARES:
        tl.store(at + 10 * step, tl.max(unknown.to(tl.int32), AXIS).to(tl.float64), mask=mask)


@triton.jit
def slack_end(x, slack):
    return tl.where(is_finite(x), x + slack, x)


@triton.jit(do_not_specialize=["out", "facts", "size"])
def bounds_kernel(
    out, facts, size: tl.int32,
    relative: tl.float64, absolute: tl.float64, flushed: tl.float64, least: tl.float64,
    F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store `sums.bounded` of the facts [10, size]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    step = size.to(tl.int64)
    at = facts + index
    value, lo, hi = tl.load(at + step, mask=mask), tl.load(at + 2 * step, mask=mask), tl.load(at + 3 * step, mask=mask)
    magnitude = tl.load(at + 4 * step, mask=mask)
    quantum = tl.load(at + 6 * step, mask=mask)
    lattice = (tl.load(at + 7 * step, mask=mask) > 0) & (magnitude < quantum * LATTICE_UNITS)
    lattice = lattice & (quantum >= like(quantum, SMALLEST_QUANTUM))
    slack = tl.where(lattice, like(lo, 0.0), relative * magnitude + absolute) + flushed
    low = lo - slack
    low = tl.where(is_finite(lo), tl.where(low < least, least, low), lo)
    overflows = (tl.load(at + 8 * step, mask=mask) > 0) & (tl.load(at + 9 * step, mask=mask) > 0)
    overflows = overflows & (tl.load(at + 5 * step, mask=mask) > like(lo, MAX[F])) & (value == value)
    result = rounded(unknown_where((tl.load(at, mask=mask), value, low, slack_end(hi, slack)), overflows), F)
    tl.store(out + index, result[0], mask=mask)
    tl.store(out + step + index, result[1], mask=mask)
    tl.store(out + 2 * step + index, result[2], mask=mask)
    tl.store(out + 3 * step + index, result[3], mask=mask)


KNOWN, APART, NAN = tl.constexpr(dots.KNOWN), tl.constexpr(dots.APART), tl.constexpr(dots.NAN)
UNDERFLOW = tl.constexpr(UNDERFLOW_OF_PRODUCT)
FP16_QUANTUM, FP16_MAX = tl.constexpr(dots.FITS_FP16[0]), tl.constexpr(dots.FITS_FP16[1])
FP16_SMALLEST, FP32_SMALLEST = tl.constexpr(2.0**FP16.min_exponent), tl.constexpr(2.0**FP32.min_exponent)


@triton.jit
def finite_or_zero(size):
    return tl.where(is_finite(size), size, like(size, 0.0))


@triton.jit
def spans(x):
    lo, hi = x[2], x[3]
    middle = (lo + hi) * 0.5
    known = (lo == hi) | (lo != lo)
    radius = tl.where(known, like(lo, 0.0), most(hi - middle, middle - lo))
    size = magnitude(middle) + radius
    return middle, radius, size, finite_or_zero(size)


@triton.jit
def limiting(x, apart):
    middle, radius = x[0], apart[0]
    known = tl.where(middle != middle, like(middle, NAN), like(middle, KNOWN))
    kind = tl.where(radius == 0, known, like(middle, APART))
    largest = negative(finite_or_zero(magnitude(middle) + radius))
    return unit_of(middle), kind, largest, largest


@triton.jit
def straying(size, left, right, least, cut, eps, flushed, terms):
    units = left[0] * right[0]
    fp16 = (least[0] >= like(units, FP16_QUANTUM)) & (negative(least[2]) <= like(units, FP16_MAX))
    smallest = tl.where(fp16, like(units, FP16_SMALLEST), like(units, FP32_SMALLEST))
    lost = smallest * cut * most(most(negative(left[2]), negative(right[2])), smallest)
    floor = most(lost, like(lost, SMALLEST_QUANTUM))
    exact = (size[0] < units * LATTICE_UNITS) & (units >= floor)
    exact = exact & (left[1] == like(units, KNOWN)) & (right[1] == like(units, KNOWN))
    radius = size[0] * eps + (lost * 2.0 + like(lost, UNDERFLOW)) * terms
    radius = tl.where(exact, like(radius, 0.0), radius) + flushed
    return radius, radius


@triton.jit
def enclosing(x, sizes, left, right, F: tl.constexpr):
    middle, radius = x[2], x[3]
    settles = (left[1] == like(left[1], NAN)) | (right[1] == like(right[1], NAN))
    settles = settles | ((left[1] == like(left[1], KNOWN)) & (right[1] == like(right[1], KNOWN)))
    infinite = is_finite(sizes[0]) == 0
    certain = settles & infinite
    low, high = tl.where(certain, x[1], middle - radius), tl.where(certain, x[1], middle + radius)
    overflows = (sizes[1] > like(sizes[1], MAX[F])) & (x[1] == x[1])
    return unknown_where(rounded((x[0], x[1], low, high), F), overflows | (infinite & (certain == 0)))


@triton.jit
def load(pointer, contract, end, offset, mask):
    """Load an element of 1, 2 or 4 parts: value lies `contract` numbers after exact, lo and hi `end` further each."""
    exact, value = pointer + offset, pointer + offset + contract
    return (
        tl.load(exact, mask=mask), tl.load(value, mask=mask),
        tl.load(value + end, mask=mask), tl.load(value + 2 * end, mask=mask),
    )  # fmt: skip


ARGUMENTS = [
    *["out", "x", "y", "z", "w", "parts", "size", "rows", "columns"],
    *[f"{operand}{what}" for operand in "xyzw" for what in ("_contract", "_end", "0", "1", "2")],
    *["first", "second", "third", "fourth"],
]


@triton.jit(do_not_specialize=ARGUMENTS)  # one compiled kernel serves all of their values
def elementwise(
    out, x, y, z, w, parts: tl.int32, size: tl.int32, rows: tl.int32, columns: tl.int32,
    x_contract: tl.int64, x_end: tl.int64, x0: tl.int64, x1: tl.int64, x2: tl.int64,
    y_contract: tl.int64, y_end: tl.int64, y0: tl.int64, y1: tl.int64, y2: tl.int64,
    z_contract: tl.int64, z_end: tl.int64, z0: tl.int64, z1: tl.int64, z2: tl.int64,
    w_contract: tl.int64, w_end: tl.int64, w0: tl.int64, w1: tl.int64, w2: tl.int64,
    first: tl.float64, second: tl.float64, third: tl.float64, fourth: tl.float64,
    FUNCTION: tl.constexpr, OPERANDS: tl.constexpr, FLAT: tl.constexpr, MOST: tl.constexpr,
    F: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply `FUNCTION` to elements of up to four operands, whose indices have three dimensions [..., rows, columns]."""
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
    if OPERANDS > 3:
        operands = operands + (load(w, w_contract, w_end, i * w0 + j * w1 + k * w2, mask),)
    if NUMBERS > 0:
        operands = operands + (first,)
    if NUMBERS > 1:
        operands = operands + (second,)
    if NUMBERS > 2:
        operands = operands + (third,)
    if NUMBERS > 3:
        operands = operands + (fourth,)
    if F is None:
        result = FUNCTION(*operands)
    else:
        result = FUNCTION(*operands, F=F)
    step = size.to(tl.int64)
    tl.store(out + index, result[0], mask=mask)
    if MOST > 1:
        tl.store(out + step + index, result[1], mask=mask & (parts > 1))
    if MOST > 2:
        tl.store(out + 2 * step + index, result[2], mask=mask & (parts > 2))
        tl.store(out + 3 * step + index, result[3], mask=mask & (parts > 2))
