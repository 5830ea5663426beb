"""Guards around what a kernel allocates itself, and which elements of it were never written.

While `guarded_allocations` is active, torch's functions that return uninitialised memory return tensors amid canaries,
filled with a poison; `lastbit.inputs.poison` says which elements of a result still hold it after two runs.

Each allocation has a poison with a payload of its own, where its dtype has NaNs with payloads: loads, stores and most
arithmetic keep it. An element of a result that holds the poison of another allocation was written, with a value that
was computed from memory that was not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.inputs.guards import MANTISSA_BITS, Guarded, canary, guard, is_whole
from lastbit.inputs.poison import POISONS, Poison
from lastbit.inputs.written import AllocationCheck, only_canaries, violations
from lastbit.result import Finding

Allocate = Callable[..., Any]

# NaNs of bf16 tell 63 payloads apart; half of them are as many allocations as one call is told of.
_PAYLOADS = 32
_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (Tensor, "new_empty"),
    (Tensor, "new_empty_strided"),
)


class _LegacyType(type):
    """The metaclass of stand-ins for types such as `torch.FloatTensor`: called with sizes, these ask `torch.empty`."""

    original: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and not kwargs and all(type(size) is int for size in args):
            return torch.empty(args, dtype=cls.original.dtype)
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


_LEGACY = tuple(
    (torch, f"{kind}Tensor")
    for kind in ("Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool")
)


class Allocations:
    """The tensors allocated under guard. All stay alive as long as this object, so that they can be checked.

    Attributes:
        poison: 0 or 1.
        unguarded: one sentence for each allocation on the device that could not be guarded.
    """

    def __init__(self, poison: int, device: torch.device | str | None) -> None:
        if poison not in POISONS:
            raise UsageError(f"poison={poison!r} must be 0 or 1")
        self.poison = poison
        self.unguarded: list[str] = []
        self._device_type = None if device is None else torch.device(device).type
        self._guarded: list[Guarded] = []

    def __len__(self) -> int:
        return len(self._guarded)

    @property
    def tensors(self) -> list[Tensor]:
        """The guarded tensors, in the order in which they were allocated."""
        return [guarded.tensor for guarded in self._guarded]

    def checks(self, names: Mapping[str, Tensor]) -> list[AllocationCheck]:
        """Return the checks that nothing was written outside the allocated tensors, each named as in `names` if it
        backs one of these.

        Of an allocation whose storage the kernel resized, which it may do with its own, nothing is known.
        """
        known = {tensor.untyped_storage().data_ptr(): name for name, tensor in names.items()}
        checks = []
        for index, guarded in enumerate(self._guarded):
            if is_whole(guarded):
                name = known.get(guarded.words.untyped_storage().data_ptr(), guarded.name)
                checks.append(only_canaries(replace(guarded, name=name), self._number(index)))
        return checks

    def violations(self, names: Mapping[str, Tensor] | None = None) -> list[Finding]:
        """Return the writes outside the allocated tensors: see `checks`."""
        return violations(self.checks(names or {}))

    def allocate(self, original: Allocate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `original` for these arguments, amid canaries where that is possible."""
        like = next((a for a in (*args[:1], kwargs.get("input"), kwargs.get("self")) if isinstance(a, Tensor)), None)
        if kwargs.get("device") is not None:  # to ask for the default may allocate there
            device = torch.device(kwargs["device"])
        else:
            device = torch.get_default_device() if like is None else like.device
        if device.type == "meta" or self._device_type not in (None, device.type):
            return original(*args, **kwargs)
        plan, reason = _plan(original, args, kwargs, like)
        if plan is None:
            self.unguarded.append(f"{original.__name__} was not guarded: {reason}")
            return original(*args, **kwargs)
        if plan.numel() == 0:
            return original(*args, **kwargs)
        shape = tuple(plan.shape)
        name = f"allocation {len(self._guarded)} ({str(plan.dtype).removeprefix('torch.')}{list(shape)})"
        guarded = guard(
            name,
            shape,
            strides=plan.stride(),
            offset=0,
            dtype=plan.dtype,
            device=device,
            number=self._number(len(self._guarded)),
            pin_memory=bool(kwargs.get("pin_memory")),
        )
        if plan.dtype is torch.bool:
            guarded.tensor.fill_(bool(self.poison))
        # A detached alias, so that what the kernel does to its tensor (set_, resize_) leaves the record as it is.
        self._guarded.append(Guarded(name, guarded.tensor.detach(), guarded.words, guarded.start))
        return guarded.tensor.requires_grad_(plan.requires_grad)

    def poison_of(self, result: Tensor) -> Poison:
        """Return the poison that the memory of a result was filled with, and those of others of its dtype."""
        memory = result.untyped_storage().data_ptr()
        numbers = {g.words.untyped_storage().data_ptr(): self._number(i) for i, g in enumerate(self._guarded)}
        own = numbers.get(memory)
        alike = {self._number(i) for i, g in enumerate(self._guarded) if g.tensor.dtype is result.dtype}
        return Poison(own, frozenset(alike - {own} if result.dtype in MANTISSA_BITS else ()))

    def blank(self, tensor: Tensor) -> int | None:
        """Return the bits of an element of `tensor` that was never written, if its memory is guarded and as allocated.

        None as well for elements of one byte, whose canary may be a value.
        """
        memory = tensor.untyped_storage().data_ptr()
        for i, guarded in enumerate(self._guarded):
            if guarded.words.untyped_storage().data_ptr() == memory and guarded.tensor.dtype is tensor.dtype:
                size = tensor.element_size()
                return canary(tensor.dtype, self._number(i)) % 2 ** (8 * size) if size > 1 else None
        return None

    def _number(self, index: int) -> int:
        """Return the number of an allocation's canary: its parity is the poison, the rest is common to both runs."""
        return 2 * (index % _PAYLOADS) + self.poison


@contextmanager
def guarded_allocations(poison: int, *, device: torch.device | str | None = None) -> Iterator[Allocations]:
    """Guard the memory that torch's `empty` functions return, filled with `poison` (0 or 1), for the duration.

    Only allocations on devices of the type of `device` are guarded (None: on every device), and only those made through
    `torch.empty`, `empty_like`, `empty_strided`, `Tensor.new_empty` and `new_empty_strided` as attributes, or with
    sizes through `torch.FloatTensor` and its like. Names imported from torch beforehand, `torch.Tensor(n)` and code
    that torch.compile generates allocate as always. Other threads are affected.

    Raises:
        UsageError: `poison` is neither 0 nor 1.
    """
    # Attributes are patched, not a TorchDispatchMode or TorchFunctionMode entered: while a mode is active,
    # torch.compile silently runs functions eagerly, and the kernel that users run would not be the one verified.
    allocations = Allocations(poison, device)
    # By these tables torch recognises its own functions: they are filled before any of these is patched. One that is
    # first filled while they are patched must be emptied afterwards.
    tables = set(_tables_of_originals())
    for table in tables:
        table()
    own = [(owner, name, name in vars(owner), getattr(owner, name)) for owner, name in (*_FUNCTIONS, *_LEGACY)]
    try:
        for owner, name, _, original in own:
            legacy = isinstance(original, type)
            stand_in = _LegacyType(f"torch.{name}", (), {"original": original}) if legacy else None
            setattr(owner, name, stand_in or _intercepted(original, allocations))
        yield allocations
    finally:
        for owner, name, is_own, original in own:
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)
        for table in set(_tables_of_originals()) - tables:
            table.cache_clear()


def _intercepted(original: Allocate, allocations: Allocations) -> Allocate:
    @functools.wraps(original)
    def allocate(*args: Any, **kwargs: Any) -> Any:
        # Dynamo evaluates this condition while it traces, so that the graph holds the original call.
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return allocations.allocate(original, args, kwargs)

    return allocate


def _plan(
    original: Allocate, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: Tensor | None
) -> tuple[Tensor | None, str]:
    """Return a meta tensor of the shape, strides and dtype that the call would return; or None and the reason."""
    unusual = [name for name in ("out", "names") if kwargs.get(name) is not None]
    if unusual:
        return None, f"it was given {unusual[0]}="
    if like is not None and type(like) not in (Tensor, torch.nn.Parameter):
        return None, f"its argument is a {type(like).__name__}"
    plan = original(*args, **{**kwargs, "device": "meta", "pin_memory": False})
    if type(plan) is not Tensor or plan.layout is not torch.strided:
        return None, f"it returns a {type(plan).__name__} of layout {plan.layout}"
    if plan.dtype.itemsize > 8 or plan.is_quantized:
        return None, f"it returns {plan.dtype}"
    return plan, ""


def _tables_of_originals() -> Iterator[Any]:
    for module, name in (
        ("torch.utils._device", "_device_constructors"),
        ("torch._dynamo.trace_rules", "get_torch_obj_rule_map"),
    ):
        table = getattr(sys.modules.get(module), name, None)
        if hasattr(table, "cache_clear"):
            yield table
