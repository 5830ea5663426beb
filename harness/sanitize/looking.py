"""Cases of a run once more under the tools of compute-sanitizer, and what these find in its results.

A kernel is called in a process under a tool: nothing is judged there, and nothing else runs on the GPU. A process ends
with the first case that its tool reports something for: that is whose fault it is, and what the process says later
means nothing. A report that is in the tool's log when a call is over belongs to that call, since the tool writes before
the host learns that the device is done. The kernel's other cases are left out, and another process goes on with the
next kernel.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from lastbit.calling.performing import under_any_name
from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan, made_current
from lastbit.errors import LastbitError, UnsupportedCase
from lastbit.inputs import bare, build
from lastbit.result import TURNED_DOWN, CaseResult, Finding, Verdict
from lastbit.run import NotRun, Run
from lastbit.sanitize.sanitizer_reports import NamedAllocation, findings, remarks, reports
from lastbit.sanitize.tool import NAME, TOOLS, UNCACHED, Sanitizer
from lastbit.verify.check import first_line
from lastbit.verify.notes import INTERRUPTED
from lastbit.verify.worker import Worker, WorkerEnded, Workplace


@dataclass(frozen=True)
class Called:
    """The results of calling a case under the tool, apart from the tool's own reports.

    Attributes:
        memory: allocations with a name.
        raised: what the kernel raised; empty if nothing.
    """

    memory: tuple[NamedAllocation, ...] = ()
    raised: str = ""


def call_bare(place: Workplace, kernel: str, line: str) -> Called:
    """Call a kernel on tensors without guards: as it is, and once more for the stages that it declares."""
    subject, case = place.subjects[kernel], parse_case(line).gathered()
    inputs, held, raised = build(case, "cpu"), list[Mapping[str, object]](), ""
    try:
        with place.watch(case), made_current(subject.device):
            stages = subject.kernel.stages
            for asked in ({}, {"stages": stages}) if stages else ({},):
                held.append(tensors := bare(inputs, subject.device))
                returned = subject.kernel.call(**tensors, **case.params, **asked)
                torch.accelerator.synchronize(subject.device)
                held.append(under_any_name(returned))
    except UnsupportedCase:
        pass
    except Exception as error:
        raised = first_line(error)
    memory = []
    for name, tensor in (pair for tensors in held for pair in tensors.items()):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            memory.append(NamedAllocation(name, storage.data_ptr(), storage.nbytes()))
    return Called(tuple(memory), raised)


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
                of = seen.result.kernel, seen.result.device
                while seen.findings and left and (left[0].kernel, left[0].device) == of:
                    yield ToolReport(self.tool, left.popleft(), reason=AFTER)

    def _until_one_ends_it(self, left: deque[CaseResult], stop: Event) -> Iterator[ToolReport]:
        """Yield the findings of one process on the cases that are left; it takes at least one, all of one device."""
        device, log = left[0].device, Path(self.config.folder, f"{self.tool}-{len(left)}.txt")
        config = replace(self.config, device_plan=DevicePlan((device,), ("of the run",)))
        launcher = self.sanitizer.launcher(self.tool, log)
        last: tuple[CaseResult, Called] | None = None
        with Worker(config, launcher=launcher, environ=UNCACHED) as worker:
            while last is None and left and left[0].device == device and not stop.is_set():
                result = left.popleft()
                try:
                    called, over = worker.do(call_bare, result.kernel, result.case), False
                except WorkerEnded as ended:
                    if not ended.case:
                        raise LastbitError(" ".join([f"{ended}; see {log}.", *remarks(_text(log))])) from None
                    called, over = Called(raised=str(ended)), True
                if over or reports(_text(log)):
                    last = result, called
                else:
                    yield ToolReport(self.tool, result, reason=called.raised)
        found = reports(_text(log))  # now that the process has ended, all of them
        if last is not None:
            result, called = last
            seen, reason = findings(self.tool, found, called.memory), "" if found else called.raised
            yield ToolReport(self.tool, result, tuple(seen), reason)
        elif found:
            raise LastbitError(f"it reports something after the last case, which nobody can be blamed for; see {log}")


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""


# Arbitrary: larger cases take minutes under the tool.
MOST_ELEMENTS = 1 << 20
"""Elements of the inputs of the largest cases that are looked at: compute-sanitizer visits every access."""


def sanitized(config: Config, sanitizer: Sanitizer, run: Run, tick: Callable[[CaseResult], None]) -> Run:
    """Add the tools' findings to the results of a run; `tick` is told of each case that a tool has looked at.

    What could not be looked at is listed as not run. A tool that does not start breaks the run, and so does an
    interruption from the keyboard, after which it has what was found until then.
    """
    chosen, stop = chosen_of(run), Event()
    config = replace(config, lines=tuple(dict.fromkeys(result.case for result in chosen)))

    def look(tool: str) -> tuple[list[ToolReport], str, str]:
        seen, broken, began = list[ToolReport](), "", time.monotonic()
        try:
            for one in Looking(config, sanitizer, tool).at(chosen, stop):
                seen.append(one)
                tick(one.result)
        except LastbitError as error:
            broken = f"{tool}: {error}"
        count = _cases(sum(not one.reason for one in seen))
        return seen, broken, f"{tool} {count} in {time.monotonic() - began:.0f} s"

    interrupted = ""
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        under_way = [pool.submit(look, tool) for tool in TOOLS]
        try:
            wait(under_way)
        except KeyboardInterrupt:
            interrupted = INTERRUPTED
        finally:
            stop.set()
    looked = [each.result() for each in under_way]
    broken = [interrupted] if interrupted else [why for _, why, _ in looked]
    run = replace(run, broken="; ".join(filter(None, (run.broken, *broken))))
    summary = f"{NAME} {sanitizer.version}: {', '.join(said for _, _, said in looked)}"
    run = replace(run, environment={**run.environment, "sanitized": summary})
    return with_seen(run, [one for seen, _, _ in looked for one in seen], strict=config.strict)


def chosen_of(run: Run) -> list[CaseResult]:
    """Order the results to be looked at: kernel by kernel, what went wrong first, then the smallest first."""
    chosen = {_key(r): r for r in run.results if _was_run(r) and _elements(r) <= MOST_ELEMENTS}
    return sorted(chosen.values(), key=lambda r: (r.device, r.op, r.kernel, r.verdict is Verdict.PASSED, _elements(r)))


def with_seen(run: Run, seen: Sequence[ToolReport], *, strict: bool = False) -> Run:
    """Add the findings to the results of a run, and list what was not looked at as not run."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for one in seen:
        found.setdefault(_key(one.result), []).extend(one.findings)
    results = []
    for result in run.results:
        if own := found.get(_key(result)):
            verdict = Verdict.worst(result.verdict, *(Verdict.FAILED for finding in own if not finding.notice))
            result = replace(result, verdict=verdict, findings=(*result.findings, *own))
        results.append(result.strict if strict else result)
    not_run = [*run.not_run]
    if large := sum(_was_run(r) and _elements(r) > MOST_ELEMENTS for r in run.results):
        not_run.append(NotRun(f"{NAME} on {_cases(large)}", f"inputs of more than {MOST_ELEMENTS:,} elements"))
    reasons = Counter((s.tool, s.result.kernel, s.result.device, s.reason) for s in seen if s.reason)
    for (tool, kernel, device, reason), count in reasons.items():
        not_run.append(NotRun(f"{tool} on {_cases(count)} of {kernel} on {device}", reason))
    return replace(run, results=tuple(results), not_run=tuple(not_run))


def _cases(count: int) -> str:
    return f"{count:,} case{'s' * (count != 1)}"


def _was_run(result: CaseResult) -> bool:
    """Check whether a kernel was called on CUDA for a case that is no step of shrinking; a case has dtypes."""
    ran = result.counted and result.dtypes != "" and result.verdict not in TURNED_DOWN
    return ran and result.device.startswith("cuda")


def _elements(result: CaseResult) -> int:
    return parse_case(result.case).numel


def _key(result: CaseResult) -> tuple[str, str, str]:
    return result.kernel, result.device, result.case
