"""Properties of kernels' bits in records, reports, between two runs and in goldens."""

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from rich.console import Console

from lastbit.case import Group, parse_case
from lastbit.config import Config
from lastbit.history.golden_check import Take, Target, asked_of, compare, held, take
from lastbit.history.golden_file import Golden, read, write
from lastbit.kernel import Kernel
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.reports import alerts, changes, html, junit, markdown, records
from lastbit.reports.golden import KernelOutcome, Status
from lastbit.reports.summary import repro_line
from lastbit.reports.terminal import print_run
from lastbit.result import CaseResult, Comparison, Finding, StageResult, Verdict
from lastbit.run import Run
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project
from lastbit.verify.worker import unwatched

LINE = "rms_norm x=fp32[40,256] weight=fp32[256] eps=1e-06 seed=1"
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
BROKEN = PropertyResult(
    name="rows",
    outcome=PropertyOutcome.BROKEN,
    pairs=84,
    first=LINE,
    second="row 0 alone",
    where="changes between 18 and 19 rows",
    result="output",
    elements=107,
    numel=10_240,
    rows=12,
    ulp=1.0,
    legal=True,
)
HOLDS = PropertyResult("rows", PropertyOutcome.HOLDS, pairs=84)
LAYOUT = PropertyResult("layout", PropertyOutcome.HOLDS, declared=True, pairs=5)
NOTHING = PropertyResult("in place", PropertyOutcome.NOT_APPLICABLE, reason="the kernel overwrites nothing")


def result(*properties: PropertyResult, kernel: str = "mine", device: str = "cpu") -> CaseResult:
    seen = Comparison(numel=10_240, decided=10_240)
    fails = [one for one in properties if one.fails]
    return CaseResult(
        case=LINE,
        op="rms_norm",
        kernel=kernel,
        contract="fp32_multiply",
        device=device,
        dtypes="fp32",
        verdict=Verdict.FAILED if fails else Verdict.PASSED,
        findings=tuple(Finding("broken_property", one.name, f"{one.name} is broken.") for one in fails),
        stages=(StageResult("output", "fp32", True, seen, seen, "bits"),),
        fingerprint="inputs",
        properties=properties,
    )


def declared(one: PropertyResult) -> PropertyResult:
    return replace(one, declared=True)


# Records


def test_records_keep_them_and_those_of_an_older_lastbit_load(tmp_path: Path) -> None:
    run = Run((result(BROKEN, LAYOUT),))
    records.write(run, tmp_path)
    assert records.read(tmp_path).results == run.results
    [row] = pd.read_parquet(tmp_path / "records.parquet").to_dict("records")
    assert json.loads(row["properties"]) == {"rows": "broken", "layout": "holds"}
    older = json.loads(records.dump(run.results[0]))
    del older["properties"]
    assert records.parse(json.dumps(older).encode(), "a file").properties == ()


# Reports


def terminal(run: Run) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        print_run(run, console, verbose=1)
    return capture.get()


def test_a_line_per_kernel_and_one_for_what_is_broken() -> None:
    shown = terminal(Run((result(LAYOUT, BROKEN, NOTHING), result(kernel="other"))))
    assert "  mine on cpu: holds what it declares: layout\n" in shown
    assert "    rows broken, undeclared: changes between 18 and 19 rows, 107 of 10,240 elements of output" in shown
    assert "other on cpu: " not in shown, "a kernel that was not asked is not named"


def test_markdown_and_html_have_a_word_for_each_property() -> None:
    run = Run((result(LAYOUT, declared(BROKEN), NOTHING), result(LAYOUT, HOLDS, kernel="other")))
    text = markdown.page(run)
    assert "| kernel | device | layout | rows |" in text, "what means nothing for any kernel is no column"
    assert "| mine | cpu | kept | **BROKEN**: changes between 18 and 19 rows" in text
    assert "| other | cpu | kept | holds |" in text
    page = html.page(run)
    assert "What the bits depend on" in page and "changes between 18 and 19 rows" in page
    assert "What the bits depend on" not in html.page(Run((result(),)))


def test_what_is_declared_and_nothing_could_show_is_said_with_the_reason() -> None:
    run = Run((result(LAYOUT, declared(NOTHING)),))
    assert "layout; declared, but not applicable in any case: in place (the kernel overwrites nothing)" in terminal(run)
    assert "| mine | cpu | kept | **unasked**: the kernel overwrites nothing |" in markdown.page(run)
    assert "unasked" in html.page(run)


def test_machines_get_those_that_are_declared() -> None:
    run = Run((result(declared(BROKEN)),))
    [alert] = json.loads(alerts.sarif(run))["runs"][0]["results"]
    assert alert["ruleId"] == "broken_property"
    assert 'type="broken_property"' in junit.document(run)


def test_the_repro_line_asks_for_the_property() -> None:
    spaced = replace(declared(BROKEN), name="run to run")
    assert repro_line(result(declared(BROKEN))).endswith("--device cpu --property rows")
    assert repro_line(result(spaced)).endswith("--property 'run to run'")
    assert "--property" not in repro_line(result(BROKEN)), "what fails nothing needs no repro"


# Two runs


def between(before: PropertyResult, after: PropertyResult) -> changes.Changes:
    return changes.compare(Run((result(before),)), Run((result(after),)))


@pytest.mark.parametrize(
    ("before", "after", "fate", "code", "said"),
    [
        (HOLDS, BROKEN, changes.Fate.CHANGED, 0, "lost: rows: changes between"),
        (declared(HOLDS), declared(BROKEN), changes.Fate.WORSE, 1, "lost: rows, which it declares: changes"),
        (declared(HOLDS), BROKEN, changes.Fate.WORSE, 1, "lost: rows, which it declared: changes between"),
        (HOLDS, replace(BROKEN, legal=False), changes.Fate.WORSE, 1, "outside the contract"),
        (BROKEN, HOLDS, changes.Fate.CHANGED, 0, "gained: rows"),
    ],
)
def test_gained_and_lost(
    before: PropertyResult, after: PropertyResult, fate: changes.Fate, code: int, said: str
) -> None:
    found = between(before, after)
    [kernel] = found.kernels
    assert (kernel.change, found.exit_code()) == (fate, code)
    assert any(said in note for note in changes.notes(kernel, found.names))
    [one] = json.loads(changes.as_json(found))["kernels"][0]["properties"]
    assert (one["property"], one["lost"], one["worse"]) == ("rows", after is not HOLDS, code == 1)


@pytest.mark.parametrize("after", [HOLDS, replace(NOTHING, name="rows"), LAYOUT])
def test_what_one_run_did_not_ask_is_neither(after: PropertyResult) -> None:
    [kernel] = between(HOLDS, after).kernels
    assert kernel.change is changes.Fate.UNCHANGED and not kernel.properties


# Goldens


def in_halves(x, weight, *, eps):
    squares = x.square()
    total = squares[..., ::2].sum(-1) + squares[..., 1::2].sum(-1)
    return x * torch.rsqrt(total / x.shape[-1] + eps)[..., None] * weight


def by_number_of_rows(x, weight, *, eps):
    if x.shape[0] >= 19:
        return in_halves(x, weight, eps=eps)
    return x * torch.rsqrt(x.square().sum(-1) / x.shape[-1] + eps)[..., None] * weight


def target(function) -> Target:
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", function)
    group = Group("properties", examples=(parse_case(LINE),), properties=True)
    return Target(Subject(kernel, RMS_NORM, torch.device("cpu")), (group,), Path("mine.safetensors"))


def today(function) -> Take:
    asked = {name: asked_of(target(function).subject, target(function).groups)[name] for name in ("rows", "run to run")}
    return take(target(function).subject, [LINE], watch=unwatched, tick=lambda result: None, asked=asked)


def checked(golden: Golden) -> KernelOutcome:
    """Return what `golden check` says of the kernel that gives other bits from 19 rows on."""
    return held(target(by_number_of_rows), golden, watch=unwatched, tick=lambda result: None).outcome


def test_a_golden_keeps_the_properties_that_held_and_a_check_says_which_are_lost(tmp_path: Path) -> None:
    golden = read(write(today(in_halves).golden, tmp_path))
    assert golden.properties == {"rows": [LINE], "run to run": [LINE]}
    outcome = checked(golden)
    assert outcome.status is Status.LOST
    [sentence] = outcome.lost
    assert "changes between 18 and 19 rows" in sentence
    assert held(target(in_halves), golden, watch=unwatched, tick=lambda result: None).outcome.status is Status.SAME


def test_a_golden_of_an_older_lastbit_says_nothing_of_them(tmp_path: Path) -> None:
    golden = read(write(replace(today(in_halves).golden, properties=None), tmp_path))
    assert golden.properties is None
    assert checked(golden).status is Status.SAME
    new = today(in_halves).golden
    assert compare(golden, new, None, "").status is Status.SAME
    assert compare(new, replace(new, properties={}), None, "").lost == (
        "rows held, and does not any more.",
        "run to run held, and does not any more.",
    )
