"""The result of `lastbit judge` on one kernel file: a document for machines, whose form has a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lastbit.result import Verdict

SCHEMA = "lastbit.judge/1"
"""The form of the document. Fields may be added to it; one that goes, or changes its type, makes it another form."""

_CODES = {Verdict.PASSED: 0, Verdict.INCONCLUSIVE: 1, Verdict.FAILED: 1, Verdict.ERRORED: 2}
_NOTHING_RUN = 3


@dataclass(frozen=True)
class CaseFinding:
    """A fault of the kernel, in the cheapest case that shows it.

    Attributes:
        kind: of the finding, as in a report; `errored` where the kernel gave nothing that can be judged.
        stage: what it is about; empty for none.
        case: the line of the case.
        repro: the command that judges the file on that case alone.
    """

    kind: str
    stage: str
    sentence: str
    case: str
    repro: str


@dataclass(frozen=True)
class DecidedShare:
    """The share of a result that could not have been otherwise, over all cases, in one format."""

    result: str
    dtype: str
    elements: int
    decided: int
    share: float


@dataclass(frozen=True)
class Contracts:
    """Contracts of the op that the cases rule out or confirm.

    Attributes:
        keeps: the one that the kernel is held to, if it keeps it; of one that fails, the simplest that allow every bit
            of each failing case.
        open: alternatives that nothing rules out.
        ruled_out: alternatives that some case rules out.
    """

    keeps: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    ruled_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Culprit:
    """The line that is wrong, what it computes there, and what is wrong with it, where that could be found out."""

    file: str
    line: int
    expression: str
    sentence: str


@dataclass(frozen=True)
class Held:
    """A limit of the kernel's process: whether it holds, and how, or why not."""

    holds: bool
    how: str


@dataclass(frozen=True)
class CallTime:
    """The time of a call, by the judge's clock, where that was asked for.

    Attributes:
        case: the line of the case that was timed.
        seconds: per call, an upper bound.
        overhead: seconds per call of a kernel that does nothing, measured in the same way.
        calls: how many were timed, one by one.
        beside: what was timed beside it → seconds per call.
        roof: share of what the device does at best, as measured in the same run; None where there is no such figure.
    """

    case: str
    seconds: float
    overhead: float
    calls: int
    beside: Mapping[str, float] = field(default_factory=dict)
    roof: float | None = None


@dataclass(frozen=True, kw_only=True)
class FileVerdict:
    """The verdict on the kernel of a file.

    Attributes:
        file, sha256: what was judged; the hash is that of the file alone, not of what it imports.
        kernel: the function.
        contract: what it is held to.
        idle: options of it that change nothing in any of the cases.
        reason: why it is ERRORED, or why nothing was run; empty otherwise.
        cases: verdict → number of cases, every verdict among them.
        planned: cases that there were to run; more than those of `cases` where the first failing one was the last.
        findings: one of each kind and stage.
        culprit: of a kernel that FAILED.
        culprit_reason: why there is none; empty if there is one, or nothing to look for.
        torch_ops: operators of torch that compute the op as a whole, and that the kernel called.
        notes: what the file declares and was not believed.
        confinement: what the process of the kernel is kept from → whether it is.
        speed: where it was asked for, of a kernel that has passed its cases.
        speed_reason: what was asked for and not measured, and why; otherwise empty.
        seconds: from the file to the verdict.
        seed: that of the cases, with which they are the same again; `random` where none was drawn.
        versions: package → version.
    """

    schema: str = SCHEMA
    file: str
    sha256: str
    op: str
    kernel: str
    contract: str
    device: str
    verdict: Verdict
    reason: str = ""
    cases: Mapping[str, int] = field(default_factory=dict)
    planned: int = 0
    decided: tuple[DecidedShare, ...] = ()
    findings: tuple[CaseFinding, ...] = ()
    culprit: Culprit | None = None
    culprit_reason: str = ""
    contracts: Contracts = field(default_factory=Contracts)
    torch_ops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    confinement: Mapping[str, Held] = field(default_factory=dict)
    speed: CallTime | None = None
    speed_reason: str = ""
    seconds: float = 0.0
    seed: str = ""
    profile: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    idle: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 it passed, 1 findings or inconclusive, 2 it is broken, 3 nothing was run."""
        return _CODES.get(self.verdict, _NOTHING_RUN)
