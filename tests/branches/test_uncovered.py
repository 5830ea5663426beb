"""A run says which branches of its kernels no case reached, in every form, and no verdict changes by that."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lastbit import cli
from lastbit.reports import alerts, coverage, markdown, records
from lastbit.result import Verdict
from lastbit.run import DEVICE, REFUSAL, Coverage, Run, Unreached
from tests.commands.test_verify_cli import REFERENCE
from tests.reports.test_reports import KERNEL, passed, shown

WIDE = Unreached("norms.py", 41, "norm", "if n > 8192", "true", (KERNEL,), 12)
UNTRIED = replace(WIDE, line=5, text="if not n", why=REFUSAL)
FALLBACK = replace(WIDE, line=9, text="if x.is_cuda", why=DEVICE)
SAID = "norms.py:41 `if n > 8192` was never true (12 cases)"


def run_with(*branches: Unreached) -> Run:
    choices = (Coverage(KERNEL, "cpu", "eps", "", ("1e-6",)),)
    return Run((passed(),), environment={"records": "runs/1"}, coverage=choices, unreached=branches)


def test_a_green_run_counts_them_and_says_how_to_see_them() -> None:
    text = shown(run_with(WIDE, UNTRIED, FALLBACK), verbose=0)
    assert "1 branch that no case reached: lastbit report runs/1 --uncovered" in text
    assert "norms.py" not in text
    assert "no case reached" not in shown(run_with(UNTRIED), verbose=0), "none that handles inputs"
    lines_of_a_reader = replace(run_with(WIDE), coverage=())
    assert "no case reached" not in shown(lines_of_a_reader, verbose=0)


def test_every_form_lists_them() -> None:
    run = run_with(UNTRIED, WIDE, FALLBACK)
    lines = list(coverage.every_line(run))
    assert lines == [
        SAID,
        "norms.py:5 `if not n` was never true (12 cases); a refusal, not tried",
        "norms.py:9 `if x.is_cuda` was never true (12 cases); behind a fallback for another device",
    ]
    text = shown(run, verbose=1)
    assert text.index(coverage.HEADING) < text.index(SAID)
    assert "norms.py:41" in markdown.page(run)


def test_they_are_kept_with_the_records(tmp_path: Path) -> None:
    run = run_with(WIDE)
    records.write(run, tmp_path)
    assert records.read(tmp_path) == run
    rest = json.loads((tmp_path / "run.json").read_text())
    del rest["unreached"]
    (tmp_path / "run.json").write_text(json.dumps(rest))
    assert records.read(tmp_path).unreached is None, "of an older lastbit"


def test_with_strict_a_kernel_is_inconclusive_and_the_line_says_which_case_would_decide() -> None:
    wanted = replace(WIDE, wanted="n > 8192, where n = x.shape[-1]")
    assert run_with(wanted).overall is Verdict.PASSED
    run = run_with(replace(wanted, decides=True), UNTRIED)
    assert (run.overall, run.exit_code) == (Verdict.INCONCLUSIVE, 1)
    reason = f"{SAID}; a case with n > 8192, where n = x.shape[-1], would"
    assert reason in " ".join(shown(run, verbose=0).split())
    assert [reason in " ".join(alert.text.split()) for alert in alerts.alerts(run)] == [True]
    other = replace(run, unreached=(replace(wanted, decides=True, kernels=("another",)),))
    assert other.overall is Verdict.PASSED


def test_sarif_has_a_note_at_the_line_and_annotations_have_none() -> None:
    run = run_with(WIDE, UNTRIED)
    [result] = json.loads(alerts.sarif(run))["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], result["level"], place["region"]) == ("unreached", "note", {"startLine": 41})
    assert place["artifactLocation"]["uri"] == "norms.py"
    assert alerts.workflow_commands(run) == ""


def test_what_is_not_known_is_said_only_where_somebody_asks() -> None:
    run = replace(run_with(), unreached=None)
    assert "is not known" not in shown(run, verbose=1)
    assert list(coverage.every_line(run)) == [coverage.UNKNOWN]


KERNELS = """\
from lastbit import UnsupportedCase, kernel


@kernel("thrice")
def triple(x):
    if x.shape[0] == 3:
        raise UnsupportedCase("three rows")
    if x.shape[-1] > 8192:
        return tripled(x.double())
    return tripled(x)


def tripled(x):
    if x.shape[0] == 3:
        return x * 3
    return (x.float() * 3).to(x.dtype)


@kernel("thrice")
def another(x):
    return tripled(x)
"""


@pytest.fixture
def untraced() -> Iterator[None]:
    tracer = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracer)


@pytest.fixture
def verify(
    untraced: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, Run]]:
    """Return what verifies both kernels on lines of cases: exit code, output and run."""
    for name, text in (("references/thrice.py", REFERENCE), ("kernels/thrice.py", KERNELS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lastbit.commands.explaining.with_explanations", lambda config, run, **_: run)

    def run(*words: str) -> tuple[int, str, Run]:
        command = ["verify", "--project", ".", "kernels", "-n", "1", "--run-folder", "run"]
        return cli.main([*command, *words]), capsys.readouterr().out, records.read(Path("run"))

    return run


def test_a_run_tells_what_no_case_of_any_kernel_reached(verify: Callable[..., tuple[int, str, Run]]) -> None:
    code, text, run = verify("thrice x=bf16[2,64] seed=1", "thrice x=bf16[3,64] seed=1", "--uncovered", "--strict")
    assert (code, run.unreached is not None) == (0, True), "lines that a reader gives are not asked for more"
    assert [(one.line, one.never, one.why, one.cases) for one in run.unreached or ()] == [(8, "true", "", 1)]
    assert "kernels/thrice.py:8 `if x.shape[-1] > 8192` was never true (1 case)" in text


def test_of_kernels_in_processes_of_their_own_nothing_is_known(verify: Callable[..., tuple[int, str, Run]]) -> None:
    code, text, run = verify("thrice x=bf16[2,64] seed=1", "--uncovered", "--isolate")
    assert (code, run.unreached) == (0, None)
    assert "is not known" in text
