"""What is said of an error in an interpreted kernel: what could not be done, and on which line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from lastbit.interpret.rewrite import Namespace

REMEDY = "Only the interpreter lacks it: check this kernel on a GPU, with --device cuda."


class NotInterpreted(NotImplementedError, AttributeError):
    """An operation that the interpreter does not have."""


def missing(name: str) -> Callable[..., Any]:
    """In place of the language's function `name`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotInterpreted(f"the operation {name!r} is not interpreted")

    return call


def described(error: Exception) -> str:
    """The error, the line of the kernel on which it was raised, and for what is not interpreted what to do."""
    place = _place(error.__traceback__)
    sentence = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
    return f"{sentence}. {REMEDY}" if isinstance(error, NotImplementedError) else sentence


def _place(trace: TracebackType | None) -> str | None:
    """The innermost line of a kernel or of a function that it calls."""
    lines = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
        if isinstance(frame.f_globals, Namespace)
    ]
    if not lines:
        return None
    file, line, name = lines[-1]
    return f"{file}:{line} in {name}: {linecache.getline(file, line).strip()}"
