"""The floating-point settings of a thread: how it rounds, and whether it flushes subnormal numbers to zero.

`torch.set_flush_denormal`, `fesetround`, and a library that was linked with -ffast-math, once it is loaded, change
them for all arithmetic that follows in the thread, and in threads that it starts. C's <fenv.h> saves and restores them,
on x86 (MXCSR) as on ARM (FPCR); what they are is seen by arithmetic, which needs to know neither register.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LEAST_NORMAL = sys.float_info.min
(_SUBNORMAL,) = struct.unpack("<d", bytes([1, *bytes(7)]))  # a literal could be read as zero where zero is what it is
_THREE_QUARTERS = 0.75 * sys.float_info.epsilon  # of the distance from 1 to the next number
_ROUNDING = {(True, True): "to nearest", (True, False): "up", (False, True): "down", (False, False): "toward zero"}
_FENV_WORDS = 8  # 64 bytes; fenv_t has 32 with glibc on x86-64, 8 on AArch64
_SOFT = 1  # omp_pause_soft


@dataclass(frozen=True)
class FloatingPoint:
    """The settings of a thread; two are equal if they compute alike.

    Attributes:
        settings: in words, for a reader.
        saved: everything that `fegetenv` saves.
    """

    settings: str
    saved: ctypes.Array[ctypes.c_uint64] = field(compare=False, repr=False)

    @classmethod
    def now(cls) -> FloatingPoint:
        """Return the settings of this thread."""
        saved = (ctypes.c_uint64 * _FENV_WORDS)()
        _libraries().fegetenv(saved)
        # How this thread computes, as its arithmetic shows it.
        up, down = 1.0 + _THREE_QUARTERS > 1.0, -1.0 - _THREE_QUARTERS < -1.0
        results = struct.pack("<d", _LEAST_NORMAL * 0.5) == bytes(8)  # a comparison may take what is no zero for one
        operands = _SUBNORMAL == 0.0
        flushed = {"subnormal results flushed to zero": results, "subnormal operands taken for zero": operands}
        words = [f"rounding {_ROUNDING[up, down]}", *(words for words, seen in flushed.items() if seen)]
        return cls(", ".join(words), saved)

    def restore(self) -> None:
        """Make these the settings of this thread."""
        _libraries().fesetenv(self.saved)

    def __str__(self) -> str:
        return self.settings


def end_openmp_threads() -> None:
    """End the threads that OpenMP keeps for its next loop: each has the settings that its starter had at that time."""
    if (pause := getattr(_libraries(), "omp_pause_resource_all", None)) is not None:
        pause(_SOFT)


@functools.cache
def _libraries() -> ctypes.CDLL:
    """Return what is linked into this process: the C library with libm, and OpenMP once torch is imported."""
    return ctypes.CDLL(None)


@contextmanager
def kept_floating_point() -> Iterator[list[str]]:
    """Restore the settings of this thread after the block, and then list what they were left at if they had changed."""
    before, left = FloatingPoint.now(), list[str]()
    try:
        yield left
    finally:
        if (now := FloatingPoint.now()) != before:
            before.restore()
            left.append(str(now))


@contextmanager
def default_floating_point() -> Iterator[None]:
    """Round to nearest and keep subnormal numbers within the block, whatever this thread does otherwise."""
    import torch

    with kept_floating_point():
        torch.set_flush_denormal(False)
        _libraries().fesetround(0)  # FE_TONEAREST on every processor that torch runs on
        yield
