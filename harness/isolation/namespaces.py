"""Namespaces: views of the system that a process has to itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lastbit.isolation import system
from lastbit.isolation.limits import MB

PROCESSES, MOUNTS = "processes", "mounts"

FOR_CPU: Mapping[str, int] = {
    PROCESSES: system.CLONE_NEWPID,
    "network": system.CLONE_NEWNET,
    "shared memory": system.CLONE_NEWIPC,
}
"""What is a process's own → its namespace."""

FOR_ACCELERATORS: Mapping[str, int] = {PROCESSES: system.CLONE_NEWPID, "shared memory": system.CLONE_NEWIPC}

_SHARED_MEMORY = 64 * MB  # locks and queues of multiprocessing; not for data
_MOST_FILES = 1 << 15  # in a folder of a kernel process


def own_namespaces(wanted: Mapping[str, int]) -> dict[str, str]:
    """Enter namespaces; return which of them the system refuses, and why. That of processes begins with the next child.

    Who is not root gets all or none, with a user namespace, in which the user is the same one.
    """
    if os.geteuid():
        return _as_user(wanted)
    refused = {}
    for name, flag in wanted.items():
        try:
            system.unshare(flag)
        except OSError as error:
            refused[name] = str(error.strerror)
    return refused


def _as_user(wanted: Mapping[str, int]) -> dict[str, str]:
    user, group = os.geteuid(), os.getegid()
    try:
        system.prctl(system.PR_SET_DUMPABLE, 1)  # who is shielded from itself cannot write the maps
        system.unshare(sum(wanted.values(), system.CLONE_NEWUSER))
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        return dict.fromkeys(wanted, f"no user namespace: {error.strerror}")
    return {}


def own_mounts(folder: Path, size: int) -> dict[str, str]:
    """Mount a `/proc` of this namespace of processes, whose first process this is, and new `/dev/shm` and `folder`.

    Both are in memory, of limited size, and go with the process. What the system refuses and why, as `own_namespaces`
    says it.
    """
    private = system.MS_NOSUID | system.MS_NODEV
    try:
        system.unshare(system.CLONE_NEWNS)
        system.mount("", "/", system.MS_REC | system.MS_PRIVATE)
        system.mount("proc", "/proc", private | system.MS_NOEXEC)
        system.mount("tmpfs", "/dev/shm", private, f"size={_SHARED_MEMORY},mode=1777")
        system.mount("tmpfs", str(folder), private, f"size={size},nr_inodes={_MOST_FILES},mode=700")
    except OSError as error:
        return {MOUNTS: str(error.strerror)}
    return {}
