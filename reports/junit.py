"""A run as JUnit XML: a suite per op and device, a test case per kernel and group of cases.

The elements and attributes are those of junit-10.xsd of the xUnit plugin of Jenkins (jenkinsci/xunit-plugin), which is
also what pytest calls xunit2 and GitLab reads. That schema allows properties of suites only, so the figures of a stage
are properties of the suite, named `KERNEL/STAGE/DTYPE/FIGURE`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from lastbit.reports.alerts import doubts
from lastbit.reports.characters import visible
from lastbit.reports.explanation import explanation_of, problem_and_why
from lastbit.reports.stage_summary import Standing, standings
from lastbit.reports.summary import KernelFailure, grouped, noticed, repro_line
from lastbit.result import BAD, TURNED_DOWN, CaseResult, Verdict
from lastbit.run import Run


@dataclass(frozen=True)
class _TestCase:
    """One test case; `outcome` is the element that says how it ended, empty if it passed, `output` what was noticed."""

    name: str
    seconds: float = 0.0
    outcome: str = ""
    kind: str = ""
    message: str = ""
    text: str = ""
    output: str = ""


def document(run: Run) -> str:
    """Write the run as the text of an XML document.

    A kernel fails the group of cases in which it fails, and a test case of its own if the run left it inconclusive. A
    group is skipped if no case of it was decided. What belongs to no kernel are a broken run, and items that were not
    run.
    """
    root = ElementTree.Element("testsuites", name="lastbit")
    for (op, device), found in grouped(((one.op, one.device), one) for one in standings(run).values()).items():
        _add_suite(root, f"{op} on {device}", [*_cases(run, found)], found, run)
    whole = [_TestCase(n.what, outcome="skipped", kind="not run", message=n.reason) for n in dict.fromkeys(run.not_run)]
    if run.broken:
        whole.insert(0, _TestCase("came to its end", outcome="error", kind="broken", message=run.broken))
    if whole:
        _add_suite(root, "the run", whole, [], run)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _add_suite(
    root: ElementTree.Element, name: str, cases: Sequence[_TestCase], found: Sequence[Standing], run: Run
) -> None:
    outcomes = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    counts = {what: str(sum(case.outcome == one for case in cases)) for what, one in outcomes.items()}
    seconds = f"{sum(case.seconds for case in cases):.3f}"
    suite = _element(root, "testsuite", name=name, tests=str(len(cases)), time=seconds, **counts)
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in run.environment.items():
        _element(properties, "property", name=key, value=value)
    for one in found:
        if one.origin:
            _element(properties, "property", name=f"{one.kernel}/verdict", value=one.origin)
    for kernel, stage in ((one.kernel, stage) for one in found for stage in one.stages):
        for figure, number in stage.figures.items():
            written = f"{number:.6g}" if isinstance(number, float) else str(number)
            _element(properties, "property", name=f"{kernel}/{stage.name}/{stage.dtype}/{figure}", value=written)
    for case in cases:
        about = {"classname": f"lastbit.{name}", "name": case.name, "time": f"{case.seconds:.3f}"}
        element = _element(suite, "testcase", **about)
        if case.outcome:
            outcome = _element(element, case.outcome, type=case.kind, message=case.message)
            outcome.text = _legal(case.text) or None
        if case.output:
            _element(element, "system-out").text = _legal(case.output)


def _element(parent: ElementTree.Element, tag: str, **attributes: str) -> ElementTree.Element:
    return ElementTree.SubElement(parent, tag, {name: _legal(value) for name, value in attributes.items()})


def _legal(text: str) -> str:
    """Remove from `text` what XML 1.0 does not allow, not even as a character reference (section 2.2)."""
    return visible(text, keep="\t\n\r")


def _cases(run: Run, found: Sequence[Standing]) -> Iterator[_TestCase]:
    """Yield a test case per kernel and group, and one of whether the run told its contract from others of its op."""
    options = run.environment.get("options", "")
    for one in found:
        own = (result for result in run.results if (result.kernel, result.device) == one.subject)
        for group, results in grouped((result.group, result) for result in own).items():
            notices = noticed(replace(run, results=tuple(results)))
            yield replace(
                _group(results, run),
                name=f"{one.kernel}: {group or 'cases'}",
                seconds=sum(result.seconds for result in results),
                output="\n".join(f"{entry.sentence}\n{entry.repro(options)}" for entry in notices),
            )
        told_apart = _TestCase(f"{one.kernel}: told from other contracts")
        if one.verdict is Verdict.INCONCLUSIVE:
            lines = doubts(run, *one.subject)
            kind, message = Verdict.INCONCLUSIVE.value, lines[0] if lines else ""
            told_apart = replace(told_apart, outcome="failure", kind=kind, message=message, text="\n".join(lines))
        if one.verdict not in BAD | TURNED_DOWN:
            yield told_apart


def _group(results: Sequence[CaseResult], run: Run) -> _TestCase:
    bad = tuple(result for result in results if result.verdict in BAD)
    if not bad:
        if any(result.verdict is Verdict.PASSED for result in results):
            return _TestCase("")
        reasons = "; ".join(dict.fromkeys(f"{r.verdict.value.lower()}: {r.reason}" for r in results))
        return _TestCase("", outcome="skipped", kind="undecided", message=reasons)
    problem, options = KernelFailure(bad, sum(result.counted for result in results)), run.environment.get("options", "")
    result = problem.smallest
    errored = result.verdict is Verdict.ERRORED
    sentences = [result.reason] if errored else [finding.sentence for finding in result.faults]
    said = problem_and_why(problem, explanation_of(run, problem), options)
    fields = "\n".join(f"{label:<12} {text}" for label, text in said)
    return _TestCase(
        "",
        outcome="error" if errored else "failure",
        kind=result.verdict.value if errored or not result.faults else result.faults[0].kind,
        message=sentences[0] if sentences else result.verdict.value,
        text=f"{fields}\n\n{repro_line(result, options)}".rstrip("\n"),
    )
