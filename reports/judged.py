"""Result of `lastbit judge`: a line of JSON for a program, or a few lines for a reader."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from lastbit.files import BUILT_IN
from lastbit.reports.bench import amount_of, short
from lastbit.reports.encoding import encoded
from lastbit.reports.paper import paragraph, print_field, verdict_word
from lastbit.reports.summary import shown_path, tally
from lastbit.result import Verdict, told

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


def schema() -> dict[str, Any]:
    """Load the JSON Schema of the document."""
    loaded: dict[str, Any] = json.loads((BUILT_IN / "reports" / "schemas" / "judge-1.json").read_text())
    return loaded


def document(found: FileVerdict) -> dict[str, Any]:
    """Encode the verdict on a file in types that JSON has, as the schema says."""
    made: dict[str, Any] = encoded(found)
    return made


def as_json_line(found: FileVerdict) -> str:
    """Write the document on one line."""
    return json.dumps(document(found), allow_nan=False)


def print_judged(found: FileVerdict, console: Console) -> None:
    """Print the verdict, the first finding, the line that is to blame, and what to do next."""
    kernel = f":{found.kernel}" if found.kernel else ""
    judged = found.verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE, Verdict.FAILED)  # else no contract was looked at
    contract = f"contract {told(found.contract, found.idle)} of " if judged else ""
    about = f"  {contract}{found.op} on {found.device}  {found.seconds:.2f} s"
    verdict = verdict_word(found.verdict)
    paragraph(
        console,
        Text.assemble(f"{shown_path(found.file)}{kernel}", (about, "dim")),
        label=f"{verdict.plain}  ",
        label_style=str(verdict.style),
    )
    for label, text in _fields(found):
        print_field(console, label, text, to_copy=label == "next")


def _fields(found: FileVerdict) -> Iterator[tuple[str, str]]:
    """List label and text of each line below the verdict."""
    if sum(found.cases.values()):
        counted = tally(Verdict(verdict) for verdict, count in found.cases.items() for _ in range(count))
        left = found.planned - sum(found.cases.values())
        yield "cases", counted + (f", {left:,} not run" if left else "")
    if ":" in found.seed:
        yield "again", f"with the same cases: --seed {found.seed}"
    if found.reason:
        yield "reason", found.reason
    for finding in found.findings[:1]:
        if finding.sentence != found.reason:
            yield "finding", finding.sentence
    if (culprit := found.culprit) is not None:
        yield "line", f"{shown_path(f'{culprit.file}:{culprit.line}')}  {culprit.expression}"
        yield "", culprit.sentence
    if found.verdict is Verdict.FAILED and found.contracts.keeps == (found.contract,):
        yield "values", f"every element fits {told(found.contract, found.idle)}; the kernel fails for what stands above"
    elif found.verdict is Verdict.FAILED and found.contracts.keeps:
        yield "keeps", " or ".join(told(name, found.idle) for name in found.contracts.keeps)
    if found.torch_ops:
        yield "torch", f"calls {' and '.join(found.torch_ops)}, which computes the op"
    if (time := found.speed) is not None:
        taken, nothing = amount_of(time.seconds, "s"), amount_of(time.overhead, "s")
        said = [f"at most {taken} on {short(time.case)}, of which nothing takes {nothing}"]
        if time.roof is not None:
            said.append(f"at least {time.roof:.0%} of the roof")
        said += [f"{name}: {amount_of(seconds, 's')}" for name, seconds in time.beside.items()]
        yield "speed", "; ".join(said)
    if found.speed_reason:
        yield "not timed", found.speed_reason
    yield from (("note", note) for note in found.notes)
    if found.findings:
        yield "next", found.findings[0].repro
