"""What a kernel does in PyTorch, as events: every operation that writes tensors, which are found by their addresses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.interpret.formats import BFLOAT16, E4M3, E5M2, Array
from harness.tracing import lanes
from harness.tracing.events import Event, Operand
from harness.tracing.lanes import Source
from harness.tracing.log import Log
from harness.tracing.memory import Addresses, of_layout
from harness.tracing.places import places

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""Operations that make tensors and write nothing."""

CHOOSING = ("condition", "mask", "index", "indices")
"""Arguments that say which elements are taken, and not what they are."""

FEW = 16
"""Elements of an operand that are kept with an operation: what made it may not have been seen."""

_VIEWED = {torch.bfloat16: (torch.int16, BFLOAT16)}
_VIEWED |= {torch.float8_e4m3fn: (torch.uint8, E4M3), torch.float8_e5m2: (torch.uint8, E5M2)}


def array_of(tensor: Tensor) -> Array:
    """A copy of a tensor's elements in its shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    raw, dtype = _VIEWED.get(plain.dtype, (None, None))
    if raw is None:
        return np.array(plain.numpy())
    return np.array(plain.contiguous().view(raw).numpy()).view(dtype)


def addresses_of(tensor: Tensor) -> Addresses:
    """Where the elements of a strided tensor are."""
    return of_layout(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())


def record_input(log: Log, name: str, tensor: Tensor) -> Event:
    """A tensor that the kernel is given, as an event that wrote it."""
    event = log.add(f"input {name}", (), array_of(tensor), tensor.dtype)
    _wrote(log, event, tensor)
    return event


def _wrote(log: Log, event: Event, tensor: Tensor, kept: Source | None = None) -> None:
    """Note where an event wrote; not where it left what was there, of which `kept` is the source."""
    lanes = np.arange(tensor.numel())
    changed = None if kept is None else lanes[kept(lanes)[:, 0] < 0]
    addresses = addresses_of(tensor).at(lanes if changed is None else changed)
    log.written(event, addresses, changed, tensor.element_size(), at=event.places)


@dataclass(frozen=True, eq=False)
class _Used:
    """A tensor that an operation reads: where it was before that, and what it held if that is little."""

    tensor: Tensor
    memory: Addresses
    values: Array | None
    address: bool

    def operand(self, source: Source) -> Operand:
        return Operand(source, memory=self.memory, values=self.values, address=self.address)


def _used(name: str, tensor: Tensor) -> _Used:
    values = array_of(tensor) if tensor.numel() <= FEW else None
    return _Used(tensor, addresses_of(tensor), values, name in CHOOSING)


class TorchWatch(TorchDispatchMode):
    """Tells a log of what PyTorch does within this context, but for views, which write nothing."""

    def __init__(self, log: Log) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._log.interpreting or torch.Tag.inplace_view in func.tags or func.overloadpacket.__name__ == "set_":
            return func(*args, **kwargs)
        given = _named(func, args, kwargs)
        changed = _changed(func, given)
        named = [(name, x) for name, x in _tensors(given) if name != "out"]
        operands = [x for _, x in named]
        name = func.overloadpacket.__name__
        fresh = name == "lift_fresh"  # what torch.tensor makes, seen for the first time
        used = [] if fresh or name in UNWRITTEN else [_used(argument, x) for argument, x in named]
        held = {_storage(x) for x in operands}
        result = func(*args, **kwargs)
        returned = [x for x in _flat([result]) if _is_plain(x)]
        made = changed or [x for x in returned if fresh or _storage(x) not in held]
        if made:
            self._tell(func, given, used, made)
        return result

    def _tell(self, func: Any, given: Mapping[str, Any], used: list[_Used], made: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        at = places(sys._getframe(2))
        for part, tensor in enumerate(made):
            sources = [source_of(func, given, x.tensor, tensor, part) for x in used]
            found = tuple(x.operand(s) for s, x in zip(sources, used, strict=True) if s is not None)
            operands = (*found, *_numbers_of(given))
            event = self._log.add(f"{func.namespace}.{name}", at, array_of(tensor), tensor.dtype, operands)
            puts = name.endswith("_") and name.removesuffix("_") in MOVERS and not given.get("accumulate")
            _wrote(self._log, event, tensor, sources[0] if puts else None)


def _numbers_of(given: Mapping[str, Any]) -> Iterator[Operand]:
    """Python's numbers that an operation computes with."""
    for name in ("other", "exponent", "value", "min", "max"):
        if isinstance(number := given.get(name), (int, float)):
            yield Operand(lanes.everything((1,)), values=np.array([number]))


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name → argument."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _changed(func: Any, given: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments that the operation writes to."""
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for name in written for x in _flat([given.get(name)]) if _is_plain(x)]


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in given.items():
        yield from ((name, x) for x in _flat([value]) if _is_plain(x))


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and x.device.type != "meta"


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# Elements of a tensor that was written → those of an operand.

POINTWISE = ("_to_copy", "copy_", "clone", "fill_", "zero_", "lift_fresh_copy", "contiguous")
REDUCTIONS = ("var_mean", "std_mean", "linalg_vector_norm", "logsumexp", "argmax", "argmin", "median", "cummax")
WITHIN = ("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "logcumsumexp")
MOVERS = {
    "cat": ("tensors",),
    "stack": ("tensors",),
    "index": ("self",),
    "index_select": ("self",),
    "gather": ("self",),
    "take": ("self",),
    "embedding": ("weight",),
    "flip": ("self",),
    "roll": ("self",),
    "repeat": ("self",),
    "constant_pad_nd": ("self",),
    "tril": ("self",),
    "triu": ("self",),
    "masked_select": ("self",),
    "index_put": ("self", "values"),
    "index_copy": ("self", "source"),
    "slice_scatter": ("self", "src"),
    "select_scatter": ("self", "src"),
    "scatter": ("self", "src"),
    "slice_backward": ("grad_output",),
    "select_backward": ("grad_output",),
}
"""Operations that only move elements → their arguments whose elements those are."""

DOTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


def source_of(func: Any, given: Mapping[str, Any], operand: Tensor, result: Tensor, part: int) -> Source | None:
    """Where the elements of a result came from in an operand; None if none did, as in what a copy overwrites."""
    name = func.overloadpacket.__name__
    shape, made = tuple(operand.shape), tuple(result.shape)
    if name == "copy_" and operand is given["self"]:
        return None
    if given.get("accumulate"):
        return lanes.pointwise(shape, made) if operand is given["self"] else lanes.everything(shape)
    if (moved := name.removesuffix("_")) in MOVERS and not name.startswith("_"):
        return _of_mover(moved, func, given, operand, part)
    if name in DOTS:
        return _of_dot(DOTS[name], given, operand, made)
    if torch.Tag.pointwise in func.tags or name in POINTWISE:
        return lanes.pointwise(shape, made)
    axes = _axes(given, len(shape))
    if "normalized_shape" in given:
        return _of_rows(shape, made, tuple(range(len(shape) - len(given["normalized_shape"]), len(shape))))
    if name in WITHIN and shape == made and axes:
        return lanes.within(shape, axes)
    if torch.Tag.reduction in func.tags or name in REDUCTIONS:
        kept = [side for axis, side in enumerate(shape) if axes and axis not in axes]
        if np.prod(kept, dtype=np.int64) == np.prod(made, dtype=np.int64):
            return lanes.along(shape, axes)
    return lanes.everything(shape)


def _axes(given: Mapping[str, Any], ndim: int) -> tuple[int, ...]:
    """The dimensions that an operation is told to go along; none if it is told none."""
    dim = given.get("dim")
    if not ndim or dim is None:
        return ()
    return tuple(sorted(d % ndim for d in (dim if isinstance(dim, (list, tuple)) else [dim])))


def _of_rows(shape: lanes.Shape, made: lanes.Shape, axes: tuple[int, ...]) -> Source:
    """Of a normalisation: the row of the input for an element or a statistic, the element of a weight."""
    if len(shape) < len(made) or not axes:
        return lanes.pointwise(shape, made)
    return lanes.within(shape, axes) if shape == made else lanes.along(shape, axes)


def _of_dot(names: tuple[str, str], given: Mapping[str, Any], operand: Tensor, made: lanes.Shape) -> Source:
    a, b = (given[name] for name in names)
    sides = tuple(a.shape), tuple(b.shape)
    if operand is a:
        return lanes.left_of_dot(*sides)
    return lanes.right_of_dot(*sides) if operand is b else lanes.pointwise(tuple(operand.shape), made)


def _of_mover(name: str, func: Any, given: Mapping[str, Any], operand: Tensor, part: int) -> Source | None:
    """By the same operation on indices, counted from 1, so that what it fills with zeros is no element."""
    data = [x for argument in MOVERS[name] for x in _flat([given.get(argument)]) if isinstance(x, Tensor)]
    if not any(x is operand for x in data):
        return lanes.everything(tuple(operand.shape))
    again: Callable[..., Any] = getattr(func.namespace and getattr(torch.ops, func.namespace), name)
    others = {key: _kept(value) for key, value in given.items()}  # the kernel may change its indices later

    def index() -> Array:
        numbers = {id(x): _numbers(x, x is operand) for x in data}
        swapped = {key: _swapped(given[key], others[key], numbers) for key in given if key != "out"}
        result = again(**swapped)
        return np.asarray((list(_flat([result]))[part] if isinstance(result, (list, tuple)) else result).numpy() - 1)

    return lanes.moved(index)


def _kept(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_kept(x) for x in value]
    return value.detach().clone().cpu() if isinstance(value, Tensor) and not value.is_floating_point() else value


def _numbers(tensor: Tensor, own: bool) -> Tensor:
    return (
        torch.arange(1, tensor.numel() + 1).reshape(tensor.shape)
        if own
        else torch.zeros(tensor.shape, dtype=torch.int64)
    )


def _swapped(value: Any, kept: Any, numbers: Mapping[int, Tensor]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_swapped(x, y, numbers) for x, y in zip(value, kept, strict=True)]
    return numbers.get(id(value), kept)
