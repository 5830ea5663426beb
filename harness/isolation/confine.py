"""The confinement of a process: it gives up all that a kernel does not need, before it loads the kernel's code.

Every measure is taken where the system has it; what it lacks is told, and stops nothing. It is no sandbox against code
that attacks the operating system.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from lastbit.isolation import files, landlock, limits, namespaces, privileges, seccomp, system
from lastbit.isolation.confinement import Confinement, Measure
from lastbit.isolation.environment import own_environment
from lastbit.isolation.guardian import close_all_but, guarded
from lastbit.isolation.limits import GB, MB, Limits

_SINCE_TCP, _SINCE_SCOPES = 4, 6  # ABIs of Landlock


def confine(
    most: Limits,
    folder: Path,
    readable: Sequence[Path],
    device_type: str,
    *,
    cache: Path | None = None,
    kept: Collection[int] | None = None,
) -> Confinement:
    """Confine this process for good, and say what holds. It returns in a grandchild: see `guardian`.

    The process must be freshly forked and have one thread. What it has imported it can use; later imports find Python,
    what is installed, packages of which something is imported, and `readable`.

    Args:
        most: how much it may use.
        folder: empty; its working folder from now on, and the only one that it can write. Where it has mounts of its
            own, what it writes there is in memory, and never seen from outside.
        readable: further folders and files that it can read and start programs of, such as the kernel's.
        device_type: `cpu`, or that of the accelerator that it needs.
        cache: a folder for compiled kernels that it can write, too, and that outlives it; in `folder` if None. Where
            the judge is root, processes with the same cache are of the same user.
        kept: descriptors that stay open besides the three standard ones; all if None.
    """
    if not system.LINUX:
        return Confinement((Measure("confinement", False, f"there is none for {sys.platform}"),))
    if kept is not None:
        close_all_but(*kept)
    own = [cache, folder] if cache else [folder]
    user = privileges.user_of(own[0])
    seccomp.new_session_keyring()
    refused = _own_views(most, folder, device_type)
    _settle_in(folder, cache or folder)
    limits.apply(most, device_type)
    abi = landlock.version()
    rules = files.rules(own, readable, device_type, shared_memory=not refused[namespaces.MOUNTS]) if abi else None
    rights = _give_up_rights(user, own, readable, landlocked=rules is not None)
    if rules:
        rules.enforce()
    privileges.settle()
    unfiltered = seccomp.enforce()
    calls = Measure("system calls", not unfiltered, unfiltered or "seccomp")
    views = (_view(name, why, _instead(name, abi)) for name, why in refused.items())
    return Confinement((_limited(most), *rights, _files(abi), calls, *views))


def _own_views(most: Limits, folder: Path, device_type: str) -> dict[str, str]:
    """Return name of a view of the system → why this process does not have it to itself; empty for those that it has.

    From here on it is a child of its guardian.
    """
    wanted = namespaces.FOR_CPU if device_type == "cpu" else namespaces.FOR_ACCELERATORS
    views = {**dict.fromkeys(namespaces.FOR_CPU, "not with an accelerator"), **dict.fromkeys(wanted, "")}
    views.update(namespaces.own_namespaces(wanted))
    own_processes = not views[namespaces.PROCESSES]
    views[namespaces.MOUNTS] = "" if own_processes else "no own processes"
    guarded(own_processes, lambda: views.update(namespaces.own_mounts(folder, most.folder_size)))
    return views


def _settle_in(folder: Path, cache: Path) -> None:
    os.chdir(folder)
    os.environ.update(own_environment(folder, cache))
    tempfile.tempdir = None  # it is looked for anew


def _give_up_rights(
    user: int, own: Sequence[Path], readable: Sequence[Path], *, landlocked: bool
) -> tuple[Measure, ...]:
    """Become a user of its own, where root started the process, and give up all capabilities."""
    if os.geteuid():
        return _same_user("lastbit does not run as root")
    open_to_all = privileges.readable_by_all([*files.python_folders(), *readable, *(path.parent for path in own)])
    if not (open_to_all or landlocked):
        return _same_user("only root can read Python or the kernel, and there is no Landlock")
    for path in own:
        os.chown(path, user, user)
    privileges.become(user, privileges.groups_of(files.accelerators()), keep_reading=not open_to_all)
    kept = "none" if open_to_all else "only to read what Landlock allows"
    return Measure("own user", True, str(user)), Measure("capabilities", True, kept)


def _same_user(why: str) -> tuple[Measure, ...]:
    privileges.become(None, (), keep_reading=False)
    return Measure("own user", False, why), Measure("capabilities", True, "none")


def _limited(most: Limits) -> Measure:
    how = f"{most.memory / GB:.3g} GB, {most.processes} processes, {most.file_size / MB:.3g} MB a file"
    return Measure("limits", True, how)


def _files(abi: int) -> Measure:
    return Measure("files", abi > 0, f"Landlock {abi}" if abi else "this system has no Landlock")


def _view(name: str, refused: str, instead: str) -> Measure:
    how = (instead or refused) if refused else "namespace"
    return Measure(f"own {name}", not refused or bool(instead), how)


def _instead(name: str, abi: int) -> str:
    """Return the restriction of Landlock that stands in for a missing namespace; empty if there is none."""
    if name == "network" and abi >= _SINCE_TCP:
        return "Landlock: no TCP"
    if name == namespaces.PROCESSES and abi >= _SINCE_SCOPES:
        return "Landlock: no signals to others"
    return ""
