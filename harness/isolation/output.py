"""What a kernel process prints, as far as anybody reads it."""

from __future__ import annotations

import os
from contextlib import suppress

MOST = 1 << 16
"""Bytes of a process that are kept."""


class Output:
    """The reading end of a pipe; it is read without waiting, beyond `MOST` to no end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._kept = descriptor, bytearray()
        os.set_blocking(descriptor, False)

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bool:
        """Take what is there; whether more may come."""
        with suppress(BlockingIOError):
            while part := os.read(self._descriptor, 1 << 16):
                self._kept += part[: MOST - len(self._kept)]
            return False
        return True

    def close(self) -> str:
        """All that was printed, as text."""
        self.read()
        os.close(self._descriptor)
        return self._kept.decode("utf-8", "backslashreplace")
