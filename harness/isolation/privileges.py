"""The rights of a process by its identity: user, groups, capabilities."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lastbit.isolation import system

USERS = range(61184, 65520)
"""Users that belong to nobody: what systemd gives to services for as long as they run."""


def shield() -> None:
    """Keep other processes of the same user from reading this one's memory or environment, and from debugging it.

    Judges call it before they start kernel processes. Root's processes are shielded from other users anyway.
    """
    if system.LINUX:
        system.prctl(system.PR_SET_DUMPABLE, 0)


def readable_by_all(paths: Iterable[Path]) -> bool:
    """Return whether a user without rights of its own gets to these places, as far as they exist."""
    found = [one for path in paths if path.exists() for one in (path.resolve(), *path.resolve().parents)]
    return all(one.stat().st_mode & (stat.S_IXOTH if one.is_dir() else stat.S_IROTH) for one in found)


def user_of(folder: Path) -> int:
    """Return a user for root to become, who shall have this folder and nothing else: always the same for a folder."""
    return USERS[folder.stat().st_ino % len(USERS)]


def become(user: int | None, groups: Sequence[int], *, keep_reading: bool) -> None:
    """Give up every capability and the groups of root, and become the user if one is named.

    `keep_reading`: but the right to read every file, also in what this process starts. It is for where Python itself
    lies in a folder of root's, and only safe where Landlock says which files there are.
    """
    kept = (system.CAP_DAC_READ_SEARCH,) if keep_reading else ()
    if user is not None:
        system.prctl(system.PR_SET_KEEPCAPS, 1)
        _drop_bounding(kept)
        os.setgroups(list(groups))
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    else:
        _drop_bounding(kept)
    system.set_capabilities(*kept)
    for capability in kept:
        system.prctl(system.PR_CAP_AMBIENT, system.PR_CAP_AMBIENT_RAISE, capability)
    system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)


def _drop_bounding(kept: Sequence[int]) -> None:
    """Drop all capabilities but `kept`, so that no program that the process starts can have them again. Who may not
    drop them has none to give up.
    """
    with suppress(OSError):
        for capability in range(64):
            if capability not in kept:
                system.prctl(system.PR_CAPBSET_DROP, capability)


def groups_of(devices: Iterable[Path]) -> list[int]:
    """Return the groups of those devices that not everybody may use."""
    found = [device.stat() for device in devices if device.is_char_device()]
    return sorted({state.st_gid for state in found if not state.st_mode & stat.S_IWOTH and state.st_gid})


def settle() -> None:
    """Set anew what a change of the user has undone: end with the guardian, and be open to itself.

    Drivers look at `/proc/self`, which a process that is shielded cannot.
    """
    system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    system.prctl(system.PR_SET_DUMPABLE, 1)
