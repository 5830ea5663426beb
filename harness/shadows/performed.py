"""Steps that a kernel performs, compared between two devices: operations of PyTorch and launches of Triton, in order.

A kernel that is followed on the CPU is followed for what it does on another device only where it does the same there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from lastbit.kernel import Kernel
from lastbit.shadows.aten import ONCE_ON_CUDA, UncompiledMode, as_written, tensors_in
from lastbit.shadows.aten_rules import EXACT, MOVES
from lastbit.shadows.shadow_memory import bytes_of
from lastbit.started import reported_launches

_ONCE = (
    "_local_scalar_dense _to_copy _unsafe_view abs add amax amin argmax argmin clamp clamp_max clamp_min copy cos div "
    "eq exp exp2 expm1 fill ge gt isfinite isinf isnan isneginf isposinf le lift_fresh log log1p log2 logical_not lt "
    "masked_fill max maximum min minimum mul ne neg reciprocal relu rsqrt rsub sigmoid silu sin sqrt sub sum tanh "
    "where zero"
)
ONCE = frozenset(_ONCE.split()) | MOVES | EXACT
"""Operations that round once, when the result is stored, whichever device computes numbers of 16 bits or fewer.

Of others, torch has a kernel for each device that may round what is in between: the mean of numbers of bf16, say, which
the CPU divides after it was rounded and a GPU before. Products of matrices may be added in parts that are rounded.
"""

_OF_TARGET = frozenset({"current_target", "is_cuda", "is_hip", "cuda_capability_geq", "is_hip_cdna3", "is_hip_cdna4"})
"""Names in programs by which they are others on another device."""


@dataclass(frozen=True)
class PerformedSteps:
    """The steps of one call of a kernel.

    Attributes:
        steps: operations and launches in order, with dtypes, shapes and numbers.
        doubts: why what was followed on another device may be something else though the steps are the same.
    """

    steps: tuple[str, ...]
    doubts: tuple[str, ...]

    @property
    def end_with_the_only_launch(self) -> bool:
        """Return whether the last step is a launch of Triton, and no other step is."""
        launches = [place for place, step in enumerate(self.steps) if ":" in step.partition("(")[0]]
        return launches == [len(self.steps) - 1]

    def apart(self, other: PerformedSteps) -> str:
        """Return why the other call, on the CPU, may compute something else; empty if both perform the same."""
        for own, theirs in zip((*self.steps, "nothing"), (*other.steps, "nothing"), strict=False):
            if own != theirs:
                # A launch begins with the name of its program, and then those of functions that this calls.
                mine, others = (step.partition("(")[0].partition(";")[0] for step in (own, theirs))
                how = f"{others} in place of {mine}" if mine != others else f"{mine} of something else"
                return f"the kernel performs {how} there"
        return next(iter((*self.doubts, *other.doubts)), "")


def performed(
    kernel: Kernel, tensors: Mapping[str, Tensor], params: Mapping[str, Any], device_type: str
) -> PerformedSteps:
    """Call a kernel on tensors, which it may write to, and return the steps it performs.

    Functions that torch would compile run as they are written. `device_type` is of the other device,
    which the doubts are about.
    """
    seen = _Steps(ONCE | ONCE_ON_CUDA if device_type == "cuda" else ONCE)
    for tensor in tensors.values():
        seen.keep(tensor)
    with as_written(), reported_launches(seen.launched), seen:
        returned = kernel.call(**tensors, **params)
    seen.check(returned)
    seen.check(list(tensors.values()))
    return PerformedSteps(tuple(seen.steps), tuple(dict.fromkeys(seen.doubts)))


class _Steps(UncompiledMode):
    """Records the steps of a kernel, and doubts where something else has written memory: an extension, another thread.

    It keeps the contents of memory after the last step that may have written there.
    """

    def __init__(self, once: Collection[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._once = once
        self.steps: list[str] = []
        self.doubts: list[str] = []
        self._held: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if (out := self.decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        if name == "lift_fresh":  # what Python has written down
            self.keep(args[0])
        with _disable_current_modes():
            self.check([args, kwargs])
        out = func(*args, **kwargs)
        with _disable_current_modes():
            written = out.tolist() if name == "lift_fresh" else ""
            self.steps.append(f"{func}({described([args, kwargs])}) as {described(out)}{written}")
            tensors = tensors_in([args, kwargs, out])
            schema = func._schema
            is_view = not schema.is_mutable and any(r.alias_info is not None for r in schema.returns)
            narrow = any(x.is_floating_point() and x.itemsize < 4 for x in tensors)
            if narrow and not is_view and name.removeprefix("_foreach_").rstrip("_") not in self._once:
                self.doubts.append(f"{func} may round elsewhere on another device")
            for x in tensors if schema.is_mutable else [] if is_view else tensors_in(out):
                self.keep(x)
        return out

    def launched(self, program: Any, args: Any, kwargs: Any, launch: Callable[[], Any]) -> Any:
        """Record a launch of a Triton program, and make it."""
        with _disable_current_modes():
            self.check([args, kwargs])
            bound = signature(program.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in program.arg_names})
            bound.apply_defaults()
            words = [f"{name}={described(value)}" for name, value in bound.arguments.items()]
            self.steps.append(f"{'; '.join(self._text(program, {}))}({', '.join(words)})")
            returned = launch()
            for x in tensors_in([[getattr(a, "base", a) for a in (*args, *kwargs.values())]]):
                self.keep(x)
        return returned

    def _text(self, program: Any, seen: dict[int, None]) -> Iterator[str]:
        """Yield the functions that a program is made of, with the numbers they take from their modules."""
        function = program.fn
        code: CodeType = function.__code__
        seen[id(code)] = None
        numbers, called = [], []
        for name in code.co_names:
            if name in _OF_TARGET:
                self.doubts.append(f"{function.__name__} asks for the device ({name})")
            value = function.__globals__.get(name)
            value = getattr(value, "value", value)  # of a constexpr
            if isinstance(value, (bool, int, float, str)):
                numbers.append(f"{name}={value!r}")
            elif hasattr(value, "arg_names") and id(value.fn.__code__) not in seen:
                called.append(value)
        given = f" with {', '.join(numbers)}" if numbers else ""
        yield f"{function.__module__}.{function.__qualname__}:{code.co_firstlineno}{given}"
        for other in called:
            if str(other.fn.__module__).split(".")[0] != "triton":
                yield from self._text(other, seen)

    def keep(self, tensor: Tensor) -> None:
        """Copy the bytes in the memory of a tensor."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._held[storage.data_ptr()] = storage, bytes_of(storage).clone()

    def check(self, tree: object) -> None:
        """Record a doubt for each tensor that has changed since the last step, or that no step has made."""
        for tensor in tensors_in(tree):
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                continue
            kept = self._held.get(storage.data_ptr())
            known = kept is not None and kept[0].nbytes() == storage.nbytes()
            if known and kept is not None and torch.equal(kept[1], bytes_of(storage)):
                continue
            if known or tensor.is_floating_point():
                self.doubts.append("a tensor was written by something that is no operation of PyTorch or Triton")
            self.keep(tensor)


def described(value: Any) -> str:
    """Describe an argument in words that are equal on every device."""
    value = getattr(value, "base", value) if not isinstance(value, Tensor) else value  # of a descriptor
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return described([f"{k}={described(v)}" for k, v in value.items() if k not in ("device", "pin_memory")])
    if isinstance(value, (list, tuple)):
        return f"({', '.join(x if isinstance(x, str) else described(x) for x in value)})"
    if isinstance(value, torch.device):
        return "device"
    if hasattr(value, "arg_names"):
        return str(value.fn.__qualname__)
    return repr(getattr(value, "value", value))
