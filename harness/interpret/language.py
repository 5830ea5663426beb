"""Triton's language patched once and for good, and functions of scalars mapped over blocks.

Triton patches and restores its language at every launch and again, without restoring, at every call of one kernel
function by another; here that happens once, at installation.

`tl.map_elementwise` calls a function of scalars once, on whole blocks. Where it branches on a value, the elements are
split by that value and it is called again for each part, so that every call takes the branches that its elements take.

`block_type(element, shape)` and `tensor(handle, type)` compute their attributes from types and constants alone, which
nothing changes afterwards; making them is most of the time of Triton's language layer. The constructors replaced here
run Triton's own once for the same element type (the same object) and shape, or the same type, and copy the attributes
that it set; no attribute is named, so that this holds on any release whose constructors take these arguments. On one
where they take others, the self-test of unknown releases fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.operations import remembering
from lastbit.interpret.places import missing
from lastbit.interpret.rewrite import (
    SUBSTITUTES,
    AmbiguousTruth,
    counting_with_names,
    observed,
    print_in_every_program,
    uniform_blocks,
)


def _shown(show: Callable[[Any], str]) -> Callable[[Any], str]:
    def shown(tensor: Any) -> str:
        interpreter_semantic.builder.give_up()
        return show(tensor.handle.data)

    return shown


def _transposed(tensor: Any) -> Any:
    handle = interpreter_semantic.builder.create_of_arrays(lambda x: x.swapaxes(-1, -2), tensor.handle)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(handle.data.shape)))


def patch_language() -> None:
    """Patch `triton.language` once, and note what replaced which function."""
    interpreter._patch_attr = lambda owner, name, member, builder, scope: scope.set_attr(
        owner, name, remembering(name, member)
    )
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_builtin(cuda, interpreter.interpreter_builder, scope)
    for module in (tl, tl.core):
        scope.set_attr(module, "range", counting_with_names)
        scope.set_attr(module, "static_print", print_in_every_program)
        scope.set_attr(module, "map_elementwise", map_elementwise)
        scope.set_attr(module, "dot_scaled", missing("dot_scaled"))
    # Triton's own code asks `if other:` for "was it given"; the conditions of kernels are rewritten instead.
    scope.set_attr(tl.tensor, "__bool__", lambda tensor: True)
    scope.set_attr(tl.tensor, "__index__", lambda tensor: observed(tensor, int))
    scope.set_attr(tl.tensor, "__repr__", _shown(repr))
    scope.set_attr(tl.tensor, "__str__", _shown(str))
    scope.set_attr(tl.tensor, "T", property(_transposed))
    for owner, name, original in scope._changes:
        if inspect.ismodule(owner) and callable(original):
            SUBSTITUTES[id(original)] = original, getattr(owner, name)


Results = tuple[Any, ...]
_SEVERAL = (tuple, tl.tuple)


def map_elementwise(scalar_fn: Any, *args: Any, pack: Any = 1, **_: Any) -> Any:
    """Apply `scalar_fn` to blocks, `pack` neighbours along the last axis at a time; return its results as blocks."""
    pack = int(getattr(pack, "value", pack))
    blocks = interpreter_semantic.broadcast_tensors(*args)
    if not blocks[0].shape:
        return scalar_fn(*blocks)
    shape = [int(side) for side in blocks[0].shape]
    on, short = interpreter_semantic.builder.create_of_arrays, [*shape[:-1], shape[-1] // pack]
    scalars = [_block(on(partial(_every, pack, j), x.handle), short) for x in blocks for j in range(pack)]
    try:
        returned = scalar_fn(*scalars)
    except AmbiguousTruth:
        interpreter_semantic.builder.give_up()
        returned = _called_by_parts(scalar_fn, scalars, short)
    results = _tensors(returned)
    joined = tuple(_joined(results[i : i + pack], shape) for i in range(0, len(results), pack))
    return joined if isinstance(returned, _SEVERAL) else joined[0]


def _tensors(returned: Any) -> Results:
    """Return the results of a function as a tuple of tensors."""
    return tuple(map(interpreter_semantic.to_tensor, returned if isinstance(returned, _SEVERAL) else (returned,)))


def _every(pack: int, first: int, x: Array) -> Array:
    return x if pack == 1 else np.ascontiguousarray(x[..., first::pack])


def _block(handle: Any, shape: list[int]) -> Any:
    return tl.tensor(handle, tl.block_type(handle.dtype.scalar, shape))


def _joined(parts: Results, shape: list[int]) -> Any:
    """Return results for neighbours as one block."""
    on = interpreter_semantic.builder.create_of_arrays
    short = (*shape[:-1], shape[-1] // len(parts))
    return _block(on(partial(_interleaved, short), *(x.handle for x in parts)), shape)


def _interleaved(short: tuple[int, ...], *parts: Array) -> Array:
    """Interleave arrays of neighbours along the last axis."""
    spread = [np.broadcast_to(x, np.broadcast_shapes(x.shape, short)) for x in parts]
    if len(parts) == 1:
        return np.ascontiguousarray(spread[0])
    whole = np.stack(np.broadcast_arrays(*spread), axis=-1)
    return np.ascontiguousarray(whole.reshape(*whole.shape[:-2], -1))


def _called_by_parts(scalar_fn: Callable[..., Any], scalars: list[Any], shape: list[int]) -> Any:
    """Call a function for parts of the elements: each is a set that has taken the same branches so far."""
    flat = [(x.handle.data.reshape(-1), x.dtype) for x in scalars]
    waiting, returned = [np.arange(flat[0][0].size)], []
    with uniform_blocks():
        while waiting:
            part = waiting.pop()
            # Repeated up to a power of two, as blocks require.
            size = 1 << (part.size - 1).bit_length()
            blocks = [_block(TensorHandle(np.resize(data[part], size), dtype), [size]) for data, dtype in flat]
            try:
                returned.append((part, scalar_fn(*blocks)))
            except AmbiguousTruth as error:
                seen = _to_part(part, error.values)
                waiting += [part[seen == value] for value in np.unique(seen)]
    parts = [(part, _tensors(results)) for part, results in returned]
    whole = []
    for i, example in enumerate(parts[0][1]):
        data = np.empty(int(np.prod(shape)), example.handle.data.dtype)
        for part, results in parts:
            if results[i].dtype != example.dtype:
                raise TypeError(f"branches of a mapped function return {example.dtype} and {results[i].dtype}")
            data[part] = _to_part(part, results[i].handle.data)
        whole.append(_block(TensorHandle(data.reshape(shape), example.dtype), shape))
    return tuple(whole) if isinstance(returned[0][1], _SEVERAL) else whole[0]


def _to_part(part: Array, data: Array) -> Array:
    """Return a block's result for the elements of a part, without the repeated ones."""
    return data[: part.size] if data.size > 1 else np.broadcast_to(data, part.shape)


# Arbitrary: more is memory in every worker, fewer are made again more often.
ENTRIES = 4096
"""How many are kept before all are forgotten."""

_new_block, _new_tensor = tl.block_type.__init__, tl.tensor.__init__
_blocks: dict[Any, Any] = {}
_of_types: dict[int, tuple[Any, dict[str, Any], list[str]]] = {}


def replace_constructors() -> None:
    """Make `tl.block_type` and `tl.tensor` remember."""
    tl.block_type.__new__ = _known_block
    tl.block_type.__init__, tl.tensor.__init__ = _init_block, _init_tensor


def _known_block(cls: Any, element_ty: Any = None, shape: Any = ()) -> Any:
    """Return the block type made before for this element type and shape, or a new object."""
    return _blocks.get(_block_key(element_ty, shape)) or object.__new__(cls)


def _init_block(self: Any, element_ty: Any, shape: Any) -> None:
    if not self.__dict__:
        _new_block(self, element_ty, shape)
        _keep(_blocks, _block_key(element_ty, shape), self)


def _block_key(element_ty: Any, shape: Any) -> Any:
    sides = tuple([side.value if type(side) is tl.constexpr else side for side in shape])
    return (id(element_ty), sides, *map(type, sides))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    found = _of_types.get(id(type))
    if found is None:
        _new_tensor(self, handle, type)
        of_type = {name: value for name, value in self.__dict__.items() if value is not handle}
        _keep(_of_types, id(type), (type, of_type, [name for name in self.__dict__ if name not in of_type]))
        return
    self.__dict__.update(found[1])
    for name in found[2]:
        self.__dict__[name] = handle


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    if len(table) >= ENTRIES:
        table.clear()
    table[key] = value
