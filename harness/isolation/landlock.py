"""Landlock: a process gives up files, the network and signals for itself and all that it will start.

It needs no privilege. Each version (ABI) of it can refuse more; what the running one does not know is left out.
"""

from __future__ import annotations

import ctypes
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from lastbit.isolation.system import syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_CREATE_VERSION, _PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEV = 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
"""Rights of what a process may read and start."""

_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
_FILES_OF_ABI = (0, (1 << 13) - 1, (1 << 14) - 1, (1 << 15) - 1, (1 << 15) - 1, (1 << 16) - 1)
"""ABI → all rights about files that it knows; later ones know those of the last."""

WRITE = _FILES_OF_ABI[3]
"""Rights of a folder that is the process's own; no device files in it do more than their rights say."""

DEVICE = READ_FILE | READ_DIR | WRITE_FILE | TRUNCATE | IOCTL_DEV

_TCP = 0b11  # bind and connect, from ABI 4
_SIGNALS, _ABSTRACT_SOCKETS = 0b10, 0b01  # from ABI 6


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Return the ABI version of this system's Landlock; 0 if it has none."""
    try:
        return syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_VERSION))
    except OSError:
        return 0


class LandlockRules:
    """The rights that remain after `enforce`, which refuses everything else that its version knows.

    `abstract_sockets`: whether those of other processes can be reached, where the network is another's business.
    """

    def __init__(self, *, abstract_sockets: bool = False) -> None:
        abi = version()
        self._files = _FILES_OF_ABI[min(abi, len(_FILES_OF_ABI) - 1)]
        scoped = _SIGNALS if abstract_sockets else _SIGNALS | _ABSTRACT_SOCKETS
        wanted = _Ruleset(self._files, _TCP if abi >= 4 else 0, scoped if abi >= 6 else 0)
        size = 8 if abi < 4 else 16 if abi < 6 else 24  # older versions know only the first fields
        self._set = syscall(_CREATE, ctypes.byref(wanted), ctypes.c_size_t(size), ctypes.c_uint32(0))

    def allow(self, paths: Iterable[Path], rights: int) -> None:
        """Keep these rights for files, and for all that lies in folders; what is not there is passed over."""
        for path in paths:
            try:
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                if known := rights & self._files & (-1 if stat.S_ISDIR(os.fstat(opened).st_mode) else _FILE):
                    rule = _Beneath(known, opened)
                    syscall(_ADD, self._set, ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))
            finally:
                os.close(opened)

    def enforce(self) -> None:
        """Refuse from now on, for good. The process must have given up new privileges, or have CAP_SYS_ADMIN."""
        syscall(_RESTRICT, self._set, ctypes.c_uint32(0))
        os.close(self._set)


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


def rules(own: Sequence[Path], readable: Sequence[Path], device_type: str, *, shared_memory: bool) -> LandlockRules:
    """Return what Landlock is to allow: `own` to write, and what programs need to read.

    `shared_memory`: `/dev/shm` is the process's own.
    """
    made = LandlockRules(abstract_sockets=device_type != "cpu")
    named = [folder for name in _NAMED for folder in os.environ.get(name, "").split(os.pathsep)]
    found = [*map(Path, filter(os.path.isabs, named)), *python_folders()]
    made.allow([*_SYSTEM, *(Path("/etc", name) for name in _SETTINGS), *found], READ)
    made.allow(readable, READ)
    made.allow((Path("/dev", name) for name in _PLAIN_DEVICES), DEVICE)
    if device_type != "cpu":
        made.allow(accelerators(), DEVICE)
        # The driver of NVIDIA names its threads in /proc/self/task/*/comm, and fails with error 304 where it cannot.
        made.allow([Path("/proc/self/task")], READ | WRITE_FILE | TRUNCATE)
    shared = [Path("/dev/shm")] if shared_memory or device_type != "cpu" else []  # that driver has files there, too
    made.allow([*own, *shared], WRITE)
    return made
