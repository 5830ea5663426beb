"""Triton's number formats as numpy dtypes, and conversions between them as NVIDIA hardware makes them.

bf16 and fp8 are ml_dtypes formats, so that numpy itself adds, compares and broadcasts them. Measured on an H200: every
conversion to fp8 saturates (cvt.satfinite: ±448, ±57344, infinities included) and NaN stays NaN; every other one
rounds to nearest, ties to even, overflowing to infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from numpy.typing import NDArray

Array = NDArray[Any]
DType = np.dtype[Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
"""Largest finite value of each fp8 format, to which conversions saturate."""

_ALIKE = "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float64 float32 float16"
NUMPY: dict[Any, DType] = {
    tl.int1: np.dtype(np.bool_),
    **{getattr(tl, name): np.dtype(name) for name in _ALIKE.split()},
    tl.bfloat16: BFLOAT16,
    tl.float8e4nv: E4M3,
    tl.float8e5: E5M2,
}


def numpy_dtype(dtype: Any) -> DType:
    """Return the numpy dtype of a Triton scalar, block or pointer type; fp8 formats of other vendors have none."""
    scalar = dtype.scalar
    if scalar.is_ptr():
        return np.dtype(np.uint64)
    if scalar not in NUMPY:
        raise NotImplementedError(f"no NVIDIA GPU computes with {scalar}; known: {', '.join(map(str, NUMPY))}")
    return NUMPY[scalar]


def bits_of(x: Array) -> Array:
    """Return the bit patterns of `x` as unsigned integers of the same width."""
    bits: Array = x.view(np.dtype(f"u{x.dtype.itemsize}"))
    return bits


def is_float(dtype: DType) -> bool:
    return dtype.kind == "f" or dtype in (BFLOAT16, E4M3, E5M2)


def round_float(x: Array, target: DType, toward_zero: bool = False) -> Array:
    """Round floats `x` to the format `target`, once, from their exact value."""
    if target.itemsize >= 4:
        rounded = x.astype(target)
    else:
        single = float32_to_odd(x) if x.dtype == np.float64 else x.astype(np.float32, copy=False)
        if target in FP8_MAX and not toward_zero:
            single = np.clip(single, -FP8_MAX[target], FP8_MAX[target])
        rounded = single.astype(target)
    if toward_zero:
        bits = bits_of(rounded)  # one step back where rounding went away from zero
        bits -= (np.abs(rounded.astype(np.float64)) > np.abs(x.astype(np.float64))).astype(bits.dtype)
    return rounded


def float32_to_odd(x: Array) -> Array:
    """Round fp64 `x` to fp32, inexact values going to whichever neighbour has an odd last bit.

    Rounding the result again, to at most 22 bits, gives what one rounding of `x` gives (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    nearest = x.astype(np.float32)
    back = nearest.astype(np.float64)
    bits = bits_of(nearest)
    bits -= (np.abs(back) > np.abs(x)).astype(np.uint32)  # truncate, then mark what was lost
    bits |= (back != x).astype(np.uint32)
    return nearest


def float_to_int(x: Array, target: DType) -> Array:
    """Truncate floats `x` to integers as an H200 does (`cvt.rzi`): out of range saturates.

    Eight-bit integers are the low bits of a 16-bit conversion. NaN becomes 0, but from fp64 or to 64 bits only the
    top bit is set.
    """
    if target.itemsize == 1:
        return float_to_int(x, np.dtype(f"{target.kind}2")).astype(target)
    low, high = int(np.iinfo(target).min), int(np.iinfo(target).max)
    whole = np.trunc(np.where(np.isnan(x), 0, x).astype(np.float64))
    result = np.clip(whole, low, high).astype(target)
    result[whole >= high] = high  # as fp64 the largest 64-bit integer is one too large to convert
    if x.dtype == np.float64 or target.itemsize == 8:
        bits_of(result)[np.isnan(x)] = 1 << (8 * target.itemsize - 1)
    return result


def flush_subnormals(x: Array) -> Array:
    """Replace fp32 subnormals by zeros of their sign (the .ftz of PTX); other formats stay as they are."""
    if x.dtype != np.float32:
        return x
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x) if small.any() else x


def convert(x: Array, target: DType, toward_zero: bool = False) -> Array:
    """Convert `x` to the format `target`, whatever kinds of numbers both are; integers wrap into narrower ones."""
    return converter(x.dtype, target, toward_zero)(x)


@cache
def converter(source: DType, target: DType, toward_zero: bool = False) -> Callable[[Array], Array]:
    """Return `convert` for arrays of the format `source`."""
    if source == target:
        return np.ascontiguousarray
    if is_float(source):
        if is_float(target):
            if target.itemsize >= 4 and not toward_zero:
                return lambda x: np.ascontiguousarray(x).astype(target)
            return lambda x: round_float(np.ascontiguousarray(x), target, toward_zero)
        return lambda x: float_to_int(np.ascontiguousarray(x), target)
    if target == BFLOAT16:  # the hardware converts integers to fp32 first, and so rounds twice
        return lambda x: np.ascontiguousarray(x).astype(np.float32).astype(target)
    return lambda x: np.ascontiguousarray(x).astype(target)
