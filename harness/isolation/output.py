"""The output of a kernel process: read so that it need not wait, kept up to a bound, and escaped."""

from __future__ import annotations

import os

from lastbit.reports.characters import visible

MOST = 1 << 16
"""Bytes of a process that are kept."""

_PIECE = 1 << 16
_HELD = 1 << 20  # bytes that a pipe holds at most, unless root makes it larger


class Output:
    """The reading end of a pipe, to be waited for. What comes after `MOST` bytes is read, counted and dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._kept = descriptor, bytearray()
        self.dropped = 0
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Read some of what has arrived; return whether more may come.

        Only some: who prints without an end must not keep the reader from looking at the clock.
        """
        try:
            piece = os.read(self._descriptor, _PIECE)
        except BlockingIOError:
            return True
        kept = piece[: MOST - len(self._kept)]
        self._kept += kept
        self.dropped += len(piece) - len(kept)
        return bool(piece)

    def close(self) -> str:
        """Close the pipe, and return what was printed, with escapes for characters that would command a terminal."""
        for _ in range(_HELD // _PIECE + 1):
            self.read()
        os.close(self._descriptor)
        text = visible(self._kept.decode("utf-8", "backslashreplace"), keep="\n\t")
        return f"{text}\n… and {self.dropped} bytes more\n" if self.dropped else text
