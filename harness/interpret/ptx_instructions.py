"""Instructions of PTX on arrays of registers: arithmetic, conversions, bits, comparisons and moves.

From the PTX ISA. Approximate instructions give the correctly rounded value, from which the hardware may differ by its
documented error. A NaN that arithmetic makes has all bits set but the sign, as the hardware's has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import ml_dtypes
import numpy as np

from lastbit.interpret import arithmetic
from lastbit.interpret.numpy_formats import (
    BFLOAT16,
    E4M3,
    E5M2,
    Array,
    DType,
    bits_of,
    float_to_int,
    is_float,
    round_float,
)
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


def _floats(operation: str, plain: Function, integers: Function | None = None) -> Maker:
    """Return the maker of a rounded floating-point operation; for integer types it returns `integers`."""

    def make(modifiers: frozenset[str], dtype: DType) -> Function | None:
        if not is_float(dtype):
            return integers
        direction = next((ROUNDINGS[m] for m in modifiers if m in ROUNDINGS), "rn")
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
        return lambda x, *others: reduce(chosen, others, x)

    return make


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
    if not is_float(dtype):
        result = np.asarray(function(*xs))
        return join_lanes(result) if lanes else result
    ftz = "ftz" in modifiers
    result = function(*(map(flush, xs) if ftz else xs))
    result = limited(modifiers, flush(result) if ftz else result)
    result = result if instruction.name == "copysign" else canonical(result)
    return join_lanes(result) if lanes else result


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


E2M1, E8M0 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e8m0fnu)
NARROW: dict[str, DType] = {
    "e4m3x2": E4M3,
    "e5m2x2": E5M2,
    "e2m3x2": np.dtype(ml_dtypes.float6_e2m3fn),
    "e3m2x2": np.dtype(ml_dtypes.float6_e3m2fn),
    "e2m1x2": E2M1,
    "ue8m0x2": E8M0,
}
"""Type of a pair of narrow numbers → the dtype of one."""
_HALVES = {"f16x2": TYPES["f16"], "bf16x2": BFLOAT16}
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_DIRECTIONS = {"rm": -np.inf, "rp": np.inf}


def convert(instruction: Instruction, registers: Registers) -> Any:
    """Perform a `cvt`; raise NotImplementedError for one of another form, such as stochastic rounding."""
    *suffixes, target, source = instruction.suffixes
    modifiers, operands, result = frozenset(suffixes), instruction.operands[1:], None
    if target in NARROW or target in _HALVES:
        result = _to_pair(modifiers, target, source, operands, registers)
    elif target == "tf32" and source == "f32" and modifiers & {"rna", "rn"}:
        # To 19 of 32 bits; a NaN whose payload is in the others becomes infinite.
        bits = registers.read(operands[0], TYPES["f32"]).view(np.uint32)
        half = np.uint32(0x1000) if "rna" in modifiers else np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
        result = (bits + half & np.uint32(0xFFFFE000)).view(np.float32)
    elif target in TYPES and source in TYPES:
        result = _to_one(modifiers, TYPES[target], registers.read(operands[0], TYPES[source]))
    if result is None:
        raise not_interpreted(instruction.text)
    return result


def _to_one(modifiers: frozenset[str], target: DType, x: Array) -> Array | None:
    known = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu"}
    if modifiers - known:
        return None
    x = flush(x) if "ftz" in modifiers else x
    to_whole = next((_TO_INTEGER[m] for m in modifiers if m in _TO_INTEGER), None)
    if not is_float(target):
        if is_float(x.dtype):
            whole = (to_whole or np.trunc)(x.astype(np.float64)).astype(x.dtype)
            x = float_to_int(whole, target if target.itemsize > 1 else TYPES["s32"])
        elif "sat" not in modifiers:
            return x.astype(target)
        limits, own = np.iinfo(target), np.iinfo(x.dtype)
        low, high = max(limits.min, own.min), min(limits.max, own.max)
        return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(target)
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        return x.astype(target) if modifiers == {"rn"} else None  # no fp64 number, so rounded here
    if to_whole is not None:
        x = to_whole(x.astype(np.float64)).astype(x.dtype)
    result = _rounded_to(modifiers, x if is_float(x.dtype) else x.astype(np.float64), target)
    return canonical(limited(modifiers, flush(result) if "ftz" in modifiers else result))


def _rounded_to(modifiers: frozenset[str], x: Array, target: DType) -> Array:
    if "rz" in modifiers:
        return round_float(x, target, toward_zero=True)
    nearest = round_float(x, target)
    direction = next((_DIRECTIONS[m] for m in modifiers if m in _DIRECTIONS), None)
    if direction is None:
        return nearest
    back, exact = nearest.astype(np.float64), x.astype(np.float64)
    wrong = back > exact if direction < 0 else back < exact
    return np.where(wrong, np.nextafter(nearest, target.type(direction)), nearest)


def _to_pair(
    modifiers: frozenset[str], target: str, source: str, operands: tuple[Any, ...], registers: Registers
) -> Array | None:
    """Pack two numbers in one register: of two fp32 the first is the upper one."""
    if modifiers - {"rn", "rz", "rp", "satfinite", "relu"}:
        return None
    if source == "f32" and len(operands) == 2:
        high, low = np.broadcast_arrays(*(registers.read(x, TYPES["f32"]) for x in operands))
        pair = np.stack([low, high], axis=-1)
    elif source in _HALVES and len(operands) == 1:
        pair = read_lanes(registers, operands[0], _HALVES[source]).astype(np.float32)
    elif source in NARROW and len(operands) == 1:
        dtype = NARROW[source]
        whole = registers.read(operands[0], TYPES["u16"])
        if dtype == E2M1:
            both = np.stack([whole & np.uint16(15), whole >> np.uint16(4) & np.uint16(15)], axis=-1).astype(np.uint8)
        else:
            both = np.ascontiguousarray(whole)[..., None].view(np.uint8)
        pair = both.view(dtype).astype(np.float32)
    else:
        return None
    pair = limited(modifiers, pair)
    if target in _HALVES:
        rounded = _rounded_to(modifiers, pair, _HALVES[target])
        if "satfinite" in modifiers:
            limit = np.copysign(_largest(rounded.dtype), rounded)
            rounded = np.where(np.isinf(rounded), limit, rounded).astype(rounded.dtype)
        return join_lanes(canonical(rounded))
    dtype = NARROW[target]
    codes = _exponents(pair, up="rp" in modifiers) if dtype == E8M0 else _codes(pair, dtype)
    if dtype == E2M1:
        nibbles: Array = codes[..., 0] | codes[..., 1] << np.uint8(4)
        return nibbles
    return join_lanes(codes)


def _largest(dtype: DType) -> np.float32:
    return np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _codes(pair: Array, dtype: DType) -> Array:
    """Round to nearest codes, saturating at the largest number; a NaN stays one in fp8, else it becomes the largest."""
    if dtype in (E4M3, E5M2):
        rounded = round_float(pair, dtype)
        return np.where(np.isnan(pair), 0x7F, rounded.view(np.uint8)).astype(np.uint8)
    largest = _largest(dtype)
    return np.clip(np.where(np.isnan(pair), largest, pair), -largest, largest).astype(dtype).view(np.uint8)


def _exponents(pair: Array, up: bool) -> Array:
    """Return fp32 magnitudes as biased exponents, rounded up or down; NaN is 255, all else is 254 at most."""
    bits = np.ascontiguousarray(pair).view(np.uint32) & np.uint32(0x7FFFFFFF)
    exponent, rest = bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)
    above = rest > np.where(exponent == 0, 0x400000, 0)
    return np.where(np.isnan(pair), 255, np.minimum(exponent + (above & up), 254)).astype(np.uint8)


Handler = Callable[[Instruction, Registers], Any]
U32, S32, U64 = TYPES["u32"], TYPES["s32"], TYPES["u64"]
PRED = TYPES["pred"]


def _typed(instruction: Instruction, modifiers: str = "") -> DType:
    """Return the type at the end of an instruction's name; raise NotImplementedError for modifiers other than these."""
    *found, kind = instruction.suffixes
    if kind not in TYPES or not set(found) <= set(modifiers.split()):
        raise not_interpreted(instruction.text)
    return TYPES[kind]


def _plain(function: Callable[..., Array], modifiers: str = "") -> Handler:
    """Return a handler that applies `function` to all operands, in the instruction's type."""

    def run(instruction: Instruction, registers: Registers) -> Array:
        dtype = _typed(instruction, modifiers)
        return function(*(registers.read(x, dtype) for x in instruction.operands[1:]))

    return run


def _move(instruction: Instruction, registers: Registers) -> Any:
    """Move a register, pack a vector into one, or unpack one into parts."""
    dtype = _typed(instruction)
    target, source = instruction.operands
    if isinstance(source, tuple):
        part = np.dtype(f"u{dtype.itemsize // len(source)}")
        values = np.broadcast_arrays(*(registers.read(x, part) for x in source))
        packed: Array = np.ascontiguousarray(np.stack(values, axis=-1)).view(f"u{dtype.itemsize}")[..., 0]
        return packed
    if isinstance(target, tuple):
        whole = registers.read(source, np.dtype(f"u{dtype.itemsize}"))
        size = dtype.itemsize // len(target)
        parts = np.ascontiguousarray(whole)[..., None].view(f"u{size}")
        return tuple(parts[..., i] for i in range(len(target)))
    return registers.read(source, dtype)


def _shift(left: bool) -> Handler:
    """Execute shl or shr: the amount is unsigned and stops at the width; a signed number shifts its sign in."""

    def run(instruction: Instruction, registers: Registers) -> Array:
        dtype = _typed(instruction)
        width = 8 * dtype.itemsize
        x = registers.read(instruction.operands[1], dtype)
        amount = registers.read(instruction.operands[2], U32)
        inside = np.minimum(amount, width - 1).astype(dtype)
        shifted = np.left_shift(x, inside) if left else np.right_shift(x, inside)
        beyond = np.right_shift(x, dtype.type(width - 1)) if dtype.kind == "i" and not left else dtype.type(0)
        result: Array = np.where(amount >= width, beyond, shifted)
        return result

    return run


def _funnel(instruction: Instruction, registers: Registers) -> Array:
    """Execute shf.l or shf.r: 64 bits are shifted, of which one half stays."""
    direction, mode, _ = instruction.suffixes
    low, high, amount = (registers.read(x, U32).astype(np.uint64) for x in instruction.operands[1:])
    amount = amount & np.uint64(31) if mode == "wrap" else np.minimum(amount, np.uint64(32))
    both = high << np.uint64(32) | low
    shifted = both << amount >> np.uint64(32) if direction == "l" else both >> amount
    half: Array = shifted.astype(np.uint32)
    return half


def _any_function_of_three(instruction: Instruction, registers: Registers) -> Array:
    """Execute lop3: bit i of the table is the result where a, b, c are the bits of i."""
    *operands, table = instruction.operands[1:]
    a, b, c = (registers.read(x, U32) for x in operands)
    truth = registers.read(table, U32)
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape, truth.shape), np.uint32)
    for i in range(8):
        chosen = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        result |= np.where(truth >> np.uint32(i) & np.uint32(1), chosen, 0).astype(np.uint32)
    return result


def _permute(instruction: Instruction, registers: Registers) -> Array:
    """Execute prmt: each byte is the one of b:a that a nibble of the selector names, or that byte's sign throughout."""
    if instruction.suffixes != ("b32",):
        raise not_interpreted(instruction.text)
    a, b, selector = np.broadcast_arrays(*(registers.read(x, U32) for x in instruction.operands[1:]))
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(a.shape, np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)).astype(np.uint64)) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte >> np.uint32(7), 255, 0).astype(np.uint32)
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


def _extract(instruction: Instruction, registers: Registers) -> Array:
    """Execute bfe: bits from a position on; a signed field is extended by its top bit, or the number's if beyond."""
    dtype = _typed(instruction)
    width = 8 * dtype.itemsize
    x = registers.read(instruction.operands[1], np.dtype(f"u{dtype.itemsize}")).astype(np.uint64)
    start, length = (registers.read(x, U32).astype(np.uint64) & np.uint64(255) for x in instruction.operands[2:])
    shifted = np.where(start < width, x >> np.minimum(start, np.uint64(width - 1)), np.uint64(0))
    field = shifted & _ones(np.minimum(length, np.uint64(64)))
    if dtype.kind == "i":
        top = np.minimum(start + length - np.uint64(1), np.uint64(width - 1))
        negative = (x >> top & np.uint64(1) == 1) & (length > 0)
        filled = ~_ones(np.minimum(np.maximum(np.uint64(width) - np.minimum(start, np.uint64(width)), 0), length))
        field = np.where(negative, field | filled, field)
    return field.astype(f"u{dtype.itemsize}").view(dtype)


def _insert(instruction: Instruction, registers: Registers) -> Array:
    """Execute bfi: put the low bits of a in place of those of b from a position on."""
    dtype = np.dtype(f"u{_typed(instruction).itemsize}")
    a, b = (registers.read(x, dtype).astype(np.uint64) for x in instruction.operands[1:3])
    start, length = (registers.read(x, U32).astype(np.uint64) & np.uint64(255) for x in instruction.operands[3:])
    mask = np.where(start < 64, _ones(np.minimum(length, np.uint64(64))) << np.minimum(start, np.uint64(63)), 0)
    mask = mask.astype(np.uint64)
    inserted: Array = (b & ~mask | a << np.minimum(start, np.uint64(63)) & mask).astype(dtype)
    return inserted


def _ones(count: Array) -> Array:
    """Return words with the lowest `count` bits set, 64 at most."""
    full = np.uint64(2**64 - 1)
    return np.where(count >= 64, full, (np.uint64(1) << np.minimum(count, np.uint64(63))) - np.uint64(1))


def _reversed(x: Array) -> Array:
    result = np.zeros_like(x)
    one = x.dtype.type(1)
    for i in range(8 * x.itemsize):
        result |= (x >> x.dtype.type(i) & one) << x.dtype.type(8 * x.itemsize - 1 - i)
    return result


def _leading_zeros(x: Array) -> Array:
    width = 8 * x.itemsize
    highest = sum((x >> x.dtype.type(i) != 0).astype(np.uint32) for i in range(width))
    return np.asarray(width - highest, np.uint32)


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": lambda x, y: (x != y) & (x == x) & (y == y), "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal, "equ": lambda x, y: ~((x < y) | (x > y)), "neu": np.not_equal,
    "ltu": lambda x, y: ~(x >= y), "leu": lambda x, y: ~(x > y), "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y), "num": lambda x, y: (x == x) & (y == y), "nan": lambda x, y: (x != x) | (y != y),
}  # fmt: skip
_JOINS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(instruction: Instruction, registers: Registers) -> Any:
    """Execute setp, with two destinations for two lanes, or for a result and its opposite."""
    comparison, *modifiers, kind = instruction.suffixes
    dtype = TYPES.get(kind.removesuffix("x2"))
    joins = [m for m in modifiers if m in _JOINS]
    if comparison not in _COMPARISONS or dtype is None or set(modifiers) - {"ftz", *joins}:
        raise not_interpreted(instruction.text)
    lanes, (target, *operands) = kind.endswith("x2"), instruction.operands
    xs = [read_lanes(registers, x, dtype) if lanes else registers.read(x, dtype) for x in operands[:2]]
    found = _COMPARISONS[comparison](*(map(flush, xs) if "ftz" in modifiers else xs))

    def joined(result: Array) -> Array:
        return _JOINS[joins[0]](result, registers.read(operands[2], PRED)) if joins else result

    if not isinstance(target, tuple):
        return joined(found)
    return tuple(map(joined, (found[..., 0], found[..., 1]) if lanes else (found, ~found)))


def _choose(instruction: Instruction, registers: Registers) -> Array:
    dtype = _typed(instruction)
    x, y, condition = instruction.operands[1:]
    return np.where(registers.read(condition, PRED), registers.read(x, dtype), registers.read(y, dtype))


def _nothing(instruction: Instruction, registers: Registers) -> None:
    """Do nothing: programs and threads need not wait for each other here."""


BITS: dict[str, Handler] = {
    "mov": _move,
    "and": _plain(np.bitwise_and),
    "or": _plain(np.bitwise_or),
    "xor": _plain(np.bitwise_xor),
    "not": _plain(np.invert),
    "cnot": _plain(lambda x: (x == 0).astype(x.dtype)),
    "shl": _shift(left=True),
    "shr": _shift(left=False),
    "shf": _funnel,
    "lop3": _any_function_of_three,
    "prmt": _permute,
    "bfe": _extract,
    "bfi": _insert,
    "brev": _plain(_reversed),
    "popc": _plain(lambda x: np.bitwise_count(x).astype(np.uint32)),
    "clz": _plain(_leading_zeros),
    "setp": _compare,
    "selp": _choose,
    **dict.fromkeys(("bar", "barrier", "fence", "membar", "griddepcontrol", "nanosleep", "prefetch"), _nothing),
}
"""Name → the result of an instruction; a tuple for several destinations, None for none."""
