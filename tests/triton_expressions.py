"""Expressions of small Triton kernels, of a wanted dtype and shape: values, conditions, addresses, masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

from tests.triton_programs import Tensor
from tests.triton_words import APART, BINARY, COMPARISONS, DTYPES, FLOATS, INTEGERS, PROGRAMS, UNARY

Shape = tuple[int, ...]
Option = TypeVar("Option")


@dataclass(frozen=True)
class Name:
    """A name of the kernel, and what it stands for; one that is `fixed` is not assigned again."""

    text: str
    dtype: str
    shape: Shape
    fixed: bool = False

    @property
    def type(self) -> tuple[str, Shape]:
        return self.dtype, self.shape


class Expressions:
    """Draws expressions from the names in scope; statements that an expression needs first go to `write`."""

    def __init__(self, draw: st.DrawFn, tensors: tuple[Tensor, ...], widths: tuple[int, int], axes: int) -> None:
        self.draw, self.tensors, self.widths, self.axes = draw, tensors, widths, axes
        apart = draw(st.sampled_from((True, True, False)))
        self.roles = {t.name: draw(st.sampled_from(APART if apart else ("all",))) for t in tensors}
        self.roles[tensors[0].name] = "slot" if apart else "all"
        self.used: set[str] = set()
        self.names: list[Name] = []
        self.made = 0

    def write(self, line: str) -> None:
        raise NotImplementedError

    def call(self, dtype: str, shape: Shape, depth: int) -> str:
        raise NotImplementedError

    # What is drawn.

    def pick(self, options: Sequence[Option]) -> Option:
        return self.draw(st.sampled_from(options))

    def shape(self) -> Shape:
        n, m = self.widths
        return self.pick(((n,), (), (n, m), (m,)))

    def type(self) -> tuple[str, Shape]:
        return self.pick(DTYPES), self.shape()

    def tensor(self, dtypes: Sequence[str] = ()) -> Tensor:
        """One that may be written, of these dtypes if there is one."""
        writable = [t for t in self.tensors if t.dtype != "bool" and self.roles[t.name] != "read" and self.unused(t)]
        return self.pick([t for t in writable if t.dtype in dtypes] or writable)

    def unused(self, tensor: Tensor) -> bool:
        return tensor.name not in self.used

    def new_text(self, letter: str, text: str) -> str:
        self.made += 1
        self.write(f"{letter}{self.made} = {text}")
        return f"{letter}{self.made}"

    def new_name(self, dtype: str, shape: Shape) -> Name:
        self.made += 1
        self.names.append(name := Name(f"v{self.made}", dtype, shape))
        return name

    # Values.

    def value(self, dtype: str, shape: Shape, depth: int = 2) -> str:
        """Write an expression of this dtype and shape."""
        dtype = "int1" if dtype == "bool" else dtype
        options = self.leaves(dtype, shape)
        if depth > 0:
            deeper = self.of_blocks(dtype, shape, depth - 1) if shape else self.of_scalars(dtype, depth - 1)
            options = [*options, *self.pointwise(dtype, shape, depth - 1), *deeper]
        made = self.pick(options)
        return made if isinstance(made, str) else made()

    def leaves(self, dtype: str, shape: Shape) -> list[Any]:
        found: list[Any] = [lambda: f"tl.full({list(shape)}, {self.constant(dtype)}, tl.{dtype})"]
        if names := [name.text for name in self.names if name.type == (dtype, shape)]:
            found += [lambda: self.pick(names)] * 4
        if shape == () and dtype in (*INTEGERS, "float32"):
            index = [self.program, self.program, "n", "(n + K)", lambda: self.program("num_programs")]
            found += {"int32": index, "int64": ["m.to(tl.int64)"], "float32": ["s"]}[dtype]
        if len(shape) == 1 and dtype == "int32":
            found += [f"tl.arange(0, {shape[0]})"] * 2
        if tensors := [t for t in self.tensors if t.dtype.replace("bool", "int1") == dtype and self.unused(t)]:
            found += [lambda: self.load(self.pick(tensors), shape)] * 4
        return found

    def program(self, what: str = "program_id") -> str:
        return f"tl.{what}({self.draw(st.integers(0, self.axes - 1))})"

    def constant(self, dtype: str) -> str:
        if dtype == "int1":
            return self.pick(("True", "False"))
        return self.pick(("1", "0", "3", "-2", "K")) if dtype in INTEGERS else self.pick(("1.0", "0.5", "-3.0", "0.1"))

    def pointwise(self, dtype: str, shape: Shape, depth: int) -> list[Callable[[], str]]:
        def binary() -> str:
            x, y = self.value(dtype, shape, depth), self.operand(dtype, shape, depth)
            return f"({self.pick(BINARY[dtype in FLOATS]).format(x, y)}).to(tl.{dtype})"

        def cast() -> str:
            return f"({self.value(self.pick(DTYPES), shape, depth)}).to(tl.{dtype})"

        def where() -> str:
            condition = self.value("int1", shape, depth)
            return f"tl.where({condition}, {self.value(dtype, shape, depth)}, {self.value(dtype, shape, depth)})"

        def unary() -> str:
            text = self.pick(UNARY[:2] if dtype in INTEGERS else UNARY)
            wide = dtype if dtype in INTEGERS or text in UNARY[:2] else "float32"
            return f"({text.format(f'({self.value(dtype, shape, depth)}).to(tl.{wide})')}).to(tl.{dtype})"

        def called() -> str:
            return self.call(dtype, shape, depth) if depth else self.value(dtype, shape, 0)

        def decision() -> str:
            x, y = self.value(dtype, shape, depth), self.value(dtype, shape, depth)
            return f"({x} if {self.condition()} else {y})"

        if dtype == "int1":
            return [lambda: self.truth(shape, depth)] * 3 + [cast]
        return [binary, binary, binary, cast, where, unary, called, decision]

    def operand(self, dtype: str, shape: Shape, depth: int) -> str:
        """Something that a block of this shape can be combined with."""
        options: list[Callable[[], str]] = [lambda: self.value(dtype, shape, depth), lambda: self.constant(dtype)]
        if shape:
            options.append(lambda: self.value(dtype, (), depth))
        if len(shape) == 2:
            options.append(lambda: f"{self.value(dtype, shape[1:], depth)}[None, :]")
            options.append(lambda: f"{self.value(dtype, shape[:1], depth)}[:, None]")
        return self.pick(options)()

    def truth(self, shape: Shape, depth: int) -> str:
        if self.draw(st.booleans()):
            word = self.pick(("({} & {})", "({} | {})", "({} ^ {})", "({} and {})", "({} or {})"))
            return word.format(self.value("int1", shape, depth), self.value("int1", shape, depth))
        dtype = self.pick(DTYPES[:-1])
        x, y = self.value(dtype, shape, depth), self.operand(dtype, shape, depth)
        return f"({self.pick(COMPARISONS).format(x, y)})"

    def condition(self) -> str:
        """Write a scalar that decides."""
        compared = f"{self.value('int32', (), 1)} {self.pick(('>', '==', '<='))} {self.pick(('1', '0', 'n', '3'))}"
        return self.pick((compared, f"{self.value('int1', (), 2)}", f"not {self.value('int1', (), 1)}"))

    # Values of other values of other shapes.

    def of_scalars(self, dtype: str, depth: int) -> list[Callable[[], str]]:
        return [lambda: self.reduced(dtype, self.pick((self.widths[:1], self.widths)), None, depth)]

    def of_blocks(self, dtype: str, shape: Shape, depth: int) -> list[Callable[[], str]]:
        def block(text: str, shape: Shape = shape, of: str = dtype) -> Callable[[], str]:
            return lambda: f"({text.format(self.value(of, shape, depth))}).to(tl.{dtype})"

        sides, axis = list(shape), len(shape) - 1
        made = [block(f"tl.broadcast_to({{}}, {sides})", ())]
        made += [block(f"tl.flip({{}}, {axis})")] if shape[axis] > 1 else []
        if len(shape) == 1:
            n, k = shape[0], self.pick((2, 4, 1))
            made += [lambda: self.reduced(dtype, (n, k), 1, depth), lambda: self.reduced(dtype, (k, n), 0, depth)]
            made += [block("tl.reshape({}, [" + str(n) + "])", (k, n // k))] if n % k == 0 else []
            made.append(
                lambda: (
                    f"tl.gather({self.value(dtype, shape, depth)}, {self.value('int32', shape, depth)} & {n - 1}, 0)"
                )
            )
        else:
            n, m = shape
            made += [block("tl.trans({})", (m, n)), block(f"tl.reshape({{}}, {sides})", (n * m,))]
            made.append(
                lambda: f"tl.broadcast_to({self.reduced(dtype, shape, self.pick((1, 0)), depth, True)}, {sides})"
            )
        if len(shape) == 2 and shape[1] == 2:
            made.append(
                lambda: f"tl.join({self.value(dtype, shape[:1], depth)}, {self.value(dtype, shape[:1], depth)})"
            )
        if len(shape) == 1 and shape[0] > 1:
            half = (shape[0] // 2,)
            pair = lambda: (self.value(dtype, half, depth), self.value(dtype, half, depth))  # noqa: E731
            made.append(lambda: "tl.cat({}, {}, can_reorder=True)".format(*pair()))
            made.append(lambda: "tl.interleave({}, {})".format(*pair()))
        return [*made, *self.running(dtype, shape, depth), *self.special(dtype, shape, depth)]

    def running(self, dtype: str, shape: Shape, depth: int) -> list[Callable[[], str]]:
        """Scan along the last axis, and sort there."""
        if dtype == "int1":
            return []
        axis, back = len(shape) - 1, self.pick(("", ", reverse=True"))
        texts = [f"tl.cumsum({{}}, {axis}{back})", f"tl.cumprod({{}}, {axis}{back})", "tl.sort({})"]
        texts += [f"tl.associative_scan({{}}, {axis}, {self.pick(('larger', 'second'))}{back})"]
        return [lambda: f"({self.pick(texts).format(self.value(dtype, shape, depth))}).to(tl.{dtype})"] * 2

    def special(self, dtype: str, shape: Shape, depth: int) -> list[Callable[[], str]]:
        if dtype == "int32" and len(shape) == 1:
            return [lambda: f"tl.histogram({self.value('int32', self.widths[:1], depth)} & {shape[0] - 1}, {shape[0]})"]
        if dtype == "float32" and len(shape) == 2:
            return [lambda: self.product(shape, depth)] * 2
        return []

    def product(self, shape: Shape, depth: int) -> str:
        factor, k = self.pick(FLOATS), self.pick((4, 1, 16))
        x, y = self.value(factor, (shape[0], k), depth), self.value(factor, (k, shape[1]), depth)
        total = self.pick(("", f", acc={self.value('float32', shape, depth)}"))
        return f"tl.dot({x}, {y}{total}{self.pick(('', ', input_precision=' + repr('ieee')))})"

    def reduced(self, dtype: str, shape: Shape, axis: int | None, depth: int, keep: bool = False) -> str:
        kept = ", keep_dims=True" if keep else ""
        if dtype == "int1":
            return f"(tl.max({self.value('int32', shape, depth)}, axis={axis}{kept}) > 1)"
        value = self.value(dtype, shape, depth)
        texts = [f"tl.sum({value}, axis={axis}{kept})", f"tl.max({value}, axis={axis}{kept})"]
        texts += [f"tl.reduce({value}, {axis}, {self.pick(('larger', 'second', 'larger', 'second', 'chosen'))}{kept})"]
        if dtype == "int32" and axis is not None and not keep:
            other = self.value(self.pick(("float32", "int64", "bfloat16")), shape, depth)
            texts += [f"tl.argmax({other}, axis={axis})", f"tl.argmin({value}, axis={axis}, tie_break_left=False)"]
            texts += [f"tl.reduce(({other}, {value}), {axis}, both)[1]"]
        if dtype in INTEGERS and axis is not None:
            texts += [f"tl.xor_sum({value}, axis={axis}{kept})"]
        return f"({self.pick(texts)}).to(tl.{dtype})"

    # Memory.

    def load(self, tensor: Tensor, shape: Shape) -> str:
        if tensor.name in self.used:
            return f"tl.full({list(shape)}, {self.constant('int1')}, tl.{tensor.dtype.replace('bool', 'int1')})"
        where, mask = self.address(tensor, shape), self.mask(shape)
        other = self.pick(("", f", other={self.constant(tensor.dtype.replace('bool', 'int1'))}")) if mask else ""
        return f"tl.load({where}{mask}{other})"

    def mask(self, shape: Shape) -> str:
        return self.pick(("", "", f", mask={self.value('int1', shape, 1)}"))

    def address(self, tensor: Tensor, shape: Shape) -> str:
        """Pointers into a tensor: regular ones, or any."""
        role, part = self.roles[tensor.name], tensor.size // PROGRAMS
        self.used |= {tensor.name} if role == "once" else set()
        offset = self.regular(shape) if self.draw(st.integers(0, 3)) else self.value(self.pick(INTEGERS), shape, 1)
        if role == "slot":
            return f"{tensor.name} + {self.own} * {part} + (({offset}) & {part - 1})"
        if role == "turn":
            return f"{tensor.name} + {self.own} + (({offset}) & {part - 1}) * {PROGRAMS}"
        return f"{tensor.name} + (({offset}) & {tensor.size - 1})"

    @property
    def own(self) -> str:
        """The number of the program."""
        more = (
            "tl.program_id(0)",
            "tl.program_id(1) * tl.num_programs(0)",
            "tl.program_id(2) * tl.num_programs(0) * tl.num_programs(1)",
        )
        return f"({' + '.join(more[: self.axes])})"

    def regular(self, shape: Shape) -> str:
        """Offsets that go by strides, from a place that may be the program's own."""
        step = self.pick((shape[0] if shape else 1, 1, 0, 3, 8))
        index = ("[:, None]", "[None, :]") if len(shape) == 2 else ("",) * len(shape)
        strides = [self.pick((1, 2, 0, 5, -1)) for _ in shape]
        terms = [f"tl.arange(0, {n}){at} * {k}" for n, at, k in zip(shape, index, strides, strict=True)]
        return " + ".join([f"{self.program()} * {step}", *terms])
