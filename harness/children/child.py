"""A process of Python that is started, asked and ended; waiting for its answers, and what it prints."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from lastbit.children.channel import Channel
from lastbit.reports.characters import visible

# Some 800 lines: more is memory for each process, and read by nobody.
MOST = 1 << 16
"""Bytes of the output of a process that are kept."""

# What a pipe of Linux holds by default: a larger read returns no more.
_PIECE = 1 << 16
# Arbitrary: shorter takes the CPU from what it waits for, longer is waited in vain.
_PAUSE = 0.005  # seconds between two looks at whether a forked process has ended
_HELD = 1 << 20  # bytes that a pipe holds at most, unless root makes it larger


class ChildProcess:
    """A process that this one has started, to be asked through `channel`.

    It is a new Python, unless it is `forked`. It is told the descriptor of its end by `command`, or by `reads`, a text
    that it finds in its standard input. Its output is none of this process's: it goes to `log`, or else to standard
    error. A signal to the group of this process does not reach one with an `own_session`.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environ: Mapping[str, str],
        *,
        reads: Callable[[int], str] | None = None,
        folder: str | Path | None = None,
        log: IO[bytes] | None = None,
        own_session: bool = False,
        **of_channel: Any,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, **of_channel)
        with theirs:
            try:
                self._process: subprocess.Popen[bytes] | _Forked = subprocess.Popen(
                    command(theirs.fileno()),
                    env=environ,
                    cwd=folder,
                    stdin=subprocess.DEVNULL if reads is None else subprocess.PIPE,
                    stdout=log or 2,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=own_session,
                )
            except BaseException:
                ours.close()
                raise
            if reads is not None:
                assert self._process.stdin is not None
                with suppress(BrokenPipeError), self._process.stdin as text:  # who asks it learns that it ended
                    text.write(reads(theirs.fileno()).encode())

    @classmethod
    def forked(
        cls, run: Callable[[int], None], environ: Mapping[str, str], *, log: IO[bytes] | None = None, **of_channel: Any
    ) -> ChildProcess:
        """Fork a process that runs a function with the descriptor of its end; what is imported here need not be there.

        Only where `may_fork()`. Its environment, output and path are those of a new one, so that the folder of the
        script that runs here is none of it.
        """
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                ours.close()
                _become(environ, log)
                run(theirs.detach())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)  # nothing of what this process was about to do at its end
        theirs.close()
        child = cls.__new__(cls)
        child.channel, child._process = Channel(ours, **of_channel), _Forked(pid)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    @property
    def silent(self) -> bool:
        """Return whether it has ended and all that it said was read; its children may keep the channel open."""
        return self.over and not select.select([self.channel], [], [], 0)[0]

    def kill(self) -> None:
        """End it at once, also from another thread; who waits for its answer learns that it has ended."""
        self._process.kill()

    def end(self, patience: float) -> int:
        """Let it end itself, which it does when the channel is closed, kill it if it does not; return its exit code."""
        self.channel.close()
        try:
            return self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class _Forked:
    """A forked process, with what is needed here of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid, self._waiting = pid, threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        with self._waiting:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float = math.inf) -> int:
        latest = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > latest:
                raise subprocess.TimeoutExpired("a forked process", timeout)
            time.sleep(_PAUSE)
        return code

    def kill(self) -> None:
        with self._waiting:  # its number may be another process's as soon as somebody has waited for it
            if self._code is None:
                os.kill(self.pid, signal.SIGKILL)


def may_fork() -> bool:
    """Return whether this process can be forked: on Linux, with one thread, as others would hold locks for ever."""
    with suppress(OSError):
        return len(os.listdir("/proc/self/task")) == 1
    return False


def _become(environ: Mapping[str, str], log: IO[bytes] | None) -> None:
    """Give a forked process the environment, signals and standard streams of a new one."""
    os.environ.clear()
    os.environ.update(environ)
    named = list(filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)))
    sys.path[:] = dict.fromkeys([*named, *sys.path[not sys.flags.safe_path :]])  # the first is the script's folder
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2 if log is None else log.fileno(), 1)
    if log is not None:
        os.dup2(log.fileno(), 2)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))


def next_message(channel: Channel, seconds: float, output: Output | None = None) -> bytearray | None:
    """Wait so many seconds for the next message, while `output` is read; return it, or None if it is not whole then.

    Raises:
        EOFError: none comes.
    """
    latest, waiting = time.monotonic() + seconds, select.poll()
    for file in (channel, output):
        if file is not None:
            waiting.register(file, select.POLLIN)
    while (left := latest - time.monotonic()) > 0:
        ready = {descriptor for descriptor, _ in waiting.poll(1000 * left)}
        if output is not None and output.fileno() in ready and not output.read():
            waiting.unregister(output)
        if channel.fileno() in ready and (message := channel.arrived()) is not None:
            return message
    return None


def too_long(limit: float) -> str:
    """Say why a process was ended that took longer than so many seconds."""
    return f"no result after {limit:g} s (--timeout), so its process was stopped"


def name_of_signal(number: int) -> str:
    """Return the name of a signal, such as SIGSEGV, or its number if it has none."""
    return signal.Signals(number).name if number in set(signal.Signals) else str(number)


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
