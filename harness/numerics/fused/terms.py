"""The kernels of `cuda_sums`: facts about terms in one pass over them, and bounds by the facts."""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.numerics.formats import FP32
from lastbit.numerics.fused.elements import is_unknown, magnitudes, rounded, unknown_where
from lastbit.numerics.fused.fp64 import INF, MAX, bits_of, is_finite, like, magnitude, most, number_of

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


@triton.jit(
    do_not_specialize=["out", "x", "contract", "end", "outer_step", "inner_step", "outer", "inner", "share"],
)
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
