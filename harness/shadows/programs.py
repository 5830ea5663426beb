"""Residues of interpreted Triton programs: a builder that computes them beside the values.

Every handle of floats has `residues`. An operation has a rule in one of the tables below, or it only moves elements,
and then it moves the residues likewise, which the bits of the values confirm. Anything else is opaque.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from operator import methodcaller
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

from lastbit.interpret.builder import Builder
from lastbit.interpret.inline_asm import assembled
from lastbit.interpret.numpy_formats import BFLOAT16, E4M3, E5M2, FP8_MAX, Array, DType, bits_of, is_float
from lastbit.interpret.places import here
from lastbit.numerics import formats
from lastbit.numerics.algebraic import FORMULAS
from lastbit.numerics.residues import Residues, constant, zeros_like
from lastbit.shadows.aten_rules import is_fixed_point, whole
from lastbit.shadows.shadow_memory import ShadowMemory

FORMATS = {
    np.dtype(np.float16): formats.FP16,
    BFLOAT16: formats.BF16,
    E4M3: formats.E4M3,
    E5M2: formats.E5M2,
    np.dtype(np.float32): formats.FP32,
    np.dtype(np.float64): formats.FP64,
}
_FLOATS = {1: E4M3, 2: np.dtype(np.float16), 4: np.dtype(np.float32), 8: np.dtype(np.float64)}
"""Of formats of a size, the one with the most digits."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Powers by multiplication: kernels have squares and cubes. Beyond, an exponent is taken to be data.
_MOST_FACTORS = 16

Rule = Callable[..., Residues]
"""Of the shadow, the handle that was made, and the operands."""


class Enough(Exception):
    """The time for following is over; no more programs run."""


class Shadowing:
    """Follow launches in a memory of residues; for `lastbit.interpret.watching.watched`.

    >>> memory = ShadowMemory()
    >>> with watched(following := Shadowing(memory)):   # doctest: +SKIP
    ...     y = kernel(x)
    >>> memory.read(y), following.opaque                # doctest: +SKIP

    After a `deadline` of `time.monotonic`, the programs of a launch that have not begun do not run. What they would
    have written is OPEN then, and nothing may be computed from it.

    Attributes:
        primitives: device function → the primitive that it is taken for.
        cut: programs of a launch did not run.
        opaque: each operation that has no rule of the field, the line of the kernel, and the reason, once each.
    """

    def __init__(
        self, memory: ShadowMemory, primitives: Mapping[str, str] = MappingProxyType({}), deadline: float = math.inf
    ) -> None:
        self.memory, self.primitives, self.deadline = memory, primitives, deadline
        self.cut = False
        self.opaque: list[tuple[str, str, str]] = []
        self._shadow: Shadow | None = None

    @contextmanager
    def launch(self, function: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
        self.require_whole()
        before = interpreter_semantic.builder
        self._shadow = interpreter_semantic.builder = Shadow(interpreter.interpreter_builder, self)
        for argument in arguments.values():
            if isinstance(argument, tl.tensor) and is_float(argument.handle.data.dtype):
                self._shadow.give(argument.handle, self._shadow.constant(float(argument.handle.data.item())))
        try:
            with _disable_current_modes():  # arithmetic of the residues is no operation of the kernel's in PyTorch
                try:
                    yield
                except Enough:
                    self._shadow.open_unchanged()
                    self.cut = True
        finally:
            interpreter_semantic.builder, self._shadow = before, None

    def require_whole(self) -> None:
        """Raise `RuntimeError` if programs of a launch did not run, since later steps may need their results."""
        if self.cut:
            raise RuntimeError("not all programs of a launch could be followed in time, and more is computed from it")

    def chosen(self, programs: Array) -> Array:
        return programs

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._shadow is None:
            return function(*args, **kwargs)
        return self._shadow.combined(function, *args, **kwargs)


class Shadow(Builder):
    """Builder for one launch that computes by the builder `other` and gives residues to every handle of floats.

    Integers that depend on the digits of a float, and not on its exponent and sign alone, have the number of these as
    `digits`: no float with their bits is known.
    """

    __slots__ = ("_before", "_bits", "_constants", "_following", "_program", "_registered", "_running", "_shadowing")

    def __init__(self, other: Builder, shadowing: Shadowing) -> None:
        self.__dict__ = other.__dict__
        self._shadowing = shadowing
        self._following = True
        self._registered = False
        self._program: tuple[int, ...] = ()
        self._running: tuple[int, ...] = ()
        self._before: list[tuple[Tensor, Tensor]] = []  # tensors with their bytes before the launch
        self._constants: dict[float, Residues] = {}
        self._bits: deque[tuple[DType, Tensor, Tensor]] = deque(maxlen=16)

    # Handles and their residues.

    def give(self, made: Any, residues: Residues) -> None:
        """Set the residues of a handle, broadcast to its shape."""
        shape = made.data.shape
        if residues.shape != shape:
            new = [1] * (len(shape) - len(residues.shape))
            residues = residues.moved(lambda n: n.reshape(4, *new, *n.shape[1:]).expand(4, *shape))
        made.residues = residues

    def residues(self, handle: Any) -> Residues:
        """Return the residues of a handle; those of integers are the numbers, OPEN if they have digits of floats."""
        if not is_float(handle.data.dtype):
            if getattr(handle, "digits", 0):
                self.opaque("bits", "digits of a float are used as an integer")
                return _of_integers(handle.data).opened
            return _of_integers(handle.data)
        if not hasattr(handle, "residues"):
            self.give_open(handle, "value", "it was not computed by an operation of the language")
        found: Residues = handle.residues
        return found

    def give_open(self, made: Any, name: str, reason: str) -> None:
        """Set a handle's residues to those of its values, OPEN, and note the operation."""
        self.opaque(name, reason)
        self.give(made, Residues.of(values_of(made)).opened)

    def opaque(self, name: str, reason: str) -> None:
        entry = name, str(here() or "unknown line"), reason
        if entry not in self._shadowing.opaque:
            self._shadowing.opaque.append(entry)

    def constant(self, number: float) -> Residues:
        if number not in self._constants:
            self._constants[number] = constant(number)
        return self._constants[number]

    # Operations.

    def standing(self, function: Any) -> str | None:
        """Return the primitive that a function stands for, if the kernel declares one."""
        return self._shadowing.primitives.get(function.__name__)

    def returned(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Set the residues of a result by the primitive that its function is declared to stand for."""
        standing = self.standing(function)
        if standing is not None and self._following:
            handles = [x.handle for x in (*args, *kwargs.values()) if isinstance(x, tl.tensor)]
            found = FORMULAS[standing](*map(self.residues, handles))
            self.give(result.handle, found.seen(values_of(result.handle)))

    def perform(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Perform a method of the builder, with residues by its rule; without a rule, `apply` moves residues."""
        if not self._following:
            return method(*args, **kwargs)
        if not self._registered:
            for given in self.memory.tensors:
                self._shadowing.memory.register(given.tensor)
                self._before.append((given.tensor, self._shadowing.memory.bits(given.tensor)))
            self._registered = True
        if self._running != self.grid_idx:
            if self._running and time.monotonic() > self._shadowing.deadline:
                raise Enough
            self._running = self.grid_idx
        if name in _EFFECTS:
            return _EFFECTS[name](self, method, *args, **kwargs)
        if name not in _RULES:
            return method(*args, **kwargs)
        made = self.quietly(method, *args, **kwargs)
        if is_float(made.data.dtype):
            self.give(made, _RULES[name](self, made, *args, **kwargs).seen(values_of(made)))
        return made

    def open_unchanged(self) -> None:
        """Make all memory OPEN that no program of the launch has written."""
        for tensor, before in self._before:
            if tensor.is_floating_point():
                self._shadowing.memory.open_unchanged(tensor, before)

    def quietly(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function without following its operations, and return its result."""
        following, self._following = self._following, False
        try:
            return function(*args, **kwargs)
        finally:
            self._following = following

    def apply(self, function: Callable[..., Array], dtype: Any, *args: Any) -> Any:
        made = super().apply(function, dtype, *args)
        if made is not None and made.data.dtype.kind in "iu":
            made.digits = _digits(function, args)
        elif self._following and made is not None and is_float(made.data.dtype):
            numbers = self._moved(function, made, args)
            if numbers is None:
                self.give_open(made, getattr(function, "__name__", "operation"), "it has no rule of the field")
            else:
                made.residues = Residues(numbers)
        return made

    def _moved(self, function: Callable[..., Array], made: Any, args: Any) -> Tensor | None:
        """Move residues as a function moves the bits of the values; return None if it does more than move."""
        stacks = [x.data for x in args]
        for i, x in enumerate(args):
            if is_float(x.data.dtype):  # the builder takes the first axis for one of programs
                stacks[i] = np.concatenate([self.residues(x).numbers.numpy(), _bits(x.data)[None]])
        try:
            moved = function(*stacks)
        except Exception:  # it is one of floats
            return None
        if moved.shape == made.data.shape and _is_one_number(made.data):
            return Residues.of(values_of(made)).numbers
        if moved.shape != (5, *made.data.shape) or not np.array_equal(moved[4], _bits(made.data)):
            return None
        return _tensor(moved[:4])

    # Constants.

    def _number(self, made: Any, number: float) -> Any:
        precision = FORMATS[made.data.dtype].precision
        found = self.constant(number)
        self.give(made, found if precision >= 24 else Residues.of(values_of(made)).written_as(found))
        return made

    def get_null_value(self, type: Any) -> Any:
        made = super().get_null_value(type)
        return self._number(made, 0.0) if is_float(made.data.dtype) else made

    # Reductions and scans.

    def combined(
        self, function: Callable[..., Any], input: Any, axis: Any, combine_fn: Any, *args: Any, **kw: Any
    ) -> Any:
        """Perform a reduction or scan: sums and extrema by a rule, others by the language, step by step."""
        if not self._following or isinstance(input, tuple) or not is_float(input.handle.data.dtype):
            return function(input, axis, combine_fn, *args, **kw)
        data, standard = input.handle.data, tl.standard
        extrema = standard._elementwise_max, standard._elementwise_min
        reduces, wide = function.__name__ == "reduce", data.dtype.itemsize >= 4
        if not reduces or not (combine_fn in extrema or (wide and combine_fn is standard._sum_combine)):
            return function(input, axis, wraps(combine_fn)(lambda *xs: combine_fn(*xs)), *args, **kw)
        made = self.quietly(function, input, axis, combine_fn, *args, **kw)
        axis = getattr(axis, "value", axis)
        axis = None if axis is None else axis % data.ndim
        numbers = self.residues(input.handle).numbers
        values = values_of(input.handle)
        if axis is None:
            numbers, values, axis = numbers.reshape(4, -1), values.reshape(-1), 0
        back = axis - values.ndim
        if combine_fn is standard._sum_combine:
            found = Residues(numbers).total(back)
        else:
            # By values; OPEN where others of its value have other residues.
            x, largest = Residues(numbers), combine_fn is standard._elementwise_max
            known = torch.where(torch.isnan(values), -math.inf if largest else math.inf, values)
            place = (known.argmax if largest else known.argmin)(back, keepdim=True)
            found = x.moved(lambda n: n.gather(back, place.expand(4, *place.shape)))
            tied = (known == known.gather(back, place)) & (x.p != found.p)
            found = found.open_where(tied.any(back, keepdim=True))
        found = Residues(found.numbers.reshape(4, *made.handle.data.shape))
        self.give(made.handle, found.seen(values_of(made.handle)))
        return made

    # Bits of floats as integers, which come back as they went, as in a sort.

    def remember(self, data: Array, residues: Residues) -> None:
        """Remember the residues of floats whose bits a kernel takes, and of their negatives."""
        bits = _tensor(_bits(data).reshape(-1))
        top = np.array(1 << 8 * data.dtype.itemsize - 1, np.uint64).astype(np.int64).item()
        numbers = [x.numbers.expand(4, *data.shape).reshape(4, -1) for x in (residues, -residues)]
        self._remembered().append((data.dtype, torch.stack([bits, bits ^ top]), torch.stack(numbers)))

    def recalled(self, data: Array, dtype: DType, *, chosen: bool = False) -> Residues:
        """Recall the residues of floats with these bits: of the same place, or of a block in another order.

        Bits that were `chosen`, and not computed, may be of any remembered float. Others are OPEN, and noted.
        """
        values = _tensor(np.ascontiguousarray(data).view(dtype).astype(np.float64))
        found = Residues.of(values).opened.numbers.reshape(4, -1)
        wanted = _tensor(_bits(data).reshape(-1))
        known = torch.zeros(wanted.shape, dtype=torch.bool)
        for kind, bits, numbers in self._remembered():
            if kind != dtype:
                continue
            same_size = len(bits[0]) == len(wanted)
            for own, own_numbers in zip(bits, numbers, strict=True):
                ordered, order = torch.sort(own)
                if chosen or (same_size and torch.equal(ordered, torch.sort(wanted).values)):
                    first = torch.searchsorted(ordered, wanted).clamp(max=len(own) - 1)
                    last = torch.searchsorted(ordered, wanted, right=True).clamp(min=1) - 1
                    another = torch.cumsum(torch.diff(own_numbers[0, order], prepend=own_numbers[0, order[:1]]) != 0, 0)
                    matched, ambiguous = ordered[first] == wanted, another[first] != another[last]
                    these = Residues(own_numbers[:, order[first]]).open_where(ambiguous).numbers
                elif same_size:
                    matched, these = own == wanted, own_numbers
                else:
                    continue
                differing = known & matched & (these[0] != found[0])
                found = Residues(torch.where(matched & ~known, these, found)).open_where(differing).numbers
                known = known | matched
        if bool((~known & ~values.reshape(-1).isnan()).any()):  # then some of the others may be so by chance
            self.opaque("bitcast", "the bits of a float were computed as an integer")
            return Residues.of(values).opened
        return Residues(found.reshape(4, *data.shape))

    def _remembered(self) -> deque[tuple[DType, Tensor, Tensor]]:
        if self.grid_idx != self._program:
            self._program = self.grid_idx
            self._bits.clear()
        return self._bits

    def held(self, handle: Any, addresses: Array, *, chosen: bool = False) -> tuple[Residues, torch.dtype]:
        """Return the residues and dtype of a handle's values as the memory at these addresses sees them."""
        data, size = handle.data, handle.data.dtype.itemsize
        if is_float(data.dtype):
            return self.residues(handle), FORMATS[data.dtype].dtype
        floats = FORMATS[_FLOATS[size]].dtype
        if self._shadowing.memory.holds(addresses, floats):
            kinds = (kind for kind, *_ in self._remembered() if kind.itemsize == size)
            return self.recalled(data, next(kinds, _FLOATS[size]), chosen=chosen), floats
        found = _of_integers(data)
        return found.opened if getattr(handle, "digits", 0) else found, _INTEGERS[size]


def _tensor(data: Array) -> Tensor:
    return torch.from_numpy(np.require(data, requirements=("C", "W")))


def values_of(handle: Any) -> Tensor:
    """Return the values of a handle of floats in fp64."""
    return _tensor(np.asarray(handle.data, np.float64))


def _bits(data: Array) -> Array:
    return bits_of(np.ascontiguousarray(data)).astype(np.int64)


def _digits(function: Any, operands: Any) -> int:
    """Return the number of low digits, of floats, on which a function's integer result may depend."""
    digits = max((getattr(x, "digits", 0) for x in operands), default=0)
    if digits and function is np.right_shift and (operands[1].data >= digits).all():
        return 0
    if digits and function is np.bitwise_and:
        masks = [x.data for x in operands if not getattr(x, "digits", 0)]
        return 0 if any(not (mask & (1 << digits) - 1).any() for mask in masks) else digits
    return digits


def _is_one_number(data: Array) -> bool:
    return bool((_bits(data) == _bits(data).flat[0]).all())


def _of_integers(data: Array) -> Residues:
    whole = _tensor(data.astype(np.int64))
    residues = Residues.of(whole)
    return residues.open_where(whole < 0) if data.dtype == np.uint64 else residues


# Rules: what an operation of the builder's, by its name without `create_`, computes.


def _of(function: Callable[..., Residues]) -> Rule:
    """Return the rule of an arithmetic function, which rounds to the format of the result."""

    def rule(self: Shadow, made: Any, *operands: Any) -> Residues:
        return function(*map(self.residues, operands)).rounded(FORMATS[made.data.dtype], values_of(made))

    return rule


def _sum(sign: int) -> Rule:
    """Return the rule of x + y or x - y, which is OPEN where a kernel relies on its rounding.

    It does so if it adds a power of two, or 1.5 of one, that leaves no room for a fraction, and if it subtracts from a
    number its own rounding to a narrower format.
    """
    function: Callable[[Residues, Residues], Residues] = operator.add if sign > 0 else operator.sub

    def rule(self: Shadow, made: Any, x: Any, y: Any) -> Residues:
        own, other, a, b = self.residues(x), self.residues(y), values_of(x), values_of(y)
        residues = function(own.beside(a, b), other.beside(b, a)).rounded(FORMATS[made.data.dtype], values_of(made))
        if _is_magic(made, a, y) or _is_magic(made, sign * b, x):
            self.opaque("addition", _MAGIC)
            return residues.opened
        if made.data.dtype.itemsize < 4:
            return residues
        for fmt in _split(x.data, -sign * y.data):
            rounded = own.rounded(fmt, a)
            split = rounded.equal(other if sign < 0 else -other) & (rounded.p != own.p)
            if bool(split.any()):
                self.opaque("subtraction", f"a number is split into parts of {fmt.name}")
                residues = residues.open_where(split)
        return residues

    return rule


def _fused(self: Shadow, made: Any, x: Any, y: Any, z: Any) -> Residues:
    if _is_magic(made, values_of(x) * values_of(y), z):
        self.opaque("addition", _MAGIC)
        return Residues.of(values_of(made)).opened
    return _of(_FUNCTIONS["fma"])(self, made, x, y, z)


_MAGIC = "a large power of two is added, which rounds to integers or to bits"


def _is_magic(made: Any, rest: Tensor, addend: Any) -> bool:
    """Return whether a number, 2^e or 1.5 · 2^e, is added to smaller ones to fix the place of their rounding."""
    data = addend.data
    if not data.size or not _is_one_number(data):
        return False
    precision, number = FORMATS[data.dtype].precision, abs(float(data.flat[0]))
    large = 2.0 ** (precision - (8 if precision >= 24 else 2))
    if not large <= number < math.inf or math.frexp(number)[0] not in (0.5, 0.75):
        return False
    lost = (values_of(made) - rest).abs() != number
    return bool((lost & (rest.abs() < number)).any())


def _split(x: Array, y: Array) -> Iterator[formats.Format]:
    """Yield narrow formats that hold some y near x but unequal to it."""
    near = (np.abs(x - y) <= 2.0**-7 * np.abs(x)) & (x != y)
    for dtype in (BFLOAT16, np.dtype(np.float16)) if near.any() else ():
        if (near & (y.astype(dtype).astype(y.dtype) == y)).any():
            yield FORMATS[dtype]


def _chosen(self: Shadow, made: Any, *operands: Any) -> Residues:
    """Return the operand that equals the result; OPEN where another number equals it, or it is a written limit."""
    values, handles = values_of(made), [x for x in operands if isinstance(x, TensorHandle)]
    found, taken = self.residues(handles[0]), values_of(handles[0]) == values
    for handle in handles[1:]:
        x, same = self.residues(handle), values_of(handle) == values
        found = Residues.where(taken, found.open_where(taken & same & (x.p != found.p)), x)
        taken = taken | same
    return found.open_where(~taken).unlimited


def _selected(self: Shadow, made: Any, condition: Any, x: Any, y: Any) -> Residues:
    alike = values_of(x) == values_of(y)
    return Residues.chosen(_tensor(condition.data), self.residues(x), self.residues(y), alike)


def _absolute(self: Shadow, made: Any, x: Any) -> Residues:
    residues = self.residues(x)
    return Residues.where(values_of(x) < 0, -residues, residues)


def _remainder(self: Shadow, made: Any, x: Any, y: Any) -> Residues:
    """Compute x - n y, with the integer n from the values."""
    n = torch.round((values_of(x) - values_of(made)) / values_of(y))
    residues = self.residues(x) - Residues.of(n) * self.residues(y)
    return residues.rounded(FORMATS[made.data.dtype], values_of(made))


def _signed(self: Shadow, made: Any, x: Any, y: Any) -> Residues:
    residues = self.residues(x)
    return Residues.where(values_of(x).signbit() == values_of(made).signbit(), residues, -residues)


def _exponential(name: str) -> Rule:
    """Return the rule of exp or exp2, which is 0 where a large negative number stands for -inf."""

    def rule(self: Shadow, made: Any, x: Any) -> Residues:
        found = FORMULAS[name](self.residues(x).masked(values_of(x)))
        return found.rounded(FORMATS[made.data.dtype], values_of(made))

    return rule


def _power(self: Shadow, made: Any, x: Any, y: Any) -> Residues:
    """Compute x^y: products for one small integer y, else exp(y log x)."""
    residues, exponents = self.residues(x), values_of(y)
    n = float(exponents.reshape(-1)[0])
    if n in range(-_MOST_FACTORS, _MOST_FACTORS + 1) and bool((exponents == n).all()):
        product = constant(1.0)
        for _ in range(abs(int(n))):
            product = product * residues
        found = product.reciprocal() if n < 0 else product
    else:
        found = (residues.log() * self.residues(y)).exp().open_where(values_of(x) <= 0)
    return found.rounded(FORMATS[made.data.dtype], values_of(made))


def _cast(self: Shadow, made: Any, x: Any, dtype: Any, rounding: Any = None) -> Residues:
    target, residues, values = made.data.dtype, self.residues(x), None
    if not is_float(x.data.dtype):
        return residues.rounded(FORMATS[target], values_of(made))
    fmt, values = FORMATS[target], values_of(x)
    if target == x.data.dtype or fmt.precision >= 24:
        return residues
    toward_zero = rounding == ir.ROUNDING_MODE.RTZ
    rounded = residues.rounded(fmt.toward("zero" if toward_zero else "nearest"), values)
    if x.data.dtype in FORMATS and FORMATS[x.data.dtype].precision < 24:  # of numbers that both formats hold
        rounded = Residues.where(values == values_of(made), residues, rounded)
    if target in FP8_MAX:
        beyond, largest = values.abs() > FP8_MAX[target], FP8_MAX[target]
        rounded = Residues.where(beyond, Residues.of(values_of(made)), rounded)
        rounded = rounded.open_where(beyond & (values.abs() <= largest * (1 + 2.0 ** (1 - fmt.precision))))
    return rounded


def _dot(self: Shadow, made: Any, a: Any, b: Any, d: Any, precision: Any, *_: Any) -> Residues:
    x, y = self.residues(a), self.residues(b)
    if a.data.dtype in FP8_MAX:
        self.opaque("dot", "tensor cores add products of fp8 with fewer bits than fp32")
        x = x.opened
    elif a.data.dtype == np.float32 and precision != ir.INPUT_PRECISION.IEEE:
        cut = [_tensor(_bits(h.data) & 0x1FFF != 0) for h in (a, b)]
        if any(bool(c.any()) for c in cut):
            self.opaque("dot", "fp32 operands are taken as tf32; input_precision='ieee' takes them as they are")
            x, y = x.open_where(cut[0]), y.open_where(cut[1])
    return (x @ y + self.residues(d)).rounded(FORMATS[made.data.dtype], values_of(made))


_FUNCTIONS: dict[str, Callable[..., Residues]] = {
    **FORMULAS,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": lambda x, y, z: x * y + z,
    "rcp": Residues.reciprocal,
    "hypot": lambda x, y: (x * x + y * y).sqrt(),
    "exp10": lambda x: (x * constant(math.log(10))).exp(),
    "log10": lambda x: x.log() * constant(math.log10(math.e)),
    "sinh": lambda x: (x.exp() - (-x).exp()) * constant(0.5),
    "cosh": lambda x: (x.exp() + (-x).exp()) * constant(0.5),
    "erfc": lambda x: constant(1.0) - x.function("erf", odd=True),
    **{
        name: methodcaller("function", name, odd=True)
        for name in ("tan", "asin", "atan", "asinh", "atanh", "cbrt", "erfinv")
    },
    **{name: methodcaller("function", name) for name in ("acos", "acosh", "lgamma")},
}

_CHOICES: dict[str, Rule] = {
    **dict.fromkeys(("minimumf", "minnumf", "maximumf", "maxnumf", "clampf"), _chosen),
    **dict.fromkeys(("fmin", "fmax", "min", "max"), _chosen),
    **dict.fromkeys(("fabs", "abs"), _absolute),
    **dict.fromkeys(
        ("floor", "ceil", "trunc", "rint", "nearbyint", "round"),
        lambda self, made, x: whole(values_of(x), self.residues(x), values_of(made)),
    ),
    **dict.fromkeys(("frem", "fmod"), _remainder),
    "copysign": _signed,
    "pow": _power,
    **{name: _exponential(name) for name in ("exp", "exp2")},
}


def _libdevice(self: Shadow, made: Any, library: str, path: str, symbol: str, args: Any, *_: Any) -> Residues:
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    stem = name[:-3] if name[-3:] in ("_rn", "_rz", "_rd", "_ru") else name
    for short in (stem, stem.removesuffix("f"), stem.removesuffix("d"), stem[1:], stem[1:].removesuffix("f")):
        if short == "divide":
            short = "div"
        if short in _CHOICES:
            return _CHOICES[short](self, made, *args)
        if short in _FUNCTIONS:
            return _of(_FUNCTIONS[short])(self, made, *args)
    self.opaque(f"libdevice {name}", "it has no rule of the field")
    return Residues.of(values_of(made)).opened


_RULES: dict[str, Rule] = {
    "fma": _fused,
    "fadd": _sum(1),
    "fsub": _sum(-1),
    "fmul": _of(operator.mul),
    "fdiv": _of(operator.truediv),
    "fneg": _of(operator.neg),  # from Triton 3.9 on; a subtraction from zero before
    **{name: _of(_FUNCTIONS[name]) for name in ("log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf")},
    "precise_sqrt": _of(Residues.sqrt),
    "precise_divf": _of(operator.truediv),
    "approx_divf": _of(operator.truediv),
    **{name: _CHOICES[name] for name in _CHOICES if hasattr(Builder, f"create_{name}")},
    **dict.fromkeys(("fp_to_fp", "fp_ext", "fp_trunc", "si_to_fp", "ui_to_fp"), _cast),
    "select": _selected,
    "dot": _dot,
    "extern_elementwise": _libdevice,
}


# Operations with effects, or with results that are no single handle of floats.


def _loaded(self: Shadow, method: Any, ptr: Any, mask: Any, other: Any, *how: Any, **kw: Any) -> Any:
    made = self.quietly(method, ptr, *(() if mask is None else (mask, other)), *how, **kw)
    data, memory = made.data, self._shadowing.memory
    addresses = np.broadcast_to(ptr.data, data.shape)
    if not is_float(data.dtype):
        floats = FORMATS[_FLOATS[data.dtype.itemsize]]
        if data.dtype.kind not in "iu":
            return made
        if memory.holds(addresses, floats.dtype):
            made.digits = floats.precision - 1
            if data.dtype.itemsize >= 4:
                bits = data.view(f"f{data.dtype.itemsize}")
                self.remember(bits, memory.load(addresses, _tensor(bits)))
        elif bool(memory.load(addresses, _tensor(data)).open.any()):
            made.digits = 52
        return made
    values = values_of(made).to(FORMATS[data.dtype].dtype)
    residues = memory.load(addresses, values)
    if mask is not None:
        inside = _tensor(mask_of(mask, data.shape))
        outside = zeros_like(residues).opened if other is None else self.residues(other)
        residues = Residues.where(inside, residues, outside)
    self.give(made, residues.seen(values_of(made)))
    return made


def _stored(self: Shadow, method: Any, ptr: Any, value: Any, mask: Any, *how: Any, **kw: Any) -> None:
    """Store a handle's residues at addresses, except where a mask is false."""
    self.quietly(method, ptr, value, *(() if mask is None else (mask,)), *how, **kw)
    shape = np.broadcast_shapes(ptr.data.shape, value.data.shape)
    addresses, inside = np.broadcast_to(ptr.data, shape), mask_of(mask, shape)
    residues, dtype = self.held(value, addresses[inside])
    numbers = residues.numbers.expand(4, *shape)[:, _tensor(inside)]
    self._shadowing.memory.store(addresses[inside], Residues(numbers), dtype)


def mask_of(mask: Any, shape: tuple[int, ...]) -> Array:
    """Broadcast a mask, given as a handle, an array or None, to the shape of the masked block."""
    data = True if mask is None else getattr(mask, "data", mask)
    return np.broadcast_to(np.asarray(data, np.bool_), shape).copy()


def _updated(self: Shadow, method: Any, operation: Any, ptr: Any, value: Any, mask: Any, *how: Any) -> Any:
    """Update memory atomically: add floats by address; take other results from memory afterwards."""
    shape = np.broadcast_shapes(ptr.data.shape, value.data.shape)
    inside = mask_of(mask, shape)
    addresses = np.broadcast_to(ptr.data, shape)[inside]
    place = TensorHandle(addresses, ptr.dtype)
    before = self.quietly(Builder.create_load, self, place) if addresses.size else None
    made = self.quietly(method, operation, ptr, value, mask, *how)
    if before is not None:
        after = self.quietly(Builder.create_load, self, place)
        after.digits = getattr(value, "digits", 0)
        given = TensorHandle(np.broadcast_to(value.data, shape)[inside], value.dtype)
        if is_float(value.data.dtype):
            fmt, picked = FORMATS[value.data.dtype], _tensor(inside)
            old = self._shadowing.memory.load(addresses, values_of(before).to(fmt.dtype))
            new = Residues(self.residues(value).numbers.expand(4, *shape)[:, picked])
            if operation == ir.ATOMIC_OP.FADD:
                exact = old + _added_by_address(addresses, new)
                total = exact.rounded(fmt, values_of(after))
                self.give(after, total.open_where(total.p != exact.p).seen(values_of(after)))
            else:
                self.give(after, new.open_where(values_of(after) != values_of(given)).seen(values_of(after)))
        elif after.digits:  # the larger one by its bits: what was there, or what is given
            own = before.data.view(_FLOATS[before.data.dtype.itemsize])
            self.remember(own, self._shadowing.memory.load(addresses, _tensor(own)))
        self._shadowing.memory.store(addresses, *self.held(after, addresses, chosen=True))
    # Which program comes first is open, and so is what it finds.
    if is_float(made.data.dtype):
        self.give(made, Residues.of(values_of(made)).opened)
    elif made.data.dtype.itemsize >= 4:
        made.digits = getattr(value, "digits", 0)
        own = made.data.view(_FLOATS[made.data.dtype.itemsize])
        if made.digits:
            self.remember(own, Residues.of(_tensor(own.astype(np.float64))).opened)
    return made


def _added_by_address(addresses: Array, x: Residues) -> Residues:
    distinct, place = np.unique(addresses, return_inverse=True)
    if len(distinct) == len(addresses):
        return x
    parts = [x[_tensor(place == i)].total(-1) for i in range(len(distinct))]
    return Residues(torch.cat([part.numbers for part in parts], 1)[:, _tensor(place)])


def _exchanged(self: Shadow, method: Any, ptr: Any, compared: Any, value: Any, *how: Any) -> Any:
    made = self.quietly(method, ptr, compared, value, *how)
    after = self.quietly(Builder.create_load, self, ptr)
    after.digits = getattr(value, "digits", 0)
    if is_float(made.data.dtype):
        self.opaque("atomic_cas", "which program comes first is open")
        for x in (made, after):
            self.give(x, Residues.of(values_of(x)).opened)
    self._shadowing.memory.store(ptr.data, *self.held(after, ptr.data))
    return made


def _cast_bits(self: Shadow, method: Any, x: Any, dtype: Any) -> Any:
    """Cast bits: remember the residues of floats, and recall them when the bits become floats again."""
    made = self.quietly(method, x, dtype)
    was, is_ = is_float(x.data.dtype), is_float(made.data.dtype)
    if was and not is_:
        self.remember(x.data, self.residues(x))
        made.digits = FORMATS[x.data.dtype].precision - 1
    elif is_:
        if x.data.dtype == made.data.dtype:
            found = self.residues(x)
        elif getattr(x, "digits", 0):
            found = self.recalled(x.data, made.data.dtype)
        else:
            found = Residues.of(values_of(made))
        self.give(made, found.seen(values_of(made)))
    return made


def _to_integers(self: Shadow, method: Any, x: Any, dtype: Any) -> Any:
    """Convert floats to integers by their values; large ones are digits of floats, as in fixed-point sums."""
    made = self.quietly(method, x, dtype)
    digits = is_fixed_point(values_of(x), self.residues(x))
    made.digits = FORMATS[x.data.dtype].precision - 1 if bool(digits.any()) else 0
    return made


def _assembly(self: Shadow, method: Any, asm: str, constraints: str, values: Any, types: Any, *how: Any) -> Any:
    """Follow inline assembly whose instructions all are functions of fp32 numbers, or that is one choice among them."""
    results = self.quietly(method, asm, constraints, values, types, *how)
    given = {f"${i}": x for i, x in enumerate(values, len(types))}
    found = self.quietly(_of_snippet, self, assembled(asm, constraints, types, how[-1]), given, results)
    for i, result in enumerate(results):
        if not is_float(result.data.dtype):
            continue
        if f"${i}" in found:
            self.give(result, found[f"${i}"].seen(values_of(result)))
        else:
            self.give_open(result, "inline assembly", f"`{' '.join(asm.split())}` has no rule of the field")
    return results


def _of_snippet(self: Shadow, made: Any, given: Mapping[str, Any], results: Any) -> Mapping[str, Residues]:
    """Return the residues of the registers after a snippet; empty if an instruction is unknown."""
    instructions = made.snippet.instructions
    if made.pack != 1 or any(x.data.dtype != np.float32 for x in given.values()):
        return {}
    registers = {name: self.residues(x) for name, x in given.items()}
    for each in instructions:
        target, *operands = each.operands
        plain = each.suffixes[-1:] == ("f32",) and _OF_ARITHMETIC.issuperset(each.suffixes) and not each.predicate
        if not plain or not all(isinstance(x, str) and x in registers for x in operands):
            return {}
        if each.name in _BY_VALUE and len(instructions) == 1:
            registers[target] = _CHOICES[_BY_VALUE[each.name]](self, results[0], *(given[x] for x in operands))
        elif each.name in _PTX:
            registers[target] = _PTX[each.name](*(registers[x] for x in operands))
        else:
            return {}
    return registers


_OF_ARITHMETIC = {"approx", "full", "ftz", "rn", "rz", "rm", "rp", "NaN", "f32"}
"""Suffixes that say how fp32 numbers are rounded, and which NaN is given."""

_BY_VALUE = {"min": "min", "max": "max", "abs": "abs", "ex2": "exp2"}
"""Instructions that look at values, which are known where one stands alone."""

_PTX: dict[str, Callable[..., Residues]] = {
    **{
        name: _FUNCTIONS[name]
        for name in ("add", "sub", "mul", "div", "fma", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos")
    },
    "ex2": FORMULAS["exp2"],
    "lg2": FORMULAS["log2"],
    "neg": operator.neg,
    "mov": lambda x: x,
}

_EFFECTS: dict[str, Callable[..., Any]] = {
    "load": lambda self, method, ptr, *caching: _loaded(self, method, ptr, None, None, *caching),
    "masked_load": _loaded,
    "store": lambda self, method, ptr, value, *caching: _stored(self, method, ptr, value, None, *caching),
    "masked_store": _stored,
    "atomic_rmw": _updated,
    "atomic_cas": _exchanged,
    "bitcast": _cast_bits,
    "inline_asm": _assembly,
    "fp_to_si": _to_integers,
    "fp_to_ui": _to_integers,
}


def _shadowed(name: str) -> Callable[..., Any]:
    def method(self: Shadow, *args: Any, **kwargs: Any) -> Any:
        return self.perform(name.removeprefix("create_"), getattr(super(Shadow, self), name), args, kwargs)

    return method


def _constant(name: str) -> Callable[[Shadow, float], Any]:
    return lambda self, value: self._number(getattr(super(Shadow, self), name)(value), value)


for _name in ("get_fp16", "get_bf16", "get_fp32", "get_fp64"):
    setattr(Shadow, _name, _constant(_name))
for _name in (f"create_{name}" for name in (*_RULES, *_EFFECTS)):
    setattr(Shadow, _name, _shadowed(_name))
