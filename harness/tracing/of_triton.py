"""Operations of interpreted Triton programs, as events: a builder that computes by another one and records.

For each operation it finds which elements of the operands a result's elements came from.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

from lastbit.interpret.builder import Builder
from lastbit.interpret.numpy_formats import NUMPY, Array, is_float
from lastbit.interpret.places import place_of
from lastbit.shadows.programs import Shadow, Shadowing, mask_of
from lastbit.tracing import lanes
from lastbit.tracing.events import Again, Event, Log, Made, Operand, Origin, Places, Program, places
from lastbit.tracing.lanes import Shape, Source, of_array, swapped

# 64 units of 2⁻²⁴: approximate instructions err by four, polynomials and tables in fp32 by more.
NEAR = 2.0**-18
"""Relative error up to which what stands for a primitive is one."""

ROUND = "round"
"""Name of the operand that is the number of a loop's round."""
OF_PROGRAM = ("get_program_id", "get_num_programs", "make_range")
"""Operations without operands that are no constants."""
MOVERS = ("splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "cat", "join", "split", "gather")
"""Operations that give elements of their operands and compute none."""

Function = Callable[..., Any]
Found = tuple[Any, Source, bool]
"""A handle or block; its elements; whether it says where something is or whether it is taken, and not what it is."""


class LaunchWatch:
    """Watcher that records launches in a log; see `lastbit.interpret.watching.Watcher`."""

    def __init__(self, log: Log, beneath: Shadowing | None = None) -> None:
        self._log, self._beneath = log, beneath
        self._tracer: Tracer | None = None

    @contextmanager
    def launch(self, function: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
        outside = sys._getframe(2)  # below it are this context and the standard library's
        with nullcontext() if self._beneath is None else self._beneath.launch(function, arguments):
            before = interpreter_semantic.builder
            other = interpreter.interpreter_builder if self._beneath is None else before
            tracer = Tracer(other, self._log, function.__name__, arguments, outside)
            interpreter_semantic.builder, self._tracer, self._log.interpreting = tracer, tracer, True
            try:
                yield
            finally:
                interpreter_semantic.builder, self._tracer, self._log.interpreting = before, None, False
                tracer.outside = None

    def chosen(self, programs: Array) -> Array:
        """Choose the programs to run: all, or only the wanted ones if the log says so."""
        if self._tracer is None or not self._log.only:
            return programs
        launch = self._tracer.launch.number
        return programs[[(launch, tuple(index)) in self._log.wanted for index in programs.tolist()]]

    def operation(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return function(*args, **kwargs) if self._tracer is None else self._tracer.whole(function, args, kwargs)


class Tracer(Builder):
    """Builder for one launch that computes by the builder `other` and records operations of wanted programs."""

    __slots__ = ("_arguments", "_kept", "_log", "_made", "_names", "_other", "_program", "_silent", "launch", "outside")

    def __init__(
        self, other: Builder, log: Log, name: str, arguments: Mapping[str, Any], outside: FrameType | None
    ) -> None:
        self.__dict__ = other.__dict__
        self._other = other
        self._log = log
        self.outside = outside
        handles = {name: x.handle for name, x in arguments.items() if isinstance(x, tl.tensor)}
        numbers = [x.data for x in handles.values() if x.data.size == 1 and not x.dtype.is_ptr()]
        constants = (getattr(x, "value", x) for x in arguments.values())
        plain = {float(x) for x in constants if isinstance(x, int | float)}
        self.launch = log.begin(name, frozenset(plain | {float(x.reshape(-1)[0]) for x in numbers}))
        self._arguments = handles
        self._program: Program | None = None
        self._made: dict[int, Event] = {}
        self._names: dict[int, str] = {}  # of arguments and of the numbers of rounds, by id
        self._kept: list[Any] = []  # so that no id is given to a second object
        self._silent = False

    def get_number(self, value: int, dtype: Any) -> Any:
        self._log.turn()
        number = super().get_number(value, dtype)
        self._names[id(number)] = ROUND
        self._kept.append(number)
        return number

    def returned(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record a function declared as a primitive as one operation, if its values are those of the primitive."""
        self._other.returned(function, args, kwargs, result)
        own = self._made.get(id(getattr(result, "handle", None)))
        if own is not None and any(isinstance(x, tl.tensor) and x.handle is result.handle for x in args):
            begin = place_of(function.__code__, 0)
            self._log.handed[own.number] = (begin, *self._at)
        standing = self._other.standing(function) if isinstance(self._other, Shadow) else None
        if standing is None or self._silent or self._of_program() not in self._log.wanted:
            return
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, tl.tensor)]
        made, blocks = result.handle, [torch.from_numpy(np.asarray(x.handle.data, np.float64)) for x in given]
        exact = getattr(torch, standing, torch.zeros_like)(*blocks).numpy()
        if np.allclose(made.data, exact, rtol=NEAR, atol=0.0, equal_nan=True):
            plain = partial(self._quietly, function)

            def followed(*args: Any, **kwargs: Any) -> Any:
                result = plain(*args, **kwargs)
                self._other.returned(function, args, kwargs, result)
                return result

            shape = made.data.shape
            found = [(x, lanes.pointwise(x.handle.data.shape, shape), False) for x in given]
            call = partial(_again, plain, followed, args, kwargs)
            self._tell(function.__name__, made, lambda *_: found, call)

    # Operations: once each, whatever they are made of, but for those on objects that hold several handles.

    def perform(self, name: str, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Perform a method of the builder and record an event for it."""
        if self._silent:
            return method(*args, **kwargs)
        if any(_holds_handles(x) for x in args):  # it is made of operations on these
            return getattr(super(), f"create_{name}")(*args, **kwargs)
        record, count = _IN_MEMORY.get(name, (None, None))
        if self._of_program() not in self._log.wanted and record in (None, Tracer.loaded):
            return method(*args, **kwargs)
        result = self._quietly(method, *args, **kwargs)
        if record is not None:
            record(self, name, result, *args[:count])
            return result
        plain = partial(self._quietly, getattr(super(), f"create_{name}"))  # moves numbers of elements, too
        call = partial(_again, plain, partial(self._quietly, method), args, kwargs)
        self._tell(name, result, partial(_sources, name, plain, args, kwargs), call)
        return result

    def whole(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Perform a function of the language, such as a reduction, and record one event for all of it."""
        follows = isinstance(self._other, Shadow)
        whole = partial(self._other.combined, function) if follows else function
        if self._silent or self._of_program() not in self._log.wanted:
            return whole(*args, **kwargs)
        result = self._quietly(whole, *args, **kwargs)
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        blocks = [x for x in tree_leaves(given["input"]) if isinstance(x, tl.tensor)]
        found = [(x, _of_whole(function.__name__, x.handle.data.shape, given), False) for x in blocks]
        self._tell(function.__name__, result, lambda *_: found, partial(_again, function, whole, args, kwargs))
        return result

    def _of_program(self) -> Program:
        program = (self.launch.number, tuple(self.grid_idx))
        if program != self._program:
            self._program = program
            self._made.clear()
            self._names = {id(handle): name for name, handle in self._arguments.items()}
            self._kept.clear()
            self._log.turn()
        return program

    def _quietly(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        self._silent = True
        try:
            return function(*args, **kwargs)
        finally:
            self._silent = False

    # Events.

    @property
    def _at(self) -> Places:
        """Where the kernel is, up to its launch."""
        return places(sys._getframe(1), self.outside)

    def _tell(self, name: str, result: Any, sources: Callable[..., list[Found]], again: Function) -> None:
        """Record an event for each part of a result.

        Args:
            sources: the operands, for the number of a part and its handle.
            again: performs the operation once more, for the number of a part, operands and their values.
        """
        for part, made in enumerate(getattr(x, "handle", x) for x in tree_leaves(result)):
            if isinstance(made, TensorHandle):
                found = sources(part, made)
                own = tuple(self._operand(*one) for one in found)
                call = partial(again, part, [operand for operand, _, _ in found])
                self._event(name, made, _deciding(own, name), call)

    def loaded(self, name: str, result: Any, ptr: Any, mask: Any = None, other: Any = None) -> None:
        """Record a load."""
        shape = result.data.shape
        taken = mask_of(mask, shape)
        memory = of_array(ptr.data)
        operands = [self._spread(ptr, shape, address=True)]
        operands.append(Operand(lanes.where(lanes.pointwise(shape, shape), taken), memory=memory))
        if isinstance(mask, TensorHandle):
            operands.append(self._spread(mask, shape, address=True))
        if isinstance(other, TensorHandle):
            operands.append(self._operand(other, lanes.where(lanes.pointwise(other.data.shape, shape), ~taken)))
        self._event("load", result, tuple(operands))

    def stored(self, name: str, result: Any, ptr: Any, value: Any, mask: Any = None) -> None:
        """Record a store, with an event if its program is wanted."""
        shape = np.broadcast_shapes(ptr.data.shape, value.data.shape)
        event = None
        if self._program in self._log.wanted:
            held = TensorHandle(np.broadcast_to(value.data, shape), value.dtype)
            if isinstance(self._other, Shadow) and is_float(value.data.dtype):
                self._other.give(held, self._other.residues(value))
            where = [x for x in (ptr, mask) if isinstance(x, TensorHandle)]
            addresses = (self._spread(x, shape, address=True) for x in where)
            event = self._event("store", held, (self._spread(value, shape), *addresses))
        self._wrote(event, ptr, mask, shape, value.data.itemsize)

    def updated(self, name: str, result: Any, *args: Any) -> None:
        """Record an atomic update: an event for the old values, which the program gets, and one for the new ones."""
        ptr, *rest = (x for x in args if isinstance(x, TensorHandle))
        mask = rest.pop() if name == "atomic_rmw" else None
        shape, width = result.data.shape, result.data.itemsize
        event = None
        if self._program in self._log.wanted:
            memory = Operand(lanes.pointwise(shape, shape), memory=of_array(ptr.data))
            self._event("atomic old", result, (memory,))
            kind = str(args[0]).rpartition(".")[2].lower() if name == "atomic_rmw" else "cas"
            load, taken = self._other.create_masked_load, TensorHandle(mask_of(mask, shape), tl.int1)
            after = self._quietly(load, ptr, taken, None)
            event = self._event(f"atomic {kind}", after, (*(self._spread(x, shape) for x in rest), memory))
        self._wrote(event, ptr, mask, shape, width, adds=True)

    def _wrote(self, event: Event | None, ptr: Any, mask: Any, shape: Shape, width: int, adds: bool = False) -> None:
        taken, addresses = mask_of(mask, shape).reshape(-1), np.broadcast_to(ptr.data, shape).reshape(-1)
        numbers = None if taken.all() else np.nonzero(taken)[0]
        addresses = addresses if numbers is None else addresses[numbers]
        at = self._at if event is None else event.places
        self._log.written(event, addresses, numbers, width, program=self._program, at=at, adds=adds)

    def _event(self, name: str, made: Any, operands: tuple[Operand, ...], again: Again | None = None) -> Event:
        least = {"store": Origin.MEMORY, **dict.fromkeys(OF_PROGRAM, Origin.ARGUMENTS)}.get(name, Origin.CONSTANTS)
        origin = max([least, *(x.origin for x in operands if not x.address)])
        add = partial(self._log.add, program=self._program, origin=origin, again=again)
        event = add(name, self._at, made.data, made.dtype.scalar, operands, residues=getattr(made, "residues", None))
        self._made[id(made)] = event
        self._kept.append(made)
        return event

    def _spread(self, handle: Any, shape: Shape, address: bool = False) -> Operand:
        """Return an operand of an elementwise operation with a result of this shape."""
        return self._operand(handle, lanes.pointwise(handle.data.shape, shape), address)

    def _operand(self, given: Any, source: Source, address: bool = False) -> Operand:
        handle = getattr(given, "handle", given)
        event = self._made.get(id(handle))
        if event is not None:
            return Operand(source, event, address=address)
        return Operand(source, values=handle.data, name=self._names.get(id(handle), ""), address=address)


def _sources(name: str, again: Function, args: Any, kwargs: Any, part: int, made: Any) -> list[Found]:
    """Return the handles among the arguments of a call, each with its source for a part of the result, `made`.

    `again` is what the method returns for other arguments and keyword arguments.
    """
    shape, handles = made.data.shape, [x for x in tree_leaves((args, kwargs)) if isinstance(x, TensorHandle)]
    plain = [(x, lanes.pointwise(x.data.shape, shape), False) for x in handles]
    if name in MOVERS:  # repeated on indices; those of a gather are addresses
        data = handles[:1] if name == "gather" else handles

        def source(chosen: Any) -> Source:
            def index() -> Array:
                numbers = [lanes.numbered(x.data.shape) if x is chosen else np.full(x.data.shape, -1) for x in data]
                given = {id(x): TensorHandle(own, tl.int64) for x, own in zip(data, numbers, strict=True)}
                result = again(*swapped(args, given), **swapped(kwargs, given))
                return np.asarray((result[part] if isinstance(result, tuple) else result).data)

            return lanes.moved(index)

        indices = [(x, lanes.pointwise(x.data.shape, x.data.shape), True) for x in handles[len(data) :]]
        return [*((x, source(x), False) for x in data), *indices]
    if name == "select":
        (condition, where, _), (chosen, x, _), (other, y, _) = plain
        mask = np.broadcast_to(condition.data, shape)
        return [(condition, where, True), (chosen, lanes.where(x, mask), False), (other, lanes.where(y, ~mask), False)]
    if name == "dot":
        a, b, _ = handles
        row, column = lanes.of_dot(a.data.shape, b.data.shape)
        return [(a, row, False), (b, column, False), plain[2]]
    if name == "of_arrays":
        return [(x, _of_function(args[0], x.data, made.data), False) for x in handles]
    return plain


def _of_function(function: Callable[..., Array], operand: Array, result: Array) -> Source:
    """Return the source of a function of one array: by its effect on indices if it moves elements, else elementwise."""
    try:
        index = function(lanes.numbered(operand.shape))
        values = operand.reshape(-1)[index]
    except Exception:  # it takes other operands, too, or numbers of another kind
        return lanes.pointwise(operand.shape, result.shape)
    same = index.shape == result.shape and values.tobytes() == np.ascontiguousarray(result).tobytes()
    return lanes.moved(lambda: index) if same else lanes.pointwise(operand.shape, result.shape)


def _of_whole(name: str, shape: Shape, given: Mapping[str, Any]) -> Source:
    """Return the source of a reduction or scan, by the name of the function in `tl`."""
    axis, reverse = (getattr(given.get(x), "value", given.get(x)) for x in ("axis", "reverse"))
    if name == "reduce":
        return lanes.along(shape, () if axis is None else (axis % len(shape),))
    if name == "associative_scan" and axis is not None:
        return lanes.upto(shape, axis % len(shape), bool(reverse))
    return lanes.everything(shape)


_SCALARS = {numpy: scalar for scalar, numpy in NUMPY.items()}


def _with(operand: Any, own: Made) -> Any:
    """Return a handle or block with other values, in their own dtype if floating-point, so that none is rounded."""
    if isinstance(operand, tl.tensor):
        return tl.tensor(_with(operand.handle, own), operand.type)
    dtype = _SCALARS[own.values.dtype] if is_float(own.values.dtype) else operand.dtype
    shaped = own.shaped(operand.data.shape)
    made = TensorHandle(shaped.values, dtype)
    if shaped.residues is not None:
        made.residues = shaped.residues
    return made


def _again(
    plain: Function,
    followed: Function,
    args: Any,
    kwargs: Any,
    part: int,
    operands: Sequence[Any],
    values: Sequence[Made | None],
) -> Made:
    """Call a function once more with other values for some of the handles or blocks among its arguments.

    It is `followed` on residues if all of these have some. A reduction by a function of the kernel's own needs the
    language, and raises.
    """
    pairs = zip(operands, values, strict=True)
    others = {id(operand): _with(operand, own) for operand, own in pairs if own is not None}
    function = followed if all(own is None or own.followed for own in values) else plain
    result = function(*swapped(args, others), **swapped(kwargs, others))
    made = result if isinstance(result, TensorHandle) else tree_leaves(result)[part]
    handle = made.handle if isinstance(made, tl.tensor) else made
    return Made(np.asarray(handle.data), getattr(handle, "residues", None))


_IN_MEMORY: dict[str, tuple[Callable[..., None], int | None]] = {
    "load": (Tracer.loaded, 1),
    "masked_load": (Tracer.loaded, 3),
    "store": (Tracer.stored, 2),
    "masked_store": (Tracer.stored, 3),
    "atomic_rmw": (Tracer.updated, None),
    "atomic_cas": (Tracer.updated, None),
}
"""What records an operation on memory, and how many of its arguments are operands."""


def _passing_on(name: str) -> Callable[..., Any]:
    """Make a method that records an operation, or only hands on the making of a constant."""

    def method(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self._other, name)
        if name.startswith("create_"):
            return self.perform(name.removeprefix("create_"), own, args, kwargs)
        return own(*args, **kwargs)

    return method


_CONSTANTS = ("get_fp16", "get_bf16", "get_fp32", "get_fp64", "get_null_value")
for _name in (*(name for name in dir(Builder) if name.startswith("create_")), *_CONSTANTS):
    setattr(Tracer, _name, _passing_on(_name))


def _deciding(operands: tuple[Operand, ...], name: str) -> tuple[Operand, ...]:
    """Return operands; a selection's condition, if from memory, is a value where it chose what is not from there."""
    if name != "select" or operands[0].origin is not Origin.MEMORY:
        return operands
    condition, *sides = operands
    varying = [side for side in sides if side.origin is Origin.MEMORY]

    def source(elements: Array) -> Array:
        taken = [side.source(elements) >= 0 for side in varying]
        return np.where(np.any(taken, axis=0) if taken else False, -1, condition.source(elements))

    return replace(condition, address=False, source=source), *sides


def _holds_handles(x: Any) -> bool:
    """Return whether an object is made of several handles, as a block pointer is."""
    if isinstance(x, (TensorHandle, list, tuple)) or not hasattr(x, "__dict__"):
        return False
    return any(isinstance(part, TensorHandle) for part in tree_leaves(list(vars(x).values())))
