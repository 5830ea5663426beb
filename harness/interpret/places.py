"""Places in a kernel's source: of instructions, and of the expression that is being run."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from lastbit.interpret.rewrite import Namespace


@dataclass(frozen=True)
class Place:
    """An expression in a file.

    Attributes:
        line, end_line: counted from 1.
        column, end_column: in characters, counted from 0; the end is the first that is not part of it.
        function: the function that it stands in.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str

    @property
    def text(self) -> str:
        """The expression as it stands in the file, in one line."""
        lines = [line.rstrip("\n") for line in linecache.getlines(self.file)[self.line - 1 : self.end_line]]
        if not lines:
            return ""
        lines[-1] = lines[-1][: self.end_column]
        lines[0] = lines[0][self.column :]
        return " ".join(line.strip() for line in lines)

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} `{self.text}`"


def place_of(code: CodeType, instruction: int) -> Place:
    """Return the expression in the file from which an instruction of `code` was compiled."""
    return _place_of(code, code.co_filename, instruction)


@cache
def _place_of(code: CodeType, file: str, instruction: int) -> Place:
    """Return the place of an instruction; `file` is the code's: code compiled from another file may be equal."""
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    line, end_line, column, end_column = positions
    first = line or code.co_firstlineno
    last = end_line or first
    start = character(file, first, column or 0)
    end = character(file, last, sys.maxsize if end_column is None else end_column)
    return Place(file, first, start, last, end, code.co_name)


def character(file: str, line: int, column: int) -> int:
    """Convert a column of a line, which Python counts in bytes of UTF-8, to characters."""
    return len(linecache.getline(file, line).rstrip("\n").encode()[:column].decode(errors="ignore"))


def here() -> Place | None:
    """Return the innermost expression of a kernel that is being run; None where its source could not be read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_globals, Namespace):
        frame = frame.f_back
    return None if frame is None else place_of(frame.f_code, frame.f_lasti)


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
    sentence = f"{type(error).__name__}: {error}"
    frames = [(f, line) for f, line in traceback.walk_tb(error.__traceback__) if isinstance(f.f_globals, Namespace)]
    if frames:  # the last is of the kernel, or of a function that it calls
        code, line = frames[-1][0].f_code, frames[-1][1]
        text = linecache.getline(code.co_filename, line).strip()
        sentence += f" ({code.co_filename}:{line} in {code.co_name}: {text})"
    return f"{sentence}. {REMEDY}" if isinstance(error, NotImplementedError) else sentence
