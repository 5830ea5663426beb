"""Alerts of a run at places in source files, one per problem, at the line that is wrong where it is known.

Written for GitHub Actions as lines on standard output that show in a pull request (escapes are those of
actions/toolkit, packages/core/src/command.ts), and for code scanning as SARIF 2.1.0 (OASIS Standard "Static Analysis
Results Interchange Format (SARIF) Version 2.1.0").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lastbit.reports import coverage, wording
from lastbit.reports.characters import visible
from lastbit.reports.explanation import explanation_of, problem_and_why, shown_steps, stage_of, value_of
from lastbit.reports.summary import KernelFailure, noticed, problems, repro_line
from lastbit.reports.why import Explanation, Step
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run

ERRORED, INCONCLUSIVE, UNREACHED = "errored", "inconclusive", "unreached"
"""Kinds of alerts besides those of findings."""


@dataclass(frozen=True)
class Location:
    """A line of a file, or an expression in it.

    Attributes:
        path: relative to the root of the repository if it is below it, otherwise absolute; empty if it is not known.
        line, end_line: from 1 on; no end of a line as a whole.
        column, end_column: in characters from 1 on, the end being the first that is not part of it; 0 of a line.
        text, code: the expression, and the whole line without the blanks around it.
    """

    path: str = ""
    line: int = 1
    end_line: int = 0
    column: int = 0
    end_column: int = 0
    text: str = ""
    code: str = ""


@dataclass(frozen=True)
class Alert:
    """A problem, doubt or notice about a kernel.

    Attributes:
        kind: of the first finding, or `errored` or `inconclusive`.
        level: `error` if the kernel has to answer for it, `warning` if it was not decided, `note` for a notice.
        key: op, kernel, kind and stage: the same for the same problem in every run.
        title: for a headline.
        text: everything there is to say; the last line runs the smallest case again, if there is one.
        place: where to look first: the expression that is wrong, or else the kernel.
        others: other places, and what each of them is.
        explanation: why the kernel fails, if the run found that out.
    """

    kind: str
    level: str
    key: tuple[str, str, str, str]
    title: str
    text: str
    place: Location
    others: tuple[tuple[str, Location], ...] = ()
    explanation: Explanation | None = None


def alerts(run: Run) -> list[Alert]:
    """Make an alert per problem, in their order, one per inconclusive kernel, and one per notice."""
    root, options = repository_root(), run.environment.get("options", "")
    found = [_of_problem(problem, explanation_of(run, problem), options, root) for problem in problems(run)]
    for kernel, device in run.subjects():
        if run.verdict(kernel, device) is Verdict.INCONCLUSIVE:
            result = next(r for r in run.results if (r.kernel, r.device) == (kernel, device))
            alert = Alert(
                kind=INCONCLUSIVE,
                level="warning",
                key=(result.op, kernel, INCONCLUSIVE, device),
                title=f"{Verdict.INCONCLUSIVE.value} {kernel} on {device}",
                text="\n".join(doubts(run, kernel, device)),
                place=_place(result, root),
            )
            found.append(alert)
    for entry in noticed(run):
        result = entry.smallest
        alert = Alert(
            kind=entry.kind,
            level="note",
            key=(result.op, result.kernel, entry.kind, result.device),
            title=f"Notice: {result.kernel} on {result.device}",
            text=f"{entry.sentence}\n{entry.repro(options)}",
            place=_place(result, root),
        )
        found.append(alert)
    return found


def doubts(run: Run, kernel: str, device: str) -> list[str]:
    """List the reasons why the run left a kernel inconclusive, and what to do about them."""
    own = replace(
        run,
        results=tuple(r for r in run.results if (r.kernel, r.device) == (kernel, device)),
        power=tuple(p for p in run.power if (p.kernel, p.device) == (kernel, device)),
        unreached=run.left_out(kernel),
    )
    missing = wording.never_told_apart(own)
    return [*missing, *wording.undecided(own), *([wording.ADVICE] if missing else [])]


def _of_problem(problem: KernelFailure, explanation: Explanation | None, options: str, root: Path) -> Alert:
    result = problem.smallest
    errored = result.verdict is Verdict.ERRORED or not result.faults
    kind, stage = (ERRORED, "") if errored else (result.faults[0].kind, result.faults[0].stage)
    said = problem_and_why(problem, explanation, options)
    fields = [f"{label}: {text}" if label else text for label, text in said]
    culprit = explanation.culprit if explanation is not None else None
    computed = culprit.match.stage if culprit is not None and culprit.match is not None else ""
    places = [("the kernel", _place(result, root))]
    if culprit is not None:
        places.insert(0, ("the expression that is wrong", place_of(culprit, root)))
    places.sort(key=lambda place: Path(place[1].path).is_absolute())  # places in the repository come before others
    document = Path("docs", "contracts", f"{result.op}.md")
    if (root / document).is_file():  # at the first line that names the stage
        lines = (root / document).read_text(encoding="utf-8", errors="replace").splitlines() if computed else []
        line = next((number for number, text in enumerate(lines, 1) if f"`{computed}`" in text), 1)
        places.append((f"the contracts of {result.op}", Location(document.as_posix(), line)))
    at = computed or stage
    return Alert(
        kind=kind,
        level="error",
        key=(result.op, result.kernel, kind, stage),
        title=f"{result.verdict.value} {result.kernel}" + (f": {at}" if at else ""),
        text="\n".join(filter(None, [*fields, repro_line(result, options)])),
        place=places[0][1],
        others=tuple(places[1:]),
        explanation=explanation,
    )


def unreached_alerts(run: Run) -> list[Alert]:
    """Make a note for each branch that handles inputs and that no case reached; no annotation shows these."""
    ops, root = {result.kernel: result.op for result in run.results}, repository_root()
    return [
        Alert(
            kind=UNREACHED,
            level="note",
            key=(ops.get(one.kernels[0], ""), one.function, UNREACHED, f"{one.text} {one.never}"),
            title=f"No case reached a branch of {one.function}",
            text=f"{coverage.reaching(one)}\nkernels: {', '.join(one.kernels)}",
            place=Location(_relative(one.file, root), one.line),
        )
        for one in coverage.telling(run)
    ]


def _place(result: CaseResult, root: Path) -> Location:
    path, _, line = result.source.rpartition(":")
    if not path:
        return Location(result.source)
    return Location(_relative(path, root), int(line) if line.isdecimal() and int(line) > 0 else 1)


def place_of(step: Step, root: Path) -> Location:
    """Locate a step in its file."""
    columns = step.column + 1, step.end_column + 1
    return Location(_relative(step.file, root), step.line, step.end_line, *columns, text=step.text, code=step.code)


def _relative(path: str, root: Path) -> str:
    resolved = Path(path).resolve()
    return resolved.relative_to(root).as_posix() if resolved.is_relative_to(root) else path


def repository_root() -> Path:
    """Return the folder that holds `.git`, from the working directory up; without one, the working directory."""
    here = Path.cwd().resolve()
    return next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)


# Annotations of GitHub Actions


def workflow_commands(run: Run) -> str:
    """Write one workflow command per problem, worst first; GitHub shows a step's first ten errors and warnings."""
    commands = [f"::error title=lastbit::{_data(run.broken)}"] if run.broken else []
    for alert in alerts(run):
        place = alert.place
        properties = {"file": place.path, "line": str(place.line)} if place.path else {}
        if place.path and place.column:
            properties["endLine"] = str(place.end_line)
            if place.line == place.end_line:  # GitHub takes columns of one line only
                properties |= {"col": str(place.column), "endColumn": str(place.end_column)}
        properties["title"] = alert.title
        escaped = (f"{n}={_data(value).replace(':', '%3A').replace(',', '%2C')}" for n, value in properties.items())
        level = "notice" if alert.level == "note" else alert.level
        commands.append(f"::{level} {','.join(escaped)}::{_data(alert.text)}")
    return "".join(f"{command}\n" for command in commands)


def _data(text: str) -> str:
    return visible(text, keep="\r\n").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


# SARIF

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
ROOT = "SRCROOT"

RULES: Mapping[str, str] = {
    "formula": "A result that follows from another formula than that of the contract",
    "outside": "A value that no kernel which keeps the contract can give",
    "special": "NaN or an infinity where it must not be, or the reverse",
    "rows": "A row that no single value of its latent stage explains",
    "nondeterministic": "Another result in a second call on the same inputs",
    "unwritten": "Elements of a result that were never written",
    "guards": "Another result where nothing watches what the kernel allocates",
    "other_values": "A wrong result in a later call with other values of the same shapes",
    "other_parameters": "A wrong result in a later call with other numbers for the parameters",
    "uninitialised": "Elements of a result that were computed from memory that was never written",
    "overlap": "Results that share memory",
    "reused_memory": "A result in the memory of an earlier call's",
    "broken_property": "A property that the kernel declares is broken",
    "depth": "A sum whose tree is higher than the kernel declares",
    "wrote_outside": "A write beyond a tensor",
    "mutated_input": "An input overwritten that the kernel does not declare",
    "rebound_input": "An input that has another shape or other memory after the call",
    "process_state": "A setting of the whole process that the kernel left changed",
    "placement": "A tensor on another device treated otherwise than the kernel declares",
    "memcheck": "An access outside of every allocation, or misaligned, seen by compute-sanitizer",
    "initcheck": "A read of memory that was never written, seen by compute-sanitizer",
    "racecheck": "A race in the shared memory of a block, seen by compute-sanitizer",
    "synccheck": "A barrier that not all threads reach, seen by compute-sanitizer",
    "lanes": "Lanes of a warp that add in two ways, both possible",
    ERRORED: "A kernel that raised, hung, died, or returned what cannot be judged",
    UNREACHED: "A branch of a kernel that no case of the run reached",
    INCONCLUSIVE: "A kernel that the run could not tell from another contract, or of which it decided too little",
}
"""Kind → what it means, in a few words."""


def sarif(run: Run) -> str:
    """Write the run as the text of a SARIF log with one run."""
    found = [*alerts(run), *unreached_alerts(run)]
    kinds = list(dict.fromkeys(alert.kind for alert in found))
    levels = {INCONCLUSIVE: "warning", UNREACHED: "note", "lanes": "note"}
    rules = [
        {
            "id": kind,
            "shortDescription": {"text": RULES.get(kind, kind.replace("_", " "))},
            "defaultConfiguration": {"level": levels.get(kind, "error")},
        }
        for kind in kinds
    ]
    driver = {"name": "lastbit", "version": run.environment.get("lastbit", ""), "rules": rules}
    invocation: dict[str, Any] = {"executionSuccessful": not run.broken}
    if run.broken:
        invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": run.broken}}]
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {name: value for name, value in driver.items() if value != ""}},
                "originalUriBaseIds": {ROOT: {"description": {"text": "The root of the repository."}}},
                "invocations": [invocation],
                "columnKind": "unicodeCodePoints",
                "results": [_result(alert, kinds) for alert in found],
                "properties": dict(run.environment),
            }
        ],
    }
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def _result(alert: Alert, kinds: list[str]) -> dict[str, Any]:
    """Write one alert; its fingerprint is of its key, so that it stays the same wherever its line moves."""
    kernel = {"name": alert.key[1], "kind": "function"}
    located = {"physicalLocation": _location(alert.place)} if alert.place.path else {}
    result = {
        "ruleId": alert.kind,
        "ruleIndex": kinds.index(alert.kind),
        "level": alert.level,
        "message": {"text": f"{alert.title}\n{alert.text}"},
        "locations": [{**located, "logicalLocations": [kernel]}],
    }
    places = [
        {"id": number, "message": {"text": what}, "physicalLocation": _location(place)}
        for number, (what, place) in enumerate(alert.others, 1)
        if place.path
    ]
    if places:
        result["relatedLocations"] = places
    if (explanation := alert.explanation) is not None and (shown := shown_steps(explanation)):
        root, steps = repository_root(), []  # the way of the worst element through the kernel, with its values
        for step in shown:
            said = f"{step.text} = {value_of(step)}", stage_of(step, explanation)
            location = {
                "physicalLocation": _location(place_of(step, root)),
                "message": {"text": " · ".join(filter(None, said))},
            }
            steps.append({"location": location, "importance": "essential" if step.match is not None else "important"})
        result["codeFlows"] = [{"threadFlows": [{"locations": steps}]}]
    fingerprint = hashlib.sha256("\0".join(alert.key).encode()).hexdigest()[:32]
    return {**result, "partialFingerprints": {"problem/v1": fingerprint}}


def _location(place: Location) -> dict[str, Any]:
    absolute = Path(place.path).is_absolute()
    uri = Path(place.path).as_uri() if absolute else quote(place.path)
    artifact = {"uri": uri} if absolute else {"uri": uri, "uriBaseId": ROOT}
    if not place.column:
        return {"artifactLocation": artifact, "region": {"startLine": place.line}}
    ends = {"endLine": place.end_line, "endColumn": place.end_column}
    region = {"startLine": place.line, "startColumn": place.column, **ends, "snippet": {"text": place.text}}
    line = {"startLine": place.line, "endLine": place.end_line}
    whole = {"snippet": {"text": place.code}} if place.line == place.end_line and place.code else {}
    return {"artifactLocation": artifact, "region": region, "contextRegion": {**line, **whole}}
