"""The files that a kernel process can read and write."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from lastbit.isolation import landlock

_SYSTEM = tuple(map(Path, ("/usr", "/opt", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/proc", "/sys")))
_SETTINGS = (
    *("alternatives", "group", "host.conf", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "locale.alias"),
    *("localtime", "nsswitch.conf", "os-release", "passwd", "timezone", "vulkan", "OpenCL", "nvidia"),
)
"""What programs read in `/etc`; the rest of it may hold secrets."""

_NAMED = ("PATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME")
"""Variables with folders of libraries and programs."""

_COMPILERS = ("torch", "triton", "nvidia")
"""Packages that load libraries from folders beside their own."""

_PLAIN_DEVICES = ("null", "zero", "full", "random", "urandom")
_ACCELERATORS = ("nvidia*", "kfd", "dri")


@cache
def python_folders() -> list[Path]:
    """Return where Python and installed packages lie, and packages that this process has imported when first asked."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *filter(_is_installed, sys.path)}
    for name, module in list(sys.modules.items()):
        if "." not in name:
            folders = list(vars(module).get("__path__", ()))
            found.update(folders)
            found.update(map(os.path.dirname, folders if name in _COMPILERS else ()))
    return sorted(map(Path, found))


def _is_installed(folder: str) -> bool:
    """Return whether an installer has put packages into a folder, as `pip install --target` does: a checkout is none.

    What this user may not look into is none, either.
    """
    readable = os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)
    return readable and any(name.endswith(".dist-info") for name in os.listdir(folder))


def accelerators() -> list[Path]:
    """Return the device files of GPUs."""
    return [path for pattern in _ACCELERATORS for path in sorted(Path("/dev").glob(pattern))]


def rules(
    own: Sequence[Path], readable: Sequence[Path], device_type: str, *, shared_memory: bool
) -> landlock.LandlockRules:
    """Return what Landlock is to allow: `own` to write, and what programs need to read.

    `shared_memory`: `/dev/shm` is the process's own.
    """
    made = landlock.LandlockRules(abstract_sockets=device_type != "cpu")
    made.allow([*_SYSTEM, *(Path("/etc", name) for name in _SETTINGS), *_named(), *python_folders()], landlock.READ)
    made.allow(readable, landlock.READ)
    made.allow((Path("/dev", name) for name in _PLAIN_DEVICES), landlock.DEVICE)
    if device_type != "cpu":
        made.allow(accelerators(), landlock.DEVICE)
        # The driver of NVIDIA names its threads in /proc/self/task/*/comm, and fails with error 304 where it cannot.
        made.allow([Path("/proc/self/task")], landlock.READ | landlock.WRITE_FILE | landlock.TRUNCATE)
    shared = [Path("/dev/shm")] if shared_memory or device_type != "cpu" else []  # that driver has files there, too
    made.allow([*own, *shared], landlock.WRITE)
    return made


def _named() -> Iterator[Path]:
    for name in _NAMED:
        yield from (Path(folder) for folder in os.environ.get(name, "").split(os.pathsep) if os.path.isabs(folder))
