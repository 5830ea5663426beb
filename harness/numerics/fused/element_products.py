"""The definitions of `lastbit.numerics.factors` and `lastbit.numerics.dots` for one element; see `elements`."""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.numerics import factors
from lastbit.numerics.dots import FITS_FP16
from lastbit.numerics.formats import FP16, FP32
from lastbit.numerics.fused.elements import rounded, unknown_where
from lastbit.numerics.fused.fp64 import MAX, is_finite, like, magnitude, most, negative
from lastbit.numerics.fused.terms import LATTICE_UNITS, SMALLEST_QUANTUM, unit_of
from lastbit.numerics.sums import UNDERFLOW as UNDERFLOW_OF_PRODUCT

KNOWN, APART, NAN = tl.constexpr(factors.KNOWN), tl.constexpr(factors.APART), tl.constexpr(factors.NAN)
UNDERFLOW = tl.constexpr(UNDERFLOW_OF_PRODUCT)
FP16_QUANTUM, FP16_MAX = tl.constexpr(FITS_FP16[0]), tl.constexpr(FITS_FP16[1])
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
