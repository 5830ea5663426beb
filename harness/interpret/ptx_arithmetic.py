"""Arithmetic and comparisons of PTX, and other operations on numbers, by the names of instructions.

From the PTX ISA. Approximate instructions give the correctly rounded value, from which the hardware may differ by its
documented error. A NaN that arithmetic makes has all bits set but the sign, as the hardware's has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from lastbit.interpret import arithmetic
from lastbit.interpret.formats import Array, DType, bits_of, is_float
from lastbit.interpret.ptx import TYPES, Instruction, Registers, not_interpreted

Function = Callable[..., Array]
Maker = Callable[[frozenset[str], DType], Function | None]
"""The function of given modifiers on arrays of a dtype; None if PTX has none."""

ROUNDINGS = {"rn": "rn", "rz": "rz", "rm": "rd", "rp": "ru"}
"""PTX's name of a rounding → that of `arithmetic.directed`."""


def flush(x: Array) -> Array:
    """Replace subnormal numbers by zeros of their sign: .ftz, which bf16 and fp64 do not have."""
    if x.dtype not in (np.float32, np.float16):
        return x
    return np.where(np.abs(x) < np.finfo(x.dtype).smallest_normal, np.copysign(x.dtype.type(0), x), x)


def canonical(x: Array) -> Array:
    """Set all bits of every NaN but the sign."""
    nan = np.isnan(x)
    if x.dtype == np.float64 or not nan.any():
        return x
    bits = bits_of(np.ascontiguousarray(x))
    return np.where(nan, np.iinfo(bits.dtype).max >> 1, bits).astype(bits.dtype).view(x.dtype)


def _rounding(modifiers: frozenset[str]) -> str:
    return next((ROUNDINGS[m] for m in modifiers if m in ROUNDINGS), "rn")


def _floats(operation: str, plain: Function, integers: Function | None = None) -> Maker:
    """Return the maker of a rounded floating-point operation; for integer types it returns `integers`."""

    def make(modifiers: frozenset[str], dtype: DType) -> Function | None:
        if not is_float(dtype):
            return integers
        direction = _rounding(modifiers)
        if dtype == np.float32 and operation != "none":
            return arithmetic.directed(operation, direction)
        return plain if direction == "rn" else None

    return make


def _approximately(function: Function) -> Maker:
    return lambda modifiers, dtype: arithmetic.via_float64(function) if is_float(dtype) else None


def _divide(modifiers: frozenset[str], dtype: DType) -> Function | None:
    if not is_float(dtype):
        return lambda x, y: (x - np.fmod(x, y)) // y
    if "approx" in modifiers:
        return _approximate_quotient
    return _floats("div", np.divide)(modifiers, dtype)


def _approximate_quotient(x: Array, y: Array) -> Array:
    """Return x · (1/y), where the inverse of |y| > 2^126 is zero."""
    quotient = arithmetic.via_float64(np.divide)(x, y)
    return np.where((np.abs(y) > 2.0**126) & ~np.isinf(y), np.copysign(x * np.float32(0), quotient), quotient)


def _extreme(choose: Callable[..., Array]) -> Maker:
    """Return the maker of min or max, of two or three operands."""

    def make(modifiers: frozenset[str], dtype: DType) -> Function:
        if not is_float(dtype):
            return choose
        chosen = partial(choose, propagate_nan="NaN" in modifiers)
        if "xorsign" in modifiers:
            return lambda x, y: _signed(chosen(np.abs(x), np.abs(y)), np.signbit(x) ^ np.signbit(y))
        return lambda x, *others: _folded(chosen, x, others)

    return make


def _folded(function: Function, x: Array, others: tuple[Array, ...]) -> Array:
    for other in others:
        x = function(x, other)
    return x


def _signed(magnitude: Array, negative: Array) -> Array:
    return np.where(np.isnan(magnitude), magnitude, np.where(negative, -magnitude, magnitude))


def _multiply(modifiers: frozenset[str], dtype: DType) -> Function | None:
    if is_float(dtype):
        return _floats("mul", np.multiply)(modifiers, dtype)
    if "wide" in modifiers:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return lambda x, y: x.astype(wide) * y.astype(wide)
    if "hi" in modifiers:
        return _high_half
    return np.multiply


def _high_half(x: Array, y: Array) -> Array:
    if x.dtype.kind == "u":
        return arithmetic.multiply_high(*np.broadcast_arrays(x, y))
    x, y = np.broadcast_arrays(x, y)
    high = arithmetic.multiply_high(x, y)  # of the bit patterns: less what a sign adds to each
    signed: Array = high - np.where(x < 0, y, 0).astype(x.dtype) - np.where(y < 0, x, 0).astype(x.dtype)
    return signed


def _fused(modifiers: frozenset[str], dtype: DType) -> Function | None:
    if is_float(dtype):
        return _floats("fma", arithmetic.fma)(modifiers, dtype)
    product = _multiply(modifiers, dtype)
    return None if product is None else lambda x, y, z: product(x, y) + z


def _addition(operation: str, plain: Function) -> Maker:
    def make(modifiers: frozenset[str], dtype: DType) -> Function | None:
        if "sat" in modifiers and not is_float(dtype):
            return partial(_saturated, plain) if dtype == np.int32 else None
        return _floats(operation, plain, plain)(modifiers, dtype)

    return make


def _saturated(plain: Function, x: Array, y: Array) -> Array:
    return np.clip(plain(x.astype(np.int64), y.astype(np.int64)), -(2**31), 2**31 - 1).astype(np.int32)


def _by_bits(mask: Callable[[Any, Any], Array], whole: Function) -> Maker:
    """Return the maker of a change of the sign bit on floating-point numbers."""

    def on_sign(x: Array) -> Array:
        bits = bits_of(np.ascontiguousarray(x))
        sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
        changed: Array = mask(bits, sign).view(x.dtype)
        return changed

    return lambda modifiers, dtype: on_sign if is_float(dtype) else whole


_ARITHMETIC: dict[str, tuple[str, Maker]] = {
    "add": ("rn rz rm rp ftz sat", _addition("add", np.add)),
    "sub": ("rn rz rm rp ftz sat", _addition("sub", np.subtract)),
    "mul": ("rn rz rm rp ftz sat lo hi wide", _multiply),
    "fma": ("rn rz rm rp ftz sat relu", _fused),
    "mad": ("rn rz rm rp ftz sat lo hi wide", _fused),
    "div": ("rn rz rm rp ftz approx full", _divide),
    "rem": ("", lambda modifiers, dtype: np.fmod),
    "rcp": ("rn rz rm rp ftz approx", _floats("rcp", lambda x: 1.0 / x)),
    "sqrt": ("rn rz rm rp ftz approx", _floats("sqrt", np.sqrt)),
    "rsqrt": ("ftz approx", _approximately(lambda x: 1.0 / np.sqrt(x))),
    "ex2": ("ftz approx", _approximately(np.exp2)),
    "lg2": ("ftz approx", _approximately(np.log2)),
    "sin": ("ftz approx", _approximately(np.sin)),
    "cos": ("ftz approx", _approximately(np.cos)),
    "tanh": ("approx", _approximately(np.tanh)),
    "max": ("ftz NaN xorsign abs relu", _extreme(arithmetic.maximum)),
    "min": ("ftz NaN xorsign abs relu", _extreme(arithmetic.minimum)),
    "abs": ("ftz", _by_bits(lambda bits, sign: bits & ~sign, np.abs)),
    "neg": ("ftz", _by_bits(np.bitwise_xor, np.negative)),
    "copysign": ("", lambda modifiers, dtype: lambda x, y: np.copysign(y, x)),
}
"""Name → its modifiers, and what makes its function."""


def _arithmetic(instruction: Instruction, registers: Registers) -> Array:
    known, make = _ARITHMETIC[instruction.name]
    modifiers, kind = frozenset(instruction.suffixes[:-1]), instruction.suffixes[-1]
    lanes = kind.endswith("x2")
    dtype = TYPES.get(kind.removesuffix("x2"))
    function = None if dtype is None else make(modifiers, dtype)
    if dtype is None or function is None or not modifiers <= set(known.split()):
        raise not_interpreted(instruction.text)
    operands = instruction.operands[1:]
    if instruction.name in ("mad", "fma") and "wide" in modifiers:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        return function(*(registers.read(x, dtype) for x in operands[:2]), registers.read(operands[2], wide))
    xs = [read_lanes(registers, x, dtype) if lanes else registers.read(x, dtype) for x in operands]
    result = _rounded(instruction.name, modifiers, function, xs) if is_float(dtype) else np.asarray(function(*xs))
    return join_lanes(result) if lanes else result


def _rounded(name: str, modifiers: frozenset[str], function: Function, xs: list[Array]) -> Array:
    """Apply `function`, and treat subnormal numbers, negative numbers and those above 1 as the modifiers say."""
    ftz = "ftz" in modifiers
    result = function(*(map(flush, xs) if ftz else xs))
    result = limited(modifiers, flush(result) if ftz else result)
    return result if name == "copysign" else canonical(result)


def limited(modifiers: frozenset[str], x: Array) -> Array:
    """Limit `x` by modifiers: .sat to [0, 1], with NaN as 0; .relu to at least +0, with NaN kept."""
    if "sat" in modifiers:
        return np.minimum(np.where(x > 0, x, 0), 1).astype(x.dtype)
    return np.where((x > 0) | np.isnan(x), x, 0).astype(x.dtype) if "relu" in modifiers else x


def read_lanes(registers: Registers, operand: Any, dtype: DType) -> Array:
    """Read the two numbers that a register holds, along a new last axis, the low half first."""
    whole = registers.read(operand, np.dtype(f"u{2 * dtype.itemsize}"))
    return np.ascontiguousarray(whole)[..., None].view(dtype)


def join_lanes(pair: Array) -> Array:
    """Pack pairs of numbers along the last axis into one register; the inverse of `read_lanes`."""
    joined: Array = np.ascontiguousarray(pair).view(np.dtype(f"u{2 * pair.dtype.itemsize}"))[..., 0]
    return joined


ARITHMETIC: dict[str, Callable[[Instruction, Registers], Any]] = dict.fromkeys(_ARITHMETIC, _arithmetic)
"""Name → the result of an instruction."""
