"""Regimes recorded as programs: their operations on the numbers of a block, as lines that Triton compiles.

A regime that is called with a `SymbolicBlock` computes nothing: every operation on its symbols adds a line to a tape.
So the function that defines the values is also the source of the fused kernel that makes them on a GPU. Numbers that a
regime puts in (bounds, scales, what follows from the width) become arguments of the kernel, so that one program serves
every shape; shifts and masks, which are never of a shape, stay in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lastbit.inputs.bits import INCREMENT, bits_of_float, signed
from lastbit.inputs.draws import DrawnBlock
from lastbit.numerics.formats import Format

_TYPES = {torch.int64: "tl.int64", torch.float64: "tl.float64", torch.bool: "tl.int1"}
_OF_INTEGERS = frozenset({"%", "//", ">>", "<<"})
_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})
_IN_TEXT = frozenset({">>", "<<", "&"})


class Unfusable(Exception):
    """An error: a regime does what no line can express, so that only torch can evaluate it."""


@dataclass(frozen=True)
class Program:
    """The operations of a regime on `rows`, `columns` and `width`, as lines of Triton.

    Attributes:
        lines: assignments, in order.
        result: the name of the values, int64 or float64.
        streams: tensor and name of the streams of random numbers, whose keys are the arguments `key0`, `key1`, …
        constants: bits of the arguments `c0`, `c1`, …
    """

    lines: tuple[str, ...]
    result: str
    streams: tuple[tuple[str, str], ...]
    constants: tuple[int, ...]


class ProgramLines:
    """The lines of a program while it is recorded; equal expressions have one line."""

    def __init__(self) -> None:
        self.values: dict[str, Symbol] = {}
        self.streams: dict[tuple[str, str], str] = {}
        self.constants: list[int] = []

    def line(self, expression: str, dtype: torch.dtype) -> Symbol:
        """Return the symbol of an expression, to which a line is added where it is new."""
        if expression not in self.values:
            self.values[expression] = Symbol(self, f"v{len(self.values)}", dtype)
        return self.values[expression]

    def constant(self, value: float, dtype: torch.dtype) -> Symbol:
        """Add a number as an argument of the program, and return its symbol."""
        if dtype is torch.bool:
            return self.line(f"tl.full([1, 1], {int(value)}, tl.int1)", dtype)
        if dtype is torch.int64 and not isinstance(value, int):
            raise Unfusable(f"{value} among integers")
        # Equal numbers stay apart, or the text would depend on which of them are equal for the shape at hand.
        name = f"c{len(self.constants)}"
        self.constants.append(bits_of_float(value) if dtype is torch.float64 else int(value))
        as_float = f"{name}.to(tl.float64, bitcast=True)"
        return self.line(as_float, dtype) if dtype is torch.float64 else Symbol(self, name, dtype)

    def key(self, tensor: str, stream: str) -> str:
        """Return the argument that holds the key of a stream."""
        return self.streams.setdefault((tensor, stream), f"key{len(self.streams)}")

    def program(self, result: Symbol) -> Program:
        """Return the recorded program, which computes `result`."""
        lines = tuple(f"{symbol.text} = {expression}" for expression, symbol in self.values.items())
        return Program(lines, result.text, tuple(self.streams), tuple(self.constants))


class Symbol:
    """Stands for an int64, float64 or bool tensor in a program, where it is called `text`."""

    def __init__(self, tape: ProgramLines, text: str, dtype: torch.dtype) -> None:
        self.tape, self.text, self.dtype = tape, text, dtype

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> Symbol:
        if function not in _FUNCTIONS:
            raise Unfusable(f"torch.{function.__name__}")
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        raise Unfusable(f"Tensor.{name}")

    def __bool__(self) -> bool:
        raise Unfusable("a choice by value")

    def to(self, dtype: torch.dtype) -> Symbol:
        if dtype is self.dtype:
            return self
        if dtype not in _TYPES or self.dtype is torch.float64:
            raise Unfusable(f"{self.dtype} → {dtype}")
        expression = f"{self.text} != 0" if dtype is torch.bool else f"{self.text}.to({_TYPES[dtype]})"
        return self.tape.line(expression, dtype)

    def view(self, dtype: torch.dtype) -> Symbol:
        if torch.bool in (dtype, self.dtype) or dtype not in _TYPES:
            raise Unfusable(f"{self.dtype} seen as {dtype}")
        return self.tape.line(f"{self.text}.to({_TYPES[dtype]}, bitcast=True)", dtype)

    def clamp(self, *, max: float) -> Symbol:
        most = self.tape.constant(max, self.dtype)
        return _where(self._with(">", most), most, self)

    def _with(self, sign: str, other: object, *, swapped: bool = False) -> Symbol:
        if sign in _IN_TEXT and isinstance(other, int) and not swapped:
            if self.dtype is not torch.int64:
                raise Unfusable(f"{self.dtype} {sign}")
            return self.tape.line(f"{self.text} {sign} {other}", self.dtype)
        known = other if isinstance(other, Symbol) else self._number(other)
        integral = sign in _OF_INTEGERS and self.dtype is not torch.int64
        if known.dtype is not self.dtype or integral or (sign == "/" and self.dtype is not torch.float64):
            raise Unfusable(f"{self.dtype} {sign} {known.dtype}")
        first, second = (known, self) if swapped else (self, known)
        return self.tape.line(f"{first.text} {sign} {second.text}", torch.bool if sign in _COMPARISONS else self.dtype)

    def _number(self, value: object) -> Symbol:
        if self.dtype is torch.bool or not isinstance(value, int | float):
            raise Unfusable(f"{self.dtype} with {value!r}")
        return self.tape.constant(value, self.dtype)

    __hash__ = None  # type: ignore[assignment]


def _operator(sign: str, *, swapped: bool = False) -> Callable[[Symbol, object], Symbol]:
    return lambda self, other: self._with(sign, other, swapped=swapped)


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "rshift": ">>", "lshift": "<<",
    "and": "&", "or": "|", "lt": "<", "gt": ">", "ge": ">=", "eq": "==",
}  # fmt: skip
for _name, _sign in _OPERATORS.items():
    setattr(Symbol, f"__{_name}__", _operator(_sign))
for _name, _sign in {"radd": "+", "rsub": "-", "rmul": "*"}.items():
    setattr(Symbol, f"__{_name}__", _operator(_sign, swapped=True))


def _where(condition: Symbol, first: object, second: object) -> Symbol:
    given = next((value for value in (first, second) if isinstance(value, Symbol)), None)
    if given is None:
        raise Unfusable("where() of two numbers, whose dtype torch chooses")
    a, b = (value if isinstance(value, Symbol) else given._number(value) for value in (first, second))
    if a.dtype is not b.dtype:
        raise Unfusable(f"where() of {a.dtype} and {b.dtype}")
    return given.tape.line(f"tl.where({condition.text}, {a.text}, {b.text})", a.dtype)


def _full_like(like: Symbol, value: float, *, dtype: torch.dtype | None = None) -> Symbol:
    return like.tape.constant(value, dtype or like.dtype)


_FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Symbol]] = {
    torch.where: _where,
    torch.floor: lambda x: x.tape.line(f"tl.floor({x.text})", x.dtype),
    torch.full_like: _full_like,
    torch.zeros_like: lambda like, dtype=None: _full_like(like, 0, dtype=dtype),
    torch.ones_like: lambda like, dtype=None: _full_like(like, 1, dtype=dtype),
}


@dataclass(frozen=True, slots=True)
class SymbolicBlock(DrawnBlock):
    """A block whose numbers are symbols; their random words come from keys that are arguments."""

    tape: ProgramLines

    @property
    def elements(self) -> Any:
        return self.tape.line("rows * width + columns", torch.int64)

    @property
    def whole(self) -> Any:
        return self.tape.line("tl.full([1, 1], 0, tl.int64)", torch.int64)

    def words(self, index: Any, stream: str, *, lane: int = 0, lanes: int = 1) -> Any:
        key = self.tape.key(self.name, stream)
        start, step = signed(INCREMENT * lane), signed(INCREMENT * lanes)
        return self.tape.line(f"hashed({index.text}, {key} + {start}, {step})", torch.int64)


def recorded(
    regime: Callable[[DrawnBlock], Tensor], name: str, fmt: Format, height: int, width: int, matrix: int
) -> Program | None:
    """Record the program of a regime for a tensor called `name`, as in `DrawnBlock`; None if no line can express it.

    Raises what the regime raises, a `UsageError` where it makes no values of that shape.
    """
    tape = ProgramLines()
    rows, columns = (Symbol(tape, text, torch.int64) for text in ("rows", "columns"))
    block = SymbolicBlock(0, name, fmt, rows, columns, height, width, matrix, tape)  # type: ignore[arg-type]
    try:
        result: Any = regime(block)
        return tape.program(result)
    except (Unfusable, TypeError):
        return None
