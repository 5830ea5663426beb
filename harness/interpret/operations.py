"""Operations of Triton's language, worked out once for the same types and constants.

An operation of the language (`x + y`, `tl.where`, `tl.load`, …) sees the types of its tensors and its constants, never
values: with the compiler, values do not exist yet. So what it asks the builder for, and the type of its result, follow
from these. The first time, a `_Spy` between the language and the builder notes that as a `_Course`; every later time
the course is taken and the language is not asked.

This holds as long as the language and the builder are the same: `current` compares every attribute of the classes and
modules that take part, and the builder's options, and forgets everything when one is another. Operations that depend on
more (the environment, the target, functions of the kernel), that warn, or that give or take anything but tensors and
plain constants, are asked every time, as are those that raise an error, so that it is the language's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_semantic

from lastbit.interpret.builder import Builder
from lastbit.interpret.recorder import PURE, Recorder

NAMES = frozenset(
    re.findall(
        r"\w+",
        """
        __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__
        __mod__ __rmod__ __neg__ __invert__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__ __not__ __getitem__
        __gt__ __rgt__ __ge__ __rge__ __lt__ __rlt__ __le__ __rle__ __eq__ __req__ __ne__ __rne__
        add sub mul logical_and logical_or to cast where minimum maximum clamp fma fdiv div_rn umulhi abs
        exp exp2 log log2 sqrt sqrt_rn rsqrt sin cos erf floor ceil
        program_id num_programs arange full broadcast broadcast_to expand_dims permute trans reshape
        load store atomic_add
        """,
    )
)
"""Operations whose source in Triton was read: they depend on nothing but types, constants and the builder's options."""

# Arbitrary, as that of language.py: fewer would record known courses again.
ENTRIES = 8192
"""How many courses are kept before all are forgotten."""

_courses: dict[Any, Any] = {}
_meanings: list[Any] = []


def current(builder: Builder) -> dict[Any, Any]:
    """Return the courses of operations by their keys, emptied first if the language or the builder has changed."""
    owners = (tl.core, tl.math, tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, tl.constexpr)
    watched = [vars(x) for x in (*owners, TritonSemantic, InterpreterBuilder, type(builder))]
    meanings = [value for names in watched for value in names.values()]
    meanings += [value for name, value in vars(interpreter_semantic).items() if name != "builder"]
    meanings.append(builder.options)
    if len(meanings) != len(_meanings) or not all(map(is_, meanings, _meanings)):
        _courses.clear()
        _meanings[:] = meanings
    return _courses


def remembering(name: str, member: Callable[..., Any]) -> Callable[..., Any]:
    """Return the language's function `member`, which kernels call by `name`, in a form that remembers its courses."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return member(*args, **kwargs)

    def remembered(*args: Any, **kwargs: Any) -> Any:
        builder = interpreter_semantic.builder
        if type(builder) is not Recorder or builder.operations is None or not builder.recording:
            return call(*args, **kwargs)
        if kwargs:
            kwargs.pop("_semantic", None)
        tensors: list[Any] = []
        key = _key(member, args, kwargs, tensors)
        if key is None:
            return call(*args, **kwargs)
        course = builder.operations.get(key, _UNKNOWN)
        if course is _UNKNOWN:
            return _worked_out(key, call, args, kwargs, tensors)
        return call(*args, **kwargs) if course is None else course.take(builder, tensors)

    return remembered if name in NAMES else call


_UNKNOWN = object()


# What an operation's course follows from.


def _key(member: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]) -> tuple[Any, ...] | None:
    """Return a key that is equal for calls which the language cannot tell from each other; None if that is unknown.

    Adds the tensors among the arguments to `tensors`.
    """
    key, handles = [member, *kwargs], []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is _TENSOR:
            handle = value.handle
            if type(handle) is not TensorHandle:
                return None
            tensors.append(value)
            handles.append(id(handle))
            key += (id(value.type), handle.data.dtype, handle.data.ndim)
        elif not _add(value, key):
            return None
    if len(handles) > 1 and len(set(handles)) < len(handles):
        key.append(tuple(map(handles.index, handles)))
    return tuple(key)


def _add(value: Any, key: list[Any]) -> bool:
    """Add to a key what tells a constant from all others; False if it is none that is understood."""
    kind = type(value)
    key.append(kind)
    if kind in _PLAIN:
        key.append(value)
    elif kind is float:
        key.append(value.hex())
    elif kind is tl.constexpr:
        return _add(value.value, key)
    elif kind is slice:
        return all(_add(x, key) for x in (value.start, value.stop, value.step))
    elif kind is tuple or kind is list:
        key.append(len(value))
        return all(_add(x, key) for x in value)
    elif isinstance(value, tl.dtype):
        key.append(id(value))
    else:
        return False
    return True


_TENSOR = tl.tensor
_PLAIN = frozenset({int, bool, str, type(None), tl.PropagateNan})


# What it does.


class _Call(NamedTuple):
    """A call of the builder.

    Attributes:
        name: of the method.
        run, dtype: of a pure one, the function of arrays that it is, and the type of its result's elements; or None.
        inputs: places of its operands.
        args: all that it is called with, operands by their place and marked as such.
    """

    name: str
    run: Callable[..., Any] | None
    dtype: Any
    inputs: tuple[int, ...]
    args: tuple[tuple[bool, Any], ...]


@dataclass(frozen=True)
class _Course:
    """The builder calls of an operation. Handles are numbered: its tensors, constants, then the result of each call.

    Attributes:
        constants: id → handle, of the handles that are the same every time.
        calls: in their order.
        given: which of the operation's tensors it returns, if it does.
        attributes, place: of the tensor that it makes, and where its handle is; None if it returns nothing.
        kept: what a key has the ids of.
    """

    constants: dict[int, Any]
    calls: Sequence[_Call]
    given: int | None
    attributes: dict[str, Any]
    place: int | None
    kept: Any

    def take(self, recorder: Any, tensors: list[Any]) -> Any:
        """Make the calls for `tensors`, and return the operation's result."""
        values = [tensor.handle for tensor in tensors]
        if self.constants:
            recorder.constants.update(self.constants)
            values += self.constants.values()
        for name, run, dtype, inputs, args in self.calls:
            if run is not None:
                values.append(recorder.pure(name, run, dtype, [values[i] for i in inputs]))
            else:
                values.append(getattr(recorder, name)(*[values[x] if placed else x for placed, x in args]))
        if self.given is not None:
            return tensors[self.given]
        if self.place is None:
            return None
        made = object.__new__(tl.tensor)
        made.__dict__.update(self.attributes)
        made.handle = values[self.place]
        return made


class _Spy:
    """A recording builder that notes the builder calls of one operation."""

    def __init__(self, recorder: Recorder, handles: Sequence[Any]) -> None:
        self._recorder = recorder
        # Handle → where it is: among the operation's tensors (0), constants (1) or results (2), and its number there.
        self._places = {id(handle): (0, i) for i, handle in enumerate(handles)}
        self._constants: dict[int, Any] = {}
        self._calls: list[tuple[str, tuple[Any, ...], Any, Any]] = []
        self._understood = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._recorder, name)
        if name.startswith("create_"):
            return partial(self._create, name, member)
        if name.startswith("get_"):
            return partial(self._get, member)
        self._understood &= name == "options"
        return member

    def _get(self, method: Callable[..., Any], *args: Any) -> Any:
        result = method(*args)
        if type(result) is TensorHandle:
            self._add_constant(result)
        return result

    def _add_constant(self, handle: Any) -> None:
        self._places[id(handle)] = 1, len(self._constants)
        self._constants[id(handle)] = handle

    def _create(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        operands = [x for x in args if type(x) is TensorHandle]
        self._understood &= not kwargs and all(id(x) in self._places for x in operands)
        self._understood &= result is None or type(result) is TensorHandle
        self._understood &= not any(isinstance(x, (list, tuple)) and _has_handle(x) for x in args)
        if name in PURE and all(id(x) in self._constants for x in operands):
            self._add_constant(result)
        else:
            self._places[id(result)] = 2, len(self._calls)
            self._calls.append((name, args, result, self._recorder.run))
        return result

    def course(self, result: Any, tensors: list[Any], kept: Any) -> _Course | None:
        """Return the course of an operation that gave `result`; None if a course cannot express it."""
        starts = (0, len(tensors), len(tensors) + len(self._constants))
        places = {key: starts[part] + number for key, (part, number) in self._places.items()}
        known = result is None or (type(result) is tl.tensor and id(result.handle) in places)
        if not (self._understood and known):
            return None
        given = next((i for i, tensor in enumerate(tensors) if tensor is result), None)
        attributes = {} if result is None else {k: v for k, v in vars(result).items() if k != "handle"}
        calls = [_call(places, *call) for call in self._calls]
        return _Course(self._constants, calls, given, attributes, result and places[id(result.handle)], kept)


def _call(places: dict[int, int], name: str, args: tuple[Any, ...], result: Any, run: Any) -> _Call:
    placed = tuple([(True, places[id(x)]) if type(x) is TensorHandle else (False, x) for x in args])
    inputs = tuple([x for is_place, x in placed if is_place])
    return _Call(name, run, result.dtype, inputs, placed) if name in PURE else _Call(name, None, None, inputs, placed)


def _has_handle(values: Any) -> bool:
    return any(_has_handle(x) if isinstance(x, (list, tuple)) else isinstance(x, TensorHandle) for x in values)


def _worked_out(key: Any, call: Callable[..., Any], args: Any, kwargs: Any, tensors: list[Any]) -> Any:
    """Let the language perform an operation, store its course under `key`, and return its result."""
    recorder = interpreter_semantic.builder
    spy = interpreter_semantic.builder = _Spy(recorder, [tensor.handle for tensor in tensors])
    try:
        result = call(*args, **kwargs)
    finally:
        interpreter_semantic.builder = recorder
    if recorder.recording:
        if len(recorder.operations) >= ENTRIES:
            recorder.operations.clear()
        constants = [value for value in (*args, *kwargs.values()) if type(value) is not tl.tensor]
        recorder.operations[key] = spy.course(result, tensors, (constants, [tensor.type for tensor in tensors]))
    return result
