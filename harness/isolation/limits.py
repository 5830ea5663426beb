"""Limits of what a kernel process may use, which the system enforces, or the judge's watch.

The watch is for limits that the system does not enforce, or only for one process. One thread looks at all kernel
processes every now and then; without any it sleeps. It tells a guardian to end its kernel process, with which all that
this has started ends, and keeps what the process was ended for.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from lastbit.isolation.guardian import Family, family

MB, GB = 1 << 20, 1 << 30


def _memory() -> int:
    """Return 8 GB, or half of the machine's memory if that is less: the other half is the judge's.

    A process with torch and Triton has 0.26 GB of its own before it does anything, a compiler it starts 0.3 GB, and
    the largest case of the design, interpreted, makes intermediates of 1 GB. Inputs and results are not counted: they
    lie in memory of the judge.
    """
    return min(8 * GB, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def _processes() -> int:
    """Return the limit of processes and threads: torch has one per core for each of two pools, a compiler dozens."""
    return 128 + 4 * (os.cpu_count() or 1)


@dataclass(frozen=True)
class Limits:
    """Limits of a kernel process and all that it starts.

    Attributes:
        memory: bytes, besides what the judge shares with it. Each process is held to it by the system on the CPU, and
            all together by the judge's watch everywhere.
        processes: processes and threads.
        file_size: bytes of a file; compiled kernels and their sources are far smaller.
        open_files: files, sockets and pipes of a process at the same time.
        seconds: processor time of a process, for one that outlives its judge; the judge's own clock is much shorter.
    """

    memory: int = field(default_factory=_memory)
    processes: int = field(default_factory=_processes)
    file_size: int = 256 * MB
    open_files: int = 1024
    seconds: int = 4 * 3600

    @property
    def folder_size(self) -> int:
        """Bytes of all files in its folder, where that is a mount of its own."""
        return 4 * self.file_size


def apply(limits: Limits, device_type: str) -> None:
    """Hold this process and all that it will start to the limits, as far as the system can.

    Only on the CPU are writable pages and files limited: the drivers of accelerators reserve far more memory than they
    use, in files of their own, too. Limits of a process that already has lower ones stay.
    """
    on_cpu = {resource.RLIMIT_DATA: limits.memory, resource.RLIMIT_FSIZE: limits.file_size}
    bounds = {
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_CPU: limits.seconds,
        resource.RLIMIT_CORE: 0,
        **(on_cpu if device_type == "cpu" else {}),
    }
    for kind, most in bounds.items():
        hard = resource.getrlimit(kind)[1]
        lowest = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (lowest, lowest))
    with suppress(OSError):  # a system without that file, or one that holds the score higher already
        Path("/proc/self/oom_score_adj").write_text("1000")  # its judge shall not end where the memory runs out


# A process can fill about a GB meanwhile; a look is a few reads of /proc.
_PAUSE = 0.2  # seconds between two looks
# Walking a folder takes longer than reading /proc, and a tmpfs has a size of its own.
_PAUSE_OF_FILES = 1.0  # seconds between two looks at its files
_MOST_FILES, _DEEPEST = 1 << 15, 64
_KB = 1024


@dataclass
class Watched:
    """A kernel process with all that it has started.

    Attributes:
        guardian: the process that was forked for it.
        limits: what they may use, all together.
        folders: on the disk, that they can write.
        shared: bytes that the judge shares with them, which do not count as theirs.
        hit: which limit they were ended for, in words; empty as long as they were not.
    """

    guardian: int
    limits: Limits
    folders: tuple[Path, ...] = ()
    shared: int = 0
    hit: str = ""
    handle: int = field(default=-1, repr=False)
    seen: float = field(default=0.0, repr=False)


class ProcessWatch:
    """Watches from `begin` to `over`."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, guardian: int, limits: Limits, folders: tuple[Path, ...] = ()) -> Watched:
        """Watch a kernel process. Only a guardian that has not been waited for can be given."""
        watched = Watched(guardian, limits, folders, handle=os.pidfd_open(guardian))
        with self._changed:
            self._watched.append(watched)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_on, name="watch", daemon=True)
                self._thread.start()
            self._changed.notify()
        return watched

    def over(self, watched: Watched) -> None:
        """Stop watching a kernel process."""
        with self._changed:
            self._watched.remove(watched)
            os.close(watched.handle)

    def _look_on(self) -> None:
        with self._changed:
            while True:
                self._changed.wait(_PAUSE if self._watched else None)
                look(self._watched)


def look(watched: Iterable[Watched]) -> None:
    """End those that use more than they may."""
    if living := [one for one in watched if not one.hit]:
        known = family()
        for one in living:
            if hit := _hit(one, known):
                one.hit = hit
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(one.handle, signal.SIGTERM)


def _hit(watched: Watched, known: Family) -> str:
    usages = [usage for pid in known.descendants(watched.guardian) if (usage := _usage(pid))]
    untouched = _usage(watched.guardian)
    if untouched is None:
        return ""
    own = sum(max(0, usage.private - untouched.private) for usage in usages)
    used = own + max(0, sum(usage.shared for usage in usages) - watched.shared * len(usages))
    if used > watched.limits.memory:
        return f"it used {used / GB:.3g} GB of memory, where {watched.limits.memory / GB:.3g} GB are allowed"
    threads = sum(usage.threads for usage in usages)
    if threads > watched.limits.processes:
        return f"it had {threads} processes and threads, where {watched.limits.processes} are allowed"
    if time.monotonic() < watched.seen + _PAUSE_OF_FILES:
        return ""
    watched.seen = time.monotonic()
    return _written(watched)


def _written(watched: Watched) -> str:
    """Return what its folders hold more of than they may, in words; links are not followed."""
    size = count = 0
    pending: list[tuple[str | Path, int]] = [(folder, 0) for folder in watched.folders]
    while pending:
        folder, depth = pending.pop()
        with suppress(OSError), os.scandir(folder) as entries:  # what is gone meanwhile is no more than it may have
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    pending.append((entry.path, depth + 1))
                else:
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
                if size > watched.limits.folder_size:
                    most = watched.limits.folder_size / GB
                    return f"it wrote {size / GB:.3g} GB of files, where {most:.3g} GB are allowed"
                if count > _MOST_FILES or depth > _DEEPEST:
                    return f"it made more than {_MOST_FILES:,} files, or folders nested more than {_DEEPEST} deep"
    return ""


class _Usage(NamedTuple):
    private: int
    shared: int
    threads: int


def _usage(pid: int) -> _Usage | None:
    """Return the bytes that a process has in memory, and its threads; None once it has ended.

    What it has of its parent's counts as private until it is written, so the guardian, which writes nothing, is what
    a process had at first.
    """
    try:
        lines = Path("/proc", str(pid), "status").read_text().splitlines()
    except OSError:
        return None
    fields = {name: words.split()[0] for name, _, words in (line.partition(":") for line in lines) if words.split()}
    if "RssAnon" not in fields:
        return None
    return _Usage(int(fields["RssAnon"]) * _KB, int(fields["RssShmem"]) * _KB, int(fields["Threads"]))
