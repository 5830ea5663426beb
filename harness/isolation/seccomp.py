"""A filter of system calls: those that no kernel needs and that reach beyond its process are refused.

It is a short program of classic BPF (seccomp(2), Linux 3.5). The packages that would write one for us need a library of
the system (libseccomp), which Python's package index does not have.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from lastbit.isolation import system

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06  # of linux/bpf_common.h
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; of the argument, its low word
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # from here on calls of x86-64 are those of another ABI

_FAMILIES = (1, 2, 10, 16)
"""Of sockets: AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK, which namespaces and Landlock confine."""

_NAMESPACES = 0x7E020080
"""The flags of clone(2) for new namespaces, in which a process has rights that the filter was to keep from it."""

_SINCE_424 = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 443, 447, 457, 458, 467)
"""On all architectures: io_uring, new mounts, pidfd_getfd, quotactl_fd, memfd_secret, statmount, listmount."""

_CLONE3 = 435  # its flags lie in memory, where no filter looks; libraries go back to clone


@dataclass(frozen=True)
class _Architecture:
    """The numbers of Linux on an architecture: of itself, of three calls by name, and of others.

    The others: more about keys, inotify and fanotify, files by handle, debugging and memory of other processes,
    performance counters, BPF, userfaultfd, namespaces, mounts, chroot, modules, kexec, swap, accounting, quotas,
    reboot, syslog.
    """

    audit: int
    socket: int
    clone: int
    keyctl: int
    refused: tuple[int, ...]


_ARCHITECTURES = {
    "x86_64": _Architecture(
        0xC000003E,
        socket=41,
        clone=56,
        keyctl=250,
        refused=(
            *(248, 249, 253, 254, 294, 300, 301, 303, 304, 101, 310, 311, 312, 298, 321, 323, 272, 308),
            *(165, 166, 155, 161, 175, 176, 313, 246, 320, 167, 168, 163, 179, 169, 103),
        ),
    ),
    "aarch64": _Architecture(
        0xC00000B7,
        socket=198,
        clone=220,
        keyctl=219,
        refused=(
            *(217, 218, 26, 27, 262, 263, 264, 265, 117, 270, 271, 272, 241, 280, 282, 97, 268),
            *(40, 39, 41, 51, 105, 106, 273, 104, 294, 224, 225, 89, 60, 142, 116),
        ),
    ),
}
_JOIN_SESSION_KEYRING = 1


def new_session_keyring() -> None:
    """Leave the keys of the session that this process was started in, where the system has such."""
    if architecture := _ARCHITECTURES.get(platform.machine()):
        with suppress(OSError):  # a system without keys, or whose own filter refuses all calls about them
            system.syscall(architecture.keyctl, ctypes.c_int(_JOIN_SESSION_KEYRING), None)


def enforce() -> str:
    """Refuse calls for good, also in all that this process starts; return why that cannot be, or an empty text.

    The process must have given up new privileges, or have CAP_SYS_ADMIN.
    """
    architecture = _ARCHITECTURES.get(platform.machine())
    if architecture is None:
        return f"no list of calls for {platform.machine()}"
    program = b"".join(_program(architecture))
    code = ctypes.create_string_buffer(program, len(program))
    filter_ = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    given = ctypes.create_string_buffer(filter_, len(filter_))
    try:
        system.prctl(system.PR_SET_SECCOMP, system.SECCOMP_MODE_FILTER, ctypes.addressof(given))
    except OSError as error:
        return f"seccomp: {error.strerror}"
    return ""


def _program(of: _Architecture) -> Iterator[bytes]:
    """Yield the instructions; a comparison skips so many of them where it holds, and so many where it does not."""
    refuse, unknown = _RETURN, _ERRNO | errno.EPERM
    yield _instruction(_LOAD, _ARCHITECTURE)
    yield _instruction(_EQUAL, of.audit, 1, 0)
    yield _instruction(refuse, unknown)
    yield _instruction(_LOAD, _NUMBER)
    yield _instruction(_AT_LEAST, _X32, 0, 1)
    yield _instruction(refuse, unknown)
    yield _instruction(_EQUAL, _CLONE3, 0, 1)
    yield _instruction(refuse, _ERRNO | errno.ENOSYS)
    for number in (of.keyctl, *of.refused, *_SINCE_424):
        yield _instruction(_EQUAL, number, 0, 1)
        yield _instruction(refuse, unknown)
    yield _instruction(_EQUAL, of.clone, 0, 4)
    yield _instruction(_LOAD, _FIRST_ARGUMENT)
    yield _instruction(_ANY_BIT, _NAMESPACES, 0, 1)
    yield _instruction(refuse, unknown)
    yield _instruction(_RETURN, _ALLOW)
    yield _instruction(_EQUAL, of.socket, 0, len(_FAMILIES) + 2)
    yield _instruction(_LOAD, _FIRST_ARGUMENT)
    for place, family in enumerate(_FAMILIES):
        yield _instruction(_EQUAL, family, len(_FAMILIES) - place, 0)
    yield _instruction(refuse, unknown)
    yield _instruction(_RETURN, _ALLOW)


def _instruction(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)
