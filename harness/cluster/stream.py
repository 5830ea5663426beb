"""Events of an item while an actor runs it, in order, in batches that the process of the run takes.

An event is a list: its name, and what belongs to it. `begins` comes with the note of a case, and nothing of the case
happens before it was taken. `waits` stops the clock of the case. `result` comes with a line of
`lastbit.reports.records`, and `lost` after one that left the accelerator unusable. `left` says how many cases are not
run. `printed` comes with the name of a kernel's file and what a process of it has printed. `hung` comes with the lines
that were under way when a case took too long. `time` says where the time of the process went. `done` is the last one.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import torch

from lastbit.case import Case
from lastbit.config import Config
from lastbit.result import CaseResult, Verdict
from lastbit.timing import seconds_so_far
from lastbit.verify.device_memory import SharedDevice, Verify, directly, is_lost
from lastbit.verify.isolating import limit_of
from lastbit.verify.plan import Item
from lastbit.verify.result_recorder import note_of

_FATAL = 17
_MARGIN = 5.0
"""Seconds beyond the limit after which the process ends by itself, where a kernel lets nothing else happen in it."""


class Failed:
    """The kernels that have failed in other items, as far as was known when the item began."""

    def __init__(self, known: Collection[tuple[str, str]]) -> None:
        self._known = set(known)

    def add(self, kernel: str, device: str) -> None:
        """Do nothing: whoever is told of the result knows."""

    def has(self, kernel: str, device: str) -> bool:
        return (kernel, device) in self._known


class Stream:
    """Tells of one item that another thread of this process performs.

    Attributes:
        cases, seed, random, timeout, failures: as in `lastbit.verify.item_run.Records`.
    """

    def __init__(
        self,
        config: Config,
        device: str,
        dump: Callable[[CaseResult], str],
        folder: Path,
        failed: Collection[tuple[str, str]],
    ) -> None:
        self.cases, self.seed, self.random = config.cases_per_group, config.seed, config.random
        self.timeout = config.timeout
        self.failures = None if config.keep_going else Failed(failed)
        self._limit = limit_of(config)
        self._device, self._dump, self._folder = device, dump, folder
        self._events: SimpleQueue[tuple[list[Any], Event]] = SimpleQueue()

    def verify_on(self, device: torch.device) -> Verify:
        """Return the function that verifies a case here: an accelerator is shared with other actors of the node."""
        if device.type == "cpu":
            return directly
        self._folder.mkdir(exist_ok=True)
        return SharedDevice(self._folder, device, self._wait).verify

    def started(self, item: Item, case: Case, *, counted: bool = True) -> None:
        """Tell of the case that is about to run, and start its clock once that was taken."""
        note = note_of(item, case, self._limit, counted=counted)
        self._tell("begins", {**note, "device": self._device}).wait()
        faulthandler.dump_traceback_later(self._limit + _MARGIN, exit=True, file=2)

    def record(self, result: CaseResult) -> None:
        """Tell a result; end the process if the kernel has left the accelerator unusable."""
        faulthandler.cancel_dump_traceback_later()
        self._tell("result", self._dump(replace(result, device=self._device)))
        if result.verdict in (Verdict.ERRORED, Verdict.SKIPPED) and is_lost(torch.device(result.device)):
            self._tell("lost").wait()
            os._exit(_FATAL)

    def leave(self, item: Item, cases: int) -> None:
        """Tell how many cases of the item are not run because its kernel has failed."""
        self._tell("left", cases)

    def printed(self, whose: str, text: str) -> None:
        """Tell what a kernel process printed."""
        self._tell("printed", whose, text)

    def note_time(self) -> None:
        """Tell where the time of this process went so far."""
        self._tell("time", dict(seconds_so_far()))

    def end(self) -> None:
        """Tell that the item is done."""
        faulthandler.cancel_dump_traceback_later()
        self._tell("done")

    def batches(self) -> Iterator[list[list[Any]]]:
        """Yield batches of events until the item is done; asking for the next batch confirms the last one.

        Where a case takes too long, the process ends after it was told.
        """
        names, latest = [""], float("inf")
        while names[-1] != "done":
            try:
                events, taken = self._next(latest)
            except Empty:
                yield [["hung", _lines_under_way(self._limit)]]
                os._exit(_FATAL)
            names = [event[0] for event in events]
            yield events
            latest = time.monotonic() + self._limit if names[-1] == "begins" else float("inf")
            for one in taken:
                one.set()

    def _next(self, latest: float) -> tuple[list[list[Any]], list[Event]]:
        """Return the events that are there, at least one; raise `Empty` if none comes until `latest`."""
        patience = None if latest == float("inf") else max(latest - time.monotonic(), 0.0)
        found = [self._events.get(timeout=patience)]
        while not self._events.empty():
            found.append(self._events.get())
        return [event for event, _ in found], [taken for _, taken in found]

    def _tell(self, name: str, *content: object) -> Event:
        taken = Event()
        self._events.put(([name, *content], taken))
        return taken

    def _wait(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._tell("waits")


def _lines_under_way(limit: float) -> str:
    """Return the stack of each thread of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return f"Timeout ({limit:g} s)!\n{file.read()}"
