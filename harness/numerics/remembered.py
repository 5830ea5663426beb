"""Memoization: a result is not computed again from the same operands, such as a stage that two contracts share.

Within `with remembering():` a function marked `@remembered` looks for a call with the same numbers, the same tensors
and equal premises. A tensor is the same if it is the same memory, read in the same way, and was not written to since.
So results that follow from remembered ones, by remembered functions and by views, are found again in turn. On the CPU a
tensor with the same bits is the same, too; an accelerator would have to finish everything before it could compare them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lastbit.numerics.formats import Format
from lastbit.numerics.premises import Premises, current

P = ParamSpec("P")
R = TypeVar("R")

# Arbitrary: larger ones take longer to compare, and push out many small ones.
_LARGE = 1 << 18  # elements of the operands of a call from which on it is not remembered
# 64 MiB of fp64 in each worker.
_MOST = 1 << 23  # elements of all operands and results that are kept
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class _RememberedCall:
    """A remembered call: its operands, whose memory is kept alive, their addresses and versions, and its result."""

    operands: list[Tensor]
    places: tuple[tuple[int, int], ...]
    result: Any

    def had(self, operands: list[Tensor]) -> bool:
        """Check whether its operands, in the memory of the host, were these, bit by bit, and are what they were."""
        for known, place, given in zip(self.operands, self.places, operands, strict=True):
            if (known.data_ptr(), known._version) != place:
                return False
            bits = _BITS[known.itemsize]
            same_place = (given.data_ptr(), given._version) == place
            if not same_place and not torch.equal(known.view(bits), given.view(bits)):
                return False
        return True


class _CallCache:
    """The calls so far, by everything that they depend on but their operands, and by the addresses of these."""

    def __init__(self) -> None:
        self._calls: dict[object, dict[tuple[tuple[int, int], ...], _RememberedCall]] = {}
        self._premises: list[Premises] = []
        self._kept: set[int] = set()
        self._elements = 0

    def call(self, function: Callable[..., R], args: tuple[object, ...]) -> R:
        operands: list[Tensor] = []
        shown = _shown(args, operands)
        if sum([operand.numel() for operand in operands]) > _LARGE:
            return function(*args)
        premises = current()
        if premises not in self._premises:
            self._premises.append(premises)
        calls = self._calls.setdefault((function, self._premises.index(premises), shown), {})
        places = tuple([(operand.data_ptr(), operand._version) for operand in operands])
        known = calls.get(places) or _alike(calls.values(), operands)
        if known is None:
            known = _RememberedCall(operands, places, function(*args))
            if self._has_room(known):
                calls[places] = known
        result: R = known.result
        return result

    def _has_room(self, call: _RememberedCall) -> bool:
        """Check whether there is room for a call, and take it; memory that is kept already takes none."""
        results: list[Tensor] = []
        _shown(call.result, results)
        taken = {t.data_ptr(): t.numel() for t in (*call.operands, *results)}
        elements = self._elements + sum([count for address, count in taken.items() if address not in self._kept])
        if elements > _MOST:
            return False
        self._elements = elements
        self._kept.update(taken)
        return True


_memory: ContextVar[_CallCache | None] = ContextVar("memory", default=None)
_marked: set[Callable[..., object]] = set()


@contextmanager
def remembering() -> Iterator[None]:
    """Remember calls of functions marked `@remembered` until the end; within another `remembering` it is that one."""
    token = _memory.set(_memory.get() or _CallCache())
    try:
        yield
    finally:
        _memory.reset(token)


def remembered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose results depend only on its arguments and the premises, and are never written to."""

    @wraps(function)
    def remembering_function(*args: P.args, **kwargs: P.kwargs) -> R:
        memory = _memory.get()
        return function(*args, **kwargs) if memory is None or kwargs else memory.call(function, args)

    _marked.add(remembering_function)
    return remembering_function


def is_remembered(function: Callable[..., object]) -> bool:
    """Return whether a function is one that `remembered` returned."""
    return function in _marked


def _shown(value: object, operands: list[Tensor]) -> object:
    """Return a hashable key of a value, without the elements of its tensors, which are added to the operands."""
    if isinstance(value, Tensor):
        operands.append(value)
        return value.dtype, value.shape, value.stride(), value.device
    kind: Any = type(value)
    if names := _names(kind):
        return kind, *[_shown(getattr(value, name), operands) for name in names]
    if isinstance(value, tuple | list):
        return tuple([_shown(v, operands) for v in value])
    return kind, value.hex() if isinstance(value, float) else value  # 0.0 == -0.0 == 0


def _alike(calls: Iterable[_RememberedCall], operands: list[Tensor]) -> _RememberedCall | None:
    """Find a call with operands of the same bits; not on an accelerator, which would have to finish first."""
    if not operands or operands[0].device.type != "cpu":
        return None
    return next((call for call in calls if call.had(operands)), None)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """Return the attributes that tell values of a type apart; none where they are hashable as they are."""
    if kind is slice:
        return "start", "stop", "step"
    return () if kind is Format or not is_dataclass(kind) else tuple(f.name for f in fields(kind))
