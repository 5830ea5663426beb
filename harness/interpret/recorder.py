"""The builder that Triton's language layer talks to while Python runs a program and its steps are recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from lastbit.interpret.block_pointers import Compositions
from lastbit.interpret.builder import Builder, origin
from lastbit.interpret.replay import Diverged
from lastbit.interpret.rewrite import Namespace
from lastbit.interpret.speculation import Conflict
from lastbit.interpret.tape import Guard, Segment, Tape, TapeStep, Trust


class Past:
    """The steps that a program took on a tape before it left it."""

    def __init__(self, diverged: Diverged) -> None:
        self.registers, self.segment, self.failed = diverged.registers, diverged.path[-1], diverged.failed
        self._events: list[tuple[str, TapeStep | None]] = []
        for segment in diverged.path:
            self._events += [(step.name, step) for step in segment.steps]
            self._events.append((Guard.__name__, None))
        if diverged.failed:
            del self._events[len(self._events) - 1 - len(self.segment.steps) + diverged.done :]
        self._position = 0

    @property
    def goes_on(self) -> bool:
        return self._position < len(self._events)

    def take(self, name: str) -> Any:
        """Return the next step, which must be the operation `name`, and advance."""
        found, step = self._events[self._position]
        if found != name:
            raise RuntimeError(f"run again with the same values, the kernel asks for {name}, not for {found}")
        self._position += 1
        return step


@dataclass(frozen=True)
class _Hole:
    """The place of an operand among arguments; `dtype` is None for objects that are no handles."""

    dtype: Any


def _with_holes(value: Any, operands: dict[int, _Hole]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_with_holes(part, operands) for part in value]
    return operands.get(id(value), value)


def _filled(value: Any, arrays: Iterator[Any]) -> Any:
    if isinstance(value, _Hole):
        return next(arrays) if value.dtype is None else TensorHandle(next(arrays), value.dtype)
    if isinstance(value, list):
        return [_filled(part, arrays) for part in value]
    return value


def on_arrays(method: Callable[..., Any], args: Any, kwargs: Any, operands: list[Any]) -> Callable[..., Any]:
    """Return a builder's method, called with these arguments, as a function of the registers of its operands."""
    holes = {id(x): _Hole(getattr(x, "dtype", None)) for x in operands}
    positional = [_with_holes(x, holes) for x in args]
    named = {name: _with_holes(x, holes) for name, x in kwargs.items()}

    def run(*arrays: Any) -> Any:
        left = iter(arrays)
        found = [_filled(x, left) for x in positional]
        return _stored(method(*found, **{name: _filled(x, left) for name, x in named.items()}))

    return run


def _stored(result: Any) -> Any:
    """Return a result as a register holds it: the arrays of handles, other objects as they are."""
    if isinstance(result, TensorHandle):
        return result.data
    return tuple(map(_stored, result)) if isinstance(result, (list, tuple)) else result


PURE = frozenset(
    f"create_{name}"
    for name in re.findall(
        r"\w+",
        """
        of_arrays make_range splat unsplat broadcast expand_dims reshape trans cat join split histogram addptr
        bitcast int_to_ptr ptr_to_int int_cast si_to_fp ui_to_fp fp_to_si fp_to_ui fp_to_fp fp_ext fp_trunc
        add sub mul sdiv udiv srem urem idiv shl lshr ashr and or xor umulhi minsi minui maxsi maxui iabs
        icmpSLE icmpSLT icmpSGE icmpSGT icmpULE icmpULT icmpUGE icmpUGT icmpEQ icmpNE
        fcmpOLT fcmpOGT fcmpOLE fcmpOGE fcmpOEQ fcmpONE fcmpULT fcmpUGT fcmpULE fcmpUGE fcmpUEQ fcmpUNE
        fadd fsub fmul fdiv frem fma fneg precise_divf approx_divf minimumf minnumf maximumf maxnumf clampf select fabs
        cos sin exp exp2 log log2 sqrt precise_sqrt rsqrt floor ceil erf extern_elementwise dot
        """,
    )
)
"""Operations that see nothing but their operands and change nothing; any other one runs in every program."""


SPREADING = frozenset({"create_get_program_id", "create_atomic_rmw", "create_atomic_cas"})
"""Operations whose result is each program's own."""

TOGETHER = frozenset(
    {*PURE, *SPREADING, "create_load", "create_masked_load", "create_store", "create_masked_store"}
    | {"create_get_num_programs", "create_assert", "create_assume", "create_barrier", "create_debug_barrier"}
    | {"create_gather"}  # not pure: an index out of bounds raises an error, whoever reads the result
)
"""Operations that take what several programs have at once."""

# Arbitrary: more is memory for a kernel that is run once, less records kernels of large tiles in vain.
LARGEST = 64 << 20
"""Bytes of the results of one program beyond which it is not worth keeping them all, as a replay does."""


CONSTANTS = (int, float, str, type(None), tl.dtype, FunctionType, BuiltinFunctionType, partial, np.ufunc, itemgetter)
CONSTANT_MODULES = ("triton._C.libtriton.ir", "triton._C.libtriton.interpreter")
"""What an operation may be asked for besides handles; anything else might hide one."""


class Recorder(Compositions):
    """A builder that computes like another one, and records on a tape which operations it was asked for.

    Along a path that the program has already gone, it gives the results of then instead.

    Attributes:
        operations: those of the language whose course is known; None if the language is to be asked.
        constants: id → handle, of those that are the same in all programs.
        run: what was asked for last, as a function of what registers hold.
        recording: what is asked for is noted.
    """

    def __init__(
        self,
        builder: Builder,
        tape: Tape,
        arguments: list[Any],
        diverged: Diverged,
        operations: dict[Any, Any] | None = None,
    ) -> None:
        self._builder, self._tape, self.operations = Noting(builder), tape, operations
        self._registers = {id(argument): i for i, argument in enumerate(arguments)}
        self.constants: dict[int, Any] = {}
        self._of_constants: dict[int, int] = {}
        self.run: Any = None
        self._kept = list(arguments)  # so that no id is given to a second object
        self._varying: set[int] = set()
        self._spread: set[int] = set()
        self._known: dict[tuple[int, Any], Any] = {}
        self._segment = Segment()
        self._known_path, self._path = diverged.path, [self._segment]
        self._past = Past(diverged) if diverged.path else None
        self._seen: Any = None
        self._bytes = 0
        self.recording = True

    def finish(self) -> None:
        """Add what was noted to the tape, once the program has ended."""
        if not self.recording:
            return
        self._segment.close(None)
        self._tape.add([*self._known_path, *self._path], len(self._known_path), self._seen)

    # What the builder offers besides operations.

    def __getattr__(self, name: str) -> Any:
        getattr(self._builder, name)
        if name.startswith("create_"):
            setattr(Recorder, name, _operation(name))
        elif name.startswith("get_"):
            setattr(Recorder, name, _constant(name))
        else:
            return getattr(self._builder, name)
        return getattr(self, name)

    def observe(self, handle: Any, read: Callable[[Any], Any]) -> Any:
        """Return the value that Python asks for, and record it as a guard of the tape."""
        value = self._builder.observe(handle, read)
        if not self._knows((handle,)) or id(handle) in self.constants:
            return value
        register = self._registers[id(handle)]
        guard = Guard(register, read, register in self._varying)
        if (asked := (guard.register, read)) in self._known:
            return value
        self._known[asked] = value
        if self._past and self._past.goes_on:
            self._past.take(Guard.__name__)
            self._seen = value
        else:
            self._segment.close(guard)
            self._segment.branches[value] = following = Segment()
            self._segment = following
            self._path.append(following)
        return value

    def entered(self, function: Any) -> None:
        """Record that `function` begins, with the current meanings of its global names."""
        if not isinstance(function.__globals__, Namespace):  # its source could not be read, so its names are not known
            self.give_up()
        elif function not in self._tape.functions:
            self._tape.functions.add(function)
            self._tape.note(function.__globals__.meanings())

    def returned(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Ignore that `function` has been called; the tape records operations alone."""

    def give_up(self) -> None:
        """Note nothing of this program, and of no later one of its kind: Python sees more than the tape can tell."""
        if self._past and self._past.goes_on:
            raise RuntimeError("run again with the same values, the kernel does something else")
        self.recording = False
        self._kept.clear()
        self._tape.refuse()
        self._require_one_program()

    def _require_one_program(self) -> None:
        """Raise `Conflict` if programs run together: the next operation, such as a print, cannot be undone."""
        if self._builder.memory.speculation is not None:
            raise Conflict

    # Operations.

    def _perform(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        method = getattr(self._builder, name)
        operands = self._operands(args)
        if kwargs:
            operands += self._operands(kwargs.values())
        if not self._knows(operands):
            return method(*args, **kwargs)
        if name in PURE and all(id(x) in self.constants for x in operands):
            return self._constant(self._computed(name, method, args, kwargs, operands))
        if (step := self._known_step(name)) is not None:
            return self._recall(step)
        if not self.recording:
            return method(*args, **kwargs)
        inputs = tuple([self._register(x) for x in operands])
        varies = name not in PURE and name != "create_get_num_programs"
        varies |= not self._varying.isdisjoint(inputs)
        spread = name in SPREADING or not self._spread.isdisjoint(inputs)
        if name not in TOGETHER:
            self._tape.trust = Trust.NEVER
            self._require_one_program()
        result = self._computed(name, method, args, kwargs, operands)
        self._result(name, self.run, inputs, result, varies, spread and result is not None)
        return result

    def _known_step(self, name: str) -> TapeStep | None:
        """Return the next step of the program's past, which must be the operation `name`; None where it has no more."""
        if self._past is None:
            return None
        if self._past.goes_on:
            step: TapeStep = self._past.take(name)
            return step
        if self._past.failed:
            self.recording = False
        return None

    def _operands(self, values: Iterable[Any]) -> list[Any]:
        """Return the handles in `values`, and other objects that the builder made."""
        found = []
        for value in values:
            if type(value) is TensorHandle or id(value) in self._registers:
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += self._operands(value)
            elif not isinstance(value, CONSTANTS) and type(value).__module__ not in CONSTANT_MODULES:
                self.give_up()
        return found

    def _knows(self, operands: Sequence[Any]) -> bool:
        """Return whether every operand is a constant or in a register; if one is not, stop recording."""
        if self.recording and not all(id(x) in self._registers or id(x) in self.constants for x in operands):
            self.give_up()
        return self.recording

    def _computed(self, name: str, method: Any, args: Any, kwargs: Any, operands: list[Any]) -> Any:
        """Return the builder's result of an operation, and set `run` to a function that computes it from arrays."""
        self._builder.noted.clear()
        result = method(*args, **kwargs)
        self.run = self._builder.function_of(operands, result) or on_arrays(
            getattr(self._builder.other, name), args, kwargs, operands
        )
        return result

    def pure(self, name: str, run: Callable[..., Any], dtype: Any, operands: Sequence[Any]) -> Any:
        """Perform the operation `name`, which is nothing but the function `run` of the arrays of `operands`."""
        inputs: Any = tuple(map(self._registers.get, map(id, operands)))
        constant = None in inputs and self._knows(operands) and all(map(self.constants.__contains__, map(id, operands)))
        if self._past is not None and not constant and (step := self._known_step(name)) is not None:
            return self._recall(step)
        data = run(*[x.data for x in operands])
        result = object.__new__(TensorHandle)
        result.__dict__.update(data=data, dtype=dtype, attr=origin(operands) if dtype.is_ptr() else {})
        if constant:
            self.constants[id(result)] = result
        elif self.recording:
            if None in inputs:
                inputs = tuple(map(self._register, operands))
            varies, spread = not self._varying.isdisjoint(inputs), not self._spread.isdisjoint(inputs)
            output = self._tape.register(None, dtype)
            self._add(TapeStep(name, run, inputs, output, True, varies, spread, data.ndim, data.nbytes), result)
        return result

    def _result(
        self, name: str, run: Callable[..., Any], inputs: tuple[int, ...], result: Any, varies: bool, spread: bool
    ) -> None:
        """Note a step that gave `result`; for a tuple also one for each of its parts."""
        output = self._tape.register(None, getattr(result, "dtype", None))
        size = result.data.nbytes if isinstance(result, TensorHandle) else 0
        self._add(TapeStep(name, run, inputs, output, name in PURE, varies, spread, _rank(result), size), result)
        if isinstance(result, (tuple, list)):
            for i, part in enumerate(result):
                self._result("part", itemgetter(i), (output,), part, varies, spread)

    def _add(self, step: TapeStep, result: Any) -> None:
        if getattr(result, "attr", None):
            self._tape.attributes[step.output] = dict(result.attr)
        self._segment.steps.append(step)
        self._place(result, step)
        self._bytes += step.bytes
        if self._bytes > LARGEST:
            self.give_up()

    def _place(self, result: Any, step: TapeStep) -> None:
        if type(result) is TensorHandle or not isinstance(result, CONSTANTS):
            self._registers[id(result)] = step.output
            self._kept.append(result)
        if step.varies:
            self._varying.add(step.output)
        if step.spread:
            self._spread.add(step.output)

    def _recall(self, step: TapeStep) -> Any:
        past = self._past
        assert past is not None
        value, dtype = past.registers[step.output], self._tape.dtypes[step.output]
        self.run = step.run
        if isinstance(value, tuple):
            return tuple([self._recall(past.take("part")) for _ in value])
        attributes = self._tape.attributes.get(step.output, {})
        result = value if dtype is None else TensorHandle(value, dtype, dict(attributes))
        self._place(result, step)
        return result

    def _constant(self, result: Any) -> Any:
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, TensorHandle):
                self.constants[id(part)] = part
        return result

    def _register(self, operand: Any) -> int:
        """Return the register of an operand; a constant gets one when it is first used."""
        found = self._registers.get(id(operand))
        if found is None and (found := self._of_constants.get(id(operand))) is None:
            found = self._of_constants[id(operand)] = self._tape.register(operand.data, operand.dtype)
        return found


def _operation(name: str) -> Callable[..., Any]:
    def operation(self: Recorder, *args: Any, **kwargs: Any) -> Any:
        return self._perform(name, args, kwargs)

    return operation


def _constant(name: str) -> Callable[..., Any]:
    def constant(self: Recorder, *args: Any) -> Any:
        return self._constant(getattr(self._builder, name)(*args))

    return constant


def _rank(result: Any) -> Any:
    if isinstance(result, (tuple, list)):
        return tuple(map(_rank, result))
    return result.data.ndim if isinstance(result, TensorHandle) else 0


class Noting(Builder):
    """The builder `other`, extended to note the functions that it applies to arrays."""

    __slots__ = ("noted", "other")

    def __init__(self, other: Builder) -> None:
        self.__dict__ = other.__dict__
        self.noted: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []
        self.other = other

    def apply(self, function: Callable[..., Any], dtype: Any, *args: Any) -> Any:
        result = super().apply(function, dtype, *args)
        self.noted.append((function, args, result))
        return result

    def function_of(self, operands: list[Any], result: Any) -> Callable[..., Any] | None:
        """Return the one function applied to exactly these operands that gave this result; None if there was none."""
        if len(self.noted) != 1:
            return None
        function, args, returned = self.noted[0]
        same = len(args) == len(operands) and all(x is y for x, y in zip(args, operands, strict=True))
        return function if same and returned is result else None
