"""Arithmetic whose result numpy does not give to the bit: fused multiply-add, IEEE maximum, directed rounding."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from lastbit.interpret.numpy_formats import Array, bits_of, flush_subnormals, round_float


def maximum(x: Array, y: Array, propagate_nan: bool = False) -> Array:
    """Return the larger of `x` and `y`, with max(-0, +0) = +0; a NaN gives way to a number unless it propagates."""
    return _extremum(x, y, np.maximum if propagate_nan else np.fmax, np.bitwise_and)


def minimum(x: Array, y: Array, propagate_nan: bool = False) -> Array:
    """Return the smaller of `x` and `y`, with min(-0, +0) = -0; a NaN gives way to a number unless it propagates."""
    return _extremum(x, y, np.minimum if propagate_nan else np.fmin, np.bitwise_or)


def _extremum(x: Array, y: Array, choose: np.ufunc, merge_zeros: np.ufunc) -> Array:
    chosen: Array = choose(x, y)
    if x.dtype.kind in "iub":
        return chosen
    zeros = (x == 0) & (y == 0)
    if not zeros.any():
        return chosen
    x, y = np.broadcast_arrays(x, y)
    merged = merge_zeros(bits_of(np.ascontiguousarray(x)), bits_of(np.ascontiguousarray(y))).view(chosen.dtype)
    return np.where(zeros, merged, chosen)


def select(cond: Array, x: Array, y: Array) -> Array:
    """Choose from `x` or `y`, whose dtypes differ where `tl.atomic_min` of floats calls one of them unsigned."""
    return np.where(cond, x, y.astype(x.dtype, copy=False))


def add_to_odd(x: Array, y: Array) -> Array:
    """Return fp64 x + y rounded to odd, from the exact error of the rounded sum (Knuth's two-sum)."""
    total = x + y
    shadow = total - x
    error = (x - (total - shadow)) + (y - shadow)
    even = (bits_of(total) & np.uint64(1)) == 0
    nudge = np.isfinite(total) & even & (error != 0) & ~np.isnan(error)
    return np.where(nudge, np.nextafter(total, np.copysign(np.inf, error)), total)


def fma(x: Array, y: Array, z: Array) -> Array:
    """Return x·y + z rounded once; all three are of one dtype."""
    x, y, z = (np.ascontiguousarray(a) for a in np.broadcast_arrays(x, y, z))
    if x.dtype == np.float64:
        result: Array = x * y + z
        finite = np.isfinite(x) & np.isfinite(y) & np.isfinite(z)
        for i in zip(*np.nonzero(finite), strict=True):
            exact = Fraction(float(x[i])) * Fraction(float(y[i])) + Fraction(float(z[i]))
            try:
                result[i] = float(exact) if exact else result[i]  # of which the sign is right
            except OverflowError:
                result[i] = np.inf if exact > 0 else -np.inf
        return result
    return round_float(_fma_to_odd(x, y, z), x.dtype)


def _fma_to_odd(x: Array, y: Array, z: Array) -> Array:
    product = x.astype(np.float64) * y.astype(np.float64)  # exact: at most 48 significant bits
    return add_to_odd(product, z.astype(np.float64))


def _round_directed(exact: Array, direction: str) -> Array:
    """Round fp64 `exact`, itself exact or rounded to odd, to fp32: rn nearest, rz toward zero, rd down, ru up."""
    nearest = exact.astype(np.float32)
    if direction == "rn":
        return nearest
    if direction == "rz":
        return round_float(exact, nearest.dtype, toward_zero=True)
    back = nearest.astype(np.float64)
    if direction == "rd":
        return np.where(back > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    return np.where(back < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)


def _doubled(operation: Callable[..., Array]) -> Callable[..., Array]:
    """Return the fp64 `operation` as a function of fp32 operands; its result stays fp64."""
    return lambda *operands: operation(*(x.astype(np.float64) for x in operands))


# A quotient or square root of fp32 numbers is exact in fp32 or farther from every fp32 number, and from every midpoint,
# than fp64 can blur; so rounding the fp64 result in any direction is rounding the exact one.
_TO_ODD: dict[str, Callable[..., Array]] = {
    "add": _doubled(add_to_odd),
    "sub": _doubled(lambda x, y: add_to_odd(x, -y)),
    "mul": _doubled(np.multiply),
    "div": _doubled(np.divide),
    "rcp": _doubled(lambda x: 1.0 / x),
    "sqrt": _doubled(np.sqrt),
    "fma": _fma_to_odd,
}


def directed(operation: str, direction: str) -> Callable[..., Array]:
    """Return `operation` (add, sub, mul, div, rcp, sqrt or fma) on fp32, rounded in `direction` (rn, rz, rd or ru)."""
    return lambda *operands: _round_directed(_TO_ODD[operation](*operands), direction)


def via_float64(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return `function` as computed in fp64 and rounded to its operands' dtype, so that all machines agree.

    The result is the correctly rounded one, or its neighbour.
    """

    def rounded(*operands: Array) -> Array:
        return function(*(x.astype(np.float64) for x in operands)).astype(operands[0].dtype)

    return rounded


def rsqrt(x: Array) -> Array:
    """Return 1/√x; fp32 subnormals count as zero, as in the hardware's rsqrt.approx.ftz.f32."""
    return via_float64(lambda wide: 1.0 / np.sqrt(wide))(flush_subnormals(x))


def multiply_high(x: Array, y: Array) -> Array:
    """Return the upper half of the double-width product of the operands' bit patterns."""
    a, b = bits_of(np.ascontiguousarray(x)), bits_of(np.ascontiguousarray(y))
    if x.dtype.itemsize < 8:
        product = a.astype(np.uint64) * b.astype(np.uint64)
        product >>= np.uint64(8 * x.dtype.itemsize)
        return product.astype(a.dtype).view(x.dtype)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    (a_high, a_low), (b_high, b_low) = (a >> half, a & mask), (b >> half, b & mask)
    middle = a_high * b_low + (a_low * b_low >> half)
    carry = (middle & mask) + a_low * b_high
    high: Array = a_high * b_high + (middle >> half) + (carry >> half)
    return high.view(x.dtype)
