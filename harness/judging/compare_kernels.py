"""The Triton kernels of `fused_compare`: everything is read once, and partial results are combined in a fixed order.

Elements are taken in row-major order, cut into blocks; program p of P takes the blocks p, p + P, p + 2P and so on.
A tensor is addressed by two strides: element i lies in row i // width and column i % width; a flat one has no rows.
An element's value is `contract` from its exact part, and each end is `end` from what comes before; 0 where these are
one number. All numbers are fp64, formats are handled by integer operations on their bits. Launched without fused
multiply-add.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.judging.torch_compare import FARTHEST
from lastbit.numerics.fused.fp64 import bits_of, number_of
from lastbit.result import NEAR

# Columns that a program of `float_statistics` writes before the worst element.
FLOAT_SUMS = 14
FLOAT_MAXIMA = 3

_FARTHEST = tl.constexpr(FARTHEST)
_NEAR = tl.constexpr(float(NEAR))
SHAPE = ("numel", "blocks", "width", "a_row", "a_column", "e_row", "e_column")
_FORMAT = ("dropped", "least", "shift", "limit", "signed_limit")


@triton.jit
def offsets(start, lanes, width, row, column, FLAT: tl.constexpr):
    if FLAT:
        return start + lanes
    across = start % width + lanes
    return (start // width + across // width) * row + across % width * column


@triton.jit
def as_fp64(x):
    if x.dtype.is_fp8():
        x = x.to(tl.float32)
    return x.to(tl.float64)


@triton.jit
def is_outside(a, lo, hi):
    inside = ((a >= lo) & (a <= hi)) | ((lo != lo) & (a != a))
    return ~(inside | ((lo == float("-inf")) & (hi == float("inf"))))


@triton.jit
def _same_class(x, y):
    finite = (tl.abs(x) < float("inf")) & (tl.abs(y) < float("inf"))
    return finite | (x == y) | ((x != x) & (y != y))


@triton.jit
def _per_spacing(x, dropped, least):
    """Return 1 / distance between neighbours around x, which is finite: a power of two, so that a product is exact."""
    high = (bits_of(x) >> 32).to(tl.int32)
    exponent = tl.maximum((high >> 20) & 0x7FF, least)
    return number_of(((2046 + 52 - dropped - exponent) << 20).to(tl.int64) << 32)


@triton.jit
def _any(condition):
    return tl.max(condition.to(tl.int32)) > 0


@triton.jit
def _count(condition):
    """Count the true elements of each row."""
    return tl.sum(condition.to(tl.int32), 1)


@triton.jit
def _position(x, dropped, least, shift, limit, signed_limit):
    """Return the ordinal of x, correctly rounded to the format; 0 for NaN. Overflow to NaN is positive."""
    magnitude = tl.abs(x)
    bits = bits_of(magnitude)
    one = tl.full(bits.shape, 1, tl.int64)
    half = (one << (dropped - 1)) - 1 + ((bits >> dropped) & 1)
    normal = ((bits + half) >> dropped) - ((least.to(tl.int64) - 1) << (52 - dropped))
    moved = tl.full(bits.shape, 0, tl.int64) + shift
    small = bits_of(magnitude + number_of(moved)) - moved
    position = tl.minimum(tl.where((bits >> 52) < least, small, normal), limit)
    position = tl.where(x != x, 0, position)
    return tl.where((x < 0) & (position < signed_limit), -position, position)


@triton.jit
def _distance(x, y, dropped, least, shift, limit, signed_limit):
    """Return how many numbers of the format x and y lie apart, in fp64; infinite if only one of them is NaN."""
    apart = _position(x, dropped, least, shift, limit, signed_limit) - _position(
        y, dropped, least, shift, limit, signed_limit
    )
    return tl.where((x != x) != (y != y), float("inf"), tl.abs(apart).to(tl.float64))


@triton.jit
def _parts(e_at, there, contract, end, PARTS: tl.constexpr):
    """Load the exact number, the contract's value and both ends."""
    exact = tl.load(e_at, there, other=0.0)
    value = exact
    if PARTS > 1:
        value = tl.load(e_at + contract, there, other=0.0)
    lo = value
    hi = value
    if PARTS == 4:
        lo = tl.load(e_at + contract + end, there, other=0.0)
        hi = tl.load(e_at + contract + end + end, there, other=0.0)
    return exact, value, lo, hi


@triton.jit(do_not_specialize=(*SHAPE, *_FORMAT))
def float_statistics(
    a_ptr, e_ptr, columns_ptr, contract: tl.int64, end: tl.int64, numel: tl.int64, blocks: tl.int32,
    width: tl.int64, a_row: tl.int64, a_column: tl.int64, e_row: tl.int64, e_column: tl.int64,
    dropped: tl.int32, least: tl.int32, shift: tl.int64, limit: tl.int64, signed_limit: tl.int64,
    PARTS: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store what a program finds in its blocks, each figure to a column of its own: sums, maxima, the worst element.

    Of each block are taken, in this order: how far elements are from the exact numbers; what the enclosure leaves open;
    and, where any element differs from the contract's value or lies outside, how many do and how far they are.
    """
    rows = tl.arange(0, BLOCK // 2)
    lanes = rows[:, None] * 2 + tl.arange(0, 2)[None, :]  # two neighbours in one thread: an accumulator for both
    undecided = tl.zeros([BLOCK // 2], tl.int32)
    mismatches = tl.zeros([BLOCK // 2], tl.int32)
    outsides = tl.zeros([BLOCK // 2], tl.int32)
    specials = tl.zeros([BLOCK // 2], tl.int32)
    far = tl.zeros([BLOCK // 2], tl.int32)
    beyond_0 = tl.zeros([BLOCK // 2], tl.int32)
    beyond_1 = tl.zeros([BLOCK // 2], tl.int32)
    beyond_2 = tl.zeros([BLOCK // 2], tl.int32)
    beyond_4 = tl.zeros([BLOCK // 2], tl.int32)
    beyond_16 = tl.zeros([BLOCK // 2], tl.int32)
    squared_error = tl.zeros([BLOCK // 2], tl.float64)
    squared_exact = tl.zeros([BLOCK // 2], tl.float64)
    squared_contract = tl.zeros([BLOCK // 2], tl.float64)
    bias_sum = tl.zeros([BLOCK // 2], tl.float64)
    max_error = tl.zeros([BLOCK // 2], tl.float64)
    max_ulp = tl.zeros([BLOCK // 2], tl.float64)
    worst = tl.zeros([BLOCK // 2], tl.float64)
    worst_at = tl.zeros([BLOCK // 2], tl.int64)
    max_ratio = tl.sum(tl.zeros([BLOCK // 2], tl.float64), 0)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = block.to(tl.int64) * BLOCK
        there = start + lanes < numel
        a = as_fp64(tl.load(a_ptr + offsets(start, lanes, width, a_row, a_column, FLAT), there))
        a = tl.where(there, a, 0.0)
        e_at = e_ptr + offsets(start, lanes, width, e_row, e_column, FLAT)
        exact, value, lo, hi = _parts(e_at, there, contract, end, PARTS)

        known = (tl.abs(a) < float("inf")) & (tl.abs(exact) < float("inf"))
        finite = known & (tl.abs(value) < float("inf"))
        error = tl.where(finite, a - exact, 0.0)
        reference = tl.where(finite, exact, 0.0)
        squared_error += tl.sum(error * error, 1)
        squared_exact += tl.sum(reference * reference, 1)
        if PARTS > 1:
            loss = tl.where(finite, value - exact, 0.0)
            squared_contract += tl.sum(loss * loss, 1)
        top = tl.max(tl.abs(error), 1)
        max_error = tl.where(top > max_error, top, max_error)
        inward = tl.where(finite, (tl.abs(a) - tl.abs(exact)) * _per_spacing(reference, dropped, least), 0.0)
        near = finite & (tl.abs(inward) <= _NEAR)
        bias_sum += tl.sum(inward * tl.where(near, 1.0, 0.0), 1)
        far += _count(~near)

        mismatched = (a != value) & ((a == a) | (value == value))
        outside = mismatched  # where ends are the value
        if PARTS == 4:
            outside = is_outside(a, lo, hi)
            undecided += _count((lo != hi) & (lo == lo))
            radius = (hi - lo) * 0.5
            away = tl.abs(a - (lo + radius))
            free = known & (radius > 0) & (radius < float("inf"))
            # Whether away / radius is more than any before: the sign of an FMA is exact unless it underflows.
            more = tl.fma(tl.zeros_like(radius) - max_ratio, radius, away) > 0
            more |= (away > 0) & (away < 2.0**-900)
            if _any(free & more):
                ratio = tl.max(tl.where(free, away / tl.where(free, radius, 1.0), 0.0))
                max_ratio = tl.where(ratio > max_ratio, ratio, max_ratio)

        if _any(mismatched | outside):
            mismatches += _count(mismatched)
            outsides += _count(outside)
            specials += _count(outside & ~_same_class(a, lo) & _same_class(lo, hi))
            distance = _distance(a, value, dropped, least, shift, limit, signed_limit)
            beyond_0 += _count(distance > 0)
            beyond_1 += _count(distance > 1)
            beyond_2 += _count(distance > 2)
            beyond_4 += _count(distance > 4)
            beyond_16 += _count(distance > 16)
            farthest = tl.max(distance, 1)
            max_ulp = tl.where(farthest > max_ulp, farthest, max_ulp)
            severity = tl.where(distance > _FARTHEST, _FARTHEST, distance) + tl.where(outside, 2 * _FARTHEST, 0.0)
            top = tl.max(severity, 1)
            first = tl.min(tl.where(severity == top[:, None], lanes, BLOCK), 1)
            worst_at = tl.where(top > worst, start + first, worst_at)
            worst = tl.where(top > worst, top, worst)

    into = columns_ptr + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(into, tl.sum(undecided, 0).to(tl.float64))
    tl.store(into + step, tl.sum(mismatches, 0).to(tl.float64))
    tl.store(into + 2 * step, tl.sum(outsides, 0).to(tl.float64))
    tl.store(into + 3 * step, tl.sum(specials, 0).to(tl.float64))
    tl.store(into + 4 * step, tl.sum(far, 0).to(tl.float64))
    tl.store(into + 5 * step, tl.sum(beyond_0, 0).to(tl.float64))
    tl.store(into + 6 * step, tl.sum(beyond_1, 0).to(tl.float64))
    tl.store(into + 7 * step, tl.sum(beyond_2, 0).to(tl.float64))
    tl.store(into + 8 * step, tl.sum(beyond_4, 0).to(tl.float64))
    tl.store(into + 9 * step, tl.sum(beyond_16, 0).to(tl.float64))
    tl.store(into + 10 * step, tl.sum(squared_error, 0))
    tl.store(into + 11 * step, tl.sum(squared_exact, 0))
    tl.store(into + 12 * step, tl.sum(squared_contract, 0))
    tl.store(into + 13 * step, tl.sum(bias_sum, 0))
    tl.store(into + 14 * step, tl.max(max_error, 0))
    tl.store(into + 15 * step, tl.max(max_ulp, 0))
    tl.store(into + 16 * step, max_ratio)
    store_worst(into + 17 * step, step, worst, worst_at)


@triton.jit
def store_worst(into, step, worst, position):
    top = tl.max(worst, 0)
    first = tl.min(tl.where(worst == top, position, 0x7FFFFFFFFFFFFFFF), 0)
    tl.store(into, top)
    tl.store(into + step, first.to(tl.float64))


@triton.jit(do_not_specialize=("programs", "width", "a_row", "a_column", "e_row", "e_column"))
def finish(
    columns_ptr, figures_ptr, a_ptr, e_ptr, contract: tl.int64, end: tl.int64, programs: tl.int64,
    width: tl.int64, a_row: tl.int64, a_column: tl.int64, e_row: tl.int64, e_column: tl.int64,
    PARTS: tl.constexpr, SUMS: tl.constexpr, MAXIMA: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the figures: sums, maxima, position and severity of the worst element, its actual value and its parts.

    PARTS is 1 also for an expected integer. One program for each sum and maximum, and one for the worst element.
    """
    column = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    from_ptr = columns_ptr + column * programs
    found = tl.zeros([BLOCK], tl.float64)
    if column < SUMS:
        for start in range(0, programs, BLOCK):
            found += tl.load(from_ptr + start + lanes, start + lanes < programs, other=0.0)
        tl.store(figures_ptr + column, tl.sum(found, 0))
    elif column < SUMS + MAXIMA:
        for start in range(0, programs, BLOCK):
            x = tl.load(from_ptr + start + lanes, start + lanes < programs, other=0.0)
            found = tl.where(x > found, x, found)
        tl.store(figures_ptr + column, tl.max(found, 0))
    else:
        first = tl.zeros([BLOCK], tl.float64)
        for start in range(0, programs, BLOCK):
            x = tl.load(from_ptr + start + lanes, start + lanes < programs, other=0.0)
            position = tl.load(from_ptr + programs + start + lanes, start + lanes < programs, other=0.0)
            better = (x > found) | ((x == found) & (position < first))
            first = tl.where(better, position, first)
            found = tl.where(better, x, found)
        top = tl.max(found, 0)
        worst = tl.min(tl.where(found == top, first, float("inf")), 0).to(tl.int64)
        into = figures_ptr + column
        tl.store(into, worst.to(tl.float64))
        tl.store(into + 1, top)
        tl.store(into + 2, as_fp64(tl.load(a_ptr + offsets(worst, 0, width, a_row, a_column, FLAT))))
        e_at = e_ptr + offsets(worst, 0, width, e_row, e_column, FLAT)
        tl.store(into + 3, as_fp64(tl.load(e_at)))
        if PARTS > 1:
            tl.store(into + 4, tl.load(e_at + contract))
        if PARTS == 4:
            tl.store(into + 5, tl.load(e_at + contract + end))
            tl.store(into + 6, tl.load(e_at + contract + end + end))


INTEGER_SUMS = 8  # columns that a program of `integer_statistics` writes before the worst element


@triton.jit(do_not_specialize=SHAPE)
def integer_statistics(
    a_ptr, e_ptr, columns_ptr, numel: tl.int64, blocks: tl.int32,
    width: tl.int64, a_row: tl.int64, a_column: tl.int64, e_row: tl.int64, e_column: tl.int64,
    FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    wrongs = tl.zeros([BLOCK], tl.int32)
    beyond_0 = tl.zeros([BLOCK], tl.int32)
    beyond_1 = tl.zeros([BLOCK], tl.int32)
    beyond_2 = tl.zeros([BLOCK], tl.int32)
    beyond_4 = tl.zeros([BLOCK], tl.int32)
    beyond_16 = tl.zeros([BLOCK], tl.int32)
    squared_error = tl.zeros([BLOCK], tl.float64)
    squared_exact = tl.zeros([BLOCK], tl.float64)
    worst = tl.zeros([BLOCK], tl.float64)
    worst_block = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = block.to(tl.int64) * BLOCK
        there = start + lanes < numel
        a = tl.load(a_ptr + offsets(start, lanes, width, a_row, a_column, FLAT), there, other=0)
        e = tl.load(e_ptr + offsets(start, lanes, width, e_row, e_column, FLAT), there, other=0)
        wrong = a.to(tl.int64) != e.to(tl.int64)
        value = e.to(tl.float64)
        apart = tl.abs(a.to(tl.float64) - value)
        distance = tl.where(wrong, tl.where(apart < 1.0, 1.0, apart), 0.0)
        wrongs += wrong.to(tl.int32)
        beyond_0 += (distance > 0).to(tl.int32)
        beyond_1 += (distance > 1).to(tl.int32)
        beyond_2 += (distance > 2).to(tl.int32)
        beyond_4 += (distance > 4).to(tl.int32)
        beyond_16 += (distance > 16).to(tl.int32)
        squared_error += distance * distance
        squared_exact += value * value
        worst_block = tl.where(distance > worst, block, worst_block)
        worst = tl.where(distance > worst, distance, worst)
    into = columns_ptr + tl.program_id(0)
    step = tl.num_programs(0)
    tl.store(into, tl.sum(wrongs, 0).to(tl.float64))
    tl.store(into + step, tl.sum(beyond_0, 0).to(tl.float64))
    tl.store(into + 2 * step, tl.sum(beyond_1, 0).to(tl.float64))
    tl.store(into + 3 * step, tl.sum(beyond_2, 0).to(tl.float64))
    tl.store(into + 4 * step, tl.sum(beyond_4, 0).to(tl.float64))
    tl.store(into + 5 * step, tl.sum(beyond_16, 0).to(tl.float64))
    tl.store(into + 6 * step, tl.sum(squared_error, 0))
    tl.store(into + 7 * step, tl.sum(squared_exact, 0))
    store_worst(into + 8 * step, step, worst, worst_block.to(tl.int64) * BLOCK + lanes)


@triton.jit(do_not_specialize=SHAPE)
def count_outside(
    a_ptr, e_ptr, count_ptr, contract: tl.int64, end: tl.int64, numel: tl.int64, blocks: tl.int32,
    width: tl.int64, a_row: tl.int64, a_column: tl.int64, e_row: tl.int64, e_column: tl.int64,
    PARTS: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the number of elements outside to a counter; PARTS is 0 for expected integers."""
    lanes = tl.arange(0, BLOCK)
    outsides = tl.zeros([BLOCK], tl.int32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
        start = block.to(tl.int64) * BLOCK
        there = start + lanes < numel
        a = tl.load(a_ptr + offsets(start, lanes, width, a_row, a_column, FLAT), there)
        e_at = e_ptr + offsets(start, lanes, width, e_row, e_column, FLAT)
        if PARTS == 0:
            outside = a.to(tl.int64) != tl.load(e_at, there).to(tl.int64)
        else:
            lo = tl.load(e_at + contract + end, there)
            hi = lo
            if PARTS == 4:
                hi = tl.load(e_at + contract + end + end, there)
            outside = is_outside(as_fp64(a), lo, hi)
        outsides += (outside & there).to(tl.int32)
    tl.atomic_add(count_ptr, tl.sum(outsides, 0).to(tl.int64))
