"""Records of a process that runs items: each result as it comes, and the case that was under way if it dies."""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import torch

from lastbit.branches.taken import watching
from lastbit.branches.unreached_branches import TAKEN, append_taken
from lastbit.case import Case
from lastbit.config import Config
from lastbit.files import append_lines
from lastbit.interpret.decisions import Decision
from lastbit.kernel import REVISION_MARK
from lastbit.result import CaseResult, Verdict
from lastbit.timing import seconds_so_far
from lastbit.verify.device_memory import SharedDevice, Verify, directly, is_lost
from lastbit.verify.isolating import limit_of
from lastbit.verify.notes import ANSWERS, LEFT, STAGES, TIME, Failures, KnownFailures, write_json, written
from lastbit.verify.plan import Item
from lastbit.verify.power import Separable

FATAL = 17
"""Exit status of a process whose accelerator can no longer be used, or whose case took too long."""


class CaseRecorder:
    """Tells what becomes of items, case by case, so that everything is known even if the process ends.

    A case that takes longer than the limit ends the process: nothing else stops a kernel that hangs in native code. How
    it tells is up to `tell`; the names of events, and what comes with them, are those of `lastbit.cluster.stream`.

    Attributes:
        cases, seed, random, timeout, failures, separable: as in `lastbit.verify.item_run.Records`.
    """

    margin = 0.0
    """Seconds beyond the limit of a case after which the process ends."""

    def __init__(
        self,
        config: Config,
        dump: Callable[[CaseResult], str],
        folder: Path,
        failures: KnownFailures,
        separable: Separable | None = None,
    ) -> None:
        self.separable = separable or Separable()
        self.cases, self.seed, self.random = config.cases_per_group, config.seed, config.random
        self.timeout, self.failures = config.timeout, None if config.keep_going else failures
        self.limit, self.folder, self._dump = limit_of(config), folder, dump
        self._shared = dict[torch.device, SharedDevice]()
        self._trace: TextIO | int = 2

    def tell(self, event: str, *content: Any) -> None:
        """Tell an event; of `begins` and `lost`, until it is known to whoever has to know."""
        raise NotImplementedError

    def called(self, device: str) -> str:
        """Return the name that the run has for a device of this process."""
        return device

    def verify_on(self, device: torch.device) -> Verify:
        """Return the function that verifies a case on a device; an accelerator is shared with other processes."""
        if device.type == "cpu":
            return directly
        if device not in self._shared:
            self.folder.mkdir(exist_ok=True)
            self._shared[device] = SharedDevice(self.folder, device, self._wait)
        return self._shared[device].verify

    def _wait(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.tell("waits")

    def started(self, item: Item, case: Case, *, counted: bool = True) -> None:
        """Tell of the case that is about to run, and start its clock."""
        subject = item.subject
        note = {
            "case": str(case),
            "kernel": subject.kernel.name,
            "contract": str(subject.contract),
            "device": self.called(str(subject.device)),
            "group": item.group.name,
            "source": subject.kernel.source,
            "limit": self.limit,
            "counted": counted,
        }
        self.tell("begins", note)
        faulthandler.dump_traceback_later(self.limit + self.margin, exit=True, file=self._trace)

    def record(self, result: CaseResult) -> None:
        """Tell a result; end the process if the kernel has left the accelerator unusable."""
        faulthandler.cancel_dump_traceback_later()
        self.tell("result", self._dump(replace(result, device=self.called(result.device))))
        if result.verdict in (Verdict.ERRORED, Verdict.SKIPPED) and is_lost(torch.device(result.device)):
            self.tell("lost")
            os._exit(FATAL)

    def leave(self, item: Item, cases: int) -> None:
        """Tell how many cases of an item are not run because its kernel has failed."""
        kernel, device = item.subject.kernel.name, self.called(str(item.subject.device))
        self.tell("left", cases, {"kernel": kernel, "device": device, "group": item.group.name})

    def keep_stages(self, found: str) -> None:
        """Tell the stages that were found in a kernel."""
        self.tell("stages", found)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """End the process if what is done in the context takes longer than a case may; no case is blamed for it."""
        faulthandler.dump_traceback_later(self.limit + self.margin, exit=True, file=self._trace)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def watched(self, item: Item) -> AbstractContextManager[object]:
        """Watch no branches."""
        return nullcontext()

    def note_time(self) -> None:
        """Tell where the time of this process went so far, by parts."""
        self.tell("time", dict(seconds_so_far()))


class ResultRecorder(CaseRecorder):
    """Tells by files in the run's folder: results are appended to one, and the case under way has one of its own.

    A note that cannot be written raises `Unrecorded`. Of a worker that ends, pytest-xdist starts another one, and the
    case that was under way is found in the `.started` file.
    """

    def __init__(self, config: Config, worker: str, dump: Callable[[CaseResult], str]) -> None:
        folder = Path(config.folder)
        super().__init__(config, dump, folder, Failures(folder))
        self._watched = config.watched
        self._lacking: list[Mapping[str, str | int]] = []
        self._told = 0
        self._taken: dict[str, Collection[Decision]] = {}
        self._stem = folder / f"{worker}-{os.getpid()}"
        with written(self._stem):
            self._results: TextIO = self._stem.with_suffix(".jsonl").open("a")
            self._trace = self._stem.with_suffix(".trace").open("w")

    def tell(self, event: str, *content: Any) -> None:
        """Write an event where the run looks for it, after the session or when the worker ends."""
        match event:
            case "begins":
                self._note(".started", content[0])
            case "result":
                try:
                    with written(Path(self._results.name)):
                        self._results.write(content[0] + "\n")
                        self._results.flush()
                finally:
                    self._stem.with_suffix(".started").unlink(missing_ok=True)
            case "left":
                self._lacking.append({**content[1], "cases": content[0]})
                self._note(LEFT, self._lacking)
            case "stages":
                append_lines(self._stem.with_suffix(STAGES), [content[0]])
            case "time":
                with suppress(OSError):
                    write_json(self._stem.with_suffix(TIME), content[0])

    def note_time(self) -> None:
        """Tell the time, and what is new of contracts that can be told apart, which is asked at the run's end, too."""
        super().note_time()
        new = list(self.separable.known.items())[self._told :]
        append_lines(self._stem.with_suffix(ANSWERS), map(json.dumps, new))
        self._told += len(new)

    @contextmanager
    def watched(self, item: Item) -> Iterator[None]:
        """Watch the branches that the calls of an item's kernel take, and write them where the run looks for them."""
        kernel = item.subject.kernel
        if REVISION_MARK in kernel.name:  # it is compared, and not asked what it lacks
            yield
            return
        with watching(kernel.name, Path(kernel.source.rpartition(":")[0]), self._watched) as taken:
            try:
                yield
            finally:
                noted, path = self._taken.get(kernel.name, ()), self._stem.with_suffix(TAKEN)
                self._taken[kernel.name] = append_taken(path, kernel.name, taken, noted)

    def _note(self, suffix: str, content: object) -> None:
        with written(path := self._stem.with_suffix(suffix)):
            write_json(path, content)
