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
from lastbit.reports.stage_summary import StageSummary, beside_values, extremes
from lastbit.reports.summary import distance, error, plural, share, shown_path, signed, tally
from lastbit.reports.traced import TracedStage, traced_cells
from lastbit.result import CaseResult, Verdict, idle_in, told
from lastbit.run import LEAST_JUDGED, Decided, DeviceAgreement, Power, Run

Subject = tuple[str, str]


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
_NEEDLESS_IF_ZERO = ("failed", "errored", "inconclusive", "turned down", "outside")


def table(caption: str, columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> Table:
    """Make a table, and drop columns with the same op or device, or with zeros, in every row."""

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


def verdict(value: Verdict, short: str = "") -> Cell:
    """Make the cell of a verdict; one that falls `short` is not green, and says so."""
    kind = "partly" if short and value is Verdict.PASSED else value.value.lower()
    return Cell(value.value, list(Verdict).index(value) + bool(short) / 2, f"verdict {kind}", short)


@dataclass(frozen=True)
class Standing:
    """One kernel on one device: its verdict, its counted cases, and what the run decided of each of its results.

    `judged` and `planned` count cases: see `Run.judged`.
    """

    kernel: str
    device: str
    verdict: Verdict
    cases: tuple[CaseResult, ...]
    decided: tuple[Decided, ...]
    judged: int
    planned: int

    @property
    def short(self) -> str:
        """How little of a kernel that PASSED was judged or decided, as `on 2 of 122 cases`; empty if it was enough."""
        if self.verdict is not Verdict.PASSED:
            return ""
        of = f"of {plural(self.planned, 'case')}"
        if self.judged < self.planned:
            return f"on {self.judged:,} {of}"
        passed = sum(result.verdict is Verdict.PASSED for result in self.cases)
        if passed < LEAST_JUDGED * self.planned:
            return f"on {passed:,} {of}, the others decided nothing"
        few = (d for d in self.decided if d.few)
        return ", ".join(f"{share(d.decided, d.numel)} of {d.stage} ({d.dtype}) decided" for d in few)


def standings(run: Run) -> dict[Subject, Standing]:
    """Return how every kernel of a run stands on every device, in the order of the run."""
    return {s: Standing(*s, run.verdict(*s), run.of(*s), run.decided(*s), *run.judged(*s)) for s in run.subjects()}


def _decided(found: Sequence[Decided]) -> Cell:
    """Return the share of elements of results that could not have been otherwise."""
    part, whole = sum(d.decided for d in found), sum(d.numel for d in found)
    return number(share(part, whole), part / whole if whole else math.nan)


def _seconds(cases: Iterable[CaseResult]) -> Cell:
    seconds = sum(result.seconds for result in cases)
    return number(f"{seconds:,.1f}", seconds)


_DECIDED = ("decided", "elements of its results for which the contract allows exactly one value")


def ops(subjects: Mapping[str, Sequence[Standing]]) -> Table:
    """Make a table with one row per op, each a link to the section of its number."""
    return Table(
        "The worst verdict on each op",
        (*_named("op, verdict, kernels, cases"), _DECIDED, ("seconds", "")),
        tuple(_op(op, f"#op-{position}", found) for position, (op, found) in enumerate(subjects.items(), start=1)),
    )


def _op(op: str, href: str, found: Sequence[Standing]) -> Row:
    verdicts, cases = [one.verdict for one in found], [case for one in found for case in one.cases]
    short = [f"{one.kernel} {one.short}" for one in found if one.short]
    few = f"{len(short)} of its kernels on few cases, or with few elements decided" if short[1:] else "".join(short)
    cells = (
        Cell(op, kind="name", href=href),
        verdict(Verdict.worst(*verdicts), few),
        replace(count(len(found)), detail=tally(verdicts) if len(set(verdicts)) > 1 else ""),
        count(len(cases)),
        _decided([decided for one in found for decided in one.decided]),
        _seconds(cases),
    )
    kernels, devices = dict.fromkeys(one.kernel for one in found), dict.fromkeys(one.device for one in found)
    return Row(cells, {"op": op, "kernel": " ".join(kernels), "device": " ".join(devices)})


def kernels(run: Run, subjects: Mapping[Subject, Standing]) -> Table:
    """Make a table with one row per kernel and device, worst first."""
    severity = list(Verdict)
    first = {(r.kernel, r.device): r for r in reversed(run.results)}
    worst_first = sorted(subjects.values(), key=lambda one: (-severity.index(one.verdict), not one.short))
    names = "kernel, verdict, op, device, cases, passed, failed, errored, inconclusive, turned down, outside"
    return table(
        "Kernels, worst first",
        (*_named(names), _DECIDED, ("seconds", "")),
        [_kernel(first[one.kernel, one.device], one) for one in worst_first],
    )


def _kernel(any_result: CaseResult, one: Standing) -> Row:
    found = Counter(result.verdict for result in one.cases)
    outside = sum(max(s.cumulative.outside, s.isolated.outside) for r in one.cases for s in r.stages)
    beside = beside_values(one.cases)
    extreme = extremes(one.cases)
    detail = (
        told(any_result.contract, idle_in(one.cases)),
        shown_path(any_result.source),
        beside and f"beside wrong values, {beside}",
        extreme and f"extreme: {extreme}",
    )
    cells = (
        Cell(one.kernel, kind="name", detail=" · ".join(filter(None, detail))),
        verdict(one.verdict, one.short),
        Cell(any_result.op),
        Cell(one.device),
        count(len(one.cases)),
        count(found[Verdict.PASSED]),
        count(found[Verdict.FAILED], "bad"),
        count(found[Verdict.ERRORED], "bad"),
        count(found[Verdict.INCONCLUSIVE], "doubtful"),
        count(found[Verdict.UNSUPPORTED] + found[Verdict.SKIPPED]),
        count(outside, "bad"),
        _decided(one.decided),
        _seconds(one.cases),
    )
    dtypes = dict.fromkeys(dtype for result in one.cases for dtype in result.dtypes.split("/"))
    return Row(cells, {**_about(any_result), "dtype": " ".join(dtypes), "verdict": one.verdict.value})


def _about(result: CaseResult) -> dict[str, str]:
    return {"op": result.op, "kernel": result.kernel, "device": result.device}


def stages(
    op: str,
    summaries: Mapping[Subject, Sequence[StageSummary]],
    traced: Mapping[Subject, Sequence[TracedStage]],
    meanings: Mapping[str, str],
) -> Table:
    """Make a table with one row per kernel, device, stage and format, followed by stages found in kernels."""
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
    """Return the anchor of a stage's row, for links within the page."""
    return "stage-" + hashlib.sha256(f"{kernel}\x00{device}\x00{stage}\x00{dtype}".encode()).hexdigest()[:12]


def _traced(op: str, subject: Subject, stage: TracedStage) -> Row:
    """Make the row of a stage that was seen in a kernel; it decides nothing, so it has no verdict."""
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
    """Make a table with one row per kernel, device, dtypes and alternative; those never told apart come first."""
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
    """Make a table with one row per op, kernel, device, stage and format: the share that the contract decides."""
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
    """Make a table with one row per tensor and dtype, and per parameter, of the choices of an op's cases."""
    return Table(
        f"Coverage of {found.op} on {found.device}",
        tuple((name, MEANING if name in ("regimes", "layouts", "values") else "") for name in COVERAGE_HEADERS),
        tuple(Row(tuple(map(Cell, cells)), {"op": found.op, "device": found.device}) for cells in found.rows),
    )


def agreement(entries: Sequence[DeviceAgreement], ops: Mapping[str, str]) -> Table:
    """Make a table with one row per kernel, stage and pair of devices; the least equal first."""
    ranked = sorted(entries, key=lambda a: a.equal / a.tensors if a.tensors else 1)
    return table(
        "Bits on two devices, for the same input bits",
        _named("kernel, stage, devices, tensors, equal, share"),
        [_agreement(a, ops.get(a.kernel, "")) for a in ranked],
    )


def _agreement(a: DeviceAgreement, op: str) -> Row:
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
    """Make a table with one row per stage and format of a kernel that changed from one run to another."""
    rows = [changes_text.cells(stage) for stage in kernel.stages if not stage.unchanged]
    kinds = ["name", "", *["number"] * (len(changes_text.HEADERS) - 2)]
    return Table(
        f"Stages of {kernel.kernel} that changed",
        tuple((name, "") for name in changes_text.HEADERS),
        tuple(Row(tuple(Cell(text, kind=kind) for text, kind in zip(row, kinds, strict=True))) for row in rows),
    )


def asked(found: properties.PropertyTable) -> Table:
    """Make a table with one row per kernel of an op: a word for each property that was asked of its bits."""
    return Table(
        f"Properties of the bits of {found.op}",
        tuple((name, "") for name in found.headers),
        tuple(_asked(one, found.properties) for one in found.kernels),
    )


def _asked(found: properties.FoundProperties, names: Sequence[str]) -> Row:
    words = [properties.cell(found.properties.get(name)) for name in names]
    looks = {"BROKEN": "bad", "ERRORED": "bad", "broken": "doubtful", "errored": "doubtful"}
    cells = [Cell(text, kind=looks.get(text, ""), detail=detail) for text, detail in words]
    about = {"op": found.op, "kernel": found.kernel, "device": found.device}
    return Row((Cell(found.kernel, kind="name"), Cell(found.device), *cells), about)
