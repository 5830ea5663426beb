"""Limits of what a kernel process may use, and the part of them that the system itself enforces."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass, field

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

    @property
    def as_json(self) -> dict[str, int]:
        """The numbers by their names."""
        return asdict(self)


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
    _end_first()


def _end_first() -> None:
    """Ask the system to end this process, and not its judge, where the machine's memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("1000")
    except OSError:
        pass  # a system without that file, or one that holds the score higher already
