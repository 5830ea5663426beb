"""PTX's `cvt`: one number, or pairs of numbers in one register; from the PTX ISA."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lastbit.interpret.formats import BFLOAT16, E4M3, E5M2, Array, DType, float_to_int, is_float, round_float
from lastbit.interpret.ptx import TYPES, Instruction, Registers, not_interpreted
from lastbit.interpret.ptx_arithmetic import canonical, flush, join_lanes, limited, read_lanes

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
    *modifiers, target, source = instruction.suffixes
    result = _converted(frozenset(modifiers), target, source, instruction.operands[1:], registers)
    if result is None:
        raise not_interpreted(instruction.text)
    return result


def _converted(
    modifiers: frozenset[str], target: str, source: str, operands: tuple[Any, ...], registers: Registers
) -> Array | None:
    if target in NARROW or target in _HALVES:
        return _to_pair(modifiers, target, source, operands, registers)
    if target == "tf32" and source == "f32" and modifiers & {"rna", "rn"}:
        return _to_tf32(registers.read(operands[0], TYPES["f32"]), "rna" in modifiers)
    if target not in TYPES or source not in TYPES:
        return None
    return _to_one(modifiers, TYPES[target], registers.read(operands[0], TYPES[source]))


def _to_one(modifiers: frozenset[str], target: DType, x: Array) -> Array | None:
    known = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "relu"}
    if modifiers - known:
        return None
    x = flush(x) if "ftz" in modifiers else x
    if not is_float(target):
        return _to_integer(modifiers, target, x)
    if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
        return x.astype(target) if modifiers == {"rn"} else None  # no fp64 number, so rounded here
    if whole := modifiers & set(_TO_INTEGER):
        x = _TO_INTEGER[next(iter(whole))](x.astype(np.float64)).astype(x.dtype)
    result = _rounded(modifiers, x if is_float(x.dtype) else x.astype(np.float64), target)
    return canonical(limited(modifiers, flush(result) if "ftz" in modifiers else result))


def _rounded(modifiers: frozenset[str], x: Array, target: DType) -> Array:
    if "rz" in modifiers:
        return round_float(x, target, toward_zero=True)
    nearest = round_float(x, target)
    direction = next((_DIRECTIONS[m] for m in modifiers if m in _DIRECTIONS), None)
    if direction is None:
        return nearest
    back, exact = nearest.astype(np.float64), x.astype(np.float64)
    wrong = back > exact if direction < 0 else back < exact
    return np.where(wrong, np.nextafter(nearest, target.type(direction)), nearest)


def _to_integer(modifiers: frozenset[str], target: DType, x: Array) -> Array:
    if is_float(x.dtype):
        whole = next((_TO_INTEGER[m] for m in modifiers if m in _TO_INTEGER), np.trunc)
        x = float_to_int(whole(x.astype(np.float64)).astype(x.dtype), target if target.itemsize > 1 else TYPES["s32"])
    elif "sat" not in modifiers:
        return x.astype(target)
    limits, own = np.iinfo(target), np.iinfo(x.dtype)
    low, high = max(limits.min, own.min), min(limits.max, own.max)
    return np.clip(x, x.dtype.type(low), x.dtype.type(high)).astype(target)


def _to_tf32(x: Array, ties_away: bool) -> Array:
    """Round fp32 to 19 of its 32 bits; a NaN whose payload is in the others becomes infinite."""
    bits = x.view(np.uint32)
    half = np.uint32(0x1000) if ties_away else np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))
    return (bits + half & np.uint32(0xFFFFE000)).view(np.float32)


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
        pair = _read_narrow(registers, operands[0], NARROW[source])
    else:
        return None
    pair = limited(modifiers, pair)
    if target in _HALVES:
        return join_lanes(canonical(_limit(modifiers, _rounded(modifiers, pair, _HALVES[target]))))
    return _write_narrow(modifiers, pair, NARROW[target])


def _limit(modifiers: frozenset[str], x: Array) -> Array:
    if "satfinite" not in modifiers:
        return x
    return np.where(np.isinf(x), np.copysign(_largest(x.dtype), x), x).astype(x.dtype)


def _largest(dtype: DType) -> np.float32:
    return np.float32(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _read_narrow(registers: Registers, operand: Any, dtype: DType) -> Array:
    whole = registers.read(operand, TYPES["u16"])
    if dtype == E2M1:
        both = np.stack([whole & np.uint16(15), whole >> np.uint16(4) & np.uint16(15)], axis=-1).astype(np.uint8)
    else:
        both = np.ascontiguousarray(whole)[..., None].view(np.uint8)
    return both.view(dtype).astype(np.float32)


def _write_narrow(modifiers: frozenset[str], pair: Array, dtype: DType) -> Array:
    codes = _exponents(pair, up="rp" in modifiers) if dtype == E8M0 else _codes(pair, dtype)
    if dtype == E2M1:
        nibbles: Array = codes[..., 0] | codes[..., 1] << np.uint8(4)
        return nibbles
    return join_lanes(codes)


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
