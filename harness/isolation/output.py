"""What a kernel process prints: read so that it never waits, kept up to a bound, and escaped."""

from __future__ import annotations

import codecs
import os
import threading
from contextlib import suppress
from typing import TextIO

from reports.characters import visible

MOST = 64 * 1024
"""Bytes that are kept of a process."""

_PIECE = 1 << 16


class Output:
    """Copies what comes out of a pipe to a log, as a context manager; the end of it waits for what is under way.

    After `MOST` bytes the rest is counted and dropped; the log has a line that says how much. Characters that would
    command a terminal are escaped, and every line begins with `prefix`, so that none can pass for lastbit's own.
    """

    def __init__(self, pipe: int, log: TextIO, prefix: str = "") -> None:
        self._pipe, self._log, self._prefix = pipe, log, prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._at_start = True
        self.kept = self.dropped = 0
        self._thread = threading.Thread(target=self._copy, name="output", daemon=True)
        self._thread.start()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self, patience: float = 1.0) -> None:
        """Wait until all processes that have the other end have ended, or for `patience` seconds."""
        self._thread.join(patience)

    def _copy(self) -> None:
        while piece := os.read(self._pipe, _PIECE):
            keep = piece[: MOST - self.kept]
            self.kept += len(keep)
            self.dropped += len(piece) - len(keep)
            self._write(self._decoder.decode(keep))
        os.close(self._pipe)
        self._write(self._decoder.decode(b"", final=True))
        if self.dropped:
            self._write(("" if self._at_start else "\n") + f"… and {self.dropped} bytes more\n")

    def _write(self, text: str) -> None:
        """Written or not, the pipe is read on."""
        with suppress(OSError, ValueError):
            for line in visible(text, keep="\n\t").splitlines(keepends=True):
                self._log.write((self._prefix if self._at_start else "") + line)
                self._at_start = line.endswith("\n")
            self._log.flush()
