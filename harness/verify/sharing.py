"""Devices shared by the workers of a run: cases run side by side, and one that ran out of memory again alone.

Two locked files of the run's folder keep the order. Whoever holds `.cases` alone is alone on the device. Whoever wants
that holds `.gate` before, so that no other case begins meanwhile.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path

import torch

from lastbit.judging.problems import PROBLEMS
from lastbit.result import CaseResult
from lastbit.verify.memory import give_back, ran_out

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
