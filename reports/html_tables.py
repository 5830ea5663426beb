"""The tables of the HTML report: cells that a reader sees, what they are sorted by, and what a filter looks at."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lastbit.reports import changes_text, properties
from lastbit.reports.changes import KernelChange
from lastbit.reports.coverage import COVERAGE_HEADERS, MEANING, CoverageTable
from lastbit.reports.stage_summary import (
    STAGE_COLUMNS,
    StageFigure,
    StageSummary,
    TracedStage,
    stage_cells,
    traced_cells,
)
from lastbit.reports.standing import Standing
from lastbit.reports.summary import share, tally
from lastbit.reports.wording import LEGEND
from lastbit.result import CaseResult, Verdict
from lastbit.run import Decided, DeviceAgreement, Power


@dataclass(frozen=True)
class Cell:
    """Text, with `detail` below it; sorted by `order`, or else by the text; `kind` says how it looks.

    The text is a link to `href` if that is not empty.
    """

    text: str
    order: float | None = None
    kind: str = ""
    detail: str = ""
    href: str = ""


@dataclass(frozen=True)
class Row:
    """Cells by the names of their columns, the first of which names the row, and what a filter looks at.

    That is `op`, `kernel`, `device`, `dtype` and `verdict`. A device and a dtype may be several, separated by blanks. A
    row passes a filter of which it does not say. A link to `anchor` leads to it.
    """

    cells: Mapping[str, Cell]
    about: Mapping[str, str] = field(default_factory=dict)
    anchor: str = ""


@dataclass(frozen=True)
class Table:
    """Rows with the same columns; `meanings` are tooltips of those whose names do not say it.

    Columns that say the same of every row are left out, unless the table is to be `whole`. One that may have no row
    says which columns it has.
    """

    caption: str
    rows: Sequence[Row]
    meanings: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    names: str = ""

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Names and meanings of the columns, without those of the same op or device, or of zeros."""
        names = self.rows[0].cells if self.rows else filter(None, self.names.split(", "))
        found = {name: {row.cells[name].text for row in self.rows} for name in names}
        needless = {name for name in _NEEDLESS_IF_ALIKE if len(found.get(name, ())) == 1}
        needless |= {name for name in _NEEDLESS_IF_ZERO if found.get(name) == {"0"}}
        return [(name, self.meanings.get(name, "")) for name in found if self.whole or name not in needless]


_NEEDLESS_IF_ALIKE = ("op", "device")
_NEEDLESS_IF_ZERO = ("failed", "errored", "inconclusive", "turned down", "outside")


def count(number: int, kind: str = "") -> Cell:
    return Cell(f"{number:,}", number, f"number {kind if number else 'nothing'}".strip())


def number(text: str, value: float) -> Cell:
    return Cell(text, None if math.isnan(value) else value, "number")


def verdict(value: Verdict, short: str = "") -> Cell:
    """Make the cell of a verdict; one that falls `short` is not green, and says so."""
    kind = "partly" if short and value is Verdict.PASSED else value.value.lower()
    return Cell(value.value, list(Verdict).index(value) + bool(short) / 2, f"verdict {kind}", short)


def _decided(found: Sequence[Decided]) -> Cell:
    """Return the share of elements of results that could not have been otherwise."""
    return _share(sum(d.decided for d in found), sum(d.numel for d in found))


def _share(part: int, whole: int) -> Cell:
    return number(share(part, whole), part / whole if whole else math.nan)


def _seconds(cases: Iterable[CaseResult]) -> Cell:
    seconds = sum(result.seconds for result in cases)
    return number(f"{seconds:,.1f}", seconds)


_DECIDED = {"decided": "elements of its results for which the contract allows exactly one value"}


def ops(subjects: Mapping[str, Sequence[Standing]]) -> Table:
    """Make a table with one row per op, each a link to the section of its number."""
    rows = [_op(op, f"#op-{position}", found) for position, (op, found) in enumerate(subjects.items(), start=1)]
    names = "op, verdict, kernels, cases, decided, seconds"
    return Table("The worst verdict on each op", rows, _DECIDED, True, names)


def _op(op: str, href: str, found: Sequence[Standing]) -> Row:
    verdicts, cases = [one.verdict for one in found], [case for one in found for case in one.cases]
    short = [f"{one.kernel} {one.short}" for one in found if one.short]
    few = f"{len(short)} of its kernels on few cases, or with few elements decided" if short[1:] else "".join(short)
    cells = {
        "op": Cell(op, kind="name", href=href),
        "verdict": verdict(Verdict.worst(*verdicts), few),
        "kernels": replace(count(len(found)), detail=tally(verdicts) if len(set(verdicts)) > 1 else ""),
        "cases": count(len(cases)),
        "decided": _decided([decided for one in found for decided in one.decided]),
        "seconds": _seconds(cases),
    }
    kernels, devices = dict.fromkeys(one.kernel for one in found), dict.fromkeys(one.device for one in found)
    return Row(cells, {"op": op, "kernel": " ".join(kernels), "device": " ".join(devices)})


def kernels(found: Iterable[Standing]) -> Table:
    """Make a table with one row per kernel and device, worst first."""
    severity = list(Verdict)
    worst_first = sorted(found, key=lambda one: (-severity.index(one.verdict), not one.short))
    names = "kernel, verdict, op, device, cases, passed, failed, errored, inconclusive, turned down, outside"
    return Table("Kernels, worst first", list(map(_kernel, worst_first)), _DECIDED, names=f"{names}, decided, seconds")


def _kernel(one: Standing) -> Row:
    found = Counter(result.verdict for result in one.cases)
    outside = sum(max(s.cumulative.outside, s.isolated.outside) for r in one.cases for s in r.stages)
    beside, extreme = one.beside and f"beside wrong values, {one.beside}", one.extremes and f"extreme: {one.extremes}"
    detail = " · ".join(filter(None, (one.contract, one.source, beside, extreme)))
    cells = {
        "kernel": Cell(one.kernel, kind="name", detail=detail),
        "verdict": verdict(one.verdict, one.short),
        "op": Cell(one.op),
        "device": Cell(one.device),
        "cases": count(len(one.cases)),
        "passed": count(found[Verdict.PASSED]),
        "failed": count(found[Verdict.FAILED], "bad"),
        "errored": count(found[Verdict.ERRORED], "bad"),
        "inconclusive": count(found[Verdict.INCONCLUSIVE], "doubtful"),
        "turned down": count(found[Verdict.UNSUPPORTED] + found[Verdict.SKIPPED]),
        "outside": count(outside, "bad"),
        "decided": _decided(one.decided),
        "seconds": _seconds(one.cases),
    }
    dtypes = dict.fromkeys(dtype for result in one.cases for dtype in result.dtypes.split("/"))
    return Row(cells, {**_about(one), "dtype": " ".join(dtypes), "verdict": one.verdict.value})


def _about(one: Standing) -> dict[str, str]:
    return {"op": one.op, "kernel": one.kernel, "device": one.device}


def stages(op: str, found: Iterable[Standing]) -> Table:
    """Make a table with one row per kernel, device, stage and format, followed by stages found in kernels."""
    rows: list[Row] = []
    for one in found:
        rows += [_stage(one, stage) for stage in one.stages]
        rows += [_traced(one, stage) for stage in one.traced]
    names = dict.fromkeys(("kernel", "device", "stage", "dtype", "values", *STAGE_COLUMNS))
    return Table(f"Stages of {op}", rows, dict(LEGEND), names=", ".join(names))


def _stage(one: Standing, stage: StageSummary) -> Row:
    row = _stage_row(one, stage_cells(stage), stage.dtype)
    anchor = stage_anchor(*one.subject, stage.name, stage.dtype)
    cells = {**row.cells, "values": verdict(stage.verdict)}
    return replace(row, cells=cells, about={**row.about, "verdict": stage.verdict.value}, anchor=anchor)


def stage_anchor(kernel: str, device: str, stage: str, dtype: str) -> str:
    """Return the anchor of a stage's row, for links within the page."""
    return "stage-" + hashlib.sha256(f"{kernel}\x00{device}\x00{stage}\x00{dtype}".encode()).hexdigest()[:12]


def _traced(one: Standing, stage: TracedStage) -> Row:
    """Make the row of a stage that was seen in a kernel; it decides nothing, so it has no verdict."""
    return _stage_row(one, traced_cells(stage), stage.dtype, stage.code)


def _stage_row(one: Standing, figures: Mapping[str, StageFigure], dtype: str, code: str = "") -> Row:
    """Make a row of the table of stages."""
    cells = {
        "kernel": Cell(one.kernel, kind="name"),
        "device": Cell(one.device),
        "stage": Cell(figures["stage"].text, kind="name", detail=code),
        "dtype": Cell(dtype),
        "values": Cell(figures["values"].text),
    }
    for name, (text, value, wrong) in figures.items():
        kind = "number nothing" if text == "0" else "number bad" if wrong else "number"
        cells.setdefault(name, replace(number(text, value), kind=kind))
    return Row(cells, {**_about(one), "dtype": dtype})


def power(entries: Sequence[Power], ops: Mapping[str, str]) -> Table:
    """Make a table with one row per kernel, device, dtypes and alternative; those never told apart come first."""
    ranked = sorted(entries, key=lambda p: (not p.missing, p.separable is False))
    meanings = {
        "ruled out": "elements that the other contract forbids and the kernel gave",
        "outcome": "coincide: no input of these shapes and dtypes can tell the two apart",
    }
    rows = [_power(p, ops.get(p.kernel, "")) for p in ranked]
    return Table("Which other contracts the run could tell from a kernel's own", rows, meanings)


def _power(p: Power, op: str) -> Row:
    outcome, kind = ("never told apart", "doubtful") if p.missing else ("told apart", "")
    cells = {
        "kernel": Cell(p.kernel, kind="name"),
        "device": Cell(p.device),
        "dtypes": Cell(p.dtypes),
        "other contract": Cell(p.alternative, kind="name"),
        "cases": count(p.cases),
        "ruled out": count(p.ruled_out),
        "outcome": Cell(outcome, kind=kind) if p.separable else Cell("coincide", kind="nothing"),
    }
    return Row(cells, {"op": op, "kernel": p.kernel, "device": p.device, "dtype": p.dtypes.replace("/", " ")})


def sensitivity(found: Iterable[Standing]) -> Table:
    """Make a table with one row per op, kernel, device, stage and format: the share that the contract decides."""
    pairs = ((one, stage) for one in found for stage in one.stages if stage.total.numel)
    ranked = sorted(pairs, key=lambda pair: pair[1].total.decided / pair[1].total.numel)
    meanings = {
        "decided": "elements for which the contract allows exactly one value",
        "used": "largest share of the allowed deviation that was used, where more than one value is allowed",
    }
    return Table("How much of each stage the contract decides", [_sensitivity(*pair) for pair in ranked], meanings)


def _sensitivity(one: Standing, stage: StageSummary) -> Row:
    total = stage.total
    used = f"{total.budget_ratio:.2g}" if total.decided < total.numel else "–"
    cells = {
        "kernel": Cell(one.kernel, kind="name"),
        "op": Cell(one.op),
        "device": Cell(one.device),
        "stage": Cell(stage.name, kind="name"),
        "dtype": Cell(stage.dtype),
        "elements": count(total.numel),
        "decided": _share(total.decided, total.numel),
        "used": number(used, total.budget_ratio),
    }
    return Row(cells, {**_about(one), "dtype": stage.dtype})


def coverage(found: CoverageTable) -> Table:
    """Make a table with one row per tensor and dtype, and per parameter, of the choices of an op's cases."""
    about, meanings = {"op": found.op, "device": found.device}, dict.fromkeys(("regimes", "layouts", "values"), MEANING)
    rows = [Row(dict(zip(COVERAGE_HEADERS, map(Cell, cells), strict=True)), about) for cells in found.rows]
    return Table(f"Coverage of {found.op} on {found.device}", rows, meanings)


def agreement(entries: Sequence[DeviceAgreement], ops: Mapping[str, str]) -> Table:
    """Make a table with one row per kernel, stage and pair of devices; the least equal first."""
    ranked = sorted(entries, key=lambda a: a.equal / a.tensors if a.tensors else 1)
    rows = [_agreement(a, ops.get(a.kernel, "")) for a in ranked]
    return Table("Bits on two devices, for the same input bits", rows)


def _agreement(a: DeviceAgreement, op: str) -> Row:
    cells = {
        "kernel": Cell(a.kernel, kind="name"),
        "stage": Cell(a.stage),
        "devices": Cell(" and ".join(a.devices)),
        "tensors": count(a.tensors),
        "equal": count(a.equal),
        "share": _share(a.equal, a.tensors),
    }
    return Row(cells, {"op": op, "kernel": a.kernel, "device": " ".join(a.devices)})


def changes(kernel: KernelChange) -> Table:
    """Make a table with one row per stage and format of a kernel that changed from one run to another."""
    kinds = dict.fromkeys(changes_text.HEADERS, "number") | {"stage": "name", "dtype": ""}
    named = (zip(kinds.items(), row, strict=True) for row in changes_text.rows(kernel))
    rows = [Row({name: Cell(text, kind=kind) for (name, kind), text in row}) for row in named]
    return Table(f"Stages of {kernel.kernel} that changed", rows, whole=True)


def asked(found: properties.PropertyTable) -> Table:
    """Make a table with one row per kernel of an op: a word for each property that was asked of its bits."""
    rows = [_asked(one, found.properties) for one in found.kernels]
    return Table(f"Properties of the bits of {found.op}", rows, whole=True)


def _asked(found: properties.FoundProperties, names: Sequence[str]) -> Row:
    looks = {"BROKEN": "bad", "ERRORED": "bad", "broken": "doubtful", "errored": "doubtful"}
    words = {name: properties.cell(found.properties.get(name)) for name in names}
    cells = {name: Cell(text, kind=looks.get(text, ""), detail=detail) for name, (text, detail) in words.items()}
    about = {"op": found.op, "kernel": found.kernel, "device": found.device}
    return Row({"kernel": Cell(found.kernel, kind="name"), "device": Cell(found.device), **cells}, about)
