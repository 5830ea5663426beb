"""The cases of a run once more, under the tools of compute-sanitizer, and what these found in its results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

from harness.case import parse_case
from harness.config import Config
from harness.errors import LastbitError
from harness.result import TURNED_DOWN, CaseResult, Finding, Verdict
from harness.run import NotRun, Run
from harness.sanitize.looking import Looking, Seen
from harness.sanitize.tool import NAME, TOOLS, Sanitizer

MOST_ELEMENTS = 1 << 20
"""Elements of the inputs of the largest cases that are looked at: compute-sanitizer visits every access."""


def sanitized(config: Config, sanitizer: Sanitizer, run: Run, tick: Callable[[CaseResult], None]) -> Run:
    """The run with what the tools found in its results; `tick` is told of each case that a tool has looked at.

    What could not be looked at is listed as not run. A tool that does not start breaks the run.
    """
    chosen, stop = chosen_of(run), Event()
    config = replace(config, lines=tuple(dict.fromkeys(result.case for result in chosen)))

    def look(tool: str) -> tuple[list[Seen], str]:
        seen = list[Seen]()
        try:
            for one in Looking(config, sanitizer, tool).at(chosen, stop):
                seen.append(one)
                tick(one.result)
        except LastbitError as error:
            return seen, f"{tool}: {error}"
        return seen, ""

    with ThreadPoolExecutor(len(TOOLS)) as pool:
        try:
            looked = list(pool.map(look, TOOLS))
        finally:
            stop.set()
    seen = [one for of_tool, _ in looked for one in of_tool]
    run = replace(run, broken="; ".join(filter(None, (run.broken, *(error for _, error in looked)))))
    return with_seen(run, seen, sanitizer.version, strict=config.strict)


def chosen_of(run: Run) -> list[CaseResult]:
    """The results whose cases are looked at: kernel by kernel, what went wrong first, then the smallest first."""
    chosen = {_key(r): r for r in run.results if _was_run(r) and _elements(r) <= MOST_ELEMENTS}
    return sorted(chosen.values(), key=lambda r: (r.device, r.op, r.kernel, r.verdict is Verdict.PASSED, _elements(r)))


def with_seen(run: Run, seen: Sequence[Seen], version: str, *, strict: bool = False) -> Run:
    """The run with findings in its results, what was not looked at, and how many cases each tool has looked at."""
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for one in seen:
        found.setdefault(_key(one.result), []).extend(one.findings)
    whole = Counter(one.tool for one in seen if not one.reason)
    counts = ", ".join(f"{tool} {whole[tool]:,}" for tool in TOOLS)
    results = (_with_findings(result, found.get(_key(result), ()), strict) for result in run.results)
    return replace(
        run,
        results=tuple(results),
        not_run=(*run.not_run, *_left_out(run, seen)),
        environment={**run.environment, "sanitized": f"{NAME} {version}, cases: {counts}"},
    )


def _with_findings(result: CaseResult, found: Sequence[Finding], strict: bool) -> CaseResult:
    failed = [Verdict.FAILED for finding in found if not finding.notice]
    verdict = Verdict.worst(result.verdict, *failed)
    result = replace(result, verdict=verdict, findings=(*result.findings, *found)) if found else result
    return result.strict if strict else result


def _left_out(run: Run, seen: Sequence[Seen]) -> Iterator[NotRun]:
    if large := sum(_was_run(r) and _elements(r) > MOST_ELEMENTS for r in run.results):
        yield NotRun(f"{NAME} on {_cases(large)}", f"inputs of more than {MOST_ELEMENTS:,} elements")
    reasons = Counter((s.tool, s.result.kernel, s.result.device, s.reason) for s in seen if s.reason)
    for (tool, kernel, device, reason), count in reasons.items():
        yield NotRun(f"{tool} on {_cases(count)} of {kernel} on {device}", reason)


def _cases(count: int) -> str:
    return f"{count:,} case{'s' * (count != 1)}"


def _was_run(result: CaseResult) -> bool:
    """Whether a kernel was called on CUDA for a case, other than to shrink a failure; one without dtypes is no case."""
    ran = result.counted and result.dtypes != "" and result.verdict not in TURNED_DOWN
    return ran and result.device.startswith("cuda")


def _elements(result: CaseResult) -> int:
    return sum(tensor.numel for tensor in parse_case(result.case).tensors)


def _key(result: CaseResult) -> tuple[str, str, str]:
    return result.kernel, result.device, result.case
