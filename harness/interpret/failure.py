"""Messages for errors in interpreted kernels: the operation that failed, and its line."""

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
    """Return a function that raises `NotInterpreted` in place of the language's function `name`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotInterpreted(f"the operation {name!r} is not interpreted")

    return call


def described(error: Exception) -> str:
    """Describe an error: its message, the line of the kernel that raised it, and a remedy if it is not interpreted."""
    place = _place(error.__traceback__)
    sentence = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
    return f"{sentence}. {REMEDY}" if isinstance(error, NotImplementedError) else sentence


def _place(trace: TracebackType | None) -> str | None:
    """Return the innermost line of a kernel, or of a function that it calls, in a traceback; None if there is none."""
    lines = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(trace)
        if isinstance(frame.f_globals, Namespace)
    ]
    if not lines:
        return None
    file, line, name = lines[-1]
    return f"{file}:{line} in {name}: {linecache.getline(file, line).strip()}"
