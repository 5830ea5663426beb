"""Events of an item while an actor runs it, in order, in batches that the process of the run takes.

An event is a list: its name, and what belongs to it. `begins` comes with the note of a case, and nothing of the case
happens before it was taken. `waits` stops the clock of the case. `result` comes with a line of
`lastbit.reports.records`, and `lost` after one that left the accelerator unusable. `left` says how many cases are not
run. `printed` comes with the name of a kernel's file and what a process of it has printed. `hung` comes with the lines
that were under way when a case took too long. `stages` comes with what was found in a kernel that declares none. `time`
says where the time of the process went. `done` is the last one.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

from lastbit.config import Config
from lastbit.result import CaseResult
from lastbit.verify.power import Separable
from lastbit.verify.result_recorder import FATAL, CaseRecorder


class Failed:
    """The kernels that have failed in other items, as far as was known when the item began."""

    def __init__(self, known: Collection[tuple[str, str]]) -> None:
        self._known = set(known)

    def add(self, kernel: str, device: str) -> None:
        """Do nothing: whoever is told of the result knows."""

    def has(self, kernel: str, device: str) -> bool:
        return (kernel, device) in self._known


class Stream(CaseRecorder):
    """Tells of one item that another thread of this process performs, on the device that the run calls `device`."""

    margin = 5.0
    """After which the process ends by itself, where a kernel lets nothing else happen in it."""

    def __init__(
        self,
        config: Config,
        device: str,
        dump: Callable[[CaseResult], str],
        folder: Path,
        failed: Collection[tuple[str, str]],
        separable: Separable | None = None,
    ) -> None:
        super().__init__(config, dump, folder, Failed(failed), separable)
        self._device = device
        self._events: SimpleQueue[tuple[list[Any], Event]] = SimpleQueue()

    def called(self, device: str) -> str:
        return self._device

    def tell(self, event: str, *content: Any) -> None:
        """Hand an event over; what must be known before anything else happens is waited for until it was taken."""
        taken = Event()
        self._events.put(([event, *content], taken))
        if event in ("begins", "lost"):
            taken.wait()

    def printed(self, whose: str, text: str) -> None:
        """Tell what a kernel process printed."""
        self.tell("printed", whose, text)

    def end(self) -> None:
        """Tell that the item is done."""
        faulthandler.cancel_dump_traceback_later()
        self.tell("done")

    def batches(self) -> Iterator[list[list[Any]]]:
        """Yield batches of events until the item is done; asking for the next batch confirms the last one.

        Where a case takes too long, the process ends after it was told.
        """
        names, latest = [""], float("inf")
        while names[-1] != "done":
            try:
                events, taken = self._next(latest)
            except Empty:
                yield [["hung", _lines_under_way(self.limit)]]
                os._exit(FATAL)
            names = [event[0] for event in events]
            yield events
            latest = time.monotonic() + self.limit if names[-1] == "begins" else float("inf")
            for one in taken:
                one.set()

    def _next(self, latest: float) -> tuple[list[list[Any]], list[Event]]:
        """Return the events that are there, at least one; raise `Empty` if none comes until `latest`."""
        patience = None if latest == float("inf") else max(latest - time.monotonic(), 0.0)
        found = [self._events.get(timeout=patience)]
        while not self._events.empty():
            found.append(self._events.get())
        return [event for event, _ in found], [taken for _, taken in found]


def _lines_under_way(limit: float) -> str:
    """Return the stack of each thread of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return f"Timeout ({limit:g} s)!\n{file.read()}"
