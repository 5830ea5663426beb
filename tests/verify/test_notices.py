"""Notices: shown in every report, counted as no fault, unless a run is strict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from lastbit.case import parse_case
from lastbit.cli import make_parser
from lastbit.commands.options import config_of
from lastbit.config import Config
from lastbit.diagnosing.handover import search_stages
from lastbit.kernel import Kernel
from lastbit.references.rms_norm import rms_norm
from lastbit.reports import alerts, html, junit, markdown, records
from lastbit.reports.stage_summary import stage_order, stage_summaries
from lastbit.reports.stages import StageKind, sentences
from lastbit.reports.summary import problems
from lastbit.result import CaseResult, Finding, RowCheck, Verdict
from lastbit.run import Run
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.processes import options_of
from tests.judging.test_latent_lanes import by_columns
from tests.reports.test_reports import failed, passed, shown

LANES = Finding("lanes", "output", "3 of 10 rows come from two values.", notice=True)
ROWS = RowCheck("inv_rms", 10, 7, 3)


def noticed(**changes: object) -> CaseResult:
    return passed(**{"findings": (LANES,), "rows": ROWS, **changes})


@pytest.fixture
def run() -> Run:
    larger = noticed(case="rms_norm x=bf16[40,128] eps=1e-06 seed=3")
    return Run((noticed(), larger, passed(kernel="plain")))


def test_a_case_with_notices_only_has_passed(run: Run) -> None:
    assert run.overall is Verdict.PASSED and run.exit_code == 0 and problems(run) == []
    stages = stage_summaries(run.results, stage_order(run.results))
    assert [stage.verdict for stage in stages] == [Verdict.PASSED, Verdict.PASSED]


def test_strict_makes_faults_of_notices() -> None:
    strict = noticed().strict
    assert strict.verdict is Verdict.FAILED
    assert (strict.notices, [f.sentence for f in strict.faults]) == ((), [LANES.sentence])
    assert passed().strict == passed() and failed().strict == failed()
    errored = noticed(verdict=Verdict.ERRORED)
    assert errored.strict.verdict is Verdict.ERRORED


def test_what_wrong_results_say_begins_with_their_faults() -> None:
    wrong = failed(findings=(LANES, *failed().findings))
    [problem] = problems(Run((replace(wrong, stages=()),)))
    assert problem.smallest.faults[0].kind == "outside"
    assert alerts.alerts(Run((wrong,)))[0].kind == "outside"


def test_every_report_shows_notices(run: Run) -> None:
    texts = {
        "terminal": " ".join(shown(run).split()),
        "markdown": markdown.page(run),
        "html": html.page(run),
        "junit": ElementTree.fromstring(junit.document(run)).findtext(".//system-out", ""),
        "sarif": alerts.sarif(run),
        "annotations": alerts.workflow_commands(run),
    }
    for form, text in texts.items():
        assert "2 cases, 6 rows; in the case below, 3 of 10 rows come from two values." in text, form
        assert "lastbit verify" in text, form
    assert "Notices" in texts["terminal"] and "### Notices" in texts["markdown"]
    assert json.loads(texts["sarif"])["runs"][0]["results"][0]["level"] == "note"
    assert texts["annotations"].startswith("::notice ")


def test_records_keep_notices_and_load_those_of_an_older_lastbit() -> None:
    line = records.dump(noticed())
    assert records.parse(line.encode(), "here") == noticed()
    table = records.frame([noticed()])
    assert table["notices"][0] == LANES.sentence and table["findings"][0] == "" and table["rows_split"][0] == 3
    old = json.loads(records.dump(failed()))
    del old["findings"][0]["notice"], old["rows"]["split"], old["rows"]["needs"]
    assert records.parse(json.dumps(old).encode(), "here") == failed()


@pytest.mark.parametrize("strict", [False, True])
def test_a_strict_subject_fails_where_lanes_disagree(strict: bool) -> None:
    def halves(x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        return by_columns(x, weight, [0] * 16 + [3] * 16, eps)["output"]

    kernel = Kernel("halves", "rms_norm", "fp32_multiply", halves)
    subject = Subject(kernel, rms_norm, torch.device("cpu"), strict=strict)
    result = verify_case(subject, parse_case("rms_norm x=fp32[6,32] weight=fp32[32] eps=1e-05 seed=1"))
    assert result.verdict is (Verdict.FAILED if strict else Verdict.PASSED)
    assert [(f.kind, f.notice) for f in result.findings] == [("lanes", not strict)]


def test_stages_finds_no_fault_where_lanes_disagree() -> None:
    def halves(x: torch.Tensor, weight: torch.Tensor, *, eps: float, stages: tuple[str, ...] = ()) -> object:
        made = by_columns(x, weight, [0] * 16 + [3] * 16, eps)
        return made if stages else made["output"]

    kernel = Kernel("halves", "rms_norm", "fp32_multiply", halves, stages=("inv_rms",))
    case = parse_case("rms_norm x=fp32[6,32] weight=fp32[32] eps=1e-05 seed=1")
    found = search_stages(Subject(kernel, rms_norm, torch.device("cpu")), case)
    assert (found.kind, found.beside, found.exit_code) == (StageKind.CLEAN, (), 0)
    assert not any(handover.isolated.outside or handover.backward for handover in found.handovers)
    assert list(sentences(found))[-1].startswith("Notice: 6 of 6 rows come from two values of fp32 inv_rms")


def test_strict_reaches_the_run_and_its_repro_lines(tmp_path: Path) -> None:
    for words in (["verify"], ["verify", "rms_norm x=fp32[6,32] eps=1e-05 seed=1"]):
        options, _ = make_parser().parse_known_args(
            [*words, "--strict", "--run-folder", str(tmp_path / str(len(words)))]
        )
        config = config_of(options)
        assert config.strict and options_of(config) == "--strict"
        assert Config.load(config.save()) == config
    assert not config_of(make_parser().parse_args(["verify", "rms_norm x=fp32[6,32] eps=1e-05 seed=1"])).strict
