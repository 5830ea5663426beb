"""One tool of compute-sanitizer at work on cases.

A process ends with the first case that its tool reports something for: that is whose fault it is, and what the process
says later means nothing. The kernel's other cases are left out, and another process goes on with the next kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.errors import LastbitError
from lastbit.result import CaseResult, Finding
from lastbit.sanitize.call import Called, call_bare
from lastbit.sanitize.findings import findings
from lastbit.sanitize.report import Report, remarks, reports
from lastbit.sanitize.tool import UNCACHED, Sanitizer
from lastbit.verify.worker import Worker, WorkerEnded

AFTER = "it reports something for an earlier case of the kernel"


@dataclass(frozen=True)
class ToolReport:
    """The result of one tool on one case: findings, or the reason why there are none."""

    tool: str
    result: CaseResult
    findings: tuple[Finding, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Looking:
    """One tool at work on the cases of a configuration."""

    config: Config
    sanitizer: Sanitizer
    tool: str

    def at(self, results: Sequence[CaseResult], stop: Event) -> Iterator[ToolReport]:
        """Yield what the tool finds in the case of each result, kernel by kernel, until `stop` is set.

        Raises:
            LastbitError: a process did not come to its first case.
        """
        left = deque(results)
        while left and not stop.is_set():
            for seen in self._until_one_ends_it(left, stop):
                yield seen
                if seen.findings:
                    yield from (
                        ToolReport(self.tool, other, reason=AFTER) for other in _others_of_kernel(seen.result, left)
                    )

    def _until_one_ends_it(self, left: deque[CaseResult], stop: Event) -> Iterator[ToolReport]:
        """Yield the findings of one process on the cases that are left; it takes at least one, all of one device."""
        device, log = left[0].device, Path(self.config.folder, f"{self.tool}-{len(left)}.txt")
        config = replace(self.config, device_plan=DevicePlan((device,), ("of the run",)))
        launcher = self.sanitizer.launcher(self.tool, log)
        last: tuple[CaseResult, Called] | None = None
        with Worker(config, launcher=launcher, environ=UNCACHED) as worker:
            while last is None and left and left[0].device == device and not stop.is_set():
                result = left.popleft()
                called, ended = _called(worker, result, log)
                if ended or _reports(log):
                    last = result, called
                else:
                    yield ToolReport(self.tool, result, reason=called.raised)
        found = _reports(log)  # now that the process has ended, all of them
        if last is not None:
            yield self._seen(*last, found)
        elif found:
            raise LastbitError(f"it reports something after the last case, which nobody can be blamed for; see {log}")

    def _seen(self, result: CaseResult, called: Called, found: Sequence[Report]) -> ToolReport:
        if not found:
            return ToolReport(self.tool, result, reason=called.raised)
        return ToolReport(self.tool, result, tuple(findings(self.tool, found, called.memory)))


def _called(worker: Worker, result: CaseResult, log: Path) -> tuple[Called, bool]:
    """Call a case in the worker; return its answer, and whether the calls ended the process."""
    try:
        return worker.do(call_bare, result.kernel, result.case), False
    except WorkerEnded as ended:
        if not ended.case:
            raise LastbitError(" ".join([f"{ended}; see {log}.", *remarks(_text(log))])) from None
        return Called(raised=str(ended)), True


def _others_of_kernel(result: CaseResult, left: deque[CaseResult]) -> Iterator[CaseResult]:
    """Take the next cases from the queue while they are of the same kernel and device."""
    while left and (left[0].kernel, left[0].device) == (result.kernel, result.device):
        yield left.popleft()


def _reports(log: Path) -> list[Report]:
    return reports(_text(log))


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""
