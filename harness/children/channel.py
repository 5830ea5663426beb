"""Messages in a stream between a process and its child: the length of each in eight bytes, then the message.

It imports nothing of lastbit: a *bare* kernel process runs the text of this file before that of
`lastbit.isolation.runner`.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any

_LENGTH = struct.Struct("!Q")
# Arbitrary: a message brings a file for each block of shared memory, and not for each tensor.
_MOST_FDS = 64
# Arbitrary: less costs system calls, more memory of which a message mostly has no use.
_PIECE = 1 << 20  # bytes that are read at once


def _as_json(content: object) -> bytes:
    return json.dumps(content).encode()


class Channel:
    """One end of a stream of messages, each of which may come with file descriptors.

    `written` makes bytes of what is sent, JSON unless it is given. Of a message of more than `most` bytes only so many
    and one more are read, which says that it was longer. Descriptors are taken where `takes_fds` alone: those of a
    stranger are not.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        written: Callable[[Any], bytes] = _as_json,
        most: int | None = None,
        takes_fds: bool = False,
    ) -> None:
        self._socket, self._written, self._most, self._takes_fds = connection, written, most, takes_fds
        self._begun, self._fds = bytearray(), list[int]()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, content: object, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send a message; raise OSError if the other end is gone, or does not listen for so many seconds."""
        text = self._written(content)
        self._socket.settimeout(timeout)
        socket.send_fds(self._socket, [_LENGTH.pack(len(text))], list(fds))
        self._socket.sendall(text)
        self._socket.settimeout(None)

    def arrived(self) -> bytearray | None:
        """Wait for some of the next message, and read it; return the message when it is whole, and None before.

        Raises:
            EOFError: no more comes.
        """
        try:
            if self._takes_fds:
                part, fds, _, _ = socket.recv_fds(self._socket, min(self._missing(), _PIECE), _MOST_FDS)
                self._fds += fds
            else:
                part = self._socket.recv(min(self._missing(), _PIECE))
        except OSError:
            part = b""
        if not part:
            raise EOFError
        self._begun += part
        if len(self._begun) < _LENGTH.size or self._missing():
            return None
        message, self._begun = self._begun, bytearray()
        del message[: _LENGTH.size]
        return message

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for the next message, and return what its JSON says, and its descriptors; None and none at the end."""
        try:
            while (message := self.arrived()) is None:
                pass
        except EOFError:
            return None, self._fds
        fds, self._fds = self._fds, []
        return json.loads(message), fds

    def close(self) -> None:
        """Close this end: the other one can read what was sent, and no more."""
        self._socket.close()

    def _missing(self) -> int:
        """Return how many bytes to read next of a message that begins with its length."""
        if len(self._begun) < _LENGTH.size:
            return _LENGTH.size - len(self._begun)
        length = int(_LENGTH.unpack_from(self._begun)[0])
        return (length if self._most is None else min(length, self._most + 1)) + _LENGTH.size - len(self._begun)
