"""Landlock: a process gives up files, the network and signals for itself and all that it will start.

It needs no privilege. Each version (ABI) of it can refuse more; what the running one does not know is left out.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable
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
                self._add(opened, rights)
            finally:
                os.close(opened)

    def _add(self, opened: int, rights: int) -> None:
        known = rights & self._files & (-1 if stat.S_ISDIR(os.fstat(opened).st_mode) else _FILE)
        if known:
            rule = _Beneath(known, opened)
            syscall(_ADD, self._set, ctypes.c_int(_PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0))

    def enforce(self) -> None:
        """Refuse from now on, for good. The process must have given up new privileges, or have CAP_SYS_ADMIN."""
        syscall(_RESTRICT, self._set, ctypes.c_uint32(0))
        os.close(self._set)
