"""PTX instructions on bits: moves, logic, shifts, permutations, comparisons and choices; from the PTX ISA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lastbit.interpret.formats import Array, DType
from lastbit.interpret.ptx import TYPES, Instruction, Registers, not_interpreted
from lastbit.interpret.ptx_arithmetic import flush, read_lanes

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
        return _packed(source, dtype, registers)
    if isinstance(target, tuple):
        whole = registers.read(source, np.dtype(f"u{dtype.itemsize}"))
        size = dtype.itemsize // len(target)
        parts = np.ascontiguousarray(whole)[..., None].view(f"u{size}")
        return tuple(parts[..., i] for i in range(len(target)))
    return registers.read(source, dtype)


def _packed(parts: tuple[Any, ...], dtype: DType, registers: Registers) -> Array:
    part = np.dtype(f"u{dtype.itemsize // len(parts)}")
    values = np.broadcast_arrays(*(registers.read(x, part) for x in parts))
    packed: Array = np.ascontiguousarray(np.stack(values, axis=-1)).view(f"u{dtype.itemsize}")[..., 0]
    return packed


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
