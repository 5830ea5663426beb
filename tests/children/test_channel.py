"""Messages between a process and its child, and a child that says nothing."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import time

from lastbit.children.channel import Channel
from lastbit.children.child import ChildProcess, next_message, too_long

ANSWERS = "import os, sys; os.write(int(sys.argv[1]), (3).to_bytes(8, 'big') + b'yes'); os.read(int(sys.argv[1]), 1)"


def both(**of_reader: int | bool) -> tuple[Channel, socket.socket, Channel]:
    ours, theirs = socket.socketpair()
    return Channel(ours, **of_reader), theirs, Channel(theirs)


def test_messages_arrive_in_order_and_whole() -> None:
    reader, _, writer = both()
    writer.send({"a": 1})
    writer.send("x" * 100_000)
    assert reader.receive() == ({"a": 1}, [])
    assert reader.receive() == ("x" * 100_000, [])
    writer.close()
    assert reader.receive() == (None, [])


def test_a_message_that_comes_in_parts_is_waited_for() -> None:
    reader, raw, _ = both()
    raw.send(struct.pack("!Q", 4) + b"tr")
    assert next_message(reader, 0.05) is None
    raw.send(b"ue")
    assert next_message(reader, 5.0) == b"true"


def test_a_message_that_is_too_long_is_cut() -> None:
    reader, raw, _ = both(most=10)
    raw.send(struct.pack("!Q", 1 << 60) + bytes(100))
    assert next_message(reader, 5.0) == bytes(11)


def test_descriptors_of_a_stranger_are_not_taken() -> None:
    reader, _, writer = both()
    taker, _, giver = both(takes_fds=True)
    reading, writing = os.pipe()
    before = len(os.listdir("/proc/self/fd"))
    writer.send({}, [writing])
    assert reader.receive() == ({}, [])
    assert len(os.listdir("/proc/self/fd")) == before
    giver.send({}, [writing])
    message, taken = taker.receive()
    assert message == {} and len(taken) == 1
    for descriptor in (reading, writing, *taken):
        os.close(descriptor)


def test_a_child_is_asked_and_ended() -> None:
    child = ChildProcess(lambda own: [sys.executable, "-c", ANSWERS, str(own)], dict(os.environ), written=pickle.dumps)
    assert next_message(child.channel, 20.0) == b"yes"
    assert not child.over and not child.silent
    assert child.end(20.0) == 0 and child.over


def test_a_child_that_does_not_end_itself_is_killed() -> None:
    child = ChildProcess(lambda own: [sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    start = time.monotonic()
    assert child.end(0.1) == -9
    assert time.monotonic() - start < 30
    assert too_long(0.1) == "no result after 0.1 s (--timeout), so its process was stopped"
