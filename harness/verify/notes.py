"""What is said of a run by the processes that take part in it, as data: its items, and what became of them.

It imports no torch: the process that hands out items need not wait for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lastbit.case import Choices, Chosen, parse_case
from lastbit.result import CaseResult, Verdict
from lastbit.run import NotRun

HAS_FAILED = "stopped after its first failure; --keep-going runs the rest"
NO_ACCELERATOR = "no accelerator is here, and the CPU ran Triton interpreted"
"""Why all that needs one was not run: one reason, and so one line of a report."""


@dataclass(frozen=True)
class Planned:
    """An item as data, for a process that has not loaded its kernel.

    Attributes:
        cases: how many it runs unless it fails early.
        choices: what its cases choose from.
        combination: the row of dtypes and options that all of its cases have, if they are of one.
        left: combinations that its kernel takes and the run leaves out.
        cost: an estimate of the time that it takes, to compare items by.
        compiles: its kernel is compiled by torch, in each process anew.
    """

    id: str
    kernel: str
    op: str
    contract: str
    device: str
    group: str
    source: str
    cases: int
    cost: int = 1
    choices: Choices = field(default_factory=dict)
    combination: Chosen = field(default_factory=dict)
    left: tuple[Chosen, ...] = ()
    compiles: bool = False


Key = tuple[str, str, str]  # of an item: kernel, device, group

INTERRUPTED = "interrupted"
STOPPED = "-x or --maxfail stopped pytest"


@dataclass(frozen=True)
class UnderWay:
    """A case during which a process ended.

    Attributes:
        note: what `lastbit.verify.result_recorder.CaseRecorder` tells of the case.
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
    under_way: tuple[UnderWay, ...] = ()
    rest: Mapping[Key, int] = field(default_factory=dict)
    given_up: Mapping[Key, str] = field(default_factory=dict)
    isolated: str = ""
