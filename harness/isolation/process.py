"""The judge's handles on its fork server and on kernel processes: start one, ask it, end it."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lastbit.children.channel import Channel
from lastbit.children.child import ChildProcess, Output, next_message
from lastbit.errors import LastbitError
from lastbit.isolation.answers import KernelProcessEnded, Unreadable, parsed
from lastbit.isolation.confinement import Confinement, clean_environment, remove, shield
from lastbit.isolation.limits import Limits, ProcessWatch
from lastbit.isolation.server import MAIN, preparation

# Arbitrary: tensors travel in shared memory, and text of megabytes is no answer.
LONGEST_ANSWER = 1 << 22
"""Bytes of what a kernel process may answer."""

# Arbitrary: a fork takes a fraction of a second, on a busy machine more.
_GRACE = 20.0  # seconds for a process to come up
# Importing torch takes seconds, and many times that from a cold file system.
_PATIENCE = 60.0  # seconds for a server, which may have to import torch first, or to end a process
# Arbitrary: an honest process ends in milliseconds, and a hostile one is ended by force.
_PARTING = 1.0  # seconds that a process has to end itself when it has closed its socket


@dataclass(frozen=True)
class Start:
    """The properties of a kernel process that is to be started.

    Attributes:
        bare: nothing of lastbit is to be seen in it.
        device_type: of what it runs on.
        readable: folders and files that it can read beside Python and what is installed.
        limits: how much it may use.
        cache: a folder for what is compiled; one of its own if None.
    """

    bare: bool = False
    device_type: str = "cpu"
    readable: tuple[Path, ...] = ()
    limits: Limits = field(default_factory=Limits)
    cache: Path | None = None

    def as_json(self, folder: Path) -> dict[str, Any]:
        return {
            "bare": self.bare,
            "device_type": self.device_type,
            "readable": [str(path) for path in self.readable],
            "limits": asdict(self.limits),
            "cache": None if self.cache is None else str(self.cache),
            "folder": str(folder),
        }


class ForkServer:
    """A process that forks kernel processes; it is started for the first one, and ends with this process.

    Attributes:
        watch: looks at what they use.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.watch = ProcessWatch()
        own = clean_environment(os.environ if environ is None else environ)
        self._environ = {**own, "PYTHONSAFEPATH": "1"}  # its working directory changes
        self._child: ChildProcess | None = None
        self._is_up = False

    def begin(self) -> None:
        """Start the server, if it does not run, and do not wait for it."""
        if self._child is not None and not self._child.over:
            return
        self.close()
        shield()
        self._child = ChildProcess(
            lambda descriptor: [sys.executable, "-c", MAIN],
            self._environ,
            reads=preparation,
            own_session=True,  # so that it ends with its judge and not before, when both are told to end
        )
        atexit.register(self.close)

    def start(self, start: Start) -> KernelProcess:
        """Start a kernel process, in an empty folder of its own.

        Raises:
            LastbitError: the server does not start, or not this process.
        """
        self.begin()
        self._wait_until_up()  # a judge that is killed before that leaves no folder
        folder = Path(tempfile.mkdtemp())
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            pid = self._ask({"start": start.as_json(folder)}, [theirs.fileno(), writing])["pid"]
        except LastbitError:
            ours.close()
            os.close(reading)
            remove(folder)
            raise
        finally:
            theirs.close()
            os.close(writing)
        return KernelProcess(self, int(pid), ours, Output(reading), folder, start)

    def ended(self, pid: int, patience: float) -> int | None:
        """End a kernel process and all it started; return how it ended by itself within `patience` seconds, or None."""
        if self._child is None:  # it has ended, and all kernel processes with it
            return None
        try:
            status = self._ask({"end": pid, "patience": patience}, [])["status"]
        except LastbitError:
            return None
        return None if status is None else int(status)

    def close(self) -> None:
        """End the server, and with it all kernel processes."""
        if self._child is not None:
            self._child.end(_GRACE)
        self._child, self._is_up = None, False
        atexit.unregister(self.close)

    def _wait_until_up(self) -> None:
        if not self._is_up:
            self._is_up = bool(self._heard()["ready"])

    def _ask(self, message: Mapping[str, Any], fds: Sequence[int]) -> Mapping[str, Any]:
        self._wait_until_up()
        return self._heard(message, fds)

    def _heard(self, message: Mapping[str, Any] | None = None, fds: Sequence[int] = ()) -> Mapping[str, Any]:
        """Send a message to the server, if there is one, and return its next answer."""
        assert self._child is not None
        try:
            if message is not None:
                self._child.channel.send(message, fds, timeout=_PATIENCE)
            if (text := next_message(self._child.channel, _PATIENCE)) is None:
                raise TimeoutError(f"nothing in {_PATIENCE:g} s")
            answer: Mapping[str, Any] = json.loads(text)
            return answer
        except (OSError, EOFError, ValueError) as error:
            self._child.kill()  # an answer that comes late would be taken for that to the next message
            self.close()
            raise LastbitError(f"the process that starts kernel processes does not answer: {error!r}") from error


class KernelProcess:
    """A kernel process: it is asked, one thing after the other, until it ends.

    Attributes:
        printed: what it has printed, once it has ended.
        confinement: what it was kept from before it loaded anything.
    """

    def __init__(
        self,
        server: ForkServer,
        pid: int,
        connection: socket.socket,
        output: Output,
        folder: Path,
        start: Start,
    ) -> None:
        self._server, self._pid, self._output, self._folder = server, pid, output, folder
        self._channel = Channel(connection, most=LONGEST_ANSWER)
        folders = (folder,) if start.cache is None else (folder, start.cache)
        self.watched = server.watch.begin(pid, start.limits, folders)
        self.known: set[int] = set()
        self.printed = ""
        self._over: KernelProcessEnded | None = None
        self.confinement = Confinement.from_json(json.loads(self._answer(_GRACE))["confinement"])

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self._over is not None

    def ask(self, message: Mapping[str, Any], timeout: float, fds: Sequence[int] = ()) -> Mapping[str, Any]:
        """Send a message to the process, and return its answer within `timeout` seconds.

        Raises:
            KernelProcessEnded: it does not; it is there no more.
            Raised: what it was asked to do raised an exception.
            Unreadable: the answer is none that a kernel process gives; it is there no more.
        """
        if self._over is not None:
            raise self._over
        try:
            self._channel.send({**message, "number": (number := secrets.token_hex(8))}, fds, timeout=timeout)
        except OSError as error:  # it ended, or does not listen
            raise self._ended(timeout if isinstance(error, TimeoutError) else None) from None
        answer = self._answer(timeout)
        try:
            return parsed(answer, number)
        except Unreadable:
            self.end()
            raise

    def end(self) -> None:
        """End it, with all that it has started."""
        if self._over is None:
            self._over = self._ended(None, patient=False)

    def _answer(self, timeout: float) -> bytearray:
        try:
            answer = next_message(self._channel, timeout, self._output)
        except EOFError:
            raise self._ended(None) from None
        if answer is None:
            raise self._ended(timeout)
        return answer

    def _ended(self, limit: float | None, *, patient: bool = True) -> KernelProcessEnded:
        """End the process, and return how it ended; who is patient lets it end itself, for it has begun to."""
        self._channel.close()
        status = self._server.ended(self._pid, patience=_PARTING if limit is None and patient else 0.0)
        self.printed = self._output.close()
        self._server.watch.over(self.watched)
        for written in self.watched.folders if self.watched.hit else (self._folder,):
            remove(written)
        ended = None if status is None or limit is not None else os.waitstatus_to_exitcode(status)
        code, number = (ended, None) if ended is None or ended >= 0 else (None, -ended)
        self._over = KernelProcessEnded(code, number, limit, self.watched.hit)
        return self._over
