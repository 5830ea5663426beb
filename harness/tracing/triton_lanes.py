"""Sources of operations of Triton's builder: which elements of the operands a result's elements came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from lastbit.interpret.numpy_formats import Array
from lastbit.tracing import lanes
from lastbit.tracing.lanes import Shape, Source, swapped

MOVERS = ("splat", "unsplat", "broadcast", "expand_dims", "reshape", "trans", "cat", "join", "split", "gather")
"""Operations that give elements of their operands and compute none."""


@dataclass(frozen=True, eq=False)
class BuilderCall:
    """A call of a method of the builder.

    Attributes:
        name: without `create_`.
        again: what the method returns for other arguments and keyword arguments.
        part: of which of several results the elements are asked for.
    """

    name: str
    again: Callable[[Any, Any], Any]
    args: Any
    kwargs: Any
    part: int


Found = tuple[Any, Source, bool]
"""An operand; its elements; whether it says where something is or whether it is taken, and not what it is."""


def sources_of(call: BuilderCall, handles: list[Any], made: Any) -> list[Found]:
    """Return the handles among the arguments of a call, each with its source for a result."""
    shape = made.data.shape
    if call.name in MOVERS:
        return _of_mover(call, handles)
    if call.name == "select":
        return _of_select(handles, shape)
    if call.name == "dot":
        return _of_dot(handles, shape)
    if call.name == "of_arrays":
        return [(x, _of_function(call.args[0], x.data, made.data), False) for x in handles]
    return [(x, lanes.pointwise(x.data.shape, shape), False) for x in handles]


def of_whole(name: str, shape: Shape, given: Mapping[str, Any]) -> Source:
    """Return the source of a reduction or scan, by the name of the function in `tl`."""
    axis, reverse = (getattr(given.get(x), "value", given.get(x)) for x in ("axis", "reverse"))
    if name == "reduce":
        return lanes.along(shape, () if axis is None else (axis % len(shape),))
    if name == "associative_scan" and axis is not None:
        return lanes.upto(shape, axis % len(shape), bool(reverse))
    return lanes.everything(shape)


def _of_mover(call: BuilderCall, handles: list[Any]) -> list[Found]:
    """Return the sources of a call that moves elements, by repeating it on indices; those of a gather are addresses."""
    data = handles[:1] if call.name == "gather" else handles

    def source(chosen: Any) -> Source:
        def index() -> Array:
            numbers = {id(x): _numbers(x, x is chosen) for x in data}
            result = call.again(swapped(call.args, numbers), swapped(call.kwargs, numbers))
            return np.asarray((result[call.part] if isinstance(result, tuple) else result).data)

        return lanes.moved(index)

    indices = [(x, lanes.pointwise(x.data.shape, x.data.shape), True) for x in handles[len(data) :]]
    return [*((x, source(x), False) for x in data), *indices]


def _of_select(handles: list[Any], shape: Shape) -> list[Found]:
    condition, chosen, other = handles
    where, x, y = (lanes.pointwise(handle.data.shape, shape) for handle in handles)
    mask = np.broadcast_to(condition.data, shape)
    taken = lanes.where(x, mask), lanes.where(y, ~mask)
    return [(condition, where, True), (chosen, taken[0], False), (other, taken[1], False)]


def _of_dot(handles: list[Any], shape: Shape) -> list[Found]:
    a, b, d = handles
    sides = a.data.shape, b.data.shape
    sources = lanes.left_of_dot(*sides), lanes.right_of_dot(*sides), lanes.pointwise(d.data.shape, shape)
    return [(handle, source, False) for handle, source in zip((a, b, d), sources, strict=True)]


def _of_function(function: Callable[..., Array], operand: Array, result: Array) -> Source:
    """Return the source of a function of one array: by its effect on indices if it moves elements, else elementwise."""
    try:
        index = function(lanes.numbered(operand.shape))
        values = operand.reshape(-1)[index]
    except Exception:  # it takes other operands, too, or numbers of another kind
        return lanes.pointwise(operand.shape, result.shape)
    same = index.shape == result.shape and values.tobytes() == np.ascontiguousarray(result).tobytes()
    return lanes.moved(lambda: index) if same else lanes.pointwise(operand.shape, result.shape)


def _numbers(handle: Any, own: bool) -> Any:
    shape = handle.data.shape
    return TensorHandle(lanes.numbered(shape) if own else np.full(shape, -1), tl.int64)
