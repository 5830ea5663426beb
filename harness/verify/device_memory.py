"""Memory of a device: what to do where it runs out, and how the workers of a run share it.

Cases run side by side, and one that ran out of memory runs again alone. Two locked files of the run's folder keep the
order. Whoever holds `.cases` alone is alone on the device. Whoever wants that holds `.gate` before, so that no other
case begins meanwhile.
"""

from __future__ import annotations

import faulthandler
import gc
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

import torch

from lastbit.errors import is_out_of_memory
from lastbit.isolation.answers import Raised
from lastbit.judging.problem import PROBLEMS
from lastbit.kernel import Kernel
from lastbit.result import CaseResult, Verdict

_OUT = "out of memory on "
LATER = "in a later call of the same case"
"""Note of an error that a kernel raised in another call than its first."""

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
    elsewhere = isinstance(error, Raised)  # in a process of the kernel's own
    if not is_out_of_memory(error, error.kinds if isinstance(error, Raised) else ()):
        return None
    code, file = getattr(inspect.unwrap(kernel.call), "__code__", None), kernel.source.rpartition(":")[0]
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    its = elsewhere or any(frame.f_code is code or frame.f_code.co_filename == file for frame in frames)
    shares = not (elsewhere and device.type == "cpu")  # the kernel takes memory from where lastbit does
    if its and not (shares and LATER in getattr(error, "__notes__", ())):
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


def _asked(error: BaseException) -> str:
    """Describe the failed allocation if the error does: `asked for 2.00 GiB with 1.19 GiB of 79.25 GiB free`."""
    kind = error.kind if isinstance(error, Raised) else type(error).__name__
    asked, free = _ASKED.search(str(error)), _FREE.search(str(error))
    if asked and free:
        return f"asked for {asked[1]} with {free[2]} of {free[1]} free"
    said = str(error)[:200]  # two lines of a terminal
    return f"asked for {asked[1]}" if asked else f"raised {kind}: {said}".rstrip(": ")


Attempt = Callable[[], CaseResult]
"""Says that a case has started, and verifies it."""

Verify = Callable[[Attempt], CaseResult]
"""Makes the attempt when it may be made, and again where that can help."""


def directly(attempt: Attempt) -> CaseResult:
    """Verify a case on a device whose memory need not be shared."""
    return attempt()


def _give_back(device: torch.device) -> None:
    """Release all memory that this process can do without."""
    PROBLEMS.forget()
    give_back(device)


class SharedDevice:
    """A device with memory of its own, and the files in `folder` by which workers take turns.

    `waits` is called when a case has to wait for others, so that its clock is stopped.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        waits: Callable[[], None] = faulthandler.cancel_dump_traceback_later,
    ) -> None:
        name = str(device).replace(":", "-")
        self._device, self._waits = device, waits
        self._gate, self._cases = ((folder / f"{name}.{part}").open("w") for part in ("gate", "cases"))

    def verify(self, attempt: Attempt) -> CaseResult:
        """Verify a case beside those of other workers, and once more alone if memory runs out."""
        with self.beside_others():
            result = attempt()
            if ran_out(result):
                _give_back(self._device)
        if not ran_out(result):
            return result
        self._waits()  # the others may take as long as they are allowed to
        with self.alone():
            result = attempt()
        return replace(result, reason=f"{result.reason}; no other case was running") if ran_out(result) else result

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """Wait while a worker is alone or about to be; release the memory of this one before and after.

        The lock of the case is held until that memory is released, so that a worker alone on the device finds it free.
        """
        if not self._may_begin():
            _give_back(self._device)
            flock(self._gate, LOCK_SH)
        flock(self._cases, LOCK_SH)
        flock(self._gate, LOCK_UN)
        try:
            yield
        finally:
            if not self._may_begin():
                _give_back(self._device)
            flock(self._gate, LOCK_UN)
            flock(self._cases, LOCK_UN)

    def _may_begin(self) -> bool:
        """Take the gate if no other worker holds it; return whether it was taken."""
        try:
            flock(self._gate, LOCK_SH | LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until every other case has ended; none begins before this one has."""
        flock(self._gate, LOCK_EX)
        flock(self._cases, LOCK_EX)
        try:
            yield
        finally:
            flock(self._cases, LOCK_UN)
            flock(self._gate, LOCK_UN)
