"""What docs/explain.md shows of a case is what its commands print; `python docs/examples/run.py` writes it anew."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import triton
from in_this_process import InThisProcess

from lastbit.cli import main
from lastbit.commands import explain as command_of_case
from lastbit.diagnosing import explainer as explaining

DOCS = Path(__file__).resolve().parents[2] / "docs"
SHOWN = re.findall(
    r"<!-- \$ lastbit (.*?) -->\n+```\n(.*?)```", (DOCS / "explain.md").read_text(encoding="utf-8"), re.DOTALL
)
OF_A_CASE = [(command, printed) for command, printed in SHOWN if command.startswith("explain fp32_weight")]


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")
@pytest.mark.parametrize(("command", "printed"), OF_A_CASE, ids=["explain", "trace"])
def test_the_page_shows_what_is_printed(
    command: str, printed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to the smallest tensors: what a search finds in five seconds depends on the machine."""
    shutil.copytree(DOCS / "examples" / "fp32_weight", tmp_path / "fp32_weight")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(explaining, "Worker", InThisProcess)
    monkeypatch.setattr(explaining, "SHRINKING", 0.0)
    monkeypatch.setattr(command_of_case, "Worker", InThisProcess)
    assert main(shlex.split(command)) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    sure = printed.partition("\n  smallest ")[0].strip()
    assert "\n".join(lines).startswith(sure) and len(sure.splitlines()) > 15
