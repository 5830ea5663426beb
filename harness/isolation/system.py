"""Calls of Linux that Python 3.11 has no function for, and the numbers that they take."""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x00020000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x4000, 0x40000

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP = 1, 4, 8, 24
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4

CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522

LINUX = sys.platform == "linux"

_libc = ctypes.CDLL(None, use_errno=True)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityWords(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def prctl(option: int, *arguments: int) -> None:
    """Call `prctl`; raise OSError if the system refuses."""
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *words))


def unshare(flags: int) -> None:
    """Call `unshare`; raise OSError if the system refuses."""
    _checked(_libc.unshare(flags))


def mount(kind: str, target: str, flags: int, options: str = "") -> None:
    """Mount a file system of a kind that needs no device; an empty kind changes the mount that is there.

    Raises OSError if the system refuses.
    """
    _checked(_libc.mount(b"none", target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode()))


def set_capabilities(*kept: int) -> None:
    """Have these capabilities and no others, also inheritable ones. Raises OSError if the system refuses."""
    bits = sum(1 << capability for capability in kept)
    low, high = (_CapabilityWords(*[bits >> shift & 0xFFFFFFFF] * 3) for shift in (0, 32))
    words = (_CapabilityWords * 2)(low, high)
    _checked(_libc.capset(ctypes.byref(_CapabilityHeader(_CAPABILITY_VERSION_3, 0)), words))


def syscall(number: int, *arguments: object) -> int:
    """Make a system call by its number, which for those before 424 depends on the architecture.

    Raises OSError if the system refuses.
    """
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments))


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
