"""Launching: Triton's language patched once and for good, arguments typed as the compiler types them, programs in turn.

Triton patches and restores its language at every launch and again, without restoring, at every call of one kernel
function by another; here that happens once, at installation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle, interpreter_semantic
from triton.runtime.jit import _normalize_ty, mangle_type, type_canonicalisation_dict

from harness.interpret.builder import Builder
from harness.interpret.formats import convert, numpy_dtype
from harness.interpret.order import programs
from harness.interpret.recorder import Past, Recorder
from harness.interpret.rewrite import SUBSTITUTES, Rewriter, compile_rewritten, counting_with_names, print_once_each
from harness.interpret.tape import Replay, Tapes


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
        bound = inspect.getcallargs(self.fn, *host_args, **host_kwargs)
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
        run = programs_of(self.fn, arguments)
        try:
            for program in programs(grid):
                builder.set_grid_idx(*program)
                run()
        except Exception as error:
            raise InterpreterError(f"{type(error).__name__}: {error}") from error


def programs_of(function: Any, arguments: Arguments) -> Callable[[], None]:
    """What runs the next program of a launch: from a tape, if the arguments allow to keep one."""
    plain = partial(function, **arguments.values)
    if arguments.key is None:
        return plain
    tape = _tapes.find((function, arguments.key), [x.dtype for x in arguments.handles])
    replay = Replay(tape, [x.data for x in arguments.handles])
    return lambda: plain() if tape.refused else _run_program(replay, plain, arguments.handles)


_tapes = Tapes(limit=128 << 20)


def _run_program(replay: Replay, plain: Callable[[], None], handles: list[Any]) -> None:
    """One program from the tape, or by Python, which then adds to the tape."""
    diverged = replay.run()
    if diverged is None:
        return
    recorder = Recorder(interpreter.interpreter_builder, replay.tape, handles)
    if diverged.path:
        recorder.follow(Past(diverged, replay.registers))
    recorder.entered(plain.func)
    interpreter_semantic.builder = recorder
    try:
        plain()
    finally:
        interpreter_semantic.builder = interpreter.interpreter_builder
    recorder.finish()


class Arguments:
    """The arguments of a launch as the kernel sees them.

    Attributes:
        values: name → pointer or scalar tensor, or constant.
        handles: those of the tensors.
        key: what the course of a program may depend on: constants, and the types of tensors. None if that is unknown.
    """

    def __init__(self, function: Any, bound: dict[str, Any]) -> None:
        annotations = _annotations(function)
        self.values: dict[str, Any] = {}
        self.handles: list[Any] = []
        key = [self._add(name, value, annotations.get(name, "")) for name, value in bound.items()]
        self.key = None if any(part is None for part in key) else tuple(key)

    def _add(self, name: str, value: Any, annotation: str) -> Any:
        seen = value if "constexpr" in annotation else as_parameter(value, annotation)
        self.values[name] = seen
        if seen is value:
            return constant_key(value)
        if type(seen) is not tl.tensor:
            return None
        self.handles.append(seen.handle)
        return str(seen.dtype)


def constant_key(value: Any) -> Any:
    """Equal for constants of which a kernel cannot tell one from the other; None if that is unknown."""
    if isinstance(value, tl.constexpr):
        inner = constant_key(value.value)
        return None if inner is None else ("constexpr", inner)
    if isinstance(value, (tuple, list)):
        parts = tuple(constant_key(part) for part in value)
        return None if None in parts else (type(value), parts)
    if isinstance(value, float):
        return float, value.hex()
    known = isinstance(value, (int, str, tl.dtype, torch.dtype, InterpretedFunction, FunctionType, Enum, type(None)))
    return (type(value), value) if known else None


@cache
def _annotations(function: Any) -> dict[str, str]:
    return {name: _normalize_ty(ty) for name, ty in inspect.get_annotations(function).items()}


@cache
def _type_named(name: str) -> Any:
    return tl.str_to_ty(name, None)


def as_parameter(value: Any, annotation: str = "") -> Any:
    """A launch argument as the kernel sees it: a pointer or a scalar tensor of the type the compiler would give it.

    A Python float is fp32 unless annotated; an integer is i32, or i64 or u64 where it does not fit.
    """
    if isinstance(value, (bool, int, float)):
        dtype = _type_named(annotation if annotation in _CANONICAL else mangle_type(value))
        wide = np.array([value], dtype=np.float64 if isinstance(value, float) else None)
        return tl.tensor(TensorHandle(convert(wide, numpy_dtype(dtype)), dtype), dtype)
    if isinstance(value, torch.Tensor):
        dtype = _type_named(mangle_type(value))
        return tl.tensor(TensorHandle(np.array([value.data_ptr()], dtype=np.uint64), dtype), dtype)
    return _stock_implicit_cvt(value)


_CANONICAL = frozenset(type_canonicalisation_dict.values())
_stock_implicit_cvt = interpreter._implicit_cvt


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
    if tensor.handle.data.size != 1:
        raise TypeError(f"a block of shape {tensor.handle.data.shape} is no index")
    value: int = interpreter_semantic.builder.observe(tensor.handle, int)
    return value


def _shown(tensor: Any) -> str:
    interpreter_semantic.builder.give_up()
    return repr(tensor.handle.data)


def _transposed(tensor: Any) -> Any:
    handle = interpreter_semantic.builder.create_of_arrays(np.transpose, tensor.handle)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(handle.data.shape)))


def patch_language() -> None:
    """Patch `triton.language` once, and note what replaced which function."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for module in (tl, tl.core):
        scope.set_attr(module, "range", counting_with_names)
        scope.set_attr(module, "static_print", print_once_each)
    # Triton's own code asks `if other:` for "was it given"; the conditions of kernels are rewritten instead.
    scope.set_attr(tl.tensor, "__bool__", lambda tensor: True)
    scope.set_attr(tl.tensor, "__index__", _index)
    scope.set_attr(tl.tensor, "__repr__", _shown)
    scope.set_attr(tl.tensor, "__str__", _shown)
    scope.set_attr(tl.tensor, "T", property(_transposed))
    for owner, name, original in scope._changes:
        if inspect.ismodule(owner) and callable(original):
            SUBSTITUTES[id(original)] = getattr(owner, name)
