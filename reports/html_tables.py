"""The tables of the HTML report: cells that a reader sees, what they are sorted by, and what a filter looks at."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lastbit.reports import changes_text
from lastbit.reports.changes import KernelChange
from lastbit.reports.coverage import COVERAGE_HEADERS, MEANING, CoverageTable
from lastbit.reports.stage_summary import StageSummary, beside_values, extremes
from lastbit.reports.summary import distance, error, share, shown_path, signed
from lastbit.reports.traced import TracedStage, traced_cells
from lastbit.result import CaseResult, Verdict
from lastbit.run import Agreement, Power, Run

Subject = tuple[str, str]


@dataclass(frozen=True)
class Cell:
    """Text, with `detail` below it; sorted by `order`, or else by the text; `kind` says how it looks."""

    text: str
    order: float | None = None
    kind: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Row:
    """Cells, the first of which names the row, and what a filter looks at.

    That is `op`, `kernel`, `device`, `dtype` and `verdict`. A device and a dtype may be several, separated by blanks. A
    row passes a filter of which it does not say. A link to `anchor` leads to it.
    """

    cells: tuple[Cell, ...]
    about: Mapping[str, str] = field(default_factory=dict)
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """Columns as name and meaning; the meaning is a tooltip, and empty where the name says it."""

    caption: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]


_NEEDLESS_IF_ALIKE = ("op", "device")
_NEEDLESS_IF_ZERO = ("errored", "inconclusive", "turned down")


def table(caption: str, columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> Table:
    """A table without the columns that would say the same op or device, or that nothing happened, in every row."""

    def needed(position: int) -> bool:
        found = {row.cells[position].text for row in rows}
        name, _ = columns[position]
        return not ((name in _NEEDLESS_IF_ALIKE and len(found) == 1) or (name in _NEEDLESS_IF_ZERO and found == {"0"}))

    kept = [position for position in range(len(columns)) if needed(position)]
    lean = tuple(replace(row, cells=tuple(row.cells[position] for position in kept)) for row in rows)
    return Table(caption, tuple(columns[position] for position in kept), lean)


def _named(names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name.strip(), "") for name in names.split(","))


def count(number: int, kind: str = "") -> Cell:
    return Cell(f"{number:,}", number, f"number {kind if number else 'nothing'}".strip())


def number(text: str, value: float) -> Cell:
    return Cell(text, None if math.isnan(value) else value, "number")


def verdict(value: Verdict) -> Cell:
    return Cell(value.value, list(Verdict).index(value), f"verdict {value.value.lower()}")


def kernels(run: Run, verdicts: Mapping[Subject, Verdict], cases: Mapping[Subject, Sequence[CaseResult]]) -> Table:
    """One row per kernel and device, worst first."""
    severity = list(Verdict)
    worst_first = sorted(verdicts, key=lambda subject: -severity.index(verdicts[subject]))
    first = {(r.kernel, r.device): r for r in reversed(run.results)}
    return table(
        "Kernels, worst first",
        _named(
            "kernel, verdict, op, device, cases, passed, failed, errored, inconclusive, turned down, outside, seconds"
        ),
        [_kernel(first[key], verdicts[key], cases[key]) for key in worst_first],
    )


def _kernel(any_result: CaseResult, outcome: Verdict, cases: Sequence[CaseResult]) -> Row:
    found = Counter(result.verdict for result in cases)
    outside = sum(max(s.cumulative.outside, s.isolated.outside) for r in cases for s in r.stages)
    seconds = sum(result.seconds for result in cases)
    beside = beside_values(cases)
    extreme = extremes(cases)
    detail = (
        any_result.contract,
        shown_path(any_result.source),
        beside and f"beside wrong values, {beside}",
        extreme and f"extreme: {extreme}",
    )
    cells = (
        Cell(any_result.kernel, kind="name", detail=" · ".join(filter(None, detail))),
        verdict(outcome),
        Cell(any_result.op),
        Cell(any_result.device),
        count(len(cases)),
        count(found[Verdict.PASSED]),
        count(found[Verdict.FAILED], "bad"),
        count(found[Verdict.ERRORED], "bad"),
        count(found[Verdict.INCONCLUSIVE], "doubtful"),
        count(found[Verdict.UNSUPPORTED] + found[Verdict.SKIPPED]),
        count(outside, "bad"),
        number(f"{seconds:,.1f}", seconds),
    )
    dtypes = dict.fromkeys(dtype for result in cases for dtype in result.dtypes.split("/"))
    return Row(cells, {**_about(any_result), "dtype": " ".join(dtypes), "verdict": outcome.value})


def _about(result: CaseResult) -> dict[str, str]:
    return {"op": result.op, "kernel": result.kernel, "device": result.device}


def stages(
    op: str,
    summaries: Mapping[Subject, Sequence[StageSummary]],
    traced: Mapping[Subject, Sequence[TracedStage]],
    meanings: Mapping[str, str],
) -> Table:
    """One row per kernel, device, stage and format, in the order of `summaries`, then those found in the kernel."""
    names = "kernel, device, stage, dtype, values, cases, extreme, rel. error, contract, ulp, mismatch, outside, bias"
    rows = []
    for key, found in summaries.items():
        rows += [_stage(op, key, stage) for stage in found]
        rows += [_traced(op, key, stage) for stage in traced[key]]
    return table(f"Stages of {op}", tuple((name, meanings.get(name, "")) for name, _ in _named(names)), rows)


def _stage(op: str, subject: Subject, stage: StageSummary) -> Row:
    total = stage.total
    mismatch = total.mismatched / total.numel if total.numel else math.nan
    cells = (
        Cell(subject[0], kind="name"),
        Cell(subject[1]),
        Cell(stage.shown_name, kind="name"),
        Cell(stage.dtype),
        verdict(stage.verdict),
        count(stage.cases),
        count(len(stage.extreme)),
        number(error(stage.worst_error), stage.worst_error),
        number(error(stage.contract_error), stage.contract_error),
        number(distance(stage.near_ulp), stage.near_ulp),
        number(share(total.mismatched, total.numel), mismatch),
        count(stage.outside, "bad"),
        number(signed(stage.typical_bias), stage.typical_bias),
    )
    about = _of_stage(op, subject, stage.dtype) | {"verdict": stage.verdict.value}
    return Row(cells, about, stage_anchor(*subject, stage.name, stage.dtype))


def stage_anchor(kernel: str, device: str, stage: str, dtype: str) -> str:
    """The name of the row of a stage, for links within the page."""
    return "stage-" + hashlib.sha256(f"{kernel}\x00{device}\x00{stage}\x00{dtype}".encode()).hexdigest()[:12]


def _traced(op: str, subject: Subject, stage: TracedStage) -> Row:
    """What decides nothing has no verdict."""
    name, dtype, cases, extreme, found, contract, *rest, values = traced_cells(stage)
    cells = (
        Cell(subject[0], kind="name"),
        Cell(subject[1]),
        Cell(name, kind="name", detail=stage.code),
        Cell(dtype),
        Cell(values),
        Cell(cases, stage.cases, "number"),
        number(extreme, math.nan),
        number(found, stage.error),
        number(contract, stage.contract_error),
        *(number(text, math.nan) for text in rest),
    )
    return Row(cells, _of_stage(op, subject, stage.dtype))


def _of_stage(op: str, subject: Subject, dtype: str) -> dict[str, str]:
    return {"op": op, "kernel": subject[0], "device": subject[1], "dtype": dtype}


def power(entries: Sequence[Power], ops: Mapping[str, str]) -> Table:
    """One row per kernel, device, dtypes and alternative; what was never told apart first."""
    ranked = sorted(entries, key=lambda p: (not p.missing, p.separable is False))
    return table(
        "Which other contracts the run could tell from a kernel's own",
        (
            *_named("kernel, device, dtypes, other contract, cases"),
            ("ruled out", "elements that the other contract forbids and the kernel gave"),
            ("outcome", "coincide: no input of these shapes and dtypes can tell the two apart"),
        ),
        [_power(p, ops.get(p.kernel, "")) for p in ranked],
    )


def _power(p: Power, op: str) -> Row:
    outcome, kind = ("never told apart", "doubtful") if p.missing else ("told apart", "")
    if not p.separable:
        outcome, kind = "coincide", "nothing"
    cells = (
        Cell(p.kernel, kind="name"),
        Cell(p.device),
        Cell(p.dtypes),
        Cell(p.alternative, kind="name"),
        count(p.cases),
        count(p.ruled_out),
        Cell(outcome, kind=kind),
    )
    return Row(cells, {"op": op, "kernel": p.kernel, "device": p.device, "dtype": p.dtypes.replace("/", " ")})


def sensitivity(summaries: Iterable[tuple[str, Subject, StageSummary]]) -> Table:
    """One row per op, kernel, device, stage and format: how much of it the contract decides, least first."""
    ranked = sorted((s for s in summaries if s[2].total.numel), key=lambda s: s[2].total.decided / s[2].total.numel)
    return table(
        "How much of each stage the contract decides",
        (
            *_named("kernel, op, device, stage, dtype, elements"),
            ("decided", "elements for which the contract allows exactly one value"),
            ("used", "largest share of the allowed deviation that was used, where more than one value is allowed"),
        ),
        [_sensitivity(*entry) for entry in ranked],
    )


def _sensitivity(op: str, subject: Subject, stage: StageSummary) -> Row:
    total = stage.total
    used = f"{total.budget_ratio:.2g}" if total.decided < total.numel else "–"
    cells = (
        Cell(subject[0], kind="name"),
        Cell(op),
        Cell(subject[1]),
        Cell(stage.name, kind="name"),
        Cell(stage.dtype),
        count(total.numel),
        number(share(total.decided, total.numel), total.decided / total.numel),
        number(used, total.budget_ratio),
    )
    return Row(cells, _of_stage(op, subject, stage.dtype))


def coverage(found: CoverageTable) -> Table:
    """One row per tensor and dtype, and per parameter, of what cases of an op choose from."""
    return Table(
        f"Coverage of {found.op} on {found.device}",
        tuple((name, MEANING if name in ("regimes", "layouts", "values") else "") for name in COVERAGE_HEADERS),
        tuple(Row(tuple(map(Cell, cells)), {"op": found.op, "device": found.device}) for cells in found.rows),
    )


def agreement(entries: Sequence[Agreement], ops: Mapping[str, str]) -> Table:
    """One row per kernel, stage and pair of devices; the least equal first."""
    ranked = sorted(entries, key=lambda a: a.equal / a.tensors if a.tensors else 1)
    return table(
        "Bits on two devices, for the same input bits",
        _named("kernel, stage, devices, tensors, equal, share"),
        [_agreement(a, ops.get(a.kernel, "")) for a in ranked],
    )


def _agreement(a: Agreement, op: str) -> Row:
    cells = (
        Cell(a.kernel, kind="name"),
        Cell(a.stage),
        Cell(" and ".join(a.devices)),
        count(a.tensors),
        count(a.equal),
        number(share(a.equal, a.tensors), a.equal / a.tensors if a.tensors else math.nan),
    )
    return Row(cells, {"op": op, "kernel": a.kernel, "device": " ".join(a.devices)})


def changes(kernel: KernelChange) -> Table:
    """One row per stage and format of a kernel that changed from one run to another."""
    rows = [changes_text.cells(stage) for stage in kernel.stages if not stage.unchanged]
    kinds = ["name", "", *["number"] * (len(changes_text.HEADERS) - 2)]
    return Table(
        f"Stages of {kernel.kernel} that changed",
        tuple((name, "") for name in changes_text.HEADERS),
        tuple(Row(tuple(Cell(text, kind=kind) for text, kind in zip(row, kinds, strict=True))) for row in rows),
    )
