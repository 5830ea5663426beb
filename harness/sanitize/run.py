"""The cases of a run once more, under the tools of compute-sanitizer, and what these found in its results."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from threading import Event

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import LastbitError
from lastbit.result import TURNED_DOWN, CaseResult, Finding, Verdict
from lastbit.run import NotRun, Run
from lastbit.sanitize.looking import Looking, ToolReport
from lastbit.sanitize.tool import NAME, TOOLS, Sanitizer
from lastbit.verify.assemble import INTERRUPTED

MOST_ELEMENTS = 1 << 20
"""Elements of the inputs of the largest cases that are looked at: compute-sanitizer visits every access."""


def sanitized(config: Config, sanitizer: Sanitizer, run: Run, tick: Callable[[CaseResult], None]) -> Run:
    """Add the tools' findings to the results of a run; `tick` is told of each case that a tool has looked at.

    What could not be looked at is listed as not run. A tool that does not start breaks the run, and so does an
    interruption from the keyboard, after which it has what was found until then.
    """
    chosen, stop = chosen_of(run), Event()
    config = replace(config, lines=tuple(dict.fromkeys(result.case for result in chosen)))

    def look(tool: str) -> _Looked:
        seen, broken, began = list[ToolReport](), "", time.monotonic()
        try:
            for one in Looking(config, sanitizer, tool).at(chosen, stop):
                seen.append(one)
                tick(one.result)
        except LastbitError as error:
            broken = f"{tool}: {error}"
        return _Looked(tool, tuple(seen), time.monotonic() - began, broken)

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
    broken = [interrupted] if interrupted else [one.broken for one in looked]
    run = replace(run, broken="; ".join(filter(None, (run.broken, *broken))))
    summary = f"{NAME} {sanitizer.version}: {', '.join(map(str, looked))}"
    run = replace(run, environment={**run.environment, "sanitized": summary})
    return with_seen(run, [seen for one in looked for seen in one.seen], strict=config.strict)


@dataclass(frozen=True)
class _Looked:
    """The findings of one tool on all cases, its time in seconds, and why it stopped early."""

    tool: str
    seen: tuple[ToolReport, ...]
    seconds: float
    broken: str

    def __str__(self) -> str:
        return f"{self.tool} {_cases(sum(not one.reason for one in self.seen))} in {self.seconds:.0f} s"


def chosen_of(run: Run) -> list[CaseResult]:
    """Order the results to be looked at: kernel by kernel, what went wrong first, then the smallest first."""
    chosen = {_key(r): r for r in run.results if _was_run(r) and _elements(r) <= MOST_ELEMENTS}
    return sorted(chosen.values(), key=lambda r: (r.device, r.op, r.kernel, r.verdict is Verdict.PASSED, _elements(r)))


def with_seen(run: Run, seen: Sequence[ToolReport], *, strict: bool = False) -> Run:
    """Add the findings to the results of a run, and list what was not looked at as not run."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for one in seen:
        found.setdefault(_key(one.result), []).extend(one.findings)
    results = (_with_findings(result, found.get(_key(result), ()), strict) for result in run.results)
    return replace(run, results=tuple(results), not_run=(*run.not_run, *_left_out(run, seen)))


def _with_findings(result: CaseResult, found: Sequence[Finding], strict: bool) -> CaseResult:
    failed = [Verdict.FAILED for finding in found if not finding.notice]
    verdict = Verdict.worst(result.verdict, *failed)
    result = replace(result, verdict=verdict, findings=(*result.findings, *found)) if found else result
    return result.strict if strict else result


def _left_out(run: Run, seen: Sequence[ToolReport]) -> Iterator[NotRun]:
    if large := sum(_was_run(r) and _elements(r) > MOST_ELEMENTS for r in run.results):
        yield NotRun(f"{NAME} on {_cases(large)}", f"inputs of more than {MOST_ELEMENTS:,} elements")
    reasons = Counter((s.tool, s.result.kernel, s.result.device, s.reason) for s in seen if s.reason)
    for (tool, kernel, device, reason), count in reasons.items():
        yield NotRun(f"{tool} on {_cases(count)} of {kernel} on {device}", reason)


def _cases(count: int) -> str:
    return f"{count:,} case{'s' * (count != 1)}"


def _was_run(result: CaseResult) -> bool:
    """Check whether a kernel was called on CUDA for a case that is no step of shrinking; a case has dtypes."""
    ran = result.counted and result.dtypes != "" and result.verdict not in TURNED_DOWN
    return ran and result.device.startswith("cuda")


def _elements(result: CaseResult) -> int:
    return sum(tensor.numel for tensor in parse_case(result.case).tensors)


def _key(result: CaseResult) -> tuple[str, str, str]:
    return result.kernel, result.device, result.case
