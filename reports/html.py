"""A run as one HTML page that needs nothing else: no network, no other file.

The page is a Jinja template with our own style and script, and Vega-Lite charts, whose library is part of the page. A
content security policy forbids every request, and every script but the page's own, known by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lastbit.errors import LastbitError
from lastbit.reports import changes_text, charts, html_tables, properties, unreached, wording
from lastbit.reports.changes import Changes, KernelChange, compare, names_of
from lastbit.reports.coverage import coverage_tables
from lastbit.reports.html_findings import finding
from lastbit.reports.properties import found_in, property_tables
from lastbit.reports.stage_summary import StageSummary, stage_order
from lastbit.reports.standing import Standing, Subject, by_op, standings
from lastbit.reports.summary import ORDER, noticed, plural, problems, shown_path, tally
from lastbit.result import BAD, Verdict
from lastbit.run import Run

TEMPLATES = Path(__file__).parent / "templates"

LIBRARIES = {"altair": "altair>=5.5", "jinja2": "jinja2", "vl_convert": "vl-convert-python"}
"""Module → what pip installs it by: all that the extra `report` brings."""


def page(run: Run, *, base: Run | None = None) -> str:
    """Write the run as the text of an HTML page, compared with `base`.

    Raises:
        LastbitError: a library that the page is made with is not installed.
    """
    _, jinja2, vl_convert = _libraries()
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


def _libraries() -> list[Any]:
    """Import those of `LIBRARIES`; a `LastbitError` names all that cannot be, and how to install them."""
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
    return found


def _hash(script: str) -> str:
    """Return the hash by which a content security policy identifies a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _context(run: Run) -> dict[str, Any]:
    """Collect everything that the template shows."""
    subjects = standings(run)
    ops = by_op(subjects)
    in_order = [one for found in ops.values() for one in found]
    every = [(one, stage) for one in in_order for stage in one.stages]
    anchors = {html_tables.stage_anchor(*one.subject, stage.name, stage.dtype) for one, stage in every}
    op_of = {one.kernel: one.op for one in in_order}
    short = [one for one in subjects.values() if one.short]
    return {
        "overall": run.overall,
        "headline": _headline([one.verdict for one in subjects.values()]),
        "short": [f"{one.kernel} on {one.device}: PASSED {one.short}" for one in short],
        "all_short": len(short) == len(subjects),
        "broken": run.broken,
        "unverified": wording.unverified(run),
        "about": _about(run),
        "facts": _facts(run),
        "table_of_ops": html_tables.ops(ops),
        "kernels": html_tables.kernels(subjects.values()),
        "findings": [finding(problem, run, anchors) for problem in problems(run)],
        "order": ORDER,
        "notices": [
            {"text": entry.sentence, "repro": entry.repro(run.environment.get("options", ""))} for entry in noticed(run)
        ],
        "legend": wording.legend(run),
        "ops": [_op(op, found, list(subjects)) for op, found in ops.items()],
        "titles": charts.TITLES,
        "data": _json({"subjects": [_about_one(one) for one in subjects.values()], "columns": charts.COLUMNS}),
        "choices": _choices(run, subjects.values(), [stage for _, stage in every]),
        "open": [one.kernel for one in subjects.values() if one.verdict is Verdict.INCONCLUSIVE],
        "missing": wording.never_told_apart(run),
        "advice": wording.ADVICE,
        "unasked": [" on ".join(subject) for subject, one in subjects.items() if one.verdict in BAD],
        "coinciding": wording.coinciding(run),
        "undecided": wording.undecided(run),
        "power": html_tables.power(run.power, op_of),
        "coverage": [(html_tables.coverage(found), found.gaps) for found in coverage_tables(run)],
        "unreached": unreached.every_line(run) if run.unreached else [],
        "unreached_heading": unreached.HEADING,
        "properties": [html_tables.asked(found) for found in property_tables(found_in(run))],
        "words": properties.MEANING,
        "sensitivity": html_tables.sensitivity(in_order),
        "agreement": html_tables.agreement(run.agreement, op_of),
        "not_run": wording.not_run(run),
        "turned_down": wording.turned_down(run),
        "environment": run.environment,
    }


def _headline(verdicts: Sequence[Verdict]) -> str:
    """Write `2 of 14 kernels failed, 1 errored`, where a kernel on two devices counts twice."""
    if not verdicts:
        return "no kernel"
    counts, of = Counter(verdicts), plural(len(verdicts), "kernel")
    worst, *others = (verdict for verdict in reversed(Verdict) if counts[verdict])
    first = f"{counts[worst]:,} of {of}" if others else of
    rest = (f"{counts[v]:,} {v.value.lower()}" for v in others if v is not Verdict.PASSED)
    return ", ".join([f"{first} {worst.value.lower()}", *rest])


def _about(run: Run) -> list[str]:
    """List facts about the run: its cases, time, devices and profile."""
    cases = [result for result in run.results if result.counted]
    profile = run.environment.get("profile", "")
    return [
        f"cases: {tally(result.verdict for result in cases)}",
        f"{sum(result.seconds for result in run.results):,.1f} s in cases",
        *filter(None, [run.environment.get("devices", ""), profile and f"profile {profile}"]),
    ]


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
    """Describe the changes since another run, worst first."""
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
    return {
        "op": kernel.op,
        "kernel": kernel.kernel,
        "devices": " ".join(side.device for side in (kernel.before, kernel.after) if side),
        "where": changes_text.devices(kernel),
        "change": kernel.change.value,
        "worse": kernel.worse,
        "head": changes_text.head(kernel),
        "lines": [*changes_text.notes(kernel, changes.names), *changes_text.drifts(kernel)],
        "table": html_tables.changes(kernel),
        "repro": changes_text.again(kernel, changes),
    }


def _op(op: str, found: Sequence[Standing], subjects: Sequence[Subject]) -> Any:
    """Make the table and charts of one op."""
    results = [result for one in found for result in one.cases]
    rows = charts.rows(results, subjects, {one.subject: one.stages for one in found})
    data = {"rows": rows, "specifications": charts.specifications(op, stage_order(results), rows)}
    return {
        "name": op,
        "table": html_tables.stages(op, found),
        "data": _json(data),
        "measured": bool(rows["stages"]),
    }


def _about_one(one: Standing) -> dict[str, str]:
    """Return the attributes by which a filter selects the rows of a chart."""
    names = {"op": one.op, "kernel": one.kernel, "device": one.device}
    return {**names, "verdict": one.verdict, "contract": one.first.contract}


def _choices(run: Run, found: Collection[Standing], stages: Sequence[StageSummary]) -> dict[str, list[str]]:
    """List the settings of each filter; a filter with a single setting is left out."""
    verdicts = {one.verdict for one in found} | {stage.verdict for stage in stages}
    dtypes = {d for r in run.results for d in r.dtypes.split("/")} | {stage.dtype for stage in stages}
    choices = {
        "op": list(dict.fromkeys(result.op for result in run.results)),
        "kernel": list(dict.fromkeys(one.kernel for one in found)),
        "device": list(dict.fromkeys(one.device for one in found)),
        "dtype": sorted(filter(None, dtypes)),
        "verdict": [verdict.value for verdict in reversed(Verdict) if verdict in verdicts],
    }
    return {name: values for name, values in choices.items() if len(values) > 1}


def _json(value: Any) -> str:
    """Write JSON that may stand inside a script element, whatever strings it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("&", "\\u0026")
