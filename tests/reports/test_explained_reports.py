"""A failure that was explained is at its line in every form of a report, with the values that show it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from explanations import BLAMED, LINES, explained, kernel_file, step
from rich.console import Console

from lastbit.reports import alerts, html, junit, markdown
from lastbit.reports.explanation import MOST_STEPS, excerpt, print_trace, stage_of
from lastbit.reports.html import stage_anchor
from lastbit.reports.why import Explanation, StageMatch
from lastbit.result import StageResult
from lastbit.run import Run
from tests.reports.test_html import read
from tests.reports.test_reports import SOURCE, failed, full_run, shown

SMALL = "rms_norm x=bf16[1,2] weight=bf16[2] eps=1e-06 seed=17"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with a kernel, and make it the working directory."""
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    kernel_file(tmp_path)
    return tmp_path


def run_of(folder: Path, file: str = "norm.py", **changes: object) -> Run:
    """Run a kernel that fails twice, and explain why it fails the smaller case."""
    source = f"{folder / 'norm.py'}:1"
    small = failed(kernel="k", source=source, case=SMALL, counted=False)
    return Run((failed(kernel="k", source=source), small), explanations=(explained(small, folder / file, **changes),))


def sarif_result(run: Run) -> dict[str, Any]:
    [found] = json.loads(alerts.sarif(run))["runs"][0]["results"]
    return dict(found)


# Which explanation is of which problem


def test_an_explanation_is_of_the_problem_that_has_its_case(folder: Path) -> None:
    other = failed(kernel="other", case=SMALL, source=SOURCE)
    run = run_of(folder)
    found = {alert.key[1]: alert for alert in alerts.alerts(replace(run, results=(*run.results, other)))}
    assert found["k"].explanation is run.explanations[0]
    assert found["other"].explanation is None
    assert found["other"].place.line == 108


def test_of_two_devices_that_of_the_smallest_case_is_shown(folder: Path) -> None:
    run = run_of(folder)
    larger = replace(run.results[0], device="cuda:0")
    there = explained(larger, "elsewhere.py")
    both = replace(run, results=(*run.results, larger), explanations=(there, *run.explanations))
    [alert] = alerts.alerts(both)
    assert alert.explanation is run.explanations[0]


# Alerts, SARIF, annotations


def test_an_alert_is_at_the_culprit_and_names_its_stage(folder: Path) -> None:
    [alert] = alerts.alerts(run_of(folder))
    assert alert.place == alerts.Location("norm.py", BLAMED, BLAMED, 12, 20, "x * rstd", "xhat = x * rstd")
    assert alert.others == (("the kernel", alerts.Location("norm.py", 1)),)
    assert alert.title == "FAILED k: normalized"
    for said in ("norm.py:3  xhat = x * rstd", "0.14904 in fp32", "to 0.1484375", "Every row is off"):
        assert said in alert.text
    assert alert.text.splitlines()[-1].startswith(f"lastbit verify k '{SMALL}'")


def test_without_a_culprit_an_alert_is_at_the_kernel_and_says_why(folder: Path) -> None:
    run = run_of(folder)
    [one] = run.explanations
    bare = Explanation(
        "k", one.device, one.case, one.verdict, replace(one.trace, leaves=None, blamed=None), reason="it was late"
    )
    [alert] = alerts.alerts(replace(run, explanations=(bare,)))
    assert (alert.place, alert.others) == (alerts.Location("norm.py", 1), ())
    assert "why: not explained: it was late" in alert.text
    assert f"see more: lastbit explain k '{SMALL}'" in alert.text


def test_a_culprit_outside_of_the_repository_stands_behind_the_kernel(folder: Path, tmp_path_factory: Any) -> None:
    package = kernel_file(tmp_path_factory.mktemp("package"))
    [alert] = alerts.alerts(run_of(folder, str(package)))
    assert alert.place == alerts.Location("norm.py", 1)
    [(what, place)] = alert.others
    assert (what, place.path, place.line) == ("the expression that is wrong", str(package), BLAMED)


def test_the_contracts_of_the_op_are_linked_at_the_stage(folder: Path) -> None:
    document = folder / "docs" / "contracts" / "rms_norm.md"
    document.parent.mkdir(parents=True)
    document.write_text("# RMSNorm\n\n`normalized` is rounded.\n")
    [alert] = alerts.alerts(run_of(folder))
    assert alert.others[-1] == ("the contracts of rms_norm", alerts.Location("docs/contracts/rms_norm.md", 3))


def test_sarif_region_is_the_expression(folder: Path) -> None:
    found = sarif_result(run_of(folder))
    physical = found["locations"][0]["physicalLocation"]
    assert physical["artifactLocation"] == {"uri": "norm.py", "uriBaseId": "SRCROOT"}
    region = {"startLine": BLAMED, "endLine": BLAMED, "startColumn": 12, "endColumn": 20}
    assert physical["region"] == {**region, "snippet": {"text": "x * rstd"}}
    assert LINES[BLAMED - 1][region["startColumn"] - 1 : region["endColumn"] - 1] == "x * rstd"
    assert physical["contextRegion"]["snippet"] == {"text": "xhat = x * rstd"}
    [related] = found["relatedLocations"]
    assert related["physicalLocation"]["region"] == {"startLine": 1}
    assert (related["id"], related["message"]["text"]) == (1, "the kernel")


SCHEMA = {
    "physicalLocation": {"artifactLocation", "region", "contextRegion"},
    "region": {"startLine", "endLine", "startColumn", "endColumn", "snippet"},
    "contextRegion": {"startLine", "endLine", "snippet"},
    "relatedLocations": {"id", "message", "physicalLocation"},
    "codeFlows": {"threadFlows"},
    "threadFlows": {"locations"},
    "location": {"physicalLocation", "message"},
}
"""Property → what its objects may have, of what lastbit writes, in sarif-schema-2.1.0.json."""


def objects(value: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with the name of the property that holds it, or its list."""
    if isinstance(value, dict):
        yield name, value
        for key, each in value.items():
            yield from objects(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from objects(each, name)


def test_sarif_keeps_to_the_schema(folder: Path) -> None:
    found = [(name, keys) for name, keys in objects(sarif_result(run_of(folder))) if name in SCHEMA]
    assert {name for name, _ in found} == set(SCHEMA)
    for name, keys in found:
        assert set(keys) <= SCHEMA[name]
        assert all(type(value) is int and value > 0 for key, value in keys.items() if key.endswith(("Line", "Column")))


def test_sarif_code_flow_has_the_values_of_the_way(folder: Path) -> None:
    [flow] = sarif_result(run_of(folder))["codeFlows"]
    [thread] = flow["threadFlows"]
    messages = [one["location"]["message"]["text"] for one in thread["locations"]]
    assert messages[1] == "x * rstd = 0.14904 in fp32 · normalized, 300 of 300 elements not possible"
    lines = [one["location"]["physicalLocation"]["region"]["startLine"] for one in thread["locations"]]
    assert lines == [2, 3, 4], "an input stands in no line"


def test_a_long_way_is_cut(folder: Path) -> None:
    run = run_of(folder)
    [one] = run.explanations
    many = tuple(step(folder / "norm.py", 4, "xhat * w", str(n)) for n in range(200))
    long = replace(run, explanations=(replace(one, trace=replace(one.trace, steps=many)),))
    locations = sarif_result(long)["codeFlows"][0]["threadFlows"][0]["locations"]
    assert len(locations) == MOST_STEPS
    assert locations[-1]["location"]["message"]["text"] == "xhat * w = 199 in fp32"
    page = html.page(long)
    assert page.count("<td>199 in fp32</td>") == 1
    assert "<td>100 in fp32</td>" not in page
    assert "the last 30 of 200" in page


def test_sarif_fingerprint_does_not_depend_on_what_was_explained(folder: Path) -> None:
    run = run_of(folder)
    fingerprints = {str(sarif_result(each)["partialFingerprints"]) for each in (run, replace(run, explanations=()))}
    assert len(fingerprints) == 1


def test_annotation_is_at_the_expression(folder: Path) -> None:
    [line] = alerts.workflow_commands(run_of(folder)).splitlines()
    place = "file=norm.py,line=3,endLine=3,col=12,endColumn=20"
    assert line.startswith(f"::error {place},title=FAILED k%3A normalized::keeps: ")
    assert "0.14904 in fp32" in line


# Texts


def test_terminal_has_the_explanation_before_figures() -> None:
    result = failed(kernel="wrong[x]")
    text = shown(Run((result,), explanations=(explained(result, "norm.py"),)))
    block = text[text.index("FAILED  wrong[x]") :].split("\n\n")[0].splitlines()
    labels = [line[2:14].strip() for line in block if line[2:14].strip()]
    assert labels[labels.index("line") :][:3] == ["line", "rounding", "diagnosis"]
    assert labels.index("diagnosis") < labels.index("statistics") < labels.index("source") < labels.index("see more")
    assert block[-1].startswith("  lastbit verify ")
    assert "  line        norm.py:3  xhat = x * rstd" in block


@pytest.mark.parametrize("form", [junit.document, markdown.page, html.page])
def test_texts_have_the_line_the_source_and_the_diagnosis(form: Callable[[Run], str], folder: Path) -> None:
    text = form(run_of(folder))
    for said in ("norm.py:3", "xhat = x * rstd", "0.14904", "neighbours in bf16", "Every row is off"):
        assert said in text.replace("\\", "")
    assert "lastbit explain" in text


# HTML


def test_page_shows_the_source_around_the_line_and_the_values(folder: Path) -> None:
    text = html.page(run_of(folder))
    page = read(text)
    source = re.findall(r"<span( class=\"blamed\")?><i>(\d)</i> (.*)", text)
    assert [int(number) for _, number, _ in source] == [1, 2, 3, 4]
    assert [code for blamed, _, code in source if blamed] == [LINES[BLAMED - 1]]
    header, *rows = page.tables["The way of the worst element"]
    assert header[:2] == ["line", "expression"]
    assert rows[1] == ["3", "x * rstd", "0.14904 in fp32", "normalized, 300 of 300 elements not possible"]


def test_a_stage_after_the_wrong_one_follows_from_it(folder: Path) -> None:
    """Unless no line is proven."""
    [one] = run_of(folder).explanations
    output = StageMatch("output", 0.149, 0.1484375, 0.1484375, 300, 300, format="bf16")
    steps = (*one.trace.steps[:-1], replace(one.trace.steps[-1], match=output))
    trace, said = replace(one.trace, steps=steps), "output, 300 of 300 elements follow from a wrong value"
    run = run_of(folder, trace=trace)
    last = read(html.page(run)).tables["The way of the worst element"][-1][3]
    assert last.removesuffix("CopyCopy") == said and said in alerts.sarif(run)
    unknown = replace(one, trace=replace(trace, blamed=None))
    assert stage_of(steps[-1], unknown) == "output, 300 of 300 elements not possible"


def test_the_way_of_an_element_loses_nothing_on_a_narrow_terminal(folder: Path) -> None:
    [one] = run_of(folder).explanations
    steps = tuple(replace(step, text=f"{step.text}, {'other=0.0, ' * 9}") for step in one.trace.steps)
    console = Console(width=80, file=StringIO(), highlight=False)
    print_trace(replace(one.trace, steps=steps), console)
    table = console.file.getvalue().partition("  line")[2]  # type: ignore[attr-defined]
    assert max(map(len, table.splitlines())) <= 80
    assert all(shown in table for shown in ("0x3e18", "0.14904", "0.1494140625", "normalized"))


def test_a_file_that_has_changed_is_not_shown(folder: Path) -> None:
    [one] = run_of(folder).explanations
    assert one.culprit is not None
    assert len(excerpt(one.culprit)) == 4
    (folder / "norm.py").write_text("\n" * 9)
    [line] = excerpt(one.culprit)
    assert (line.number, line.text, line.blamed) == (BLAMED, "xhat = x * rstd", True)


def test_page_links_the_row_of_the_stage(folder: Path) -> None:
    """Of the culprit's if the kernel shows it, or else of the stage that failed."""
    run = run_of(folder)
    output, normalized = (stage_anchor("k", "cpu", stage, "bf16") for stage in ("output", "normalized"))
    text = html.page(run)
    assert f'<tr id="{output}"' in text
    assert f'<a href="#{output}">output</a>' in text
    [stage] = [stage for stage in failed().stages if stage.result]
    own = StageResult("normalized", "bf16", False, stage.cumulative, stage.isolated)
    shows = replace(run, results=tuple(replace(r, stages=(own, *r.stages)) for r in run.results))
    text = html.page(shows)
    assert f'<a href="#{normalized}">normalized</a>' in text
    assert len(re.findall(r' id="([^"]+)"', text)) == len(set(re.findall(r' id="([^"]+)"', text)))


NASTY = "</pre><script>alert(1)</script>"


def test_source_and_values_cannot_leave_their_place(folder: Path) -> None:
    run = run_of(folder)
    [one] = run.explanations
    nasty = replace(one.trace.leaves, text=NASTY, code=NASTY, file=f"{NASTY}.py")
    trace = replace(one.trace, leaves=nasty, blamed=nasty, steps=(nasty,))
    text = html.page(replace(run, explanations=(replace(one, trace=trace, diagnoses=(NASTY,)),)))
    assert "<script>alert(1)" not in text
    assert read(text).text.count(NASTY) >= 4


def test_reports_of_a_run_that_explained_nothing_say_nothing_of_it() -> None:
    for text in (shown(full_run()), html.page(full_run()), markdown.page(full_run()), junit.document(full_run())):
        assert "lastbit explain" not in text
    assert all("codeFlows" not in result for result in json.loads(alerts.sarif(full_run()))["runs"][0]["results"])
