"""Records of a worker: one line per result, and the case that was under way if it dies."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch

from lastbit.case import Case
from lastbit.config import Config
from lastbit.result import CaseResult, Verdict
from lastbit.timing import seconds_so_far
from lastbit.verify.device_memory import SharedDevice, Verify, directly, is_lost
from lastbit.verify.isolating import limit_of
from lastbit.verify.notes import LEFT, TIME, Failures, KnownFailures, write_json, written
from lastbit.verify.plan import Item

_FATAL = 17
"""Exit status of a worker whose accelerator can no longer be used."""


class ResultRecorder:
    """Appends results of one worker process to files in the run's folder.

    A case that takes longer than the limit ends the process: nothing else stops a kernel that hangs in native code.
    pytest-xdist then starts another worker, and the case that was under way is found in the `.started` file.
    """

    def __init__(self, config: Config, worker: str, dump: Callable[[CaseResult], str]) -> None:
        self.cases, self.seed, self.random = config.cases_per_group, config.seed, config.random
        self.timeout, self._dump = config.timeout, dump
        self._limit = limit_of(config)
        self._folder, self._shared = Path(config.folder), dict[torch.device, SharedDevice]()
        self.failures: KnownFailures | None = None if config.keep_going else Failures(self._folder)
        self._lacking: list[dict[str, str | int]] = []
        stem = self._folder / f"{worker}-{os.getpid()}"
        self._under_way, self._time = stem.with_suffix(".started"), stem.with_suffix(TIME)
        self._left = stem.with_suffix(LEFT)
        with written(stem):
            self._results: TextIO = stem.with_suffix(".jsonl").open("a")
            self._trace: TextIO = stem.with_suffix(".trace").open("w")

    def verify_on(self, device: torch.device) -> Verify:
        """Return the function that verifies a case on a device; an accelerator is shared with other workers."""
        if device.type == "cpu":
            return directly
        if device not in self._shared:
            self._shared[device] = SharedDevice(self._folder, device)
        return self._shared[device].verify

    def started(self, item: Item, case: Case, *, counted: bool = True) -> None:
        """Note the case that is about to run, and start its clock.

        Raises:
            Unrecorded: the note cannot be written.
        """
        with written(self._under_way):
            write_json(self._under_way, note_of(item, case, self._limit, counted=counted))
        faulthandler.dump_traceback_later(self._limit, exit=True, file=self._trace)

    def record(self, result: CaseResult) -> None:
        """Keep a result; end the process if the kernel has left the accelerator unusable.

        Raises:
            Unrecorded: the result cannot be written.
        """
        faulthandler.cancel_dump_traceback_later()
        try:
            with written(Path(self._results.name)):
                self._results.write(self._dump(result) + "\n")
                self._results.flush()
        finally:
            self._under_way.unlink(missing_ok=True)
        if result.verdict in (Verdict.ERRORED, Verdict.SKIPPED) and is_lost(torch.device(result.device)):
            os._exit(_FATAL)

    def leave(self, item: Item, cases: int) -> None:
        """Note how many cases of an item are not run because its kernel has failed.

        Raises:
            Unrecorded: the note cannot be written.
        """
        kernel, device = item.subject.kernel.name, str(item.subject.device)
        self._lacking.append({"kernel": kernel, "device": device, "group": item.group.name, "cases": cases})
        with written(self._left):
            write_json(self._left, self._lacking)

    def note_time(self) -> None:
        """Note the time that this process has spent so far, by parts; if that fails, ignore it."""
        with suppress(OSError):
            write_json(self._time, seconds_so_far())


def note_of(item: Item, case: Case, limit: float, *, counted: bool) -> dict[str, Any]:
    """Return the data to report about a case if its process ends during it; `limit` is in seconds."""
    subject = item.subject
    return {
        "case": str(case),
        "kernel": subject.kernel.name,
        "contract": str(subject.contract),
        "device": str(subject.device),
        "group": item.group.name,
        "source": subject.kernel.source,
        "limit": limit,
        "counted": counted,
    }
