"""Out-of-memory errors: whether the kernel asked for too much, or lastbit did."""

from __future__ import annotations

import gc
import inspect
import re
import traceback

import torch

from lastbit.isolation.answers import Raised
from lastbit.kernel import Kernel
from lastbit.result import CaseResult, Verdict

_OUT = "out of memory on "
LATER = "in a later call of the same case"
"""Note of an error that a kernel raised in another call than its first."""

_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
_PHRASES = ("out of memory", "can't allocate memory")  # of CUDA and Triton, of torch on the CPU
_ASKED = re.compile(r"[Tt]ried to allocate (\d[\d.]* \w+)")
_FREE = re.compile(r"total capacity of (\d[\d.]* \w+) of which (\d[\d.]* \w+) is free")


def ran_out(result: CaseResult) -> bool:
    """Return whether a case has no result because memory ran out."""
    return result.reason.startswith(_OUT)


def out_of_memory(error: BaseException, kernel: Kernel, device: torch.device) -> tuple[Verdict, str] | None:
    """Return verdict and reason for a case out of memory: ERRORED in the kernel's first call, otherwise SKIPPED.

    In later calls lastbit holds inputs and results of the earlier ones, unless the kernel has memory of its own.
    Return None for any other error.
    """
    if not _is_out(error):
        return None
    if _raised_in(kernel, error) and not (_shares(error, device) and LATER in getattr(error, "__notes__", ())):
        return Verdict.ERRORED, f"{_OUT}{device}: the kernel {_asked(error)}"
    need = f"the inputs and the reference of lastbit need more than there is ({_asked(error)})"
    return Verdict.SKIPPED, f"{_OUT}{device}: {need}; verify the case on another device, or one with fewer rows"


def give_back(device: torch.device, *, beyond: int = 0) -> None:
    """Release an accelerator's unused memory if this process holds more than `beyond` bytes of it."""
    if device.type != "cpu" and torch.accelerator.memory_reserved(device) > beyond:
        gc.collect()
        torch.accelerator.empty_cache()


def available_bytes() -> int:
    """Return the bytes of host memory that a process can take before others lose theirs, as Linux estimates it."""
    with open("/proc/meminfo") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) << 10


def is_lost(device: torch.device) -> bool:
    """Return whether an accelerator can no longer be used, as after an illegal access to memory."""
    if device.type == "cpu":
        return False
    try:
        torch.accelerator.synchronize(device)
    except RuntimeError:
        return True
    return False


def _shares(error: BaseException, device: torch.device) -> bool:
    """Return whether the kernel takes memory from where lastbit does: not in a process of its own on the CPU."""
    return not (isinstance(error, Raised) and device.type == "cpu")


def _is_out(error: BaseException) -> bool:
    kinds = error.kinds if isinstance(error, Raised) else [kind.__name__ for kind in type(error).__mro__]
    known = not _OF_MEMORY.isdisjoint(kinds)
    return known or ("RuntimeError" in kinds and any(phrase in str(error).lower() for phrase in _PHRASES))


def _raised_in(kernel: Kernel, error: BaseException) -> bool:
    """Return whether an error passed through the kernel's function or file, or came from a process of its own."""
    if isinstance(error, Raised):
        return True
    code, file = getattr(inspect.unwrap(kernel.call), "__code__", None), kernel.source.rpartition(":")[0]
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_code is code or frame.f_code.co_filename == file for frame in frames)


def _asked(error: BaseException) -> str:
    """Describe the failed allocation if the error does: `asked for 2.00 GiB with 1.19 GiB of 79.25 GiB free`."""
    kind = error.kind if isinstance(error, Raised) else type(error).__name__
    asked, free = _ASKED.search(str(error)), _FREE.search(str(error))
    if asked and free:
        return f"asked for {asked[1]} with {free[2]} of {free[1]} free"
    return f"asked for {asked[1]}" if asked else f"raised {kind}: {str(error)[:200]}".rstrip(": ")
