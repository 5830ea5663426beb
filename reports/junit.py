"""A run as JUnit XML: a suite per op and device, a test case per kernel and group of cases.

The elements and attributes are those of junit-10.xsd of the xUnit plugin of Jenkins (jenkinsci/xunit-plugin), which is
also what pytest calls xunit2 and GitLab reads. That schema allows properties of suites only, so the figures of a stage
are properties of the suite, named `KERNEL/STAGE/DTYPE/FIGURE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from lastbit.reports.alerts import doubts
from lastbit.reports.characters import visible
from lastbit.reports.explanation import explanation_of, problem_and_why
from lastbit.reports.standing import Standing, standings
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
    group is skipped if no case of it was decided.
    """
    root = ElementTree.Element("testsuites", name="lastbit")
    for (op, device), found in grouped(((one.op, one.device), one) for one in standings(run).values()).items():
        _add_suite(root, f"{op} on {device}", [*_cases(run, found)], [*_figures(found)], run)
    if whole := [*_whole_run(run)]:
        _add_suite(root, "the run", whole, [], run)
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root):.3f}")
    ElementTree.indent(root)
    text: str = ElementTree.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _add_suite(
    root: ElementTree.Element, name: str, cases: Sequence[_TestCase], figures: Sequence[tuple[str, str]], run: Run
) -> None:
    counts = {what: sum(c.outcome == one for c in cases) for what, one in _OUTCOMES.items()}
    seconds = f"{sum(case.seconds for case in cases):.3f}"
    attributes = {"name": name, "tests": str(len(cases)), "time": seconds, **{w: str(n) for w, n in counts.items()}}
    suite = ElementTree.SubElement(root, "testsuite", {key: _legal(value) for key, value in attributes.items()})
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in (*run.environment.items(), *figures):
        ElementTree.SubElement(properties, "property", name=_legal(key), value=_legal(value))
    for case in cases:
        _add_case(suite, name, case)


_OUTCOMES = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def _add_case(suite: ElementTree.Element, suite_name: str, case: _TestCase) -> None:
    attributes = {"classname": f"lastbit.{suite_name}", "name": case.name, "time": f"{case.seconds:.3f}"}
    element = ElementTree.SubElement(suite, "testcase", {key: _legal(value) for key, value in attributes.items()})
    if case.outcome:
        outcome = ElementTree.SubElement(element, case.outcome, type=case.kind, message=_legal(case.message))
        outcome.text = _legal(case.text) or None
    if case.output:
        ElementTree.SubElement(element, "system-out").text = _legal(case.output)


def _cases(run: Run, found: Sequence[Standing]) -> Iterator[_TestCase]:
    for one in found:
        own = (result for result in run.results if (result.kernel, result.device) == one.subject)
        for group, results in grouped((result.group, result) for result in own).items():
            name = f"{one.kernel}: {group or 'cases'}"
            seconds, output = sum(result.seconds for result in results), _output(results, run)
            yield replace(_group(results, run), name=name, seconds=seconds, output=output)
        if one.verdict not in BAD | TURNED_DOWN:
            yield _told_apart(run, one)


def _group(results: Sequence[CaseResult], run: Run) -> _TestCase:
    """Make the test case of a kernel on one group of cases."""
    bad = tuple(result for result in results if result.verdict in BAD)
    if bad:
        return _problem(KernelFailure(bad, sum(result.counted for result in results)), run)
    if not any(result.verdict is Verdict.PASSED for result in results):
        reasons = "; ".join(dict.fromkeys(f"{r.verdict.value.lower()}: {r.reason}" for r in results))
        return _TestCase("", outcome="skipped", kind="undecided", message=reasons)
    return _TestCase("")


def _output(results: Sequence[CaseResult], run: Run) -> str:
    """Write the notices on one group of cases."""
    options = run.environment.get("options", "")
    found = noticed(replace(run, results=tuple(results)))
    return "\n".join(f"{entry.sentence}\n{entry.repro(options)}" for entry in found)


def _problem(problem: KernelFailure, run: Run) -> _TestCase:
    result, options = problem.smallest, run.environment.get("options", "")
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


def _told_apart(run: Run, one: Standing) -> _TestCase:
    """Make the test case that passes if the run could tell the kernel's contract from the others of its op."""
    name = f"{one.kernel}: told from other contracts"
    if one.verdict is not Verdict.INCONCLUSIVE:
        return _TestCase(name)
    lines = doubts(run, *one.subject)
    return _TestCase(name, 0.0, "failure", Verdict.INCONCLUSIVE.value, lines[0] if lines else "", "\n".join(lines))


def _whole_run(run: Run) -> Iterator[_TestCase]:
    """Yield test cases that belong to no kernel: a broken run, and items that were not run."""
    if run.broken:
        yield _TestCase("came to its end", outcome="error", kind="broken", message=run.broken)
    for missing in dict.fromkeys(run.not_run):
        yield _TestCase(missing.what, outcome="skipped", kind="not run", message=missing.reason)


def _figures(found: Iterable[Standing]) -> Iterator[tuple[str, str]]:
    """Name and value of every figure of every stage of some kernels."""
    for one in found:
        for stage in one.stages:
            for figure, value in stage.figures.items():
                written = f"{value:.6g}" if isinstance(value, float) else str(value)
                yield f"{one.kernel}/{stage.name}/{stage.dtype}/{figure}", written


def _legal(text: str) -> str:
    """Remove from `text` what XML 1.0 does not allow, not even as a character reference (section 2.2)."""
    return visible(text, keep="\t\n\r")
