"""The steps that a program took before it left its tape, and operations as functions of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from triton.runtime.interpreter import TensorHandle

from lastbit.interpret.replay import Diverged
from lastbit.interpret.tape import Guard, TapeStep


class Past:
    """The steps that a program took on a tape before it left it."""

    def __init__(self, diverged: Diverged) -> None:
        self.registers, self.segment, self.failed = diverged.registers, diverged.path[-1], diverged.failed
        self._events: list[tuple[str, TapeStep | None]] = []
        for segment in diverged.path:
            self._events += [(step.name, step) for step in segment.steps]
            self._events.append((Guard.__name__, None))
        if diverged.failed:
            del self._events[len(self._events) - 1 - len(self.segment.steps) + diverged.done :]
        self._position = 0

    @property
    def goes_on(self) -> bool:
        return self._position < len(self._events)

    def take(self, name: str) -> Any:
        """Return the next step, which must be the operation `name`, and advance."""
        found, step = self._events[self._position]
        if found != name:
            raise RuntimeError(f"run again with the same values, the kernel asks for {name}, not for {found}")
        self._position += 1
        return step


@dataclass(frozen=True)
class _Hole:
    """The place of an operand among arguments; `dtype` is None for objects that are no handles."""

    dtype: Any


def _with_holes(value: Any, operands: dict[int, _Hole]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_with_holes(part, operands) for part in value]
    return operands.get(id(value), value)


def _filled(value: Any, arrays: Iterator[Any]) -> Any:
    if isinstance(value, _Hole):
        return next(arrays) if value.dtype is None else TensorHandle(next(arrays), value.dtype)
    if isinstance(value, list):
        return [_filled(part, arrays) for part in value]
    return value


def on_arrays(method: Callable[..., Any], args: Any, kwargs: Any, operands: list[Any]) -> Callable[..., Any]:
    """Return a builder's method, called with these arguments, as a function of the registers of its operands."""
    holes = {id(x): _Hole(getattr(x, "dtype", None)) for x in operands}
    positional = [_with_holes(x, holes) for x in args]
    named = {name: _with_holes(x, holes) for name, x in kwargs.items()}

    def run(*arrays: Any) -> Any:
        left = iter(arrays)
        found = [_filled(x, left) for x in positional]
        return _stored(method(*found, **{name: _filled(x, left) for name, x in named.items()}))

    return run


def _stored(result: Any) -> Any:
    """Return a result as a register holds it: the arrays of handles, other objects as they are."""
    if isinstance(result, TensorHandle):
        return result.data
    return tuple(map(_stored, result)) if isinstance(result, (list, tuple)) else result
