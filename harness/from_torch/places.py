"""The place in its source that a function has reached while it is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

_OWN = str(Path(__file__).parent)
_OF_NO_FUNCTION = (str(Path(torch.__file__).parent), _OWN)

Place = tuple[str, int]
"""File and line."""


def frames() -> Iterator[FrameType]:
    """Yield the frames of the traced function and of what it calls, the innermost first; none of torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if of_source(file):
            yield frame
        elif file.startswith(_OWN) and frame.f_code.co_name == "called":
            return
        frame = frame.f_back


def of_source(file: str) -> bool:
    """Return whether a file is one of the function or of what it calls."""
    return not file.startswith(("<", *_OF_NO_FUNCTION))


def place_now() -> Place:
    """Return file and line of the operation that is being traced."""
    return next(((f.f_code.co_filename, f.f_lineno) for f in frames()), ("", 0))


def here() -> str:
    """Return file and line of the operation that is being traced, as text for a message."""
    return "{}:{}".format(*place_now())
