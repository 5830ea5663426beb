"""Assembly of a run from the recorded results and the plan, with reasons for items that have no result.

Every planned item is looked for among the results. One without any is listed with the reason, as far as it is known; if
nothing explains it, the run is broken.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.result import CaseResult, Verdict
from lastbit.run import NotRun, Run, Spent
from lastbit.timing import Clock, listening
from lastbit.verify.coverage import coverage_of
from lastbit.verify.notes import HAS_FAILED
from lastbit.verify.plan import Planned
from lastbit.verify.power import agreement_of, power_of, undecidable_of
from lastbit.verify.project import open_project

_MOST_GROUPS = 3
Key = tuple[str, str, str]  # of an item: kernel, device, group

INTERRUPTED = "interrupted"
STOPPED = "-x or --maxfail stopped pytest"
DESELECTED = "left out by -k, --deselect or another option or plugin of pytest"
NO_CASES = "its groups of cases have no examples, and no case was to be generated"
UNKNOWN = "no result was recorded, and nothing says why"


@dataclass(frozen=True)
class UnderWay:
    """A case during which a process ended.

    Attributes:
        note: what `lastbit.verify.recorder.note_of` made of the case.
        died: the kernel is what ended the process, and not whoever told it to end.
        hung: it took longer than it may.
        trace: the file with the lines that were under way.
    """

    note: Mapping[str, Any]
    died: bool
    hung: bool = False
    trace: str = ""

    def not_run(self, reason: str) -> NotRun:
        """Describe the case as not run, where the process was told to end."""
        kernel, device = self.note["kernel"], self.note["device"]
        return NotRun(f"{kernel} on {device} from this case on: {self.note['case']}", reason, kernel, device)

    @property
    def errored(self) -> CaseResult:
        """The result of the case, where the kernel ended the process."""
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


@dataclass(frozen=True)
class Ended:
    """Everything left behind by the processes that ran the cases of one type of device, whoever started them.

    Attributes:
        items, not_run: their plan.
        selected: ids of the items that were not left out; None where none can be, or nobody came to say.
        stop: why they ended before all items had run; empty if they did not.
        unrecorded: why a result could not be written; empty if all could.
        under_way: the cases that a process was in when it ended.
        rest: items that were not finished because their kernel had failed → how many cases were not run.
        given_up: items that were begun again and again → why they were not finished.
        isolated: what kernel processes were kept from; empty where kernels were called without.
    """

    device_type: str
    log: Path
    items: tuple[Planned, ...]
    not_run: tuple[NotRun, ...]
    selected: frozenset[str] | None = None
    stop: str = ""
    unrecorded: str = ""
    under_way: tuple[UnderWay, ...] = ()
    rest: Mapping[Key, int] = field(default_factory=dict)
    given_up: Mapping[Key, str] = field(default_factory=dict)
    isolated: str = ""


def isolation_of(ended: Iterable[Ended]) -> dict[str, str]:
    """Describe the isolation of kernel processes, for each type of device that had any."""
    told = [f"{process.device_type}: {process.isolated}" for process in ended if process.isolated]
    return {"isolated": "; ".join(told)} if told else {}


def assembled(
    config: Config,
    ended: Sequence[Ended],
    recorded: Sequence[CaseResult],
    *,
    environment: Mapping[str, str],
    spent: Spent,
    interrupted: bool,
) -> Run:
    """Assemble the run, with results in the order of the plan; of an interrupted run, as many as there are.

    The power of an interrupted run is not computed: it takes long and could not be relied on. An interruption from the
    keyboard while it is computed interrupts the run.
    """
    left = [(case, process.stop) for process in ended for case in process.under_way]
    results = _in_order([*recorded, *(case.errored for case, _ in left if case.died)], ended)
    given_up = [_of_given_up(key, reason) for process in ended for key, reason in process.given_up.items()]
    rest = {key: cases for process in ended for key, cases in process.rest.items()}
    told = {(r.kernel, r.device, r.group) for r in results} | rest.keys()
    missing = [n for process in ended for n in _missing(process, told | process.given_up.keys())]
    with listening(Clock()) as clock:
        try:
            project = open_project(config)
            power = () if interrupted else power_of(results, project)
            undecidable = () if interrupted else undecidable_of(results, project)
        except KeyboardInterrupt:
            power, undecidable, interrupted = (), (), True
    planned = [item for process in ended for item in process.items]
    return Run(
        results=tuple(results),
        broken=INTERRUPTED if interrupted else "; ".join(_broken(ended, missing, given_up)),
        power=power,
        undecidable=undecidable,
        not_run=(
            *_of_failed(ended, rest),  # first, since it is why a reader of a red run misses cases
            *_left_out(ended),
            *(case.not_run(stop) for case, stop in left if not case.died),
            *given_up,
            *missing,
        ),
        agreement=agreement_of(results),
        environment=environment,
        spent=Spent(clock.seconds) + spent,
        coverage=coverage_of(planned, results),
    )


def _in_order(results: Iterable[CaseResult], processes: Iterable[Ended]) -> list[CaseResult]:
    """Sort results by the plans' items, whichever worker had them when; results of one item keep their order."""
    keys = [(item.device, item.kernel, item.group) for process in processes for item in process.items]
    places = {key: place for place, key in enumerate(keys)}
    return sorted(results, key=lambda result: places.get((result.device, result.kernel, result.group), len(places)))


def _left_out(processes: Sequence[Ended]) -> Iterator[NotRun]:
    """Yield everything left out of the plans, and the cases that a failure kept from running if it stopped pytest."""
    if any(process.stop == STOPPED for process in processes):
        yield NotRun("what came after the first failure", STOPPED)
    for process in processes:
        yield from process.not_run


def _broken(processes: Iterable[Ended], missing: Iterable[NotRun], given_up: Iterable[NotRun]) -> Iterator[str]:
    """Yield the reasons for which the run is incomplete."""
    for process in processes:
        if process.unrecorded:
            yield f"results could not be recorded: {process.unrecorded}"
        if process.stop not in ("", STOPPED):
            yield f"{process.stop}; see {process.log}"
    for lost in given_up:
        yield f"{lost.what}: {lost.reason}"
    if unknown := [n.what for n in missing if n.reason.startswith(UNKNOWN)]:
        yield f"no result of {', '.join(unknown)} was recorded"


def _of_failed(processes: Iterable[Ended], rest: Mapping[Key, int]) -> Iterator[NotRun]:
    """Yield the number of cases that failed kernels did not run, for each kernel and device."""
    for kernel, device in dict.fromkeys((item.kernel, item.device) for process in processes for item in process.items):
        if cases := sum(count for key, count in rest.items() if key[:2] == (kernel, device)):
            yield NotRun(f"{kernel} on {device}, {cases:,} more case{'s' * (cases > 1)}", HAS_FAILED, kernel, device)


def _of_given_up(key: Key, reason: str) -> NotRun:
    kernel, device, group = key
    return NotRun(f"{kernel} on {device}, the rest of group {group}", reason, kernel, device)


def _missing(process: Ended, told: Collection[Key]) -> Iterator[NotRun]:
    """Yield the planned items without a result, for each kernel, device and reason."""
    lacking: dict[tuple[str, str, str], list[str]] = {}
    for item in process.items:
        if (item.kernel, item.device, item.group) not in told:
            reason = _reason(item, process)
            lacking.setdefault((item.kernel, item.device, reason), []).append(item.group)
    planned = [(item.kernel, item.device) for item in process.items]
    for (kernel, device, reason), groups in lacking.items():
        whole = len(groups) == planned.count((kernel, device))
        of = "" if whole else f", {_listed(groups)}"
        yield NotRun(f"{kernel} on {device}{of}", reason, kernel, device)


def _reason(item: Planned, process: Ended) -> str:
    """Return the reason for which an item has no result."""
    if not item.cases:
        return NO_CASES
    if process.selected is not None and item.id not in process.selected:
        return DESELECTED
    return process.stop or process.unrecorded or f"{UNKNOWN}; see {process.log}"


def _listed(groups: Sequence[str]) -> str:
    rest = len(groups) - _MOST_GROUPS
    names = ", ".join(groups[:_MOST_GROUPS])
    return f"group{'s' * (len(groups) > 1)} {names}{f' and {rest} more' if rest > 0 else ''}"
