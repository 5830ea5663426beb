"""The document of `lastbit judge`: its form is a promise."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from rich.console import Console

from lastbit.reports.judged import (
    SCHEMA,
    CallTime,
    CaseFinding,
    Contracts,
    Culprit,
    DecidedShare,
    FileVerdict,
    Held,
    as_json_line,
    document,
    print_judged,
    schema,
)
from lastbit.result import Verdict

FOUND = FileVerdict(
    file="kernel.py",
    sha256="0" * 64,
    op="an_op",
    kernel="mine",
    contract="an_option",
    device="cpu",
    verdict=Verdict.FAILED,
    cases=dict.fromkeys(Verdict, 0) | {Verdict.PASSED: 7, Verdict.FAILED: 1},
    planned=51,
    decided=(DecidedShare("output", "bf16", 1000, 990, 0.99),),
    findings=(CaseFinding("outside", "output", "1 of 4 elements is wrong.", "an_op x=bf16[4]", "lastbit judge …"),),
    culprit=Culprit("kernel.py", 3, "x * eps", "x * eps is 2, and the contract allows 1"),
    contracts=Contracts(("another",), (), ("an_option",)),
    torch_ops=("aten::an_op",),
    notes=("the file declares the contract another; it is held to an_option",),
    confinement={"memory": Held(True, "8 GB")},
    speed=CallTime("an_op x=bf16[4]", 2e-5, 1e-6, 100, {"eager": 3e-5}, 0.7),
    seconds=0.25,
    seed="random",
    profile="smoke",
    versions={"torch": "2.13.0"},
)

PLAIN = replace(FOUND, verdict=Verdict.PASSED, findings=(), culprit=None, speed=None, torch_ops=(), notes=())

PROMISED = {
    "schema": "lastbit.judge/1",
    **dict.fromkeys(("file", "sha256", "op", "kernel", "contract", "device", "reason"), "string"),
    **dict.fromkeys(("culprit_reason", "speed_reason", "seed", "profile"), "string"),
    "verdict": "PASSED SKIPPED UNSUPPORTED INCONCLUSIVE FAILED ERRORED",
    **{f"cases.{verdict.value}": "integer" for verdict in Verdict},
    "planned": "integer",
    **dict.fromkeys(("decided[].result", "decided[].dtype"), "string"),
    **dict.fromkeys(("decided[].elements", "decided[].decided"), "integer"),
    "decided[].share": "number",
    **{f"findings[].{name}": "string" for name in ("kind", "stage", "sentence", "case", "repro")},
    "culprit": "null",
    **{f"culprit.{name}": "string" for name in ("file", "expression", "sentence")},
    "culprit.line": "integer",
    **{f"contracts.{name}[]": "string" for name in ("keeps", "open", "ruled_out")},
    **{f"{name}[]": "string" for name in ("torch_ops", "notes")},
    "confinement.*.holds": "boolean",
    "confinement.*.how": "string",
    "speed": "null",
    "speed.case": "string",
    **dict.fromkeys(("speed.seconds", "speed.overhead", "speed.beside.*", "seconds"), "number"),
    "speed.calls": "integer",
    "speed.roof": "number null",
    "versions.*": "string",
}
"""Field → type in documents of `lastbit.judge/1`. Whoever has to change a line of this needs `lastbit.judge/2`."""


def fields(given: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Path and type of every field that a schema knows and requires."""
    for option in given.get("anyOf", ()):
        yield from fields(option, path)
    if "const" in given or "enum" in given:
        yield path, given.get("const") or " ".join(given["enum"])
    elif "properties" in given:
        assert set(given["required"]) == set(given["properties"]), path
        for name, each in given["properties"].items():
            yield from fields(each, f"{path}.{name}".removeprefix("."))
    elif given.get("type") == "array":
        yield from fields(given["items"], f"{path}[]")
    elif "additionalProperties" in given:
        yield from fields(given["additionalProperties"], f"{path}.*")
    elif "type" in given:
        yield path, given["type"] if isinstance(given["type"], str) else " ".join(given["type"])


def test_no_field_of_this_schema_goes_or_changes_its_type() -> None:
    known = dict(fields(schema()))
    assert {name: known.get(name) for name in PROMISED} == PROMISED


@pytest.mark.parametrize("found", [FOUND, PLAIN, replace(PLAIN, seconds=float(3))])
def test_documents_are_as_the_schema_says(found: FileVerdict) -> None:
    made = json.loads(as_json_line(found))
    jsonschema.validate(made, schema())
    assert made["schema"] == SCHEMA == schema()["$id"]


def test_every_field_of_a_document_is_in_the_schema() -> None:
    """With all of them required and none unknown, so that a new field cannot be forgotten there."""

    def closed(given: Any) -> Any:
        if isinstance(given, list):
            return [closed(each) for each in given]
        if not isinstance(given, dict):
            return given
        made = {name: closed(each) for name, each in given.items()}
        return {"additionalProperties": False, **made} if "required" in made else made

    jsonschema.validate(document(FOUND), closed(schema()))


@pytest.mark.parametrize("change", [{"verdict": "PASS"}, {"seconds": "0.25"}, {"schema": "lastbit.judge/2"}])
def test_the_schema_refuses_something_else(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document(FOUND), **change}, schema())


def test_exit_codes_are_those_of_verify() -> None:
    codes = {verdict.value: replace(FOUND, verdict=verdict).exit_code for verdict in Verdict}
    assert codes == {"PASSED": 0, "INCONCLUSIVE": 1, "FAILED": 1, "ERRORED": 2, "SKIPPED": 3, "UNSUPPORTED": 3}


def test_a_reader_gets_the_first_finding_the_line_and_what_to_do_next() -> None:
    printed = io.StringIO()
    print_judged(replace(FOUND, kernel="mi\x1bne"), Console(file=printed, width=100))
    text = printed.getvalue()
    assert "\x1b" not in text and "FAILED  kernel.py:mi\\x1bne  contract an_option of an_op on cpu" in text
    print_judged(replace(FOUND, seed="random:12", contract="a+b", idle=("b",)), Console(file=printed, width=100))
    assert "contract a of an_op" in printed.getvalue() and "--seed random:12" in printed.getvalue()
    for part in ("7 passed, 1 failed, 43 not run", "1 of 4 elements is wrong.", "kernel.py:3  x * eps", "next "):
        assert part in text


def test_the_next_command_is_not_broken_and_nothing_else_is_wider_than_the_terminal() -> None:
    printed, repro = io.StringIO(), "lastbit judge kernel.py 'an_op x=bf16[4]' --op an_op --contract an_option"
    found = replace(FOUND, file="a/long/path/of/a/kernel.py", findings=(replace(FOUND.findings[0], repro=repro),))
    print_judged(found, Console(file=printed, width=60))
    assert [line.strip() for line in printed.getvalue().splitlines() if len(line) > 60] == [repro]


def test_what_a_kernel_raised_is_said_once_and_no_contract_of_what_was_not_compared() -> None:
    printed = io.StringIO()
    raised = replace(FOUND.findings[0], kind="errored", sentence="ValueError: no")
    found = replace(FOUND, verdict=Verdict.ERRORED, reason="ValueError: no", findings=(raised,), culprit=None, notes=())
    print_judged(found, Console(file=printed, width=100))
    assert printed.getvalue().count("ValueError: no") == 1
    assert "contract" not in printed.getvalue()


def test_a_kernel_that_fails_for_no_value_is_not_told_to_keep_what_it_is_held_to() -> None:
    for keeps, said in (
        ("an_option", "values    every element fits an_option; the kernel"),
        ("another", "keeps     another"),
    ):
        printed = io.StringIO()
        print_judged(replace(FOUND, contracts=Contracts((keeps,), (), ())), Console(file=printed, width=100))
        assert f"\n  {said}" in printed.getvalue()
        assert ("  keeps" in printed.getvalue()) == (keeps == "another")
