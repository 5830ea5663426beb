"""A forked process is asked and ended like a new one."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from lastbit.children.channel import Channel
from lastbit.children.child import ChildProcess, next_message

ENVIRONMENT = {"PYTHONPATH": "/somewhere", "ONLY": "this"}


def answering(descriptor: int) -> None:
    """Say what the process is, and end when there is no more to read."""
    channel = Channel(socket.socket(fileno=descriptor))
    print("printed there")
    channel.send(
        {"pid": os.getpid(), "environment": dict(os.environ), "input": os.read(0, 1).decode(), "first": sys.path[0]}
    )
    assert channel.receive() == (None, [])


def raising(descriptor: int) -> None:
    raise ValueError("from there")


def idling(descriptor: int) -> None:
    time.sleep(60)


def test_it_answers_in_its_own_environment_and_prints_to_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = ChildProcess.forked(answering, ENVIRONMENT, log=log)
        message = next_message(child.channel, 60)
        assert message is not None and not child.over
        assert child.end(60) == 0 and child.over
    assert json.loads(message) == {"pid": child.pid, "environment": ENVIRONMENT, "input": "", "first": "/somewhere"}
    assert child.pid != os.getpid() and (tmp_path / "log").read_text() == "printed there\n"


def test_an_exception_there_ends_it_with_one_and_is_told_in_the_log(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = ChildProcess.forked(raising, ENVIRONMENT, log=log)
        with pytest.raises(EOFError):
            next_message(child.channel, 60)
        assert child.end(60) == 1
    assert "ValueError: from there" in (tmp_path / "log").read_text()


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        child = ChildProcess.forked(idling, ENVIRONMENT, log=log)
        assert not child.silent and child.end(0.0) == -signal.SIGKILL
        child.kill()  # its number may belong to another process now
