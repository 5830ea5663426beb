"""PyTorch's operations in a kernel, as events: every one that writes tensors, found by their addresses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
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
from lastbit.tracing.events import Again, Event, Made, Operand
from lastbit.tracing.kernel_frames import is_lastbits_own, places
from lastbit.tracing.lanes import Addresses, Source, of_layout, swapped
from lastbit.tracing.log import Log
from lastbit.tracing.torch_lanes import MOVERS, source_of

UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
"""Operations that make tensors and write nothing."""

NUMBERS = ("other", "exponent", "value", "min", "max")
"""Arguments that are numbers of Python's which an operation computes with."""

CHOOSING = ("condition", "mask", "index", "indices")
"""Arguments that say which elements are taken, and not what they are."""

# Scalars and small vectors, as torch keeps eps and codebooks; more is a tensor that some operation made.
FEW = 16
"""Elements of an operand that are kept with an operation: what made it may not have been seen."""

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
    return of_layout(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.element_size())


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
    addresses = addresses_of(tensor).at(lanes if changed is None else changed)
    log.written(event, addresses, changed, tensor.element_size(), at=event.places)


def _used(name: str, tensor: Tensor) -> Operand:
    """Return a tensor that an operation reads as operand: its addresses before that, and its values if they are few."""
    values, size = array_of(tensor) if tensor.numel() <= FEW else None, tensor.numel()
    return Operand(
        lanes.everything(()), memory=addresses_of(tensor), values=values, address=name in CHOOSING, size=size
    )


class TorchWatch(UncompiledMode):
    """Dispatch mode that records PyTorch's operations in a log, except for views, which write nothing."""

    def __init__(self, log: Log, shadow: ShadowMemory | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._shadow = log, shadow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._log.interpreting or torch.Tag.inplace_view in func.tags or func.overloadpacket.__name__ == "set_":
            return func(*args, **kwargs)
        given = _named(func, args, kwargs)
        changed = _changed(func, given)
        named = [(name, x) for name, x in _tensors(given) if name != "out"]
        operands = [x for _, x in named]
        own = is_lastbits_own(sys._getframe(1))  # memory under guards, where the kernel asked for torch.empty
        name = "empty" if own else func.overloadpacket.__name__
        fresh = name == "lift_fresh"  # what torch.tensor makes, seen for the first time
        with _disable_current_modes():
            used = [] if fresh or name in UNWRITTEN else [(x, _used(argument, x)) for argument, x in named]
        held = {_storage(x) for x in operands}
        with _disable_current_modes() if own else nullcontext():
            result = func(*args, **kwargs)
        returned = [x for x in tree_leaves(result) if _is_plain(x)]
        made = changed or [x for x in returned if fresh or _storage(x) not in held]
        with _disable_current_modes():  # what is found out about it is no operation of the kernel's
            if own and self._shadow is not None:
                for x in returned:
                    if x.is_floating_point():
                        self._shadow.allocate(x)
            if made:
                self._tell(name, func, given, used, made)
        return result

    def _tell(
        self, name: str, func: Any, given: Mapping[str, Any], used: list[tuple[Tensor, Operand]], made: list[Tensor]
    ) -> None:
        at = places(sys._getframe(2))
        for part, tensor in enumerate(made):
            sources = [source_of(func, given, x, tensor, part) for x, _ in used]
            taken = [(x, replace(own, source=s)) for (x, own), s in zip(used, sources, strict=True) if s is not None]
            operands = (*(own for _, own in taken), *_numbers_of(given))
            again = _repeatable(func, given, [x for x, _ in taken], part)
            made_of = array_of(tensor), tensor.dtype, operands
            residues = None
            if self._shadow is not None and tensor.is_floating_point() and tensor.numel():
                residues = self._shadow.read(tensor)
            event = self._log.add(f"{func.namespace}.{name}", at, *made_of, again=again, residues=residues)
            puts = name.endswith("_") and name.removesuffix("_") in MOVERS and not given.get("accumulate")
            _wrote(self._log, event, tensor, sources[0] if puts else None)


def _numbers_of(given: Mapping[str, Any]) -> Iterator[Operand]:
    """Yield Python's numbers that an operation computes with, as operands."""
    for name in NUMBERS:
        if isinstance(number := given.get(name), (int, float)):
            yield Operand(lanes.everything((1,)), values=np.array([number]))


@dataclass(frozen=True, eq=False)
class _Slot:
    """A tensor argument without its memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def filled(self, values: Array | None) -> Tensor:
        """Make a tensor of these values; in fp32 where the argument's narrower dtype does not hold them."""
        if values is None:
            return torch.zeros(self.shape, dtype=self.dtype)
        if values.dtype == np.float32 and self.dtype.is_floating_point and self.dtype.itemsize < 4:
            return torch.from_numpy(values.copy()).reshape(self.shape)
        wide = np.float64 if self.dtype.is_floating_point else np.int64
        given = torch.from_numpy(values.astype(wide)).reshape(self.shape)
        own = given.to(self.dtype)
        same = torch.equal(own.to(given.dtype).nan_to_num(), given.nan_to_num())
        return own if same or own.element_size() >= 4 or not own.is_floating_point() else given.float()


def _repeatable(func: Any, given: Mapping[str, Any], operands: Sequence[Tensor], part: int) -> Again:
    """Make a function that repeats an operation, from values of its operand tensors, then of its numbers."""
    of_tensor = {id(x): _Slot(tuple(x.shape), x.dtype) for _, x in _tensors(given)}
    slots, kept = [of_tensor[id(x)] for x in operands], swapped(dict(given), of_tensor)
    names = [name for name in NUMBERS if isinstance(given.get(name), (int, float))]

    def again(values: Sequence[Made | None]) -> Made:
        filled, memory = {id(slot): slot.filled(None) for slot in of_tensor.values()}, ShadowMemory()
        known = [own for own in values[: len(slots)] if own is not None]
        follows = bool(known) and all(own.followed for own in known)
        for slot, own in zip(slots, values, strict=False):
            tensor = filled[id(slot)] = slot.filled(None if own is None else own.values)
            if own is not None and own.residues is not None:
                memory.write(tensor, Residues(own.residues.numbers.reshape(4, *tensor.shape)))
        numbers = zip(names, values[len(slots) :], strict=True)
        changed = {name: float(own.values.reshape(-1)[0]) for name, own in numbers if own is not None}
        arguments = swapped(kept, filled) | changed
        with Following(memory) if follows else nullcontext():
            result = func(**arguments)
        made = (_changed(func, arguments) or [x for x in tree_leaves(result) if _is_plain(x)])[part]
        has = follows and made.is_floating_point() and made.numel()
        return Made(array_of(made), memory.read(made) if has else None)

    return again


def _named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Map the names of an operation's parameters to its arguments."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _changed(func: Any, given: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that the operation writes to."""
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [x for name in written for x in tree_leaves(given.get(name)) if _is_plain(x)]


def _tensors(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in given.items():
        yield from ((name, x) for x in tree_leaves(value) if _is_plain(x))


def _is_plain(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout is torch.strided and x.device.type != "meta"


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
