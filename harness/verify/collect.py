"""A run put together: what was recorded, and what was planned and was not.

Every planned item is looked for among the results. One without any is listed with the reason, as far as it is known; if
nothing explains it, the run is broken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.case import parse_case
from harness.config import Config
from harness.errors import LastbitError
from harness.result import BAD, CaseResult, Verdict
from harness.run import NotRun, Run, Spent
from harness.timing import Clock, listening
from harness.verify.coverage import coverage_of
from harness.verify.notes import HAS_FAILED, LEFT, TIME, read_json
from harness.verify.plan import Planned
from harness.verify.power import agreement_of, power_of
from harness.verify.project import open_project
from harness.verify.run import Child, environment_of

_RAN, _STOPPED = (0, 1, 5), 2  # statuses of pytest: all passed, some failed, nothing selected; stopped by -x
_MOST_GROUPS = 3
_Key = tuple[str, str, str]  # of an item: kernel, device, group

INTERRUPTED = "interrupted"
STOPPED = "-x or --maxfail stopped pytest"
DESELECTED = "left out by -k, --deselect or another option or plugin of pytest"
NO_CASES = "its groups of cases have no examples, and no case was to be generated"
UNKNOWN = "no result was recorded, and nothing says why"


@dataclass(frozen=True)
class Ended:
    """What a pytest process has left behind.

    Attributes:
        selected: ids of the items that pytest did not leave out; None if it did not come to say.
        crashed: names of its workers that ended in the middle of an item.
        status: with which pytest ended; None if it did not come to say.
        unrecorded: why a result could not be written; empty if all could.
        isolated: what its kernel processes were kept from; empty where it called kernels itself.
    """

    device_type: str
    log: Path
    items: tuple[Planned, ...]
    not_run: tuple[NotRun, ...]
    selected: frozenset[str] | None
    crashed: frozenset[str]
    status: int | None
    unrecorded: str
    isolated: str = ""


def collect(
    config: Config, children: Sequence[Child], recorded: Sequence[CaseResult], *, interrupted: bool = False
) -> Run:
    """The finished run, with its results in the order of the plan, or what there is of one that was interrupted.

    Nobody has the patience for the power of an interrupted run, and nobody can rely on it.

    Raises:
        LastbitError: a process could not make its plan, and the message is its own, or the run's folder is gone.
    """
    ended = {child.device_type: _ended(child) for child in children}
    left = [_left(path) for path in sorted(Path(config.folder).glob("*.started"))]
    killed = [case for case in left if case.hung or case.worker in ended[case.device_type].crashed]
    failed = bool(killed) or any(result.verdict in BAD for result in recorded)
    stops = {device: _stop(process, interrupted, failed) for device, process in ended.items()}
    died = [case for case in left if case in killed or not stops[case.device_type]]
    unfinished = [case.not_run(stops[case.device_type]) for case in left if case not in died]
    results = _in_order([*recorded, *(case.errored for case in died)], ended.values())
    rest = _left_by_failures(Path(config.folder))
    told = {(r.kernel, r.device, r.group) for r in results} | rest.keys()
    missing = [n for process in ended.values() for n in _missing(process, told, stops[process.device_type])]
    with listening(Clock()) as clock:
        power = () if interrupted else power_of(results, open_project(config))
    planned = [item for process in ended.values() for item in process.items]
    return Run(
        results=tuple(results),
        broken=INTERRUPTED if interrupted else "; ".join(_broken(ended.values(), stops, missing)),
        power=power,
        not_run=(*_left_out(ended.values(), stops.values()), *unfinished, *_of_failed(ended.values(), rest), *missing),
        agreement=agreement_of(results),
        environment=environment_of(config) | _isolation(ended.values()),
        spent=_spent(Path(config.folder), clock),
        coverage=coverage_of(planned, results),
    )


def _spent(folder: Path, clock: Clock) -> Spent:
    """Where the time of the workers went, as they noted it, and that of this process by its clock."""
    noted = (Spent(read_json(path), processes=1) for path in sorted(folder.glob(f"*{TIME}")))
    return sum(noted, Spent(clock.seconds))


def _isolation(processes: Iterable[Ended]) -> dict[str, str]:
    """What the kernel processes of each type of device were kept from, where there were any."""
    told = [f"{process.device_type}: {process.isolated}" for process in processes if process.isolated]
    return {"isolated": "; ".join(told)} if told else {}


def _ended(child: Child) -> Ended:
    notes = child.notes
    if refused := notes.read("refused"):
        raise LastbitError(refused)
    if not (plan := notes.read("plan")):
        raise LastbitError(_last_words(child.log))
    done, selected = notes.read("done") or {}, notes.read("selected")
    return Ended(
        device_type=child.device_type,
        log=child.log,
        items=tuple(Planned(**item) for item in plan["items"]),
        not_run=tuple(NotRun(**n) for n in plan["not_run"]),
        selected=None if selected is None else frozenset(selected),
        crashed=frozenset(notes.read("crashed") or ()),
        status=done.get("status"),
        unrecorded=done.get("unrecorded", ""),
        isolated=plan.get("isolated", ""),
    )


def _last_words(log: Path) -> str:
    """The error that ended a process: from the first line that says so, or else the last lines."""
    if not log.is_file():
        return f"the folder of the run, {log.parent}, was removed while the run went on; its results are lost"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if line.startswith("ERROR: ")), len(lines) - 20)
    return "\n".join(lines[max(first, 0) :]).removeprefix("ERROR: ")


def _in_order(results: Iterable[CaseResult], processes: Iterable[Ended]) -> list[CaseResult]:
    """The results as the plans list their items, whichever worker had them when; those of an item stay as they came."""
    keys = [(item.device, item.kernel, item.group) for process in processes for item in process.items]
    places = {key: place for place, key in enumerate(keys)}
    return sorted(results, key=lambda result: places.get((result.device, result.kernel, result.group), len(places)))


def _stop(process: Ended, interrupted: bool, failed: bool) -> str:
    """Why a process ended before all its items had run; empty if it did not, or only its workers did."""
    if interrupted:
        return INTERRUPTED
    if process.status in _RAN:
        return ""
    return STOPPED if failed and process.status == _STOPPED else f"pytest for {process.device_type} ended early"


def _left_out(processes: Iterable[Ended], stops: Iterable[str]) -> Iterator[NotRun]:
    """What no plan has, and what the rest of a group of cases is after a failure that stopped pytest."""
    for process in processes:
        yield from process.not_run
    if not torch.accelerator.is_available():
        yield NotRun("every kernel on an accelerator", "torch finds none; the CPU runs Triton interpreted")
    if STOPPED in stops:
        yield NotRun("what came after the first failure", STOPPED)


def _broken(processes: Iterable[Ended], stops: Mapping[str, str], missing: Iterable[NotRun]) -> Iterator[str]:
    """What keeps the run from being whole."""
    for process in processes:
        if process.unrecorded:
            yield f"results could not be recorded: {process.unrecorded}"
        if (stop := stops[process.device_type]) not in ("", STOPPED):
            yield f"{stop}; see {process.log}"
    if unknown := [n.what for n in missing if n.reason.startswith(UNKNOWN)]:
        yield f"no result of {', '.join(unknown)} was recorded"


def _left_by_failures(folder: Path) -> dict[_Key, int]:
    """The items that were not finished because their kernel had failed → how many cases were not run."""
    notes = [note for path in folder.glob(f"*{LEFT}") for note in read_json(path)]
    return {(note["kernel"], note["device"], note["group"]): note["cases"] for note in notes}


def _of_failed(processes: Iterable[Ended], rest: Mapping[_Key, int]) -> Iterator[NotRun]:
    """What failed kernels did not run, a line for each kernel and device."""
    for kernel, device in dict.fromkeys((item.kernel, item.device) for process in processes for item in process.items):
        if cases := sum(count for key, count in rest.items() if key[:2] == (kernel, device)):
            yield NotRun(f"{kernel} on {device}, {cases:,} more case{'s' * (cases > 1)}", HAS_FAILED, kernel, device)


def _missing(process: Ended, told: Collection[_Key], stop: str) -> Iterator[NotRun]:
    """The planned items without any result or reason, a line for each kernel, device and reason."""
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for item in process.items:
        if (item.kernel, item.device, item.group) not in told:
            reason = _reason(item, process, stop)
            lacking.setdefault((item.kernel, item.device, reason), []).append(item.group)
    planned = [(item.kernel, item.device) for item in process.items]
    for (kernel, device, reason), groups in lacking.items():
        whole = len(groups) == planned.count((kernel, device))
        of = "" if whole else f", {_listed(groups)}"
        yield NotRun(f"{kernel} on {device}{of}", reason, kernel, device)


def _reason(item: Planned, process: Ended, stop: str) -> str:
    """Why an item has no result."""
    if not item.cases:
        return NO_CASES
    if process.selected is not None and item.id not in process.selected:
        return DESELECTED
    return stop or process.unrecorded or f"{UNKNOWN}; see {process.log}"


def _listed(groups: Sequence[str]) -> str:
    rest = len(groups) - _MOST_GROUPS
    names = ", ".join(groups[:_MOST_GROUPS])
    return f"group{'s' * (len(groups) > 1)} {names}{f' and {rest} more' if rest > 0 else ''}"


@dataclass(frozen=True)
class _Left:
    """A case in the middle of which a worker ended, by the note that it wrote before."""

    path: Path
    device_type: str
    worker: str
    note: Mapping[str, Any]

    @property
    def trace(self) -> Path:
        return self.path.with_suffix(".trace")

    @property
    def hung(self) -> bool:
        return self.trace.is_file() and "Timeout" in self.trace.read_text()

    def not_run(self, reason: str) -> NotRun:
        """The case where the worker was told to end."""
        kernel, device = self.note["kernel"], self.note["device"]
        return NotRun(f"{kernel} on {device} from this case on: {self.note['case']}", reason, kernel, device)

    @property
    def errored(self) -> CaseResult:
        """The result of the case where the kernel is what ended the worker."""
        counted = self.note.get("counted", True)
        rest = "; the other cases of its group did not run" if counted else ", while a failure was made smaller"
        reason = (
            f"no result after {self.note['limit']:g} s (--timeout), so its process was stopped{rest}; see {self.trace}"
            if self.hung
            else f"the process died in this case without an exception{rest}"
        )
        case = parse_case(self.note["case"])
        return CaseResult(
            case=self.note["case"],
            op=case.op,
            kernel=self.note["kernel"],
            contract=self.note["contract"],
            device=self.note["device"],
            dtypes=case.dtypes,
            verdict=Verdict.ERRORED if counted else Verdict.SKIPPED,
            reason=reason,
            group=self.note["group"],
            counted=counted,
            source=self.note["source"],
        )


def _left(path: Path) -> _Left:
    device_type, worker, _ = path.stem.split("-")
    return _Left(path, device_type, worker, read_json(path))
