"""Result of `lastbit explain --stages`: which stage goes wrong, seen or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from lastbit.reports.paper import line, paragraph, print_table
from lastbit.reports.summary import error, listed, plural, share, signed
from lastbit.result import Comparison, RowCheck, Verdict, told


class StageKind(StrEnum):
    """The kind of fault at a stage, or its absence."""

    CLEAN = "clean"
    """Nothing: every element is possible, and every row explained."""
    LOCAL = "local"
    """It does not follow from the stages before it, and the results show it."""
    UNSEEN = "unseen"
    """It does not follow from the stages before it, but no result shows it."""
    MISSING = "missing"
    """Every stage follows from those before it, but the results do not follow from the inputs."""
    ROWS = "rows"
    """Every element is possible, but not every row: the elements of a row disagree about it."""


@dataclass(frozen=True)
class Handover:
    """The reference goes on from the kernel's own stages, up to and including one of them.

    Attributes:
        stage: the last stage that is the kernel's; empty where the reference begins with the inputs.
        dtype: its format under the contract.
        result: the kernel must return it; otherwise the kernel let it be seen.
        isolated: the stage against what follows from the kernel's own earlier stages.
        forward: all results, those up to the stage the kernel's and the others the reference's, against what follows
            from the inputs: the error that is there by this stage.
        error: the largest relative L2 error of those results.
        backward: elements of the kernel's later results that do not follow from there: what goes wrong after it.
    """

    stage: str
    dtype: str
    result: bool
    isolated: Comparison
    forward: Comparison
    error: float
    backward: int


@dataclass(frozen=True)
class StageSearch:
    """The first stage of a kernel that matters, on one case.

    Attributes:
        handovers: the one of the inputs, then one per stage that the kernel gave, in the order of the reference.
        stage: the first of these stages that is wrong; empty if none is.
        shown: the first with which the results become impossible; empty if none is.
        wrong: how many of its elements are, of how many.
        rows: rows that one latent value explains.
        beside: what else is wrong with the kernel on this case, which no stage shows.
        notices: what is unusual about it and no fault.
        verdict: of the case as `lastbit verify` judges it.
        reason: why the kernel gave nothing that can be judged; empty if it did.
        idle: options of the contract that change nothing in the case.
    """

    kernel: str
    op: str
    contract: str
    case: str
    device: str
    verdict: Verdict
    reason: str = ""
    handovers: tuple[Handover, ...] = ()
    kind: StageKind = StageKind.CLEAN
    stage: str = ""
    shown: str = ""
    wrong: tuple[int, int] = (0, 0)
    rows: RowCheck | None = None
    beside: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 nothing goes wrong, 1 something does, 2 the kernel raised, 3 it does not take the case."""
        if not self.handovers:
            return 3 if self.verdict in (Verdict.UNSUPPORTED, Verdict.SKIPPED) else 2
        return int(self.kind is not StageKind.CLEAN or bool(self.beside))


# As in changes.py.
MOST_OTHERS = 4
"""Stages that are named beside the first one."""

_HEADERS = ("stage", "dtype", "isolated", "of", "forward", "rel. error", "mismatch", "bias", "backward")
LEGEND = (
    ("isolated", "elements of the stage that do not follow from the kernel's own stages before it"),
    (
        "forward",
        "elements of the results that are not possible if the reference goes on from the kernel's stages so far",
    ),
    ("backward", "elements of the kernel's later results that do not follow from these stages"),
)


def print_stages(found: StageSearch, console: Console) -> None:
    """Print the stages in a table, then the first that matters."""
    head = f" on {found.device}  contract {told(found.contract, found.idle)} of {found.op}"
    line(console, Text.assemble((found.kernel, "bold"), head))
    line(console, f"  {found.case}", "dim")
    if not found.handovers:
        paragraph(console, Text(f"{found.verdict.lower()}: {found.reason}", "bold magenta"), label="  ")
        return
    rows = []
    for handover in found.handovers:
        isolated, forward = handover.isolated, handover.forward
        counts = (isolated.outside, forward.outside, handover.backward)
        own, ahead, behind = (Text(f"{count:,}", "bold red" if count else "") for count in counts)
        name = handover.stage if handover.result else f"({handover.stage or 'inputs'})"
        first = [Text(name), Text(handover.dtype), own, Text(f"{isolated.numel:,}")]
        if not handover.stage:
            first[1:] = [Text(), Text(), Text()]
        figures = error(handover.error), share(forward.mismatched, forward.numel), signed(forward.bias)
        rows.append((*first, ahead, *map(Text, figures), behind))
    print_table(console, _HEADERS, rows)
    style = "green" if found.kind is StageKind.CLEAN else "bold red"
    for sentence in sentences(found):
        paragraph(console, Text(sentence, style), label="  → ")
    line(console)


def print_legend(console: Console) -> None:
    """Print the meaning of each column."""
    for word, meaning in LEGEND:
        paragraph(console, Text(meaning, "dim"), label=f"{word:<9} ", label_style="dim")


def sentences(found: StageSearch) -> Iterator[str]:
    """Yield sentences on the first stage that goes wrong, and other wrong stages."""
    match found.kind:
        case StageKind.CLEAN:
            yield f"No stage goes wrong.{_largest_step(found.handovers)}"
        case StageKind.ROWS:
            assert found.rows is not None
            unexplained = f"{found.rows.unexplained:,} of {plural(found.rows.rows, 'row')}"
            yield f"Every element is possible, but {unexplained} cannot come from one {found.stage}."
        case StageKind.MISSING:
            yield f"Every stage follows from those before it, but not the results from the inputs.{_seen(found)}"
        case _:
            wrong, numel = found.wrong
            begins = f"Stage {found.stage} is the first that goes wrong: {wrong:,} of {plural(numel, 'element')}"
            given = ""
            if len(found.handovers) != 2:
                seen = " No result shows it here." if found.kind is StageKind.UNSEEN else _seen(found)
                given = f", given the kernel's own stages before it.{seen}"
            yield f"{begins} impossible{given or '.'}"
    also = [h.stage for h in found.handovers if h.isolated.outside and h.stage != found.stage]
    if also:
        yield f"Not possible given the stages before them, either: {listed(also, MOST_OTHERS)}."
    yield from found.beside
    yield from (f"Notice: {sentence}" for sentence in found.notices)


def _seen(found: StageSearch) -> str:
    """Say where the results begin to show the fault, and whether anything goes wrong after that."""
    names = [h.stage for h in found.handovers]
    at = names.index(found.shown)
    before, shown = found.handovers[at - 1], found.handovers[at]
    cause = "it" if found.shown == found.stage and found.kind is StageKind.LOCAL else found.shown
    count = plural(shown.forward.outside, "impossible element")
    change = f"their relative error goes from {error(before.error)} to {error(shown.error)}"
    rest = f"{shown.backward:,} more go wrong after that" if shown.backward else "whatever comes later follows from it"
    return f" With {cause}, the results have {count} and {change}; {rest}."


def _largest_step(handovers: Sequence[Handover]) -> str:
    """Name the step at which the error of the results grows most, although nothing is wrong."""
    steps = [(b.error - a.error, a, b) for a, b in itertools.pairwise(handovers)]
    growth, before, after = max(steps, key=lambda step: step[0], default=(0.0, None, None))
    if growth <= 0 or before is None or after is None:
        return ""
    return (
        f" The relative error of the results grows most with {after.stage}, from {error(before.error)} to "
        f"{error(after.error)}, as the contract lets it."
    )
