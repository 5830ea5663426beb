"""Goldens of a CPU on another processor: what torch's libraries decide there is told, and is no loss."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from lastbit.history.golden_check import Take, compare
from lastbit.history.golden_file import Golden
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.reports.golden import GoldenReport, Status, print_goldens

BEFORE = Golden("mine", "rms_norm", "fp32_multiply", "cpu", {"device": "one processor"}, (), {"layout": ("line",)})
HERE = replace(BEFORE, properties={})
ELSEWHERE = replace(HERE, provenance={"device": "another processor"})
BROKEN = PropertyResult(
    "layout", PropertyOutcome.BROKEN, elements=1, numel=4000, ulp=1.0, second="strides", result="output"
)
CHECKED = {"fine": (Status.SAME, Status.CHANGED)}


@pytest.mark.parametrize(
    ("after", "found", "status"),
    [
        (ELSEWHERE, replace(BROKEN, legal=True), Status.SAME),
        (ELSEWHERE, replace(BROKEN, legal=False), Status.LOST),
        (ELSEWHERE, replace(BROKEN, declared=True, legal=True), Status.LOST),
        (ELSEWHERE, PropertyResult("layout", PropertyOutcome.NOT_APPLICABLE, reason="it raised"), Status.LOST),
        (HERE, replace(BROKEN, legal=True), Status.LOST),
    ],
    ids=["undeclared", "not legal", "declared", "not asked", "same processor"],
)
def test_only_what_a_processor_may_decide_is_no_loss(after: Golden, found: PropertyResult, status: Status) -> None:
    outcome = compare(BEFORE, after, Take({}, after, {"layout": found}), "mine.safetensors")
    assert outcome.status is status
    report = GoldenReport("cpu", (outcome,))
    assert report.exit_code(**CHECKED) == (0 if status is Status.SAME else 1)
    print_goldens(report, Console(file=(shown := StringIO()), width=120))
    assert "layout" in shown.getvalue()
    assert ("of another processor" in shown.getvalue()) is (status is Status.SAME)
