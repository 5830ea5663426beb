"""Sentences and cells about two runs side by side, whatever they are shown on."""

from __future__ import annotations

from collections import Counter

from lastbit.reports import property_changes
from lastbit.reports.changes import Changes, Fate, KernelChange
from lastbit.reports.stage_changes import Drift, StageChange
from lastbit.reports.stage_summary import StageSummary
from lastbit.reports.summary import (
    distance,
    elements,
    error,
    listed,
    plural,
    share,
    signed,
    tally,
)
from lastbit.result import CaseResult, Verdict

HEADERS = ("stage", "dtype", "cases", "same bits", "outside", "mismatch", "rel. error", "contract", "bias", "ulp")
"""Columns of `cells`."""

MOST_NAMES = 4


def summary(changes: Changes) -> str:
    """Write `2 kernels worse, 12 unchanged · bits unchanged in 812 of 812 tensors · 784 cases in both`, and so on."""
    counts = Counter("new and failing" if _new_and_bad(k) else k.change.value.lower() for k in changes.kernels)
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
    together: dict[tuple[Fate, str], list[KernelChange]] = {}
    for kernel in changes.kernels:
        if not kernel.telling:
            together.setdefault((kernel.change, kernel.op), []).append(kernel)
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
    lines += [property_changes.sentence(one) for one in kernel.properties]
    if before.verdict != after.verdict and not kernel.worse_cases and not kernel.better_cases:
        lines.append(
            "every case that both runs have kept its verdict: what changed comes from cases that only one of them has"
        )
    if kernel.change is not Fate.UNCHANGED and kernel.tensors == kernel.equal > 0 and not kernel.properties:
        lines.append("its bits are the same: what changed is what judges them, or which cases were run")
    return lines


def smallest_worse(kernel: KernelChange) -> CaseResult | None:
    """Return the smallest case that got worse, as the second run has it; a failing case comes before others."""
    worse = [after for _, after in kernel.worse_cases]
    failed = [result for result in worse if result.verdict is Verdict.FAILED]
    return min(failed or worse, key=lambda result: elements(result.case), default=None)


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
        _arrow([_mismatch(s) for s in both]),
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


def _new_and_bad(kernel: KernelChange) -> bool:
    return kernel.change is Fate.NEW and kernel.worse


def _arrow(values: list[str]) -> str:
    return " → ".join(dict.fromkeys(values))


def _mismatch(stage: StageSummary) -> str:
    return share(stage.total.mismatched, stage.total.numel)


def _percent(value: float) -> str:
    return share(round(value * 1e12), 10**12)
