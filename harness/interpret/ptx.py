"""PTX of inline assembly: snippets parsed once, then run on arrays of registers.

A register is an array of unsigned integers of its width, or of booleans, with one element for each thread that Triton
would run the snippet in. Threads are independent: there is no warp, no shared memory and no loop.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lastbit.interpret.numpy_formats import BFLOAT16, Array, DType, bits_of

TYPES: Mapping[str, DType] = {
    "pred": np.dtype(np.bool_), "f16": np.dtype(np.float16), "bf16": BFLOAT16,
    "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    **{f"{kind}{8 * size}": np.dtype(f"{numpy}{size}")
       for kind, numpy in (("b", "u"), ("u", "u"), ("s", "i")) for size in (1, 2, 4, 8)},
}  # fmt: skip
"""Type of one number → its numpy dtype."""


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction.

    Attributes:
        text: as it was written.
        name, suffixes: `cvt` and (`rn`, `f16`, `f32`).
        operands: names of registers, numbers, and tuples of these; destinations come first.
        predicate: the register that says where it runs, and the value that it has there; None if everywhere.
    """

    text: str
    name: str
    suffixes: tuple[str, ...]
    operands: tuple[Any, ...]
    predicate: tuple[str, bool] | None


@dataclass(frozen=True)
class Snippet:
    """A snippet's instructions, and the dtypes of the registers that they declare."""

    declared: Mapping[str, DType]
    instructions: tuple[Instruction, ...]


def not_interpreted(text: str) -> NotImplementedError:
    """Return the error to raise for an instruction that no table knows."""
    return NotImplementedError(f"the PTX instruction `{text}` is not interpreted")


@cache
def parse(assembly: str) -> Snippet:
    """Parse a snippet into instructions; NotImplementedError for a directive, a label or another kind of statement."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", assembly, flags=re.DOTALL)
    declared: dict[str, DType] = {}
    instructions = []
    # Split a snippet into statements, which semicolons separate, without the braces of blocks in front of them.
    parts = [re.sub(r"^[\s{}]+", "", part) for part in text.replace("$$", "$").split(";")]
    for statement in [" ".join(part.split()) for part in parts if part]:
        if statement.startswith(".reg"):
            # Parse `.reg .b32 a, b<3>` into {a, b0, b1, b2} with their dtypes.
            found = re.fullmatch(r"\.reg \.(\w+) (.*)", statement)
            if found is None or found[1] not in TYPES:
                raise not_interpreted(statement)
            dtype = np.dtype(np.bool_) if found[1] == "pred" else np.dtype(f"u{TYPES[found[1]].itemsize}")
            names: list[str] = []
            for name in re.split(r"\s*,\s*", found[2]):
                counted = re.fullmatch(r"(.+?)\s*<(\d+)>", name)
                names += [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            declared |= dict.fromkeys(names, dtype)
        else:
            instructions.append(_instruction(statement))
    return Snippet(declared, tuple(instructions))


_INSTRUCTION = re.compile(r"(?:@(!?)\s*([%$\w]+)\s+)?([a-z]\w*)((?:(?:\.|::)\w+)*)(?:\s+(.*))?")


def _instruction(statement: str) -> Instruction:
    found = _INSTRUCTION.fullmatch(statement)
    if found is None:
        raise not_interpreted(statement)
    negated, predicate, name, suffixes, operands = found.groups()
    return Instruction(
        statement,
        name,
        tuple(suffixes.split(".")[1:]),
        tuple(_operands(operands or "", statement)),
        (predicate, not negated) if predicate else None,
    )


def _operands(text: str, statement: str) -> list[Any]:
    """Split operands at commas; `{a, b}` is a tuple, and so is `p|q`."""
    found: list[Any] = []
    for vector, single in re.findall(r"\{([^}]*)\}|([^,\s{}][^,{}]*)", text):
        if vector:
            found.append(tuple(_operands(vector, statement)))
        elif "|" in single:
            found.append(tuple(part.strip() for part in single.split("|")))
        else:
            number = next((read for form, read in _FORMS if re.fullmatch(form, single.strip())), None)
            if number is None:
                raise not_interpreted(statement)
            found.append(number(single.strip()))
    return found


_FORMS: tuple[tuple[str, Callable[[str], Any]], ...] = (
    (r"0[fF][0-9a-fA-F]{8}", lambda x: np.uint32(int(x[2:], 16)).view(np.float32)),
    (r"0[dD][0-9a-fA-F]{16}", lambda x: struct.unpack(">d", bytes.fromhex(x[2:]))[0]),
    (r"-?0[xX][0-9a-fA-F]+U?", lambda x: int(x.rstrip("U"), 16)),
    (r"-?0[bB][01]+U?", lambda x: int(x.rstrip("U"), 2)),
    (r"-?0[0-7]+U?", lambda x: int(x.rstrip("U"), 8)),
    (r"-?\d+U?", lambda x: int(x.rstrip("U"))),
    (r"-?(\d+\.\d*|\.?\d+)([eE][-+]?\d+)?", float),
    (r"[%$_a-zA-Z][%$\w.]*", str),
)


class Registers:
    """The contents of a snippet's registers; a register never written has all bits set, which is a NaN or -1."""

    def __init__(self, declared: Mapping[str, DType]) -> None:
        self._dtypes = dict(declared)
        self._values: dict[str, Array] = {}

    def place(self, name: str, bits: Array) -> None:
        """Set a register to `bits`, and declare it with their width."""
        self._dtypes[name], self._values[name] = bits.dtype, bits

    def width(self, operand: Any) -> int:
        """Return the bytes of a register; 0 for a number."""
        return self._dtypes[operand].itemsize if operand in self._dtypes else 0

    def read(self, operand: Any, dtype: DType) -> Array:
        """Read the low bits of a register, or a number, as values of `dtype`.

        A number is read by its value, but a floating-point number by its bits where the type is one of bits.
        """
        if not isinstance(operand, str):
            if isinstance(operand, int) and dtype.kind in "iu":
                return np.array([operand % (1 << 8 * dtype.itemsize)], _raw(dtype)).view(dtype)
            if dtype.kind in "iu":
                wide = np.float32 if dtype.itemsize == 4 else np.float64
                return np.array([operand], wide).view(dtype)
            return np.array([operand], np.float64).astype(dtype)
        if operand not in self._dtypes:
            raise NotImplementedError(f"the PTX register `{operand}` is not interpreted")
        if operand not in self._values:
            held = self._dtypes[operand]
            return np.full(1, held == np.bool_ or (1 << 8 * held.itemsize) - 1, held).astype(_raw(dtype)).view(dtype)
        return self._values[operand].astype(_raw(dtype)).view(dtype)

    def write(self, name: str, value: Array, where: Array | None = None) -> None:
        """Write the low bits of `value`, extended by its sign if it has one, where the predicate `where` holds."""
        if name == "_":
            return
        held = self._dtypes[name]
        bits = value
        if value.dtype != np.bool_:
            value = np.ascontiguousarray(value)
            bits = (value if value.dtype.kind == "i" else bits_of(value)).astype(held)
        if where is not None:
            bits = np.where(where, bits, self.read(name, held))
        self._values[name] = bits


def _raw(dtype: DType) -> DType:
    return dtype if dtype == np.bool_ else np.dtype(f"u{dtype.itemsize}")


def run(snippet: Snippet, registers: Registers, table: Mapping[str, Callable[[Instruction, Registers], Any]]) -> None:
    """Run all instructions by the functions of `table`, which give what the destinations hold afterwards."""
    for instruction in snippet.instructions:
        if instruction.name not in table:
            raise not_interpreted(instruction.text)
        results = table[instruction.name](instruction, registers)
        if results is None:
            continue
        where = None
        if instruction.predicate is not None:
            name, value = instruction.predicate
            where = registers.read(name, TYPES["pred"]) == value
        first = instruction.operands[0]
        names, values = (first, results) if isinstance(first, tuple) else ((first,), (results,))
        for name, result in zip(names, values, strict=True):
            registers.write(name, result, where)
