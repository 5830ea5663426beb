"""Where in a kernel's source the interpreter is."""

from __future__ import annotations

import linecache
import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType

from harness.interpret.rewrite import Namespace


@dataclass(frozen=True)
class Place:
    """An expression of a kernel: the instruction at `offset` of `code`, which was compiled from the kernel's file."""

    code: CodeType
    offset: int

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def line(self) -> int:
        return self._position[0] or self.code.co_firstlineno

    @property
    def expression(self) -> str:
        """The text of the expression, on one line."""
        first, last, start, stop = self._position
        if first is None or last is None:
            return linecache.getline(self.file, self.line).strip()
        lines = [linecache.getline(self.file, i).rstrip("\n") for i in range(first, last + 1)]
        lines[-1] = lines[-1].encode()[:stop].decode()
        lines[0] = lines[0].encode()[start:].decode()
        return " ".join(" ".join(lines).split())

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line} `{self.expression}`"

    @cached_property
    def _position(self) -> tuple[int | None, int | None, int | None, int | None]:
        """First and last line, first and last column; columns count bytes of UTF-8."""
        return next(islice(self.code.co_positions(), self.offset // 2, None))


def here() -> Place | None:
    """The innermost expression of a kernel that is being run; None where its source could not be read."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_globals, Namespace):
        frame = frame.f_back
    return None if frame is None else Place(frame.f_code, frame.f_lasti)
