"""A run as one HTML page that needs nothing else: no network, no other file.

The page is a Jinja template with our own style and script, and Vega-Lite charts, whose library is part of the page. A
content security policy forbids every request, and every script but the page's own, known by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lastbit.errors import LastbitError
from lastbit.reports import changes_text, chart_data, charts, html_tables, properties, wording
from lastbit.reports.changes import Changes, KernelChange, compare, names_of
from lastbit.reports.coverage import coverage_tables
from lastbit.reports.explained import explanation_of
from lastbit.reports.html_explained import explained
from lastbit.reports.html_properties import property_table
from lastbit.reports.noticed import noticed
from lastbit.reports.properties import found_in, property_tables
from lastbit.reports.stage_summary import StageSummary, stage_order, stage_summaries
from lastbit.reports.summary import (
    ORDER,
    Problem,
    elements,
    plural,
    problems,
    repro_line,
    shown_path,
    tally,
)
from lastbit.reports.traced import traced_stages
from lastbit.reports.wording import LEGEND
from lastbit.result import BAD, CaseResult, Verdict
from lastbit.run import Run

TEMPLATES = Path(__file__).parent / "templates"

MOST_CASES = 20
"""Repro lines of one finding, besides that of its smallest case."""

Subject = tuple[str, str]
Cases = Mapping[Subject, Sequence[CaseResult]]


def page(run: Run, *, base: Run | None = None) -> str:
    """The run as the text of an HTML page, compared with `base`.

    Raises:
        LastbitError: a library that the page is made with is not installed.
    """
    jinja2, vl_convert, _ = (_library(name) for name in ("jinja2", "vl_convert", "altair"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    scripts = (vl_convert.javascript_bundle(), (TEMPLATES / "report.js").read_text(encoding="utf-8"))
    text: str = environment.get_template("report.html").render(
        **_context(run),
        changes=_changes(base, run) if base else None,
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        style=(TEMPLATES / "report.css").read_text(encoding="utf-8"),
    )
    return text


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise LastbitError(
            f"the HTML report needs {name!r}, which is not installed ({error}): "
            "python3 -m pip install 'lastbit[report]'"
        ) from error


def _hash(script: str) -> str:
    """What a content security policy calls a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _context(run: Run) -> dict[str, Any]:
    """Everything that the template shows."""
    subjects = run.subjects()
    verdicts = {subject: run.verdict(*subject) for subject in subjects}
    cases: Cases = {subject: run.of(*subject) for subject in subjects}
    ops = {result.kernel: result.op for result in run.results}
    summaries = {op: _summaries(run, op, cases, ops) for op in dict.fromkeys(ops.values())}
    every = [(op, key, stage) for op, found in summaries.items() for key, stages in found.items() for stage in stages]
    anchors = {html_tables.stage_anchor(*key, stage.name, stage.dtype) for _, key, stage in every}
    return {
        "overall": run.overall,
        "headline": _headline(verdicts) + wording.on_cases(run, *subjects),
        "broken": run.broken,
        "facts": _facts(run, verdicts),
        "kernels": html_tables.kernels(run, verdicts, cases),
        "findings": [_finding(problem, run, anchors) for problem in problems(run)],
        "order": ORDER,
        "notices": [
            {"text": entry.sentence, "repro": entry.repro(run.environment.get("options", ""))} for entry in noticed(run)
        ],
        "legend": wording.legend(run),
        "ops": [_op(op, found, run, cases) for op, found in summaries.items()],
        "titles": charts.TITLES,
        "data": _json({"subjects": _subjects(run, verdicts), "columns": chart_data.COLUMNS}),
        "choices": _choices(run, verdicts, every),
        "missing": wording.never_told_apart(run),
        "advice": wording.ADVICE,
        "unasked": [" on ".join(subject) for subject, verdict in verdicts.items() if verdict in BAD],
        "coinciding": wording.coinciding(run),
        "undecided": wording.undecided(run),
        "power": html_tables.power(run.power, ops),
        "coverage": [(html_tables.coverage(found), found.gaps) for found in coverage_tables(run)],
        "properties": [property_table(found) for found in property_tables(found_in(run))],
        "words": properties.MEANING,
        "sensitivity": html_tables.sensitivity(every),
        "agreement": html_tables.agreement(run.agreement, ops),
        "not_run": [*filter(None, [wording.unverified(run)]), *wording.not_run(run)],
        "turned_down": wording.turned_down(run),
        "environment": run.environment,
    }


def _summaries(run: Run, op: str, cases: Cases, ops: Mapping[str, str]) -> dict[Subject, list[StageSummary]]:
    order = stage_order(result for result in run.results if result.op == op)
    return {key: stage_summaries(found, order) for key, found in cases.items() if ops[key[0]] == op}


def _headline(verdicts: Mapping[Subject, Verdict]) -> str:
    """`2 of 14 kernels failed, 1 errored`, where a kernel on two devices counts twice."""
    bad = [verdict for verdict in verdicts.values() if verdict is not Verdict.PASSED]
    return f"{tally(bad) if bad else 'all'} of {plural(len(verdicts), 'kernel')}" if verdicts else "no kernel"


def _facts(run: Run, verdicts: Mapping[Subject, Verdict]) -> list[tuple[str, str]]:
    """What a reader wants to know of the whole run, as label and text; what is unknown is left out."""
    environment = run.environment
    compared = sum(s.cumulative.numel for r in run.results if r.counted for s in r.stages)
    said = [
        ("Kernels", tally(verdicts.values())),
        ("Cases", tally(result.verdict for result in run.results if result.counted)),
        ("Compared", plural(compared, "element")),
        ("Time in cases", f"{sum(r.seconds for r in run.results):,.1f} s"),
        ("Where time went", wording.time_spent(run)),
        ("Devices", environment.get("devices", "")),
        ("Profile", environment.get("profile", "")),
        ("Error bounds", environment.get("premises", "")),
        ("Kernel processes were kept from", environment.get("isolated", "")),
        ("Records", shown_path(environment.get("records", ""))),
    ]
    return [(label, text) for label, text in said if text]


def _finding(problem: Problem, run: Run, anchors: Collection[str]) -> dict[str, Any]:
    result, options = problem.smallest, run.environment.get("options", "")
    others = sorted((r for r in problem.bad if r.counted and r is not result), key=lambda r: elements(r.case))
    failing = result.failing_stage
    return {
        "verdict": result.verdict,
        "kernel": result.kernel,
        "op": result.op,
        "groups": wording.problem_groups(problem),
        "stage": failing.name if failing else "",
        "devices": " ".join(dict.fromkeys(r.device for r in problem.bad)),
        "dtypes": " ".join(dict.fromkeys(d for r in problem.bad for d in r.dtypes.split("/"))),
        "fields": [(label, text) for label, text in wording.problem_fields(problem) if text],
        "why": explained(explanation_of(run, problem), problem, options, anchors),
        "repro": repro_line(result, options),
        "others": [repro_line(r, options) for r in others[:MOST_CASES]],
        "rest": max(0, len(others) - MOST_CASES),
    }


def _changes(base: Run, run: Run) -> dict[str, Any]:
    """What changed since another run, worst first."""
    changes = compare(base, run, names=names_of(base))
    return {
        "name": changes.names[0],
        "verdict": changes_text.verdict(changes),
        "summary": changes_text.summary(changes),
        "about": changes_text.about(changes),
        "kernels": [_changed(kernel, changes) for kernel in changes.kernels if kernel.telling],
        "others": [f"{change.value.lower()}: {text}" for change, text in changes_text.others(changes)],
    }


def _changed(kernel: KernelChange, changes: Changes) -> dict[str, Any]:
    worst = changes_text.smallest_worse(kernel)
    drifts = [changes_text.drift(stage, one) for stage in kernel.stages for one in stage.drifts]
    return {
        "op": kernel.op,
        "kernel": kernel.kernel,
        "devices": " ".join(side.device for side in (kernel.before, kernel.after) if side),
        "where": changes_text.devices(kernel),
        "change": kernel.change.value,
        "worse": kernel.worse,
        "head": changes_text.head(kernel),
        "lines": [*changes_text.notes(kernel, changes.names), *drifts],
        "table": html_tables.changes(kernel),
        "repro": repro_line(worst, changes.options) if worst else "",
    }


def _op(op: str, summaries: Mapping[Subject, Sequence[StageSummary]], run: Run, cases: Cases) -> Any:
    """Table and charts of one op."""
    subjects = run.subjects()
    traced = {key: traced_stages(run, *key) for key in summaries}
    results = [result for key in summaries for result in cases[key]]
    stages = stage_order(results)
    rows = chart_data.rows(results, subjects, summaries)
    data = {"rows": rows, "specifications": charts.specifications(op, stages, rows)}
    return {
        "name": op,
        "table": html_tables.stages(op, summaries, traced, dict(LEGEND)),
        "data": _json(data),
        "measured": bool(rows["stages"]),
    }


def _subjects(run: Run, verdicts: Mapping[Subject, Verdict]) -> list[dict[str, str]]:
    """What a filter looks at, for the rows of charts."""
    first = {(r.kernel, r.device): r for r in reversed(run.results)}
    return [
        {"op": first[key].op, "kernel": key[0], "device": key[1], "verdict": outcome, "contract": first[key].contract}
        for key, outcome in verdicts.items()
    ]


def _choices(
    run: Run, verdicts: Mapping[Subject, Verdict], stages: Sequence[tuple[str, Subject, StageSummary]]
) -> dict[str, list[str]]:
    """What each filter can be set to."""
    found = set(verdicts.values()) | {stage.verdict for _, _, stage in stages}
    dtypes = {d for r in run.results for d in r.dtypes.split("/")} | {stage.dtype for _, _, stage in stages}
    return {
        "op": list(dict.fromkeys(result.op for result in run.results)),
        "kernel": list(dict.fromkeys(kernel for kernel, _ in verdicts)),
        "device": list(dict.fromkeys(device for _, device in verdicts)),
        "dtype": sorted(filter(None, dtypes)),
        "verdict": [verdict.value for verdict in reversed(Verdict) if verdict in found],
    }


def _json(value: Any) -> str:
    """JSON that may stand inside a script element, whatever the strings in it hold."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")
