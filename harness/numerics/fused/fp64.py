"""Triton functions of blocks of fp64 numbers: their bits, rounding, and sums that can be rounded again.

A Python number beside a block counts as fp32 in a comparison or a choice: `like` makes it fp64 first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lastbit.numerics.formats import BF16, E4M3, E5M2, FP16, FP32, FP64, WIDE_FP32

FORMATS = (FP32, BF16, FP16, E4M3, E5M2, FP64, WIDE_FP32)
"""The formats to round to. A kernel takes the position of one."""

PRECISION = tl.constexpr(tuple(f.precision for f in FORMATS))
SMALLEST = tl.constexpr(tuple(2.0**f.min_exponent for f in FORMATS))
QUANTUM = tl.constexpr(tuple(f.quantum for f in FORMATS))
MAX = tl.constexpr(tuple(f.max for f in FORMATS))
OVERFLOWS_TO_NAN = tl.constexpr(tuple(f.overflow == "nan" for f in FORMATS))
FP32_MAX = tl.constexpr(FP32.max)

INF = tl.constexpr(float("inf"))
SIGN = tl.constexpr(-(2**63))


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
    """Return the smaller one, NaN if either is."""
    return tl.where(a != a, a, tl.where(a < b, a, b))


@triton.jit
def most(a, b):
    """Return the larger one, NaN if either is."""
    return tl.where(a != a, a, tl.where(a > b, a, b))


@triton.jit
def round_to(x, F: tl.constexpr):
    """Round to nearest as `formats.round_to`."""
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
def sum_to_odd(x, y):
    """Add as `formats.sum_to_odd`: the neighbour on the side of the error is one step of the bits away."""
    total = x + y
    part = total - x
    error = (x - (total - part)) + (y - part)
    bits = bits_of(total)
    step = ((bits ^ bits_of(error)) >> 63) | 1
    inexact = ((bits & 1) == 0) & (error != 0) & is_finite(error)
    return number_of(tl.where(inexact, bits + step, bits))
