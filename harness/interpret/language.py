"""Triton's language patched once and for good.

Triton patches and restores its language at every launch and again, without restoring, at every call of one kernel
function by another; here that happens once, at installation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_semantic

from lastbit.interpret.failure import missing
from lastbit.interpret.mapping import map_elementwise
from lastbit.interpret.operations import remembering
from lastbit.interpret.rewrite import SUBSTITUTES, counting_with_names, observed, print_in_every_program


def _index(tensor: Any) -> int:
    value: int = observed(tensor, int)
    return value


def _shown(show: Callable[[Any], str]) -> Callable[[Any], str]:
    def shown(tensor: Any) -> str:
        interpreter_semantic.builder.give_up()
        return show(tensor.handle.data)

    return shown


def _transposed(tensor: Any) -> Any:
    handle = interpreter_semantic.builder.create_of_arrays(lambda x: x.swapaxes(-1, -2), tensor.handle)
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
            SUBSTITUTES[id(original)] = original, getattr(owner, name)
