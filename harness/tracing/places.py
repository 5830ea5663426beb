"""Where in the text of a kernel something happens."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import CodeType, FrameType


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


Places = tuple[Place, ...]


def places(frame: FrameType | None, upto: FrameType | None = None) -> Places:
    """The places in kernels that a frame and its callers are at, the innermost first.

    Frames of Python, torch, Triton, numpy and lastbit are left out, and all from `upto` on.
    """
    found: list[Place] = []
    delayed = None
    while frame is not None and frame is not upto:
        code = frame.f_code
        if _is_of_a_kernel(code.co_filename):
            if delayed != code.co_filename:
                found.append(_place(code, frame.f_lasti))
            delayed = code.co_filename if code.co_name == "<lambda>" else None
        frame = frame.f_back
    return tuple(found)


def is_lastbits_own(frame: FrameType | None) -> bool:
    """Whether a frame is one of lastbit that a kernel called, as where lastbit guards what a kernel allocates."""
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_a_kernel(file):
            return False
        if file.startswith(_OWN) and not file.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


@cache
def _place(code: CodeType, instruction: int) -> Place:
    positions = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    line, end_line, column, end_column = positions
    first = line or code.co_firstlineno
    last = end_line or first
    start = _character(code.co_filename, first, column or 0)
    end = _character(code.co_filename, last, sys.maxsize if end_column is None else end_column)
    return Place(code.co_filename, first, start, last, end, code.co_name)


def _character(file: str, line: int, column: int) -> int:
    """The character of a line at a column, which Python counts in bytes of UTF-8."""
    return len(linecache.getline(file, line).rstrip("\n").encode()[:column].decode(errors="ignore"))


@cache
def _is_of_a_kernel(file: str) -> bool:
    if file.startswith("<"):
        return False
    if file.startswith(_packages()):
        return False
    return "site-packages" in file or not file.startswith(_PYTHON)


_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "")
_PYTHON = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


def _packages() -> tuple[str, ...]:
    """The folders of torch, Triton, numpy and lastbit, with what is loaded of them."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "triton", "numpy"))
    return (_OWN, *(os.path.join(os.path.dirname(file), "") for file in files if file))
