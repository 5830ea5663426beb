"""Launching: Triton's language patched once and for good, arguments typed as the compiler types them, programs in turn.

Triton patches and restores its language at every launch and again, without restoring, at every call of one kernel
function by another; here that happens once, at installation.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, TensorHandle
from triton.runtime.jit import _normalize_ty, mangle_type, type_canonicalisation_dict

from harness.interpret.builder import Builder
from harness.interpret.formats import convert, numpy_dtype
from harness.interpret.order import programs
from harness.interpret.rewrite import SUBSTITUTES, Rewriter, compile_rewritten, counting_with_names


class Launcher(GridExecutor):  # type: ignore[misc]
    """Runs the programs of one launch, one after the other, on the CPU."""

    def __init__(self, fn: Any, arg_names: list[str], grid: Any, pre_run_hooks: Any = ()) -> None:
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        self.annotations = {name: _normalize_ty(ty) for name, ty in inspect.get_annotations(fn).items()}

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
        host_args, host_kwargs = self._init_args_hst(args, kwargs)
        for hook in self.pre_run_hooks:
            hook(*host_args, **host_kwargs)
        bound = inspect.getcallargs(self.fn, *host_args, **host_kwargs)
        grid = tuple(self.grid(bound) if callable(self.grid) else self.grid)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"a grid has 1 to 3 dimensions, not {grid}")
        arguments = {name: self._argument(name, value) for name, value in bound.items()}
        with np.errstate(all="ignore"):
            self._run_programs(arguments, tuple(int(n) for n in grid) + (1,) * (3 - len(grid)))
        if _any_on_device((*args, *kwargs.values())):
            self._restore_args_dev(args, host_args, kwargs, host_kwargs)

    def _argument(self, name: str, value: Any) -> Any:
        annotation = self.annotations.get(name, "")
        return value if "constexpr" in annotation else as_parameter(value, annotation)

    def _run_programs(self, arguments: dict[str, Any], grid: tuple[int, ...]) -> None:
        builder = interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        try:
            for program in programs(grid):
                builder.set_grid_idx(*program)
                self.fn(**arguments)
        except Exception as error:
            raise InterpreterError(f"{type(error).__name__}: {error}") from error


def as_parameter(value: Any, annotation: str = "") -> Any:
    """A launch argument as the kernel sees it: a pointer or a scalar tensor of the type the compiler would give it.

    A Python float is fp32 unless annotated; an integer is i32, or i64 or u64 where it does not fit.
    """
    if isinstance(value, (bool, int, float)):
        known = annotation in type_canonicalisation_dict.values()
        dtype = tl.str_to_ty(annotation if known else mangle_type(value), None)
        wide = np.array([value], dtype=np.float64 if isinstance(value, float) else None)
        return tl.tensor(TensorHandle(convert(wide, numpy_dtype(dtype)), dtype), dtype)
    return _stock_implicit_cvt(value)


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
    return self.rewrite()(*args, **kwargs)


def patch_language() -> None:
    """Patch `triton.language` once, and note what replaced which function."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    for module in (tl, tl.core):
        scope.set_attr(module, "range", counting_with_names)
    # Triton's own code asks `if other:` for "was it given"; the conditions of kernels are rewritten instead.
    scope.set_attr(tl.tensor, "__bool__", lambda tensor: True)
    for owner, name, original in scope._changes:
        if inspect.ismodule(owner) and callable(original):
            SUBSTITUTES[id(original)] = getattr(owner, name)
