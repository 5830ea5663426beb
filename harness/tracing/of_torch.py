"""PyTorch's operations in a kernel, as events: every one that writes tensors, found by their addresses.

For each operation it finds which elements of the operands those of a written tensor came from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lastbit.interpret.numpy_formats import BFLOAT16, E4M3, E5M2, Array
from lastbit.numerics.residues import Residues
from lastbit.shadows.aten import Following, UncompiledMode
from lastbit.shadows.shadow_memory import ShadowMemory
from lastbit.tracing import lanes
from lastbit.tracing.events import Again, Event, Log, Made, Operand, is_lastbits_own, places
from lastbit.tracing.lanes import Addresses, Source, swapped

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""Operations that make tensors and write nothing."""

FILLING = ("zeros", "zeros_like", "new_zeros", "zero_", "ones", "ones_like", "full", "full_like", "new_full", "fill_")
"""Operations that give every element one number."""

NUMBERS = ("other", "exponent", "value", "min", "max")
"""Arguments that are numbers of Python's which an operation computes with."""

CHOOSING = ("condition", "mask", "index", "indices")
"""Arguments that say which elements are taken, and not what they are."""

# Scalars and small vectors, as torch keeps eps and codebooks; more is a tensor that some operation made.
FEW = 16
"""Elements of an operand that are kept with an operation: what made it may not have been seen."""

# Operations by what they do, where a tag of torch does not say it: element by element; along dimensions; along one of
# them and of the same shape; moving elements, with the arguments whose elements those are; products.
_POINTWISE = ("_to_copy", "copy_", "clone", "fill_", "zero_", "lift_fresh_copy", "contiguous")
_REDUCTIONS = ("var_mean", "std_mean", "linalg_vector_norm", "logsumexp", "argmax", "argmin", "median", "cummax")
_WITHIN = ("_softmax", "_log_softmax", "cumsum", "cumprod", "sort", "logcumsumexp")
_MOVERS = {
    **dict.fromkeys(("index", "index_select", "gather", "take", "masked_select"), ("self",)),
    **dict.fromkeys(("flip", "roll", "repeat", "constant_pad_nd", "tril", "triu"), ("self",)),
    **dict.fromkeys(("slice_scatter", "select_scatter", "scatter"), ("self", "src")),
    **dict.fromkeys(("slice_backward", "select_backward"), ("grad_output",)),
    **dict.fromkeys(("cat", "stack"), ("tensors",)),
    "embedding": ("weight",),
    "index_put": ("self", "values"),
    "index_copy": ("self", "source"),
}
_DOTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}

_VIEWED = {torch.bfloat16: (torch.int16, BFLOAT16)}
_VIEWED |= {torch.float8_e4m3fn: (torch.uint8, E4M3), torch.float8_e5m2: (torch.uint8, E5M2)}


def array_of(tensor: Tensor) -> Array:
    """Copy a tensor's elements to an array of its shape."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    raw, dtype = _VIEWED.get(plain.dtype, (None, None))
    if raw is None:
        return np.array(plain.numpy())
    return np.array(plain.contiguous().view(raw).numpy()).view(dtype)


def addresses_of(tensor: Tensor) -> Addresses:
    """Return the addresses of a strided tensor's elements."""
    start, shape, width = tensor.data_ptr(), tuple(tensor.shape), tensor.element_size()
    strides = tensor.stride()

    def at(lanes: Array) -> Array:
        index = np.unravel_index(lanes, shape) if shape else ()
        steps = (i * stride for i, stride in zip(index, strides, strict=True))
        return np.asarray(sum(steps, np.zeros(len(lanes), np.int64)) * width + start, np.int64)

    return at


def record_input(log: Log, name: str, tensor: Tensor, shadow: ShadowMemory | None = None) -> Event:
    """Record an input of the kernel as an event that wrote it."""
    residues = None
    if shadow is not None and tensor.is_floating_point():
        shadow.register(tensor)
        residues = Residues.of(tensor)
    event = log.add(f"input {name}", (), array_of(tensor), tensor.dtype, residues=residues)
    _wrote(log, event, tensor)
    return event


def _wrote(log: Log, event: Event, tensor: Tensor, kept: Source | None = None) -> None:
    """Record the addresses that an event wrote, except for elements it kept: those for which `kept` has a source."""
    lanes = np.arange(tensor.numel())
    changed = None if kept is None else lanes[kept(lanes)[:, 0] < 0]
    addresses = addresses_of(tensor)(lanes if changed is None else changed)
    log.written(event, addresses, changed, tensor.element_size(), at=event.places)


def is_unwritten(event: Event) -> bool:
    """Return whether an event only makes a tensor, and writes nothing."""
    return event.name.rpartition(".")[2] in UNWRITTEN


def is_filled(event: Event) -> bool:
    """Return whether an event gives every element of a tensor one number."""
    return event.name.rpartition(".")[2] in FILLING


class TorchWatch(UncompiledMode):
    """Dispatch mode that records PyTorch's operations in a log, except for views, which write nothing."""

    def __init__(self, log: Log, shadow: ShadowMemory | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._shadow = log, shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._log.interpreting or torch.Tag.inplace_view in func.tags or func.overloadpacket.__name__ == "set_":
            return func(*args, **kwargs)
        call = _TorchCall.of(func, args, kwargs)
        named = [(name, x) for name, x in call.tensors if name != "out"]
        own = is_lastbits_own(sys._getframe(1))  # memory under guards, where the kernel asked for torch.empty
        name = "empty" if own else call.name
        fresh = name == "lift_fresh"  # what torch.tensor makes, seen for the first time
        used = list[tuple[Tensor, Operand]]()
        with _disable_current_modes():
            for argument, x in named if not fresh and name not in UNWRITTEN else ():
                values, chooses = array_of(x) if x.numel() <= FEW else None, argument in CHOOSING
                plain = Operand(lanes.everything(()), memory=addresses_of(x), values=values)
                used.append((x, replace(plain, address=chooses, size=x.numel())))
        held = {x.untyped_storage()._cdata for _, x in named}
        with _disable_current_modes() if own else nullcontext():
            result = func(*args, **kwargs)
        returned = [x for x in tree_leaves(result) if _is_plain(x)]
        made = call.changed or [x for x in returned if fresh or x.untyped_storage()._cdata not in held]
        with _disable_current_modes():  # what is found out about it is no operation of the kernel's
            if own and self._shadow is not None:
                for x in returned:
                    if x.is_floating_point():
                        self._shadow.allocate(x)
            for part, tensor in enumerate(made):
                self._tell(name, call, used, tensor, part)
        return result

    def _tell(self, name: str, call: _TorchCall, used: list[tuple[Tensor, Operand]], tensor: Tensor, part: int) -> None:
        """Record an event for one of the tensors that a call made or changed."""
        sources = [call.source(x, tensor, part) for x, _ in used]
        taken = [(x, replace(own, source=s)) for (x, own), s in zip(used, sources, strict=True) if s is not None]
        numbers = [Operand(lanes.everything((1,)), values=np.array([n])) for n in call.numbers.values()]
        residues = None
        if self._shadow is not None and tensor.is_floating_point() and tensor.numel():
            residues = self._shadow.read(tensor)
        event = self._log.add(
            f"{call.func.namespace}.{name}",
            places(sys._getframe(2)),
            array_of(tensor),
            tensor.dtype,
            (*(own for _, own in taken), *numbers),
            again=call.again([x for x, _ in taken], part),
            residues=residues,
        )
        puts = name.endswith("_") and name.removesuffix("_") in _MOVERS and not call.given.get("accumulate")
        _wrote(self._log, event, tensor, sources[0] if puts else None)


@dataclass(frozen=True, eq=False)
class _TorchCall:
    """A call of an operation, with its arguments by name."""

    func: Any
    given: Mapping[str, Any]

    @classmethod
    def of(cls, func: Any, args: Any, kwargs: Any) -> _TorchCall:
        names = [argument.name for argument in func._schema.arguments]
        return cls(func, {**dict(zip(names, args, strict=False)), **kwargs})

    @property
    def name(self) -> str:
        """The name of the operation without its namespace."""
        return str(self.func.overloadpacket.__name__)

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors among the arguments, each with the name of its argument."""
        return [(name, x) for name, value in self.given.items() for x in tree_leaves(value) if _is_plain(x)]

    @property
    def numbers(self) -> dict[str, float]:
        """Arguments that are numbers of Python's, with which the operation computes."""
        return {name: x for name in NUMBERS if isinstance(x := self.given.get(name), int | float)}

    @property
    def changed(self) -> list[Tensor]:
        """The tensors among the arguments that the operation writes to."""
        written = (a.name for a in self.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        return [x for name in written for x in tree_leaves(self.given.get(name)) if _is_plain(x)]

    def again(self, operands: Sequence[Tensor], part: int) -> Again:
        """Make a function that repeats the call, from values of its operand tensors, then of its numbers."""
        empty = {id(x): torch.empty_like(x, device="meta") for _, x in self.tensors}  # nobody's memory is held
        slots, numbers = [empty[id(x)] for x in operands], list(self.numbers)
        kept = _TorchCall(self.func, swapped(dict(self.given), empty))

        def again(values: Sequence[Made | None]) -> Made:
            tensors, memory = {id(x): filled(x, None) for x in empty.values()}, ShadowMemory()
            known = [own for own in values[: len(slots)] if own is not None]
            follows = bool(known) and all(own.followed for own in known)
            for slot, own in zip(slots, values, strict=False):
                tensor = tensors[id(slot)] = filled(slot, None if own is None else own.values)
                if own is not None and own.residues is not None:
                    memory.write(tensor, Residues(own.residues.numbers.reshape(4, *tensor.shape)))
            pairs = zip(numbers, values[len(slots) :], strict=True)
            other = {name: float(own.values.reshape(-1)[0]) for name, own in pairs if own is not None}
            call = replace(kept, given=swapped(kept.given, tensors) | other)
            with Following(memory) if follows else nullcontext():
                result = call.func(**call.given)
            made = (call.changed or [x for x in tree_leaves(result) if _is_plain(x)])[part]
            has = follows and made.is_floating_point() and made.numel()
            return Made(array_of(made), memory.read(made) if has else None)

        return again

    def source(self, operand: Tensor, result: Tensor, part: int) -> Source | None:
        """Return the source of a result in an operand; None if nothing came from it, as from the target of a copy."""
        name, shape, made = self.name, tuple(operand.shape), tuple(result.shape)
        if name == "copy_" and operand is self.given["self"]:
            return None
        if self.given.get("accumulate"):
            return lanes.pointwise(shape, made) if operand is self.given["self"] else lanes.everything(shape)
        if name.removesuffix("_") in _MOVERS and not name.startswith("_"):
            return self._moved(operand, part)
        if name in _DOTS:
            sides = [self.given[side] for side in _DOTS[name]]
            of_sides = lanes.of_dot(*(tuple(side.shape) for side in sides))
            own = (source for side, source in zip(sides, of_sides, strict=True) if operand is side)
            return next(own, lanes.pointwise(shape, made))
        if torch.Tag.pointwise in self.func.tags or name in _POINTWISE:
            return lanes.pointwise(shape, made)
        if "normalized_shape" in self.given:  # an input's row for an element or statistic, a weight's element
            axes = tuple(range(len(shape) - len(self.given["normalized_shape"]), len(shape)))
            if len(shape) < len(made) or not axes:
                return lanes.pointwise(shape, made)
            return lanes.within(shape, axes) if shape == made else lanes.along(shape, axes)
        dim = self.given.get("dim") if shape else None
        dims = dim if isinstance(dim, list | tuple) else [] if dim is None else [dim]
        axes = tuple(sorted(d % len(shape) for d in dims))
        if name in _WITHIN and shape == made and axes:
            return lanes.within(shape, axes)
        if torch.Tag.reduction in self.func.tags or name in _REDUCTIONS:
            kept = [side for axis, side in enumerate(shape) if axes and axis not in axes]
            if np.prod(kept, dtype=np.int64) == np.prod(made, dtype=np.int64):
                return lanes.along(shape, axes)
        return lanes.everything(shape)

    def _moved(self, operand: Tensor, part: int) -> Source:
        """Return the source of an operation that moves elements, by repeating it on their indices.

        Indices count from 1, so that a zero that the operation fills in is no element.
        """
        name = self.name.removesuffix("_")
        data = {id(x): x for a in _MOVERS[name] for x in tree_leaves(self.given.get(a)) if isinstance(x, Tensor)}
        if id(operand) not in data:
            return lanes.everything(tuple(operand.shape))
        again: Callable[..., Any] = getattr(getattr(torch.ops, self.func.namespace), name)
        indices = (x for _, x in self.tensors if id(x) not in data and not x.is_floating_point())
        kept = {id(x): x.detach().clone().cpu() for x in indices}  # they may change later
        arguments = swapped({key: value for key, value in self.given.items() if key != "out"}, kept)

        def index() -> Array:
            numbers = {key: torch.zeros(x.shape, dtype=torch.int64) for key, x in data.items()}
            numbers[id(operand)] = torch.arange(1, operand.numel() + 1).reshape(operand.shape)
            return np.asarray(tree_leaves(again(**swapped(arguments, numbers)))[part].numpy() - 1)

        return lanes.moved(index)


def filled(like: Tensor, values: Array | None) -> Tensor:
    """Make a tensor of these values; in fp32 where the narrower dtype of the one `like` it does not hold them."""
    if values is None:
        return torch.zeros(like.shape, dtype=like.dtype)
    wide = np.float64 if like.is_floating_point() else np.int64
    given = torch.from_numpy(values.astype(wide)).reshape(like.shape)
    own = given.to(like.dtype)
    if not like.is_floating_point() or like.element_size() >= 4:
        return own
    holds = torch.equal(own.to(given.dtype).nan_to_num(), given.nan_to_num())
    return own if holds and values.dtype != np.float32 else given.float()


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and x.device.type != "meta"
