"""What becomes of an item while a process runs it, case by case, so that everything is known even if the process ends.

It is told in events, in order. An event is a list: its name, and what belongs to it. `begins` comes with the note of a
case, and nothing of the case happens before it was taken. `waits` stops the clock of the case. `result` comes with a
line of `lastbit.reports.records`, and `lost` after one that left the accelerator unusable. `left` says how many cases
are not run. `printed` comes with the name of a kernel's file and what a process of it has printed. `hung` comes with
the lines that were under way when a case took too long. `looks` says that all cases have run, and `stages` comes with
what was then found in a kernel that declares none. `taken` comes with the branches that a kernel took, `answers` with
which contracts can be told apart on which cases, and `time` says where the time of the process went. `reads` comes with
what a kernel's code has read. `refused` comes with the reason why the run means nothing. `done` is the last one.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import torch

from lastbit.branches.taken import watching
from lastbit.calling.uses_compile import is_compiled
from lastbit.case import Case
from lastbit.config import Config
from lastbit.interpret.decisions import Decision
from lastbit.kernel import REVISION_MARK
from lastbit.result import CaseResult, Verdict
from lastbit.timing import seconds_so_far
from lastbit.verify.device_memory import SharedDevice, Verify, directly, is_lost
from lastbit.verify.plan import Item
from lastbit.verify.power import Separable

FATAL = 17
"""Exit status of a process whose accelerator can no longer be used, or whose case took too long."""

# Arbitrary: time for a process to tell of its limit itself, where a kernel lets it.
_MARGIN = 5.0
"""Seconds beyond the limit of a case after which the process ends, where a kernel lets nothing else happen in it."""


class CaseRecorder:
    """Tells of the items that another thread of this process performs, one after the other.

    A case that takes longer than the limit ends the process: nothing else stops a kernel that hangs in native code.
    `dump` makes a line of a result, `called` is what the run calls the device, where that is another name than here,
    and in `folder` processes take turns on an accelerator.

    Attributes:
        cases, seed, random, timeout: of the run, as its configuration has them.
        failures: kernel and device of those that have failed, as far as is known; None if those run on.
        separable: the answers that this process knows on contracts that can be told apart.
    """

    def __init__(self, config: Config, dump: Callable[[CaseResult], str], folder: Path, called: str = "") -> None:
        self.cases, self.seed, self.random = config.cases_per_group, config.seed, config.random
        self.failures: set[tuple[str, str]] | None = None if config.keep_going else set()
        self.separable = Separable()
        self.timeout, self._limit, self._watched = config.timeout, config.limit, config.watched
        self._dump, self._folder, self._called = dump, folder, called
        self._events: SimpleQueue[tuple[list[Any], Event]] = SimpleQueue()
        self._shared = dict[torch.device, SharedDevice]()
        self._taken: dict[str, set[Decision]] = {}
        self._answered = 0

    def begin(self, failed: Collection[tuple[str, str]]) -> None:
        """Begin an item, when these kernels have failed in others."""
        if self.failures is not None:
            self.failures = set()
        self.learn(failed)

    def learn(self, failed: Collection[tuple[str, str]]) -> None:
        """Take note of kernels that have failed in other items meanwhile."""
        if self.failures is not None:
            self.failures.update((kernel, device) for kernel, device in failed)

    def tell(self, event: str, *content: Any) -> None:
        """Hand an event over; what must be known before anything else happens is waited for until it was taken."""
        taken = Event()
        self._events.put(([event, *content], taken))
        if event in ("begins", "lost"):
            taken.wait()

    def batches(self) -> Iterator[list[list[Any]]]:
        """Yield batches of events until the item is done; asking for the next batch confirms the last one.

        Where a case takes too long, the process ends after it was told.
        """
        events, latest = [[""]], float("inf")
        while events[-1][0] != "done":
            patience = None if latest == float("inf") else max(latest - time.monotonic(), 0.0)
            try:
                found = [self._events.get(timeout=patience)]
            except Empty:
                with tempfile.TemporaryFile("w+") as file:  # of the stack of each thread of this process
                    faulthandler.dump_traceback(file)
                    file.seek(0)
                    yield [["hung", f"Timeout ({self._limit:g} s)!\n{file.read()}"]]
                os._exit(FATAL)
            while not self._events.empty():
                found.append(self._events.get())
            events = [event for event, _ in found]
            yield events
            latest = time.monotonic() + self._limit if events[-1][0] == "begins" else float("inf")
            for _, taken in found:
                taken.set()

    def verify_on(self, device: torch.device) -> Verify:
        """Return the function that verifies a case on a device; an accelerator is shared with other processes."""
        if device.type == "cpu":
            return directly

        def waits() -> None:
            faulthandler.cancel_dump_traceback_later()
            self.tell("waits")

        if device not in self._shared:
            self._folder.mkdir(exist_ok=True)
            self._shared[device] = SharedDevice(self._folder, device, waits)
        return self._shared[device].verify

    def started(self, item: Item, case: Case, *, counted: bool = True) -> None:
        """Tell of the case that is about to run, and start its clock."""
        subject = item.subject
        note = {
            "case": str(case),
            "kernel": subject.kernel.name,
            "contract": str(subject.contract),
            "device": self._called or str(subject.device),
            "group": item.group.name,
            "source": subject.kernel.source,
            "limit": self._limit,
            "counted": counted,
        }
        self.tell("begins", note)
        faulthandler.dump_traceback_later(self._limit + _MARGIN, exit=True)

    def record(self, result: CaseResult) -> None:
        """Tell a result; end the process if the kernel has left the accelerator unusable."""
        faulthandler.cancel_dump_traceback_later()
        self.tell("result", self._dump(replace(result, device=self._called or result.device)))
        if result.verdict in (Verdict.ERRORED, Verdict.SKIPPED) and is_lost(torch.device(result.device)):
            self.tell("lost")
            os._exit(FATAL)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Let stages be looked for; end the process, and blame nobody, if that takes longer than a case may."""
        self.tell("looks")
        faulthandler.dump_traceback_later(self._limit + _MARGIN, exit=True)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def watched(self, item: Item) -> Iterator[None]:
        """Watch the branches that the calls of an item's kernel take, and tell those that are new."""
        kernel = item.subject.kernel
        if REVISION_MARK in kernel.name:  # it is compared, and not asked what it lacks
            yield
            return
        file, compiles = Path(kernel.source.rpartition(":")[0]), is_compiled(kernel.call)
        with watching(kernel.name, file, self._watched, compiles=compiles) as taken:
            try:
                yield
            finally:
                found, known = taken.decisions() if taken.known else None, self._taken.setdefault(kernel.name, set())
                self.tell("taken", kernel.name, None if found is None else sorted(found - known))
                known |= found or set()

    def end(self) -> None:
        """Tell what is new of contracts that can be told apart, where the time went, by parts, and that this is all."""
        faulthandler.cancel_dump_traceback_later()
        new = list(self.separable.known.items())[self._answered :]
        self._answered += len(new)
        self.tell("answers", new)
        self.tell("time", dict(seconds_so_far()))
        self.tell("done")
