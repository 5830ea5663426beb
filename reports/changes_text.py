"""Two runs side by side, in sentences and cells whatever they are shown on, on a console, and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from lastbit.reports.changes import Changes, Drift, Fate, KernelChange, PropertyChange, StageChange
from lastbit.reports.encoding import encoded
from lastbit.reports.paper import line, make_console, paragraph, print_table
from lastbit.reports.properties import extent
from lastbit.reports.summary import (
    distance,
    elements,
    error,
    grouped,
    listed,
    plural,
    repro_line,
    share,
    signed,
    tally,
)
from lastbit.result import CaseResult, Verdict

HEADERS = ("stage", "dtype", "cases", "same bits", "outside", "mismatch", "rel. error", "contract", "bias", "ulp")
"""Columns of `cells`."""

# What fits into a line of 100 characters, as everywhere in reports.
MOST_NAMES = 4


def summary(changes: Changes) -> str:
    """Write `2 kernels worse, 12 unchanged · bits unchanged in 812 of 812 tensors · 784 cases in both`, and so on."""
    counts = Counter(
        "new and failing" if k.change is Fate.NEW and k.worse else k.change.value.lower() for k in changes.kernels
    )
    kernels = ", ".join(f"{count:,} {word}" for word, count in counts.items()) or "none"
    parts = [f"kernels: {kernels}", bits(changes.kernels), paired(changes.kernels, changes.names)]
    return " · ".join(filter(None, parts))


def verdict(changes: Changes) -> str:
    """Return the one word that comes first."""
    if changes.broken[1]:
        return "BROKEN"
    if any(kernel.worse for kernel in changes.kernels):
        return "WORSE"
    if not any(kernel.before and kernel.after for kernel in changes.kernels):
        return "NOTHING COMPARED"
    drifted = any(kernel.drifted_worse for kernel in changes.kernels)
    return "NOTHING GOT WORSE" + (", but figures drifted" if drifted else "")


def about(changes: Changes) -> list[str]:
    """List the sentences that a reader must know of the two runs before reading on."""
    lines = [f"{name}: {before or '–'} → {after or '–'}" for name, before, after in changes.settings]
    if changes.across:
        lines.append(f"Kernels on {changes.across[0]} are compared with the same kernels on {changes.across[1]}.")
    for name, broken in zip(changes.names, changes.broken, strict=True):
        if broken:
            lines.append(f"{name} did not come to its end: {broken}")
    return lines


def bits(kernels: tuple[KernelChange, ...]) -> str:
    """Count the tensors with unchanged bits; empty where none could be compared."""
    tensors, equal = sum(k.tensors for k in kernels), sum(k.equal for k in kernels)
    return f"bits unchanged in {equal:,} of {plural(tensors, 'tensor')}" if tensors else ""


def paired(kernels: tuple[KernelChange, ...], names: tuple[str, str]) -> str:
    """Count the cases that both runs have, and those that only one of them has."""
    both = [k for k in kernels if k.before and k.after]
    if not both:
        return ""
    parts = [f"{plural(sum(len(k.pairs) for k in both), 'case')} in both"]
    for side, name in enumerate(names):
        if alone := sum(k.unpaired[side] for k in both):
            parts.append(f"{alone:,} only in {name}")
    if other := sum(k.other_inputs for k in both):
        parts.append(f"{other:,} of the same line but with other input bits")
    return ", ".join(parts)


def others(changes: Changes) -> list[tuple[Fate, str]]:
    """Write one line for each op and change of kernels that need no details: new, gone or unchanged."""
    together = grouped(((kernel.change, kernel.op), kernel) for kernel in changes.kernels if not kernel.telling)
    lines = []
    for (change, op), kernels in together.items():
        sides = [kernel.after or kernel.before for kernel in kernels]
        about = [bits(tuple(kernels)), tally(side.verdict for side in sides if side)]
        names = listed((kernel.kernel for kernel in kernels), MOST_NAMES)
        lines.append((change, f"{op}: {plural(len(kernels), 'kernel')}, {', '.join(filter(None, about))}: {names}"))
    return lines


def head(kernel: KernelChange) -> str:
    """Write `PASSED → FAILED`, `FAILED` for both runs, or the verdict in the only run that has the kernel."""
    sides = [side for side in (kernel.before, kernel.after) if side]
    return _arrow([side.verdict.value for side in sides])


def devices(kernel: KernelChange) -> str:
    """Write `cpu`, or `cpu → cuda:0`."""
    return _arrow([side.device for side in (kernel.before, kernel.after) if side])


def notes(kernel: KernelChange, names: tuple[str, str]) -> list[str]:
    """Write sentences about one kernel, most important first."""
    before, after = kernel.before, kernel.after
    if before is None or after is None:
        return [f"only in {names[0] if after is None else names[1]}"]
    lines = [", ".join(filter(None, (paired((kernel,), names), bits((kernel,)))))]
    if before.contract != after.contract:
        lines.append(f"contract: {before.contract} → {after.contract}")
    moved = [("worse", kernel.worse_cases), ("better", kernel.better_cases)]
    for word, pairs in moved:
        if pairs:
            then, now = tally(p[0].verdict for p in pairs), tally(p[1].verdict for p in pairs)
            lines.append(f"{plural(len(pairs), 'case')} got {word}: {then} → {now}")
    if kernel.silent:
        lines.append("it raised before, and gives wrong results now: whoever calls it is not told")
    lines += [_of_property(one) for one in kernel.properties]
    if before.verdict != after.verdict and not kernel.worse_cases and not kernel.better_cases:
        lines.append(
            "every case that both runs have kept its verdict: what changed comes from cases that only one of them has"
        )
    if kernel.change is not Fate.UNCHANGED and kernel.tensors == kernel.equal > 0 and not kernel.properties:
        lines.append("its bits are the same: what changed is what judges them, or which cases were run")
    return lines


def _of_property(change: PropertyChange) -> str:
    """Write `lost: rows, which it declares: changes between 255 and 256 rows, …`, or what was gained."""
    one = change.after
    declared = ", which it declares" if one.declared else ", which it declared" if change.before.declared else ""
    return f"lost: {one.name}{declared}: {extent(one)}" if change.lost else f"gained: {one.name}{declared}"


def smallest_worse(kernel: KernelChange) -> CaseResult | None:
    """Return the smallest case that got worse, as the second run has it; a failing case comes before others."""
    worse = [after for _, after in kernel.worse_cases]
    failed = [result for result in worse if result.verdict is Verdict.FAILED]
    return min(failed or worse, key=lambda result: elements(result.case), default=None)


def again(kernel: KernelChange, changes: Changes) -> str:
    """Return the command that runs the smallest case again that got worse; empty if none did."""
    worst = smallest_worse(kernel)
    return repro_line(worst, changes.options) if worst else ""


def rows(kernel: KernelChange) -> list[tuple[str, ...]]:
    """Return the cells of each stage that changed."""
    return [cells(stage) for stage in kernel.stages if not stage.unchanged]


def cells(stage: StageChange) -> tuple[str, ...]:
    """Write one row under `HEADERS`: `before → after`, or one value where the two read the same."""
    shown = stage.shown
    both = [summary for summary in (stage.before, stage.after) if summary]
    cases = [f"{s.cases:,}" for s in both]
    alone = "new" if stage.before is None else "gone" if stage.after is None else ""
    return (
        shown.shown_name,
        shown.dtype,
        _arrow(cases),
        alone or (f"{stage.equal:,}/{stage.tensors:,}" if stage.tensors else "–"),
        _arrow([f"{s.outside:,}" for s in both]),
        _arrow([share(s.total.mismatched, s.total.numel) for s in both]),
        _arrow([error(s.worst_error) for s in both]),
        _arrow([error(s.contract_error) for s in both]),
        _arrow([signed(s.typical_bias) for s in both]),
        _arrow([distance(s.near_ulp) for s in both]),
    )


def drifts(kernel: KernelChange) -> list[str]:
    """Return a line for each figure that drifted; none for a kernel that got worse, of which it says nothing more."""
    return [] if kernel.worse else [_drift(stage, one) for stage in kernel.stages for one in stage.drifts]


def _drift(stage: StageChange, one: Drift) -> str:
    """Write `output bf16: mismatch drifted for the worse, 0.01 % → 1.2 %`."""
    write = {"mismatch": _percent, "bias": signed}.get(one.figure, error)
    direction = "worse" if one.worse else "better"
    shown = stage.shown
    return f"{shown.name} {shown.dtype}: {one.figure} drifted for the {direction}, " + _arrow(
        [write(one.before), write(one.after)]
    )


def _arrow(values: list[str]) -> str:
    return " → ".join(dict.fromkeys(values))


def _percent(value: float) -> str:
    return share(round(value * 1e12), 10**12)


# On a console

# A page of a terminal; the files of a run have all.
MOST_KERNELS = 30

STYLES: Mapping[Fate, str] = {
    Fate.WORSE: "bold red",
    Fate.DRIFTED: "yellow",
    Fate.UNPAIRED: "yellow",
    Fate.GONE: "yellow",
    Fate.NEW: "cyan",
    Fate.BETTER: "green",
    Fate.CHANGED: "cyan",
    Fate.UNCHANGED: "dim",
}


def print_changes(changes: Changes, console: Console | None = None, *, strict: bool = False) -> None:
    """Print what changed from one run to another, worst first, and a last line that sums it up."""
    console = console or make_console()
    line(console, f"Changes from {changes.names[0]} to {changes.names[1]}", "bold")
    for text in about(changes):
        paragraph(console, Text(text), label="  ")
    line(console)
    told = [kernel for kernel in changes.kernels if kernel.telling]
    for kernel in told[:MOST_KERNELS]:
        _print_kernel(kernel, changes, console)
    if rest := told[MOST_KERNELS:]:
        line(console, f"and {plural(len(rest), 'more kernel')}: {listed((k.kernel for k in rest), MOST_NAMES)}")
        line(console)
    _print_others(changes, console)
    style = "bold red" if changes.exit_code(strict=strict) else "bold green"
    paragraph(console, Text.assemble((verdict(changes), style), f"  {summary(changes)}"))


def _print_kernel(kernel: KernelChange, changes: Changes, console: Console) -> None:
    style = STYLES[Fate.WORSE if kernel.worse else kernel.change]
    word = Text(kernel.change.value, style)
    rest = f" on {devices(kernel)}  {head(kernel)}  of {kernel.op}"
    paragraph(console, Text.assemble(word, "  ", (kernel.kernel, "bold"), rest))
    for note in notes(kernel, changes.names):
        paragraph(console, Text(note, "dim"), label="  ")
    for text in drifts(kernel):
        paragraph(console, Text(text), label="  ")
    if changed := [[*map(Text, row)] for row in rows(kernel)]:
        print_table(console, HEADERS, changed, spare=("bias", "contract", "cases", "ulp", "rel. error", "mismatch"))
    if command := again(kernel, changes):
        line(console, "  a case that got worse")
        line(console, f"    {command}")
    line(console)


def _print_others(changes: Changes, console: Console) -> None:
    """Print one paragraph for the kernels of an op that are new, gone or unchanged."""
    said = others(changes)
    for change, text in said:
        paragraph(console, Text.assemble((change.value, STYLES[change]), f"  {text}"))
    if said:
        line(console)


# As JSON


def as_json(changes: Changes, *, strict: bool = False) -> str:
    """Write the changes as one JSON object; a float that JSON cannot spell is a string such as `NaN` or `-Infinity`."""
    data = {
        "runs": changes.names,
        "exit_code": changes.exit_code(strict=strict),
        "settings": {name: (before, after) for name, before, after in changes.settings},
        "across": changes.across,
        "broken": changes.broken,
        "kernels": tuple(map(_kernel, changes.kernels)),
    }
    return json.dumps(encoded(data), indent=1, allow_nan=False, ensure_ascii=False)


def _kernel(kernel: KernelChange) -> dict[str, Any]:
    return {
        "op": kernel.op,
        "kernel": kernel.kernel,
        "change": kernel.change.value,
        "worse": kernel.worse,
        "before": kernel.before,
        "after": kernel.after,
        "cases_in_both": len(kernel.pairs),
        "cases_in_one": kernel.unpaired,
        "cases_on_other_inputs": kernel.other_inputs,
        "cases_worse": tuple(after.case for _, after in kernel.worse_cases),
        "cases_better": tuple(after.case for _, after in kernel.better_cases),
        "tensors": kernel.tensors,
        "tensors_equal": kernel.equal,
        "stages": tuple(map(_stage, kernel.stages)),
        "properties": tuple(
            {"property": one.after.name, "lost": one.lost, "worse": one.worse, "where": one.after.where}
            for one in kernel.properties
        ),
    }


def _stage(stage: StageChange) -> dict[str, Any]:
    return {
        "stage": stage.shown.name,
        "dtype": stage.shown.dtype,
        "tensors": stage.tensors,
        "tensors_equal": stage.equal,
        "before": stage.before and stage.before.figures,
        "after": stage.after and stage.after.figures,
        "drifts": tuple(
            {"figure": d.figure, "worse": d.worse, "before": d.before, "after": d.after} for d in stage.drifts
        ),
    }
