"""`tl.inline_asm_elementwise`: PTX snippets by a table of instructions, on whole blocks.

Triton hands `pack` elements at a time to the snippet, those of less than 32 bits together in one register. Which
elements come together is unspecified; here they are neighbours along the last axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from lastbit.interpret.driver import MULTIPROCESSORS
from lastbit.interpret.numpy_formats import Array, DType, bits_of, numpy_dtype
from lastbit.interpret.ptx import Instruction, Registers, Snippet, parse, run
from lastbit.interpret.ptx_instructions import ARITHMETIC, BITS, convert

INSTRUCTIONS: dict[str, Callable[[Instruction, Registers], Any]] = {**ARITHMETIC, **BITS, "cvt": convert}
"""Name of an instruction → what it leaves in its destinations."""

SPECIAL: dict[str, Callable[[Any], Any]] = {
    **{f"%ctaid.{'xyz'[i]}": methodcaller("create_get_program_id", i) for i in range(3)},
    **{f"%nctaid.{'xyz'[i]}": methodcaller("create_get_num_programs", i) for i in range(3)},
    **dict.fromkeys(("%globaltimer", "%clock64", "%clock"), methodcaller("create_clock")),
    "%smid": methodcaller("get_int32", 0),
    "%nsmid": methodcaller("get_int32", MULTIPROCESSORS),
}
"""What a special register holds; all programs run on one multiprocessor, and clocks count nanoseconds."""

_WIDTHS = {"r": 4, "f": 4, "h": 2, "l": 8, "d": 8, "c": 1, "b": 1}


@dataclass(frozen=True)
class Assembly:
    """A snippet with its registers.

    Attributes:
        snippet: the instructions.
        widths: bytes of each output register.
        outputs: the dtype of each result.
        pack: how many elements the snippet handles at a time.
        special: names of the registers that tell what is not of the kernel; their arrays follow the operands.
    """

    snippet: Snippet
    widths: tuple[int, ...]
    outputs: tuple[DType, ...]
    pack: int
    special: tuple[str, ...]

    def result(self, i: int, *inputs: Array) -> Array:
        """Return the elements of result `i`, in the broadcast shape of the inputs."""
        registers = Registers(self.snippet.declared)
        operands, special = inputs[: len(inputs) - len(self.special)], inputs[len(inputs) - len(self.special) :]
        values = [part for x in operands for part in self._registers_of(x)]
        for j, width in enumerate(self.widths):
            registers.place(f"${j}", np.full(1, (1 << 8 * width) - 1, f"u{width}"))
        for j, bits in enumerate(values, len(self.widths)):
            registers.place(f"${j}", bits)
        for name, x in zip(self.special, special, strict=True):
            registers.place(name, bits_of(np.ascontiguousarray(x)))
        run(self.snippet, registers, INSTRUCTIONS)
        first = sum(self.pack // self._together(dtype) for dtype in self.outputs[:i])
        dtype, shape = self.outputs[i], np.broadcast_shapes(*(x.shape for x in inputs))
        size = self._together(dtype)
        raw = np.dtype(f"u{size * dtype.itemsize}")
        parts = [registers.read(f"${first + j}", raw) for j in range(self.pack // size)]
        if self.pack == 1:
            return _as_elements(np.broadcast_to(parts[0], shape), dtype)
        runs = (*shape[:-1], -(-shape[-1] // self.pack))
        whole = np.stack([np.broadcast_to(part, runs) for part in parts], axis=-1)
        elements = _as_elements(whole, dtype).reshape(*shape[:-1], runs[-1] * self.pack)
        return np.ascontiguousarray(elements[..., : shape[-1]])

    def _together(self, dtype: DType) -> int:
        """Return how many elements one register holds."""
        return min(max(1, 4 // dtype.itemsize), self.pack)

    def _registers_of(self, x: Array) -> list[Array]:
        """Return the registers that hold one input, each an array with one element for every run of the snippet."""
        bits = x.astype(np.uint8) if x.dtype == np.bool_ else bits_of(np.ascontiguousarray(x))
        if self.pack == 1:
            return [bits]
        count, size = x.shape[-1], self._together(bits.dtype)
        runs = -(-count // self.pack)
        grouped = bits[..., np.arange(runs * self.pack) % count].reshape(*x.shape[:-1], runs, self.pack)
        whole = np.ascontiguousarray(grouped).view(f"u{size * bits.itemsize}")
        return [whole[..., j] for j in range(self.pack // size)]


def _as_elements(bits: Array, dtype: DType) -> Array:
    bits = np.ascontiguousarray(bits)
    return bits.astype(np.bool_) if dtype == np.bool_ else bits.view(dtype)


def assembled(assembly: str, constraints: str, types: Sequence[Any], pack: int) -> Assembly:
    """Parse a snippet and its constraints; raise NotImplementedError for constraints that are not interpreted."""
    widths = []
    for constraint in re.split(r"\s*,\s*", constraints.strip()):
        if constraint.startswith("="):
            letter = constraint.lstrip("=&")
            if letter not in _WIDTHS:
                raise NotImplementedError(f"inline assembly with the constraint `{constraint}` is not interpreted")
            widths.append(_WIDTHS[letter])
        elif constraint.isdigit():
            raise NotImplementedError(f"inline assembly with the tied operand `{constraint}` is not interpreted")
    snippet = parse(assembly)
    read = {x for instruction in snippet.instructions for x in instruction.operands if isinstance(x, str)}
    special = tuple(name for name in SPECIAL if name in read)
    return Assembly(snippet, tuple(widths), tuple(map(numpy_dtype, types)), pack, special)


class AsmResults(tuple[Any, ...]):
    """The handles of a snippet's results, with the method by which Triton's language asks for them."""

    __slots__ = ()

    def get_result(self, i: int) -> Any:
        return self[i]


def inline_assembly(
    builder: Any, assembly: str, constraints: str, values: Sequence[Any], types: Sequence[Any], pack: int
) -> AsmResults:
    """Run a snippet on handles, by the operations of `builder`, and return the handles of its results."""
    made = assembled(assembly, constraints, types, pack)
    special = [SPECIAL[name](builder) for name in made.special]
    if values and types[0].is_block():
        special = [builder.create_splat(types[0], x) for x in special]
    operands = [*values, *special] or [builder.get_int32(0)]
    return AsmResults(
        builder.create_of_arrays(partial(made.result, i), *operands, dtype=dtype.scalar)
        for i, dtype in enumerate(types)
    )
