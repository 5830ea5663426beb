"""The actors of this machine: processes that are forked or started, and asked through a channel."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Collection, Hashable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from lastbit.children.channel import Channel
from lastbit.children.child import ChildProcess, name_of_signal
from lastbit.config import Config
from lastbit.crew.resources import DeviceKind
from lastbit.crew.team import Heard
from lastbit.isolation import system
from lastbit.isolation.guardian import close_all_but
from lastbit.verify.processes import child_for

# Arbitrary: they have little to save; what isolated kernels have written goes meanwhile.
_GRACE = 5.0  # seconds that processes without work have to end themselves
_PAUSE = 0.01  # seconds between two looks at whether they have


class LocalPool:
    """The actors of a run on this machine, each known by a number."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._children: dict[Hashable, ChildProcess] = {}
        self._ending: list[ChildProcess] = []
        self._idle: set[Hashable] = set()
        self._started = 0

    def start(self, kind: DeviceKind) -> int:
        """Start an actor for a type of device."""
        if kind.type == "cpu":
            import_module("lastbit.crew.actor")  # once for all that are forked
        folder = Path(self._config.folder).resolve()
        with (folder / f"{kind.type}.log").open("ab") as log:
            child = child_for(self._config, kind.type, serve, log)
        self._started += 1
        self._children[self._started] = child
        device = next(device for device in self._config.devices if device.startswith(kind.type))
        self._send(self._started, {"config": str(folder / "config.json"), "device": device})
        return self._started

    def run(self, actor: Hashable, place: int, failed: Collection[tuple[str, str]]) -> None:
        """Let an actor run an item."""
        self._idle.discard(actor)
        self._send(actor, {"place": place, "failed": list(failed)})

    def warn(self, actor: Hashable, failed: Collection[tuple[str, str]]) -> None:
        """Let an actor that works know which kernels have failed meanwhile."""
        self._send(actor, {"failed": list(failed)})

    def _send(self, actor: Hashable, asked: object) -> None:
        with suppress(OSError):  # it has ended, which is heard
            self._children[actor].channel.send(asked)

    def kill(self, actor: Hashable) -> None:
        """End an actor, at once if it has work; nothing more is heard of it."""
        child = self._children.pop(actor, None)
        if child is not None:
            child.channel.close()
            self._ending.append(child)
            if actor not in self._idle:
                _kill(child)

    def hear(self, seconds: float) -> Sequence[Heard]:
        """Return the messages that arrive within so many seconds."""
        waiting, polled = select.poll(), dict[int, Hashable]()
        for actor, child in self._children.items():
            polled[child.channel.fileno()] = actor
            waiting.register(child.channel, select.POLLIN)
        found = []
        for actor in [polled[descriptor] for descriptor, _ in waiting.poll(1000 * seconds)]:
            try:
                message = self._children[actor].channel.arrived()
            except EOFError:
                found.append(self._gone(actor))
                continue
            if message is not None:
                kind, content = json.loads(message)
                if kind == "ready" or (kind == "events" and content[-1] == ["done"]):
                    self._idle.add(actor)
                found.append(Heard(actor, kind, content))
        return found + [self._gone(actor) for actor, child in list(self._children.items()) if child.silent]

    def _gone(self, actor: Hashable) -> Heard:
        code = self._children.pop(actor).end(_GRACE)
        how = f"exit code {code}" if code >= 0 else f"signal {name_of_signal(-code)}"
        return Heard(actor, "gone", f"it ended with {how}")

    def close(self) -> None:
        """End all actors and what they have started; those without work end themselves."""
        for actor in list(self._children):
            self.kill(actor)
        latest = time.monotonic() + _GRACE
        try:
            while time.monotonic() < latest and not all(child.over for child in self._ending):
                time.sleep(_PAUSE)
        finally:
            for child in self._ending:
                if not child.over:
                    _kill(child)
                child.end(0.0)


def _kill(child: ChildProcess) -> None:
    """End a process with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.kill()


def serve(descriptor: int) -> None:
    """Be an actor of this machine: do what comes through the channel until the sender closes it."""
    os.setsid()  # so that it ends with all that it starts, and only when it is told to,
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)  # or when nobody can tell it any more, whatever it does
    close_all_but(descriptor)  # where it is forked, it has the other ends of those before it
    channel = Channel(socket.socket(fileno=descriptor))
    asked, _ = channel.receive()
    from lastbit.crew.actor import Actor

    try:
        config = Config.load(Path(asked["config"]))
        channel.send(["placed", {"node": "", "host": socket.gethostname(), "address": "", "pid": os.getpid()}])
        try:
            actor = Actor(config, asked["device"], Path(config.folder))
            channel.send(["ready", actor.start()])
        except Exception as error:
            traceback.print_exc()
            channel.send(["failed", f"{type(error).__name__}: {error}"])
        while (asked := channel.receive()[0]) is not None:
            for batch in actor.run(**asked) if "place" in asked else ():
                channel.send(["events", batch])
                while batch[-1] != ["done"] and select.select([channel], [], [], 0)[0]:  # then comes another item
                    actor.recorder.learn(**(channel.receive()[0] or os._exit(1)))
    except OSError:
        os._exit(1)  # nobody listens any more, and the kernel may go on for ever
