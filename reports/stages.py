"""Reports of `lastbit explain --stages`, on a console."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from lastbit.outcomes.stages import Handover, StageKind, StageSearch
from lastbit.reports.paper import line, paragraph, print_table
from lastbit.reports.summary import error, listed, plural, share, signed
from lastbit.result import told

MOST_SUSPECTS = 4

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
    print_table(console, _HEADERS, [_row(h) for h in found.handovers])
    style = "green" if found.kind is StageKind.CLEAN else "bold red"
    for sentence in sentences(found):
        paragraph(console, Text(sentence, style), label="  → ")
    line(console)


def print_legend(console: Console) -> None:
    """Print the meaning of each column."""
    for word, meaning in LEGEND:
        paragraph(console, Text(meaning, "dim"), label=f"{word:<9} ", label_style="dim")


def _row(handover: Handover) -> tuple[Text, ...]:
    isolated, forward = handover.isolated, handover.forward
    name = handover.stage if handover.result else f"({handover.stage or 'inputs'})"
    counts = (isolated.outside, forward.outside, handover.backward)
    own, ahead, behind = (Text(f"{count:,}", "bold red" if count else "") for count in counts)
    figures = error(handover.error), share(forward.mismatched, forward.numel), signed(forward.bias)
    middle = tuple(map(Text, figures))
    if not handover.stage:
        return Text(name), Text(""), Text(""), Text(""), ahead, *middle, behind
    return Text(name), Text(handover.dtype), own, Text(f"{isolated.numel:,}"), ahead, *middle, behind


def sentences(found: StageSearch) -> Iterator[str]:
    """Yield sentences on the first stage that goes wrong, what would explain it, and other wrong stages."""
    yield _first(found)
    if found.suspects:
        yield _explanation(found)
    elif found.wrong[0]:
        yield "No other contract of the op and no other rounding of one stage explains it."
    also = [h.stage for h in found.handovers if h.isolated.outside and h.stage != found.stage]
    if also:
        yield f"Not possible given the stages before them, either: {listed(also, MOST_SUSPECTS)}."
    yield from found.beside
    yield from (f"Notice: {sentence}" for sentence in found.notices)


def _first(found: StageSearch) -> str:
    if found.kind is StageKind.CLEAN:
        return f"No stage goes wrong.{_largest_step(found.handovers)}"
    if found.kind is StageKind.ROWS:
        assert found.rows is not None
        unexplained = f"{found.rows.unexplained:,} of {plural(found.rows.rows, 'row')}"
        return f"Every element is possible, but {unexplained} cannot come from one {found.stage}."
    if found.kind is StageKind.MISSING:
        return f"Every stage follows from those before it, but not the results from the inputs.{_seen(found)}"
    wrong, numel = found.wrong
    begins = f"Stage {found.stage} is the first that goes wrong: {wrong:,} of {plural(numel, 'element')} impossible"
    if len(found.handovers) == 2:
        return f"{begins}."
    consequence = " No result shows it here." if found.kind is StageKind.UNSEEN else _seen(found)
    return f"{begins}, given the kernel's own stages before it.{consequence}"


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


def _explanation(found: StageSearch) -> str:
    """Name the suspects that explain the most."""
    wrong, first = found.wrong[0], found.suspects[0]
    explained = wrong - first.left
    extent = "all of it" if explained == wrong else f"{explained:,} of {wrong:,}"
    rest = len(found.suspects) - MOST_SUSPECTS
    names = [f"{s.stage} {s.change}" for s in found.suspects[:MOST_SUSPECTS]]
    said = " or ".join([*names, *([f"{rest} more"] if rest > 0 else [])])
    equally = ", equally well" if len(found.suspects) > 1 else ""
    doubt = "" if first.exact and not first.left else "Nothing that was tried explains all of it exactly; "
    return f"{doubt}{said} would explain {extent}{equally}."


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
