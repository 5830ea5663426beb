"""A run as SARIF 2.1.0, for code scanning: a result per problem, at the line that is wrong where it is known.

Source: OASIS Standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lastbit.reports.alerts import (
    ERRORED,
    INCONCLUSIVE,
    UNREACHED,
    Alert,
    Location,
    alerts,
    place_of,
    repository_root,
    unreached_alerts,
)
from lastbit.reports.explanation import shown_steps, stage_of, value_of
from lastbit.run import Run

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


def document(run: Run) -> str:
    """Write the run as the text of a SARIF log with one run."""
    found = [*alerts(run), *unreached_alerts(run)]
    kinds = list(dict.fromkeys(alert.kind for alert in found))
    driver = {"name": "lastbit", "version": run.environment.get("lastbit", ""), "rules": [_rule(k) for k in kinds]}
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {name: value for name, value in driver.items() if value != ""}},
                "originalUriBaseIds": {ROOT: {"description": {"text": "The root of the repository."}}},
                "invocations": [_invocation(run)],
                "columnKind": "unicodeCodePoints",
                "results": [_result(alert, kinds) for alert in found],
                "properties": dict(run.environment),
            }
        ],
    }
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


def _rule(kind: str) -> dict[str, Any]:
    text = RULES.get(kind, kind.replace("_", " "))
    level = {INCONCLUSIVE: "warning", UNREACHED: "note", "lanes": "note"}.get(kind, "error")
    return {"id": kind, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}


def _invocation(run: Run) -> dict[str, Any]:
    """Say whether the run came to its end, and if not, why."""
    if not run.broken:
        return {"executionSuccessful": True}
    notification = {"level": "error", "message": {"text": run.broken}}
    return {"executionSuccessful": False, "toolExecutionNotifications": [notification]}


def _result(alert: Alert, kinds: list[str]) -> dict[str, Any]:
    kernel = {"name": alert.key[1], "kind": "function"}
    located = {"physicalLocation": _location(alert.place)} if alert.place.path else {}
    return {
        "ruleId": alert.kind,
        "ruleIndex": kinds.index(alert.kind),
        "level": alert.level,
        "message": {"text": f"{alert.title}\n{alert.text}"},
        "locations": [{**located, "logicalLocations": [kernel]}],
        **_related(alert),
        **_code_flow(alert),
        "partialFingerprints": {"problem/v1": _fingerprint(alert)},
    }


def _related(alert: Alert) -> dict[str, Any]:
    """List the other places to look at, if there are any."""
    places = [
        {"id": number, "message": {"text": what}, "physicalLocation": _location(place)}
        for number, (what, place) in enumerate(alert.others, 1)
        if place.path
    ]
    return {"relatedLocations": places} if places else {}


def _code_flow(alert: Alert) -> dict[str, Any]:
    """Describe the way of the worst element through the kernel, with its values, if it was followed."""
    explanation, root = alert.explanation, repository_root()
    if explanation is None or not (steps := shown_steps(explanation)):
        return {}
    said = ((step, f"{step.text} = {value_of(step)}", stage_of(step, explanation)) for step in steps)
    locations = [
        {
            "location": {
                "physicalLocation": _location(place_of(step, root)),
                "message": {"text": " · ".join(filter(None, parts))},
            },
            "importance": "essential" if step.match is not None else "important",
        }
        for step, *parts in said
    ]
    return {"codeFlows": [{"threadFlows": [{"locations": locations}]}]}


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


def _fingerprint(alert: Alert) -> str:
    """Hash the alert's key, so that a problem keeps its fingerprint wherever its line moves."""
    return hashlib.sha256("\0".join(alert.key).encode()).hexdigest()[:32]
