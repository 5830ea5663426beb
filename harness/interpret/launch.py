"""Launching: Triton's language patched once and for good, arguments typed as the compiler types them, programs in turn.

Triton patches and restores its language at every launch and again, without restoring, at every call of one kernel
function by another; here that happens once, at installation.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, cached_property, lru_cache
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle, interpreter_semantic
from triton.runtime.jit import _normalize_ty, mangle_type, type_canonicalisation_dict
from triton.tools.tensor_descriptor import TensorDescriptor

from harness.interpret.blocks import described_tensor, descriptor_key, host_descriptor
from harness.interpret.builder import ORIGIN, Builder
from harness.interpret.failure import described, missing
from harness.interpret.faults import blank_of, masked, noted
from harness.interpret.formats import Array, convert, numpy_dtype
from harness.interpret.given import given
from harness.interpret.mapping import map_elementwise
from harness.interpret.memory import Memory
from harness.interpret.operations import current, remembering
from harness.interpret.order import is_one_by_one, programs, watching_races
from harness.interpret.racing import Races
from harness.interpret.recorder import Recorder
from harness.interpret.replay import Diverged, Replay
from harness.interpret.rewrite import (
    SUBSTITUTES,
    Rewriter,
    compile_rewritten,
    counting_with_names,
    observed,
    print_in_every_program,
)
from harness.interpret.speculation import Speculation
from harness.interpret.tape import Segment, Tape, Tapes, Trust
from harness.interpret.watching import watched_launch


class Launcher(GridExecutor):  # type: ignore[misc]
    """Runs the programs of one launch, one after the other, on the CPU."""

    def __init__(self, fn: Any, arg_names: list[str], grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
        elsewhere = _any_on_device((*args, *kwargs.values()))
        host_args, host_kwargs = self._init_args_hst(args, kwargs) if elsewhere else (args, kwargs)
        for hook in self.pre_run_hooks:
            hook(*host_args, **host_kwargs)
        bound = bind(self.fn, host_args, host_kwargs)
        grid = tuple(self.grid(bound) if callable(self.grid) else self.grid)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"a grid has 1 to 3 dimensions, not {grid}")
        with np.errstate(all="ignore"):
            self._run_programs(Arguments(self.fn, bound), tuple(int(n) for n in grid) + (1,) * (3 - len(grid)))
        if elsewhere:
            self._restore_args_dev(args, host_args, kwargs, host_kwargs)

    def _run_programs(self, arguments: Arguments, grid: tuple[int, ...]) -> None:
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        before = builder.memory
        try:
            with watched_launch(self.fn, lambda: arguments.values):
                Launch(self.fn, arguments, builder).run(np.array(list(programs(grid)), np.int32).reshape(-1, 3))
        except Exception as error:
            raise InterpreterError(described(error)) from error
        finally:
            builder.memory = before


BATCH_BYTES = 16 << 20
"""About how much memory the programs of a batch may take."""


class Launch:
    """One launch of a kernel.

    Args:
        function: the rewritten kernel.
        arguments: what it gets.
        builder: the interpreter's.
    """

    def __init__(self, function: Any, arguments: Arguments, builder: Builder) -> None:
        self._function, self._arguments, self._builder = function, arguments, builder
        self._memory = builder.memory = Memory(given(arguments.bound.items(), blank_of))
        by_python = arguments.key is None or is_one_by_one()
        key = (function, arguments.key)
        self._tape = Tape([], [], refused=True) if by_python else _tapes.find(key, arguments.dtypes)
        self._replay = Replay(self._tape, arguments.arrays, self._memory)
        self._first: Segment | None = None
        self._memory.stored |= {tensor.region for tensor in self._memory.tensors if tensor.name in self._tape.stored}

    def run(self, grid_indices: Array) -> None:
        """Run the programs with these indices, in this order, a row each."""
        if watching_races():
            self._watching_races(grid_indices)
        else:
            self._run(grid_indices)

    def _watching_races(self, grid_indices: Array) -> None:
        """Look for races, too; and run again for each place with masked lanes: does what they hold reach memory?"""
        memory = self._memory
        before = memory.copies()
        memory.races, memory.refilled = Races(noted), None
        self._run(grid_indices)
        memory.races, after = None, memory.copies()
        for place in sorted(memory.unfilled - {None}, key=str):
            memory.restore(before)
            memory.refilled = place
            self._run(grid_indices)
            if (tensor := memory.differing(after)) is not None:
                noted(masked(place, tensor))
        memory.refilled = None
        memory.restore(after)

    def _run(self, grid_indices: Array) -> None:
        done = 0
        while done < len(grid_indices):
            batch = grid_indices[done : done + self._batch_size()]
            if len(batch) == 1:
                self._alone(batch)
            elif not self._together(batch):
                continue
            done += len(batch)
        self._tape.stored |= {tensor.name for tensor in self._memory.tensors if tensor.region in self._memory.stored}

    def _batch_size(self) -> int:
        """How many programs may run together now."""
        if self._memory.races is not None or self._tape.refused or self._tape.trust is Trust.NEVER:
            return 1
        self._first = self._first or self._replay.begin()
        if self._first is None:
            return 1
        return max(1, BATCH_BYTES // max(1, self._first.together.bytes + self._tape.later_bytes))

    def _together(self, grid_indices: Array) -> bool:
        """Run programs together; False if nothing has happened, and another attempt is to be made in another way."""
        assert self._first is not None
        how, count = self._tape.trust, len(grid_indices)
        stored = set(self._memory.stored)
        self._memory.speculation = speculation = Speculation(count, how is Trust.BYTES, np.arange(count))
        try:
            self._replay.together(self._first, grid_indices, self._explore)
        except Exception:
            speculation.undo()
            if self._memory.stored == stored:
                self._tape.trust = Trust(how + 1)
            return False
        finally:
            self._memory.speculation = None
        return True

    def _alone(self, grid_indices: Array) -> None:
        for index in grid_indices:
            self._memory.ids = tuple(index.reshape(3, 1))
            self._builder.grid_idx = tuple(index.tolist())
            if self._tape.refused:
                self._function(**self._arguments.values)
            else:
                self._replay.alone(self._explore)

    def _explore(self, diverged: Diverged) -> None:
        """Run a program by Python, and add what it does to the tape."""
        with _no_search_for_garbage():
            self._record(diverged)

    def _record(self, diverged: Diverged) -> None:
        recorder = Recorder(self._builder, self._tape, self._arguments.handles, diverged, current(self._builder))
        recorder.entered(self._function)
        interpreter_semantic.builder = recorder
        try:
            self._function(**self._arguments.values)
        finally:
            interpreter_semantic.builder = self._builder
        recorder.finish()


@contextmanager
def _no_search_for_garbage() -> Iterator[None]:
    """Python looks for unreachable cycles the more often the more objects are made; recording makes many, and none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_tapes = Tapes(limit=128 << 20)


def bind(function: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Name → argument, in the order of the parameters, defaults included; TypeError as from a call."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(bound) == len(names) == len(args) + len(kwargs):
        return {name: bound[name] for name in names}
    return inspect.getcallargs(function, *args, **kwargs)


class Arguments:
    """The arguments of a launch as the kernel sees them.

    Attributes:
        bound: the arguments, by name.
        arrays, dtypes: what the pointers and scalars hold, and their types.
        key: what the course of a program may depend on: constants, and the types. None if that is unknown.
    """

    def __init__(self, function: Any, bound: dict[str, Any]) -> None:
        self.bound = bound
        self.arrays: list[Array] = []
        self.dtypes: list[Any] = []
        self._names: list[str] = []
        self._constants: dict[str, Any] = {}
        self._descriptors: dict[str, TensorDescriptor] = {}
        annotations = _annotations(function)
        key = tuple([self._add(name, value, annotations.get(name, "")) for name, value in bound.items()])
        self.key = None if None in key else key

    def _add(self, name: str, value: Any, annotation: str) -> Any:
        if "constexpr" in annotation:
            self._constants[name] = value
            return constant_key(value)
        if isinstance(value, TensorDescriptor):
            self._descriptors[name] = value
            parts = described_tensor(value)
            return tuple([self._add(f"{name}.{part}", *parts[part]) for part in parts]), descriptor_key(value)
        if (parameter := _parameter(value, annotation)) is not None:
            mangled, array = parameter
            self.arrays.append(array)
            self.dtypes.append(_type_named(mangled))
            self._names.append(name)
            return mangled
        seen = self._constants[name] = _stock_implicit_cvt(value)
        return constant_key(value) if seen is value else None

    @cached_property
    def handles(self) -> list[Any]:
        named = zip(self._names, self.arrays, self.dtypes, strict=True)
        return [TensorHandle(array, dtype, {ORIGIN: name}) for name, array, dtype in named]

    @cached_property
    def values(self) -> dict[str, Any]:
        """Name → pointer or scalar tensor, or constant."""
        tensors = dict(zip(self._names, map(tl.tensor, self.handles, self.dtypes), strict=True))
        for name, value in self._descriptors.items():
            tensors[name] = host_descriptor(value, {x: tensors.pop(f"{name}.{x}") for x in described_tensor(value)})
        return {**self._constants, **tensors}


def _parameter(value: Any, annotation: str) -> tuple[str, Array] | None:
    """The mangled type of a pointer or scalar, and what it holds; None for any other argument.

    A Python float is fp32 unless annotated; an integer is i32, or i64 or u64 where it does not fit.
    """
    if isinstance(value, torch.Tensor):
        return mangle_type(value), np.array([value.data_ptr()], dtype=np.uint64)
    if type(value) is int:
        mangled, array = _integer(value, annotation)
        return mangled, array.copy()
    return _number(value, annotation) if isinstance(value, (bool, int, float)) else None


def _number(value: Any, annotation: str) -> tuple[str, Array]:
    """The mangled type of a scalar, and an array of it."""
    mangled = annotation if annotation in _CANONICAL else mangle_type(value)
    wide = np.array([value], dtype=np.float64 if isinstance(value, float) else None)
    return mangled, convert(wide, numpy_dtype(_type_named(mangled)))


_integer = lru_cache(maxsize=4096, typed=True)(_number)
_CANONICAL = frozenset(type_canonicalisation_dict.values())


def as_parameter(value: Any, annotation: str = "") -> Any:
    """A launch argument as the kernel sees it: a pointer or a scalar tensor of the type the compiler would give it."""
    if (parameter := _parameter(value, annotation)) is None:
        return _stock_implicit_cvt(value)
    dtype = _type_named(parameter[0])
    return tl.tensor(TensorHandle(parameter[1], dtype), dtype)


_stock_implicit_cvt = interpreter._implicit_cvt


@cache
def _annotations(function: Any) -> dict[str, str]:
    return {name: _normalize_ty(ty) for name, ty in inspect.get_annotations(function).items()}


@cache
def _type_named(mangled: str) -> Any:
    return tl.str_to_ty(mangled, None)


def constant_key(value: Any) -> Any:
    """Equal for constants of which a kernel cannot tell one from the other; None if that is unknown."""
    if isinstance(value, tl.constexpr):
        inner = constant_key(value.value)
        return None if inner is None else ("constexpr", inner)
    if isinstance(value, (tuple, list)):
        parts = tuple(constant_key(part) for part in value)
        return None if None in parts else (type(value), parts)
    if isinstance(value, float):
        return type(value), value.hex()
    if isinstance(value, tl.dtype):
        return type(value), str(value)
    known = isinstance(value, (int, str, torch.dtype, InterpretedFunction, FunctionType, Enum, type(None)))
    return (type(value), value) if known else None


def _any_on_device(values: tuple[Any, ...]) -> bool:
    for value in values:
        if isinstance(value, tuple):
            if _any_on_device(value):
                return True
        elif str(getattr(getattr(value, "base", value), "device", "cpu")) != "cpu":
            return True
    return False


def replace_launcher() -> None:
    """Put this module's launcher, the rewriter and the builder into Triton's interpreter.

    The builder object stays the one that Triton made, since functions hold on to it; it changes its class.
    """
    interpreter.InterpreterBuilder = Builder
    interpreter.interpreter_builder.__class__ = Builder
    interpreter.interpreter_builder.__dict__.pop("options", None)
    interpreter._get_np_dtype = numpy_dtype
    interpreter._implicit_cvt = as_parameter
    interpreter.GridExecutor = Launcher
    interpreter.FunctionRewriter.ast_transformer = Rewriter()
    interpreter.FunctionRewriter._compile_and_exec = compile_rewritten
    InterpretedFunction.rewritten_fn.clear()
    InterpretedFunction.__call__ = _call_from_kernel


def _call_from_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A kernel function called by another one: a plain call."""
    function = self.rewrite()
    interpreter_semantic.builder.entered(function)
    return function(*args, **kwargs)


def _index(tensor: Any) -> int:
    value: int = observed(tensor, int)
    return value


def _shown(show: Callable[[Any], str]) -> Callable[[Any], str]:
    def shown(tensor: Any) -> str:
        interpreter_semantic.builder.give_up()
        return show(tensor.handle.data)

    return shown


def _transposed(tensor: Any) -> Any:
    handle = interpreter_semantic.builder.create_of_arrays(np.transpose, tensor.handle)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(handle.data.shape)))


def _patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(owner, name, remembering(name, member))


def patch_language() -> None:
    """Patch `triton.language` once, and note what replaced which function."""
    interpreter._patch_attr = _patch_attr
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_builtin(cuda, interpreter.interpreter_builder, scope)
    for module in (tl, tl.core):
        scope.set_attr(module, "range", counting_with_names)
        scope.set_attr(module, "static_print", print_in_every_program)
        scope.set_attr(module, "map_elementwise", map_elementwise)
        scope.set_attr(module, "dot_scaled", missing("dot_scaled"))
    # Triton's own code asks `if other:` for "was it given"; the conditions of kernels are rewritten instead.
    scope.set_attr(tl.tensor, "__bool__", lambda tensor: True)
    scope.set_attr(tl.tensor, "__index__", _index)
    scope.set_attr(tl.tensor, "__repr__", _shown(repr))
    scope.set_attr(tl.tensor, "__str__", _shown(str))
    scope.set_attr(tl.tensor, "T", property(_transposed))
    for owner, name, original in scope._changes:
        if inspect.ismodule(owner) and callable(original):
            SUBSTITUTES[id(original)] = getattr(owner, name)
