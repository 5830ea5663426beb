"""Reductions and scans by trees of the kernel's own combine function, each step rounded to the operand's format.

A GPU reduces in a tree whose shape depends on layouts that do not exist here; neighbours are paired, which keeps the
order of elements, so that any associative function is reduced correctly. Every level is one call on whole blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from harness.interpret import arithmetic
from harness.interpret.formats import Array
from harness.interpret.rewrite import AmbiguousTruth

Arrays = tuple[Array, ...]
Combine = Callable[[Arrays, Arrays], Arrays]


def replace_reductions() -> None:
    """Make `tl.reduce` and `tl.associative_scan` those of this module; they are patched in with the language."""
    from triton.runtime import interpreter

    interpreter._patch_reduce_scan = _patch_reduce_scan


def _patch_reduce_scan(scope: Any) -> None:
    for module in (tl, tl.core):
        scope.set_attr(module, "reduce", reduce)
        scope.set_attr(module, "associative_scan", associative_scan)


def reduce(input: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **_: Any) -> Any:
    """`tl.reduce`: combine all elements along `axis`, or all elements if it is None."""
    tensors = input if isinstance(input, tuple) else (input,)
    ndim = tensors[0].handle.data.ndim
    arrays = tuple(x.handle.data for x in tensors)
    axis = _value(axis)
    if axis is None:
        arrays, along = tuple(x.reshape(-1) for x in arrays), 0
    else:
        along = _checked_axis(axis, ndim)
    reduced = _reduce_tree(tuple(np.moveaxis(x, along, -1) for x in arrays), _combiner(combine_fn, tensors))
    if _value(keep_dims):
        reduced = tuple(x.reshape((1,) * ndim) if axis is None else np.expand_dims(x, along) for x in reduced)
    return _like_input(input, tuple(_tensor(x, t.dtype) for x, t in zip(reduced, tensors, strict=True)))


def associative_scan(input: Any, axis: Any, combine_fn: Any, reverse: Any = False, **_: Any) -> Any:
    """`tl.associative_scan`: the running combination along `axis`, from the far end if `reverse`."""
    tensors = input if isinstance(input, tuple) else (input,)
    along = _checked_axis(_value(axis), tensors[0].handle.data.ndim)
    step = -1 if _value(reverse) else 1
    arrays = tuple(np.moveaxis(x.handle.data, along, -1)[..., ::step] for x in tensors)
    scanned = _scan_tree(arrays, _combiner(combine_fn, tensors))
    moved = tuple(np.ascontiguousarray(np.moveaxis(x[..., ::step], -1, along)) for x in scanned)
    return _like_input(input, tuple(_tensor(x, t.dtype) for x, t in zip(moved, tensors, strict=True)))


def _reduce_tree(arrays: Arrays, combine: Combine) -> Arrays:
    while arrays[0].shape[-1] > 1:  # a power of two, as all of Triton's block sides
        arrays = combine(tuple(x[..., 0::2] for x in arrays), tuple(x[..., 1::2] for x in arrays))
    return tuple(x[..., 0] for x in arrays)


def _scan_tree(arrays: Arrays, combine: Combine) -> Arrays:
    index = np.arange(arrays[0].shape[-1])
    distance = 1
    while distance < len(index):
        ahead = combine(tuple(np.roll(x, distance, axis=-1) for x in arrays), arrays)
        arrays = tuple(np.where(index < distance, x, y) for x, y in zip(arrays, ahead, strict=True))
        distance *= 2
    return arrays


def _combiner(combine_fn: Any, tensors: tuple[Any, ...]) -> Combine:
    """`combine_fn` on arrays; the three that nearly every kernel uses skip the language layer."""
    standard = tl.standard
    if combine_fn is standard._sum_combine and tensors[0].handle.data.dtype != np.bool_:
        return lambda a, b: (a[0] + b[0],)
    if combine_fn is standard._elementwise_max:
        return lambda a, b: (arithmetic.maximum(a[0], b[0]),)
    if combine_fn is standard._elementwise_min:
        return lambda a, b: (arithmetic.minimum(a[0], b[0]),)
    dtypes = tuple(x.dtype for x in tensors)

    def combine(a: Arrays, b: Arrays) -> Arrays:
        try:
            return _apply(combine_fn, dtypes, a, b)
        except AmbiguousTruth:  # the function branches on a value, so it sees one pair of elements at a time
            return _apply_each(combine_fn, dtypes, a, b)

    return combine


def _apply(combine_fn: Any, dtypes: tuple[Any, ...], a: Arrays, b: Arrays) -> Arrays:
    operands = [_tensor(np.ascontiguousarray(x), t) for side in (a, b) for x, t in zip(side, dtypes, strict=True)]
    results = combine_fn(*operands)
    results = results if isinstance(results, tuple) else (results,)
    returned = tuple(r.dtype for r in results)
    if returned != dtypes:
        raise TypeError(f"combine function {combine_fn.__name__!r} of {dtypes} returns {returned}")
    return tuple(np.broadcast_to(r.handle.data, x.shape) for r, x in zip(results, a, strict=True))


def _apply_each(combine_fn: Any, dtypes: tuple[Any, ...], a: Arrays, b: Arrays) -> Arrays:
    results = tuple(np.empty_like(x) for x in a)
    for i in np.ndindex(a[0].shape):
        one = _apply(combine_fn, dtypes, tuple(x[i].reshape(1) for x in a), tuple(x[i].reshape(1) for x in b))
        for result, value in zip(results, one, strict=True):
            result[i] = value[0]
    return results


def _tensor(data: Array, dtype: Any) -> Any:
    """A scalar tensor for no axis or a single element, else a block."""
    if data.ndim == 0:
        return tl.core.tensor(TensorHandle(data.reshape(1), dtype.scalar), dtype.scalar)
    return tl.core.tensor(TensorHandle(data, dtype.scalar), tl.block_type(dtype.scalar, list(data.shape)))


def _value(x: Any) -> Any:
    return x.value if isinstance(x, tl.constexpr) else x


def _checked_axis(axis: int, ndim: int) -> int:
    if not -ndim <= axis < ndim:
        raise ValueError(f"axis {axis} is outside a block of {ndim} dimensions")
    return axis % ndim


def _like_input(input: Any, results: tuple[Any, ...]) -> Any:
    return results if isinstance(input, tuple) else results[0]
