"""A guardian between a kernel process and the one that forked it: it ends all that the kernel process has started.

The guardian is the process that was forked. It forks once more, and what that child starts is below it for good: in a
namespace of processes that ends with its first process, or, where the system gives none, because the guardian adopts
what has lost its parent. It ends as the kernel process did, by the same signal or exit code.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lastbit.isolation import system

_PROC = Path("/proc")


@dataclass(frozen=True)
class Family:
    """The processes of one moment, by their parents."""

    children: Mapping[int, Sequence[int]]

    def descendants(self, pid: int) -> list[int]:
        """Return every process below this one, parents before their children."""
        found = list(self.children.get(pid, ()))
        for process in found:  # grows while it is read
            found += self.children.get(process, ())
        return found


def family() -> Family:
    """Return the processes of this moment, without dead ones that nobody has waited for."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdecimal, os.listdir(_PROC)):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = Path(_PROC, name, "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children[int(parent)].append(int(name))
    return Family(dict(children))


def end_descendants(pid: int) -> None:
    """End every process below this one, which must be the one that adopts them when their parents end.

    They are stopped until no new ones appear, and only then ended: one that is stopped starts no others, and while it
    is there it takes up room below the limit of processes.
    """
    stopped: set[int] = set()
    while new := set(family().descendants(pid)) - stopped:
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def _signal(processes: set[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


class _Told(Exception):
    """The signal that asks the guardian to end the kernel process, as an exception."""


def guarded(own_processes: bool, prepare: Callable[[], None]) -> None:
    """Return in a new process, the kernel process; this one becomes its guardian, and never returns.

    SIGTERM makes the guardian end the kernel process with all that it has started. Its own end does the same in a
    namespace of processes. Both are in a session of their own: no signal to a group reaches who forked the guardian.

    Args:
        own_processes: the next child is the first of a namespace. That one does `prepare` and then only waits, since
            signals do nothing to the first process of a namespace.
        prepare: is done in the namespace before the kernel process begins.
    """
    with suppress(PermissionError):  # it leads a session already
        os.setsid()
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    system.prctl(system.PR_SET_DUMPABLE, 0)
    system.prctl(system.PR_SET_CHILD_SUBREAPER, 1)
    theirs, ours = os.pipe()
    child = os.fork()
    if child:
        _forget_descriptors(theirs)
        _guard(child, theirs, alone=not own_processes)
    os.close(theirs)
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    if own_processes:
        prepare()
        if first := os.fork():
            _forget_descriptors(ours)
            with suppress(BaseException):  # tell how it ended when all processes of the namespace have
                os.write(ours, _waited(first).to_bytes(8, "little"))
            os._exit(0)
    os.close(ours)


def _guard(child: int, status: int, *, alone: bool) -> NoReturn:
    """Wait until the kernel process ends, and end what it left: alone if no namespace does that."""

    def tell(number: int, frame: FrameType | None) -> NoReturn:
        raise _Told

    signal.signal(signal.SIGTERM, tell)
    try:
        if alone:
            ended = _waited(child)
        else:  # by the first process of its namespace, which somebody may have ended
            said = os.read(status, 8)
            ended = int.from_bytes(said, "little") if said else signal.SIGKILL
    except _Told:
        ended = signal.SIGKILL
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if alone:
        with suppress(ChildProcessError):
            while True:
                end_descendants(os.getpid())
                os.waitpid(-1, 0)
    else:
        os.kill(child, signal.SIGKILL)  # nobody has waited for it yet
        os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        number = os.WTERMSIG(ended)
        with suppress(OSError):  # SIGKILL has no other effect that could be undone
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(ended))


def _waited(child: int) -> int:
    """Return how the child ended, after waiting for all others that ended before it."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == child:
            return status


def _forget_descriptors(kept: int) -> None:
    """Close sockets and pipes: whoever waits for their other end shall wait for the kernel process alone."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    close_all_but(kept)


def close_all_but(*kept: int) -> None:
    """Close what is open beyond the three standard descriptors, but for these."""
    bounds = sorted({2, *(descriptor for descriptor in kept if descriptor > 2)})
    for low, high in zip(bounds, [*bounds[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(low + 1, high)
