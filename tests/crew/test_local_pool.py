"""Actors of this machine: all end when they are told to, with what they have started, whatever they do."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from lastbit.children.channel import Channel
from lastbit.config import Config
from lastbit.crew import local_pool
from lastbit.crew.local_pool import LocalPool
from lastbit.crew.resources import DeviceKind
from lastbit.crew.team import Heard

CPU = DeviceKind("cpu", "", 1, 1)
SLEEP = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


def _answers(descriptor: int) -> Channel:
    """Begin as an actor does, and tell which process it has started."""
    os.setsid()
    channel = Channel(socket.socket(fileno=descriptor))
    channel.receive()
    channel.send(["placed", subprocess.Popen(SLEEP).pid])
    return channel


def deaf(descriptor: int) -> None:
    """Be an actor that no signal ends but one, and that does not see that nobody asks any more."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _answers(descriptor)
    signal.pause()


def dying(descriptor: int) -> None:
    """Be an actor that ends when it gets work; what it has started holds its end of the channel."""
    channel = _answers(descriptor)
    os.set_inheritable(descriptor, True)
    subprocess.Popen(SLEEP, close_fds=False)
    channel.receive()
    os._exit(3)


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalPool:
    monkeypatch.setattr(local_pool, "_GRACE", 0.1)
    return LocalPool(Config(folder=str(tmp_path)))


def heard(pool: LocalPool) -> Heard:
    found: Sequence[Heard] = ()
    while not found:
        found = pool.hear(0.05)
    return found[0]


def test_who_does_not_listen_is_killed_with_all_that_it_has_started(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_pool, "serve", deaf)
    pool.start(CPU)
    started = heard(pool).content
    pool.close()
    until_gone(started)


def test_an_actor_that_ends_is_heard_of_even_if_its_children_hold_the_channel(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_pool, "serve", dying)
    actor = pool.start(CPU)
    heard(pool)
    pool.run(actor, 0, [])
    found = heard(pool)
    assert (found.actor, found.kind, found.content) == (actor, "gone", "it ended with exit code 3")
    pool.close()


class Busy:
    """A channel that says which process has it, and then keeps that from looking whether anybody is there."""

    def __init__(self, connection: socket.socket) -> None:
        connection.send(str(os.getpid()).encode())
        signal.pause()


def test_an_actor_ends_with_the_process_that_has_started_it_even_in_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_pool, "Channel", Busy)
    here, there = socket.socketpair()
    starter = os.fork()
    if starter == 0:
        if os.fork() == 0:
            local_pool.serve(there.fileno())
        signal.pause()
    actor = int(here.recv(20))
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    until_gone(actor)


class Quick:
    """An actor that has done an item at once, and takes note of kernels that have failed."""

    def __init__(self, *_: object) -> None:
        self.recorder, self.known = self, list[object]()

    def start(self) -> dict[str, object]:
        return {}

    def learn(self, failed: object) -> None:
        self.known.append(failed)

    def run(self, place: int, failed: object) -> Iterator[list[list[object]]]:
        yield [["begins", place, failed]]
        yield [["known", *self.known], ["done"]]


def test_an_actor_takes_its_next_item_when_it_has_just_done_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The next item is there before the actor looks for what others have learned."""
    look = select.select
    monkeypatch.setattr(select, "select", lambda *of: time.sleep(0.05) or look(*of))
    monkeypatch.setattr("lastbit.crew.actor.Actor", Quick)
    here, there = socket.socketpair()
    channel, actor = Channel(here), os.fork()
    if actor == 0:
        local_pool.serve(there.detach())
        os._exit(0)
    there.close()
    channel.send({"config": str(Config(folder=str(tmp_path)).save()), "device": "cpu"})
    told = [channel.receive()[0], channel.receive()[0]]
    for place in range(3):
        channel.send({"place": place, "failed": []})
        told += [channel.receive()[0], channel.receive()[0]]
    assert told[2:] == [
        ["events", batch] for place in range(3) for batch in ([["begins", place, []]], [["known"], ["done"]])
    ]
    here.close()
    assert os.waitpid(actor, 0)[1] == 0


def until_gone(pid: int) -> None:
    """Wait until a process is there no more, or only its parent has not heard of it."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        signal.sigtimedwait([], 0.01)
    raise AssertionError("it is there")
