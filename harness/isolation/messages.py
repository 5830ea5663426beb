"""The form of messages in a stream: their length in four bytes, then JSON."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_ANSWER = 1 << 22
"""Bytes of what a kernel process may answer."""

LENGTH = struct.Struct("!I")


def missing(begun: bytearray) -> int:
    """Return how many bytes to read next of a message that begins with its length."""
    if len(begun) < LENGTH.size:
        return LENGTH.size - len(begun)
    return min(int(LENGTH.unpack_from(begun)[0]), LONGEST_ANSWER + 1) + LENGTH.size - len(begun)


def is_whole(begun: bytearray) -> bool:
    """Return whether these bytes are all of a message."""
    return len(begun) >= LENGTH.size and missing(begun) == 0


def send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Send a message with file descriptors."""
    text = json.dumps(message).encode()
    socket.send_fds(connection, [LENGTH.pack(len(text))], list(fds))
    connection.sendall(text)


def received(connection: socket.socket) -> bytes:
    """Return the next message; the other end is trusted to finish what it began."""
    head = _exactly(connection, LENGTH.size)
    return _exactly(connection, LENGTH.unpack(head)[0])


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = connection.recv(min(count, 1 << 16))
        if not part:
            raise EOFError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
