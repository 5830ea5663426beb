"""A run as one HTML page that needs nothing else: no network, no other file.

The page is a Jinja template with our own style and script, and Vega-Lite charts, whose library is part of the page. A
content security policy forbids every request, and every script but the page's own, known by their hashes. Tables hold
what a reader sees, what it is sorted by, and what a filter looks at; in a finding, certain facts and places come first,
its numbers and other cases behind them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lastbit.errors import LastbitError
from lastbit.reports import changes, charts, coverage, invariance, wording
from lastbit.reports.coverage import COVERAGE_HEADERS, CoverageTable, coverage_tables
from lastbit.reports.explanation import (
    MOST_STEPS,
    excerpt,
    explanation_fields,
    explanation_of,
    follows,
    shown_steps,
    stage_of,
    value_of,
)
from lastbit.reports.invariance import PropertyTable, found_in, property_tables
from lastbit.reports.stage_summary import (
    STAGE_COLUMNS,
    StageSummary,
    Standing,
    Subject,
    TracedStage,
    by_op,
    kept_of,
    stage_cells,
    stage_order,
    standings,
    traced_cells,
)
from lastbit.reports.summary import (
    ORDER,
    KernelFailure,
    elements,
    noticed,
    plural,
    problems,
    repro_line,
    share,
    shown_path,
    tally,
)
from lastbit.reports.why import Explanation
from lastbit.result import BAD, OF_VALUES, CaseResult, Verdict
from lastbit.run import Decided, DeviceAgreement, Power, Run

TEMPLATES = Path(__file__).parent / "templates"

LIBRARIES = {"altair": "altair>=5.5", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
"""Module → what pip installs it by: all that the extra `report` brings."""


def page(run: Run, *, base: Run | None = None) -> str:
    """Write the run as the text of an HTML page, compared with `base`.

    Raises:
        LastbitError: a library that the page is made with is not installed.
    """
    found, missing = list[Any](), dict[str, ImportError]()
    for name in LIBRARIES:
        try:
            found.append(import_module(name))
        except ImportError as error:
            missing[name] = error
    if missing:  # by their own names: lastbit is on no index, by which pip could find its extra
        why = "; ".join(f"{n}: {error}" for n, error in missing.items() if not isinstance(error, ModuleNotFoundError))
        raise LastbitError(
            f"the HTML report needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
            f"{f' ({why})' if why else ''}. Install what it needs, and run this command again: "
            f"python3 -m pip install {' '.join(map(shlex.quote, LIBRARIES.values()))}"
        )
    _, jinja2, vl_convert = found
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    scripts = (vl_convert.javascript_bundle(), (TEMPLATES / "report.js").read_text(encoding="utf-8"))
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    text: str = environment.get_template("report.html").render(
        **_context(run),
        changes=_changes(base, run) if base else None,
        scripts=scripts,
        hashes=[f"sha256-{digest}" for digest in hashes],
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
    )
    return text


def _context(run: Run) -> dict[str, Any]:
    subjects = standings(run)
    by_ops = by_op(subjects)
    in_order = [one for found in by_ops.values() for one in found]
    every = [stage for one in in_order for stage in one.stages]
    anchors = {stage_anchor(*one.subject, stage.name, stage.dtype) for one in in_order for stage in one.stages}
    op_of = {one.kernel: one.op for one in in_order}
    short = [one for one in subjects.values() if one.short]
    options, environment = run.environment.get("options", ""), run.environment
    verdicts = Counter(one.verdict for one in subjects.values())
    headline = "no kernel"
    if subjects:  # `2 of 14 kernels failed, 1 errored`, where a kernel on two devices counts twice
        worst, *others = (verdict for verdict in reversed(Verdict) if verdicts[verdict])
        of = plural(len(subjects), "kernel")
        first = f"{verdicts[worst]:,} of {of}" if others else of
        rest = (f"{verdicts[v]:,} {v.value.lower()}" for v in others if v is not Verdict.PASSED)
        headline = ", ".join([f"{first} {worst.value.lower()}", *rest])
    profile = environment.get("profile", "")
    # What a filter offers; one with a single setting is left out.
    shown = set(verdicts) | {stage.verdict for stage in every}
    dtypes = {d for r in run.results for d in r.dtypes.split("/")} | {stage.dtype for stage in every}
    choices = {
        "op": list(dict.fromkeys(result.op for result in run.results)),
        "kernel": list(dict.fromkeys(one.kernel for one in subjects.values())),
        "device": list(dict.fromkeys(one.device for one in subjects.values())),
        "dtype": sorted(filter(None, dtypes)),
        "verdict": [verdict.value for verdict in reversed(Verdict) if verdict in shown],
    }
    chosen_by = [  # the attributes by which a filter selects the rows of a chart
        {**_about(one), "verdict": one.verdict, "contract": one.first.contract} for one in subjects.values()
    ]
    return {
        "overall": run.overall,
        "headline": headline,
        "short": [f"{one.kernel} on {one.device}: PASSED {one.short}" for one in short],
        "all_short": len(short) == len(subjects),
        "broken": run.broken,
        "unverified": wording.unverified(run),
        "about": [
            f"cases: {tally(result.verdict for result in run.results if result.counted)}",
            f"{sum(result.seconds for result in run.results):,.1f} s in cases",
            *filter(None, [f"kernels{kept_of(run)}" if kept_of(run) else ""]),
            *filter(None, [environment.get("devices", ""), profile and f"profile {profile}"]),
        ],
        "facts": _facts(run),
        "table_of_ops": _ops_table(by_ops),
        "kernels": _kernels_table(subjects.values()),
        "findings": [finding(problem, run, anchors) for problem in problems(run)],
        "order": ORDER,
        "notices": [{"text": entry.sentence, "repro": entry.repro(options)} for entry in noticed(run)],
        "legend": wording.legend(run),
        "ops": [_op(op, found, list(subjects)) for op, found in by_ops.items()],
        "titles": charts.TITLES,
        "data": _json({"subjects": chosen_by, "columns": charts.COLUMNS}),
        "choices": {name: values for name, values in choices.items() if len(values) > 1},
        "open": [one.kernel for one in subjects.values() if one.verdict is Verdict.INCONCLUSIVE],
        "missing": wording.never_told_apart(run),
        "advice": wording.ADVICE,
        "unasked": [" on ".join(subject) for subject, one in subjects.items() if one.verdict in BAD],
        "coinciding": wording.coinciding(run),
        "undecided": wording.undecided(run),
        "power": _power_table(run.power, op_of),
        "coverage": [(_coverage_table(found), found.gaps) for found in coverage_tables(run)],
        "unreached": coverage.every_line(run) if run.unreached else [],
        "unreached_heading": coverage.HEADING,
        "properties": [_properties_table(found) for found in property_tables(found_in(run))],
        "words": invariance.MEANING,
        "sensitivity": _sensitivity_table(in_order),
        "agreement": _agreement_table(run.agreement, op_of),
        "not_run": wording.not_run(run),
        "turned_down": wording.turned_down(run),
        "environment": environment,
    }


def _facts(run: Run) -> list[tuple[str, str]]:
    """List the time spent and the premises of verdicts, as label and text; unknown facts are left out."""
    environment = run.environment
    compared = sum(s.cumulative.numel for r in run.results if r.counted for s in r.stages)
    said = [
        ("Compared", plural(compared, "element")),
        ("Where time went", wording.time_spent(run)),
        ("Error bounds", environment.get("premises", "")),
        ("Kernel processes were kept from", environment.get("isolated", "")),
        ("Records", shown_path(environment.get("records", ""))),
    ]
    return [(label, text) for label, text in said if text]


def _changes(base: Run, run: Run) -> dict[str, Any]:
    found = changes.compare(base, run, names=changes.names_of(base))
    kinds = dict.fromkeys(changes.HEADERS, "number") | {"stage": "name", "dtype": ""}
    kernels = []
    for kernel in (kernel for kernel in found.kernels if kernel.telling):
        named = (zip(kinds.items(), row, strict=True) for row in changes.rows(kernel))
        rows = [Row({name: Cell(text, kind=kind) for (name, kind), text in row}) for row in named]
        shown = {
            "op": kernel.op,
            "kernel": kernel.kernel,
            "devices": " ".join(side.device for side in (kernel.before, kernel.after) if side),
            "where": changes.devices(kernel),
            "change": kernel.change.value,
            "worse": kernel.worse,
            "head": changes.head(kernel),
            "lines": [*changes.notes(kernel, found.names), *changes.drifts(kernel)],
            "table": Table(f"Stages of {kernel.kernel} that changed", rows, whole=True),
            "repro": changes.again(kernel, found),
        }
        kernels.append(shown)
    return {
        "name": found.names[0],
        "verdict": changes.verdict(found),
        "summary": changes.summary(found),
        "about": changes.about(found),
        "kernels": kernels,
        "others": [f"{change.value.lower()}: {text}" for change, text in changes.others(found)],
    }


def _op(op: str, found: Sequence[Standing], subjects: Sequence[Subject]) -> dict[str, Any]:
    results = [result for one in found for result in one.cases]
    rows = charts.rows(results, subjects, {one.subject: one.stages for one in found})
    data = {"rows": rows, "specifications": charts.specifications(op, stage_order(results), rows)}
    return {"name": op, "table": _stages_table(op, found), "data": _json(data), "measured": bool(rows["stages"])}


def _json(value: Any) -> str:
    """Write JSON that may stand inside a script element, whatever strings it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


# Tables


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


def _named(text: str, *, detail: str = "", href: str = "") -> Cell:
    return Cell(text, kind="name", detail=detail, href=href)


def _count(number: int, kind: str = "") -> Cell:
    return Cell(f"{number:,}", number, f"number {kind if number else 'nothing'}".strip())


def _number(text: str, value: float) -> Cell:
    return Cell(text, None if math.isnan(value) else value, "number")


def _verdict(value: Verdict, short: str = "") -> Cell:
    """Make the cell of a verdict; one that falls `short` is not green, and says so."""
    kind = "partly" if short and value is Verdict.PASSED else value.value.lower()
    return Cell(value.value, list(Verdict).index(value) + bool(short) / 2, f"verdict {kind}", short)


def _share(part: int, whole: int) -> Cell:
    return _number(share(part, whole), part / whole if whole else math.nan)


def _decided(found: Sequence[Decided]) -> Cell:
    """Return the share of elements of results that could not have been otherwise."""
    return _share(sum(d.decided for d in found), sum(d.numel for d in found))


def _seconds(cases: Iterable[CaseResult]) -> Cell:
    seconds = sum(result.seconds for result in cases)
    return _number(f"{seconds:,.1f}", seconds)


_DECIDED = {"decided": "elements of its results for which the contract allows exactly one value"}


def _ops_table(subjects: Mapping[str, Sequence[Standing]]) -> Table:
    rows = []
    for position, (op, found) in enumerate(subjects.items(), start=1):
        verdicts, cases = [one.verdict for one in found], [case for one in found for case in one.cases]
        short = [f"{one.kernel} {one.short}" for one in found if one.short]
        few = f"{len(short)} of its kernels on few cases, or with few elements decided" if short[1:] else "".join(short)
        cells = {
            "op": _named(op, href=f"#op-{position}"),
            "verdict": _verdict(Verdict.worst(*verdicts), few),
            "kernels": replace(_count(len(found)), detail=tally(verdicts) if len(set(verdicts)) > 1 else ""),
            "cases": _count(len(cases)),
            "decided": _decided([decided for one in found for decided in one.decided]),
            "seconds": _seconds(cases),
        }
        kernels, devices = dict.fromkeys(one.kernel for one in found), dict.fromkeys(one.device for one in found)
        rows.append(Row(cells, {"op": op, "kernel": " ".join(kernels), "device": " ".join(devices)}))
    names = "op, verdict, kernels, cases, decided, seconds"
    return Table("The worst verdict on each op", rows, _DECIDED, True, names)


def _kernels_table(found: Iterable[Standing]) -> Table:
    severity, rows = list(Verdict), []
    for one in sorted(found, key=lambda one: (-severity.index(one.verdict), not one.short)):
        verdicts = Counter(result.verdict for result in one.cases)
        outside = sum(max(s.cumulative.outside, s.isolated.outside) for r in one.cases for s in r.stages)
        beside = one.beside and f"beside wrong values, {one.beside}"
        extreme = one.extremes and f"extreme: {one.extremes}"
        more = one.origin, beside, extreme
        cells = {
            "kernel": _named(one.kernel, detail=" · ".join(filter(None, (one.contract, one.source, *more)))),
            "verdict": _verdict(one.verdict, one.short),
            "op": Cell(one.op),
            "device": Cell(one.device),
            "cases": _count(len(one.cases)),
            "passed": _count(verdicts[Verdict.PASSED]),
            "failed": _count(verdicts[Verdict.FAILED], "bad"),
            "errored": _count(verdicts[Verdict.ERRORED], "bad"),
            "inconclusive": _count(verdicts[Verdict.INCONCLUSIVE], "doubtful"),
            "turned down": _count(verdicts[Verdict.UNSUPPORTED] + verdicts[Verdict.SKIPPED]),
            "outside": _count(outside, "bad"),
            "decided": _decided(one.decided),
            "seconds": _seconds(one.cases),
        }
        dtypes = dict.fromkeys(dtype for result in one.cases for dtype in result.dtypes.split("/"))
        rows.append(Row(cells, {**_about(one), "dtype": " ".join(dtypes), "verdict": one.verdict.value}))
    names = "kernel, verdict, op, device, cases, passed, failed, errored, inconclusive, turned down, outside"
    return Table("Kernels, worst first", rows, _DECIDED, names=f"{names}, decided, seconds")


def _about(one: Standing) -> dict[str, str]:
    return {"op": one.op, "kernel": one.kernel, "device": one.device}


def _stages_table(op: str, found: Iterable[Standing]) -> Table:
    """Make a table with one row per kernel, device, stage and format.

    A stage that was seen in a kernel decides nothing, so it has no verdict.
    """
    rows = []
    for one in found:
        every: list[StageSummary | TracedStage] = [*one.stages, *one.traced]
        for stage in every:
            dtype, anchor = stage.dtype, ""
            figures = stage_cells(stage) if isinstance(stage, StageSummary) else traced_cells(stage)
            cells, about = {"kernel": _named(one.kernel), "device": Cell(one.device)}, {**_about(one), "dtype": dtype}
            cells |= {"stage": _named(figures["stage"].text), "dtype": Cell(dtype)}
            if isinstance(stage, StageSummary):
                cells["values"], about["verdict"] = _verdict(stage.verdict), stage.verdict.value
                anchor = stage_anchor(*one.subject, stage.name, dtype)
            else:
                cells["values"] = Cell(figures["values"].text)
                cells["stage"] = _named(figures["stage"].text, detail=stage.code)
            for name, (text, value, wrong) in figures.items():
                kind = "number nothing" if text == "0" else "number bad" if wrong else "number"
                cells.setdefault(name, replace(_number(text, value), kind=kind))
            rows.append(Row(cells, about, anchor))
    names = dict.fromkeys(("kernel", "device", "stage", "dtype", "values", *STAGE_COLUMNS))
    return Table(f"Stages of {op}", rows, dict(wording.LEGEND), names=", ".join(names))


def stage_anchor(kernel: str, device: str, stage: str, dtype: str) -> str:
    """Return the anchor of a stage's row, for links within the page."""
    return "stage-" + hashlib.sha256(f"{kernel}\x00{device}\x00{stage}\x00{dtype}".encode()).hexdigest()[:12]


def _power_table(entries: Sequence[Power], ops: Mapping[str, str]) -> Table:
    """Make a table with one row per kernel, device, dtypes and alternative; those never told apart come first."""
    rows = []
    for p in sorted(entries, key=lambda p: (not p.missing, p.separable is False)):
        outcome, kind = ("never told apart", "doubtful") if p.missing else ("told apart", "")
        cells = {
            "kernel": _named(p.kernel),
            "device": Cell(p.device),
            "dtypes": Cell(p.dtypes),
            "other contract": _named(p.alternative),
            "cases": _count(p.cases),
            "ruled out": _count(p.ruled_out),
            "outcome": Cell(outcome, kind=kind) if p.separable else Cell("coincide", kind="nothing"),
        }
        about = {"op": ops.get(p.kernel, ""), "kernel": p.kernel, "device": p.device}
        rows.append(Row(cells, {**about, "dtype": p.dtypes.replace("/", " ")}))
    meanings = {
        "ruled out": "elements that the other contract forbids and the kernel gave",
        "outcome": "coincide: no input of these shapes and dtypes can tell the two apart",
    }
    return Table("Which other contracts the run could tell from a kernel's own", rows, meanings)


def _sensitivity_table(found: Iterable[Standing]) -> Table:
    pairs = ((one, stage) for one in found for stage in one.stages if stage.total.numel)
    rows = []
    for one, stage in sorted(pairs, key=lambda pair: pair[1].total.decided / pair[1].total.numel):
        total = stage.total
        used = f"{total.budget_ratio:.2g}" if total.decided < total.numel else "–"
        cells = {
            "kernel": _named(one.kernel),
            "op": Cell(one.op),
            "device": Cell(one.device),
            "stage": _named(stage.name),
            "dtype": Cell(stage.dtype),
            "elements": _count(total.numel),
            "decided": _share(total.decided, total.numel),
            "used": _number(used, total.budget_ratio),
        }
        rows.append(Row(cells, {**_about(one), "dtype": stage.dtype}))
    meanings = {
        "decided": "elements for which the contract allows exactly one value",
        "used": "largest share of the allowed deviation that was used, where more than one value is allowed",
    }
    return Table("How much of each stage the contract decides", rows, meanings)


def _coverage_table(found: CoverageTable) -> Table:
    about, meanings = (
        {"op": found.op, "device": found.device},
        dict.fromkeys(("regimes", "layouts", "values"), coverage.MEANING),
    )
    rows = [Row(dict(zip(COVERAGE_HEADERS, map(Cell, cells), strict=True)), about) for cells in found.rows]
    return Table(f"Coverage of {found.op} on {found.device}", rows, meanings)


def _agreement_table(entries: Sequence[DeviceAgreement], ops: Mapping[str, str]) -> Table:
    rows = []
    for a in sorted(entries, key=lambda a: a.equal / a.tensors if a.tensors else 1):
        cells = {
            "kernel": _named(a.kernel),
            "stage": Cell(a.stage),
            "devices": Cell(" and ".join(a.devices)),
            "tensors": _count(a.tensors),
            "equal": _count(a.equal),
            "share": _share(a.equal, a.tensors),
        }
        rows.append(Row(cells, {"op": ops.get(a.kernel, ""), "kernel": a.kernel, "device": " ".join(a.devices)}))
    return Table("Bits on two devices, for the same input bits", rows)


def _properties_table(found: PropertyTable) -> Table:
    """Make a table with one row per kernel of an op: a word for each property that was asked of its bits."""
    looks = {"BROKEN": "bad", "ERRORED": "bad", "broken": "doubtful", "errored": "doubtful"}
    rows = []
    for one in found.kernels:
        cells = {"kernel": _named(one.kernel), "device": Cell(one.device)}
        for name in found.properties:
            text, detail = invariance.cell(one.properties.get(name))
            cells[name] = Cell(text, kind=looks.get(text, ""), detail=detail)
        rows.append(Row(cells, {"op": one.op, "kernel": one.kernel, "device": one.device}))
    return Table(f"Properties of the bits of {found.op}", rows, whole=True)


# Findings

# They are folded away; more make the page large, and the records have them.
MOST_CASES = 20
"""Commands of one finding, besides that of its smallest case."""

# Arbitrary: the others unfold.
MOST_SENTENCES = 2
"""Sentences of a finding that no line explains, before the others are behind it."""

Field = tuple[str, str]
Words = list[tuple[str, bool]]

_STEPS = {
    "line": "in the file of the kernel; sorting by it restores the order in which values were computed",
    "stage": "the stage of the reference that it agrees with",
    "value": "of the worst element, or of the first of those that led to it",
}


def finding(problem: KernelFailure, run: Run, anchors: Collection[str]) -> dict[str, Any]:
    """Return what the template shows of a problem; rows of stages that a link may lead to are called `anchors`."""
    result, options = problem.smallest, run.environment.get("options", "")
    explanation = explanation_of(run, problem)
    culprit = explanation.culprit if explanation else None
    failing = result.failing_stage
    said, label = dict[str, list[str]](), ""
    for name, text in (*wording.problem_fields(problem), *explanation_fields(explanation, options)):
        label = name or label  # a text without a label belongs to the label before it
        said.setdefault(label, []).append(text)
    gist = _gist(problem, said)
    _, *computed = said.pop("line") if culprit else [""]
    first = _fields((label, said.pop(label)) for label in ("rounding", "value", "diagnosis", "line") if label in said)
    sentences = said.pop("finding", [])  # without one that is the gist
    if not first or {fault.kind for fault in result.faults if fault.sentence in sentences} - OF_VALUES:
        first += _fields([("finding", sentences[:MOST_SENTENCES])])
        sentences = sentences[MOST_SENTENCES:]
    said = {"finding": sentences, **said}
    smallest = said.pop("smallest", [])
    case = replace(result, case=smallest[0], device=explanation.device) if explanation and smallest else result
    command = repro_line(case, options)
    others = sorted((r for r in problem.bad if r.counted and r is not result), key=lambda r: elements(r.case))
    commands = [line for line in (repro_line(r, options) for r in (result, *others)) if line not in ("", command)]
    explain = "".join(said.pop("see more", []))
    link, steps = None, None
    if explanation is not None:  # to the row of the wrong stage: the culprit's, or else the one that failed
        match = culprit.match if culprit is not None else None
        stages = [(match.stage, match.format)] if match is not None else []
        stages += [(failing.name, failing.dtype)] if failing is not None else []
        links = [(stage, stage_anchor(explanation.kernel, explanation.device, stage, dtype)) for stage, dtype in stages]
        link, steps = next((one for one in links if one[1] in anchors), None), _steps(explanation)
    return {
        "verdict": result.verdict,
        "kernel": result.kernel,
        "op": result.op,
        "stage": failing.name if failing else "",
        "devices": " ".join(dict.fromkeys(r.device for r in problem.bad)),
        "dtypes": " ".join(dict.fromkeys(d for r in problem.bad for d in r.dtypes.split("/"))),
        "gist": gist,
        "where": shown_path(f"{culprit.file}:{culprit.line}") if culprit else "",
        "defined": shown_path(result.source),
        "source": excerpt(culprit) if culprit else [],
        "computed": computed,
        "fields": first,
        "command": command,
        "more": _fields([*said.items(), ("groups", [", ".join(problem.groups)])]),
        "link": link,
        "steps": steps,
        "explain": explain,
        "others": commands[:MOST_CASES],
        "rest": max(0, len(commands) - MOST_CASES),
    }


def _fields(said: Iterable[tuple[str, Sequence[str]]]) -> list[Field]:
    return [(label if n == 0 else "", text) for label, texts in said for n, text in enumerate(texts) if text]


def _gist(problem: KernelFailure, said: dict[str, list[str]]) -> Words:
    """Summarize the problem on one line, as words and whether to stress them: contracts, an error or a sentence."""
    result = problem.smallest
    if kept := problem.kept:
        claimed = set(problem.claimed.split("+"))
        common = set[str].intersection(*(set(name.split("+")) for name in kept))
        words: Words = []
        for name in kept:
            words += [(" or " if words else "keeps ", False), *_options(name, claimed)]
        return [*words, (", claims ", False), *_options(problem.claimed, common)]
    if result.verdict is Verdict.ERRORED:
        return [(" ".join(said.pop("error", [])), False)]
    return [(said["finding"].pop(0) if said.get("finding") else "", False)]


def _options(contract: str, known: Collection[str]) -> Words:
    """Split a contract into its options, and stress those that are not `known`."""
    words: Words = []
    for option in contract.split("+"):
        words += [("+", False)] * bool(words) + [(option, option not in known)]
    return words


def _steps(explanation: Explanation) -> Table:
    steps, every = shown_steps(explanation), sum(step.line > 0 for step in explanation.trace.steps)
    rest = f", the last {MOST_STEPS} of {plural(every, 'step')}" if every > len(steps) else ""
    rows = []
    for position, step in enumerate(steps):
        wrong = step.match is not None and bool(step.match.outside) and not follows(step, explanation)
        cells = {
            "line": Cell(str(step.line), position),
            "expression": _named(step.text),
            "value": Cell(value_of(step)),
            "stage": Cell(stage_of(step, explanation), kind="verdict failed" if wrong else ""),
        }
        rows.append(Row(cells))
    return Table(f"The way of the worst element{rest}", rows, _STEPS)
