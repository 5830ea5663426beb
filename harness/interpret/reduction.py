"""Reductions and scans by trees of the kernel's own combine function, each step rounded to the operand's format.

A GPU reduces in a tree whose shape depends on layouts that do not exist here; neighbours are paired, which keeps the
order of elements, so that any associative function is reduced correctly. Every level is one call on whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

from lastbit.interpret import arithmetic
from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.rewrite import AmbiguousTruth
from lastbit.interpret.watching import as_one

Parts = tuple[Any, ...]
"""What is combined, a tensor each: arrays or the builder's handles."""
Combine = Callable[[Parts, Parts], Parts]
On = Callable[..., Any]
"""Applies a function of arrays to parts."""

_EVEN, _ODD = itemgetter((..., slice(0, None, 2))), itemgetter((..., slice(1, None, 2)))


def replace_reductions() -> None:
    """Make `tl.reduce` and `tl.associative_scan` those of this module; they are patched in with the language."""
    from triton.runtime import interpreter

    interpreter._patch_reduce_scan = _patch_reduce_scan


def _patch_reduce_scan(scope: Any) -> None:
    for module in (tl, tl.core):
        scope.set_attr(module, "reduce", as_one(reduce))
        scope.set_attr(module, "associative_scan", as_one(associative_scan))


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """Combine all elements along `axis`, or all elements if it is None: `tl.reduce`."""
    tensors = input if isinstance(input, tuple) else (input,)
    axis, keep, ndim = _value(axis), bool(_value(keep_dims)), tensors[0].handle.data.ndim
    axis = None if axis is None else _checked_axis(axis, ndim)

    def axis_last(x: Array) -> Array:
        return x.reshape(*x.shape[: x.ndim - ndim], -1) if axis is None else np.moveaxis(x, axis - ndim, -1)

    def reduced(x: Array) -> Array:
        """Return the only element along the last axis of `x`, in the shape of a result; a scalar has shape [1]."""
        if keep:
            return x.reshape(*x.shape[:-1], *(1,) * (ndim - 1)) if axis is None else np.moveaxis(x, -1, axis - ndim)
        return x if axis is None or ndim == 1 else x[..., 0]

    def tree(parts: Parts, combine: Combine, on: On) -> Parts:
        parts = tuple(on(axis_last, x) for x in parts)
        while _shape(parts[0])[-1] > 1:  # a power of two, as all of Triton's block sides
            parts = combine(tuple(on(_EVEN, x) for x in parts), tuple(on(_ODD, x) for x in parts))
        return tuple(on(reduced, x) for x in parts)

    scalar = not keep and (axis is None or ndim == 1)
    return _like_input(input, tuple(_tensor(x, scalar) for x in _combined(tree, combine_fn, tensors)))


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    """Return the running combination along `axis`, from the far end if `reverse`: `tl.associative_scan`."""
    tensors = input if isinstance(input, tuple) else (input,)
    ndim = tensors[0].handle.data.ndim
    back = _checked_axis(_value(axis), ndim) - ndim
    step = -1 if _value(reverse) else 1

    def tree(parts: Parts, combine: Combine, on: On) -> Parts:
        parts = tuple(on(lambda x: np.moveaxis(x, back, -1)[..., ::step], x) for x in parts)
        index, distance = np.arange(_shape(parts[0])[-1]), 1
        while distance < len(index):
            ahead = combine(tuple(on(partial(np.roll, shift=distance, axis=-1), x) for x in parts), parts)
            unchanged = index < distance
            parts = tuple(on(partial(np.where, unchanged), x, y) for x, y in zip(parts, ahead, strict=True))
            distance *= 2
        return tuple(on(lambda x: np.ascontiguousarray(np.moveaxis(x[..., ::step], -1, back)), x) for x in parts)

    return _like_input(input, tuple(_tensor(x) for x in _combined(tree, combine_fn, tensors)))


def _combined(tree: Callable[[Parts, Combine, On], Parts], combine_fn: Any, tensors: tuple[Any, ...]) -> Parts:
    """Return the handles that `tree` makes of tensors, by a single builder operation if it needs no language."""
    handles = tuple(x.handle for x in tensors)
    operation = interpreter_semantic.builder.create_of_arrays
    if (direct := _direct(combine_fn, tensors)) is not None:
        return (operation(lambda x: tree((x,), direct, lambda function, *parts: function(*parts))[0], *handles),)
    return tree(handles, _by_language(combine_fn, tuple(x.dtype for x in tensors)), operation)


def _shape(part: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = (part if isinstance(part, np.ndarray) else part.data).shape
    return shape


def _direct(combine_fn: Any, tensors: tuple[Any, ...]) -> Combine | None:
    """Return the sum, maximum or minimum that `combine_fn` is, as a function of arrays; None for any other function."""
    standard = tl.standard
    if len(tensors) > 1:
        return None
    if combine_fn is standard._sum_combine and tensors[0].handle.data.dtype != np.bool_:
        return lambda a, b: (a[0] + b[0],)
    if combine_fn is standard._elementwise_max:
        return lambda a, b: (arithmetic.maximum(a[0], b[0]),)
    if combine_fn is standard._elementwise_min:
        return lambda a, b: (arithmetic.minimum(a[0], b[0]),)
    return None


def _by_language(combine_fn: Any, dtypes: tuple[Any, ...]) -> Combine:
    """Return `combine_fn` as a function of handles."""

    def combine(a: Parts, b: Parts) -> Parts:
        try:
            return _apply(combine_fn, dtypes, a, b)
        except AmbiguousTruth:  # the function branches on a value, so it sees one pair of elements at a time
            interpreter_semantic.builder.give_up()
            results = tuple(np.empty_like(x.data) for x in a)
            for i in np.ndindex(a[0].data.shape):
                ones = [tuple(TensorHandle(x.data[i].reshape(1), x.dtype) for x in side) for side in (a, b)]
                for result, value in zip(results, _apply(combine_fn, dtypes, *ones), strict=True):
                    result[i] = value.data[0]
            return tuple(TensorHandle(x, dtype) for x, dtype in zip(results, dtypes, strict=True))

    return combine


def _apply(combine_fn: Any, dtypes: tuple[Any, ...], a: Parts, b: Parts) -> Parts:
    operation = interpreter_semantic.builder.create_of_arrays
    results = combine_fn(*(_tensor(operation(np.ascontiguousarray, x)) for side in (a, b) for x in side))
    results = results if isinstance(results, tuple) else (results,)
    returned = tuple(r.dtype for r in results)
    if returned != dtypes:
        raise TypeError(f"combine function {combine_fn.__name__!r} of {dtypes} returns {returned}")
    return tuple(operation(partial(_broadcast, r.handle.data.ndim, a[0].data.shape), r.handle) for r in results)


def _broadcast(ndim: int, shape: tuple[int, ...], x: Array) -> Array:
    programs, own = x.shape[: x.ndim - ndim], x.shape[x.ndim - ndim :]
    return np.broadcast_to(x.reshape(*programs, *(1,) * (len(shape) - ndim), *own), programs + shape)


def _tensor(handle: Any, scalar: bool = False) -> Any:
    dtype = handle.dtype.scalar
    return tl.core.tensor(handle, dtype if scalar else tl.block_type(dtype, list(handle.data.shape)))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _checked_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is outside a block of {ndim} dimensions")
    return axis % ndim


def _like_input(input: Any, results: tuple[Any, ...]) -> Any:
    return results if isinstance(input, tuple) else results[0]
