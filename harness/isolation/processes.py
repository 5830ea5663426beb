"""The processes that a process has started, directly or not, and their end."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    for process, parent in _parents():
        children[parent].append(process)
    return Family(dict(children))


def _parents() -> Iterator[tuple[int, int]]:
    for name in filter(str.isdecimal, os.listdir(_PROC)):
        with suppress(OSError):  # it has ended meanwhile
            state, parent = Path(_PROC, name, "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                yield int(name), int(parent)


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
