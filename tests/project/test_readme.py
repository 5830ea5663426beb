"""README's sample output has the words and cases of what README's kernel prints, and the findings of its smallest case.

`python docs/examples/run.py sample` writes it anew.
"""

from __future__ import annotations

import io
import re
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.diagnosing.explain import explain_case
from lastbit.kernel import load_kernels
from lastbit.references.rms_norm import rms_norm
from lastbit.reports.terminal import print_run
from lastbit.result import Verdict
from lastbit.run import Run
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.drawing import draw
from lastbit.verify.plan import make_plan

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
SAMPLE = README.partition("## Reading the output")[2].partition("```\n")[2].partition("```")[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with README's kernel, under the claim of the sample."""
    folder = tmp_path_factory.mktemp("my_kernels")
    source = README.partition("```python\nimport torch\nfrom lastbit ")[2].partition("```")[0]
    claimed = source.replace('contract="fp32_multiply"', 'contract="native_multiply"')
    (folder / "norms.py").write_text(f"import torch\nfrom lastbit {claimed}")
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """What a run of the kernel on the sample's smallest case prints."""
    (kernel,) = load_kernels(folder)
    line = next(word for word in shlex.split(SAMPLE.splitlines()[-1]) if "=" in word)
    console = Console(file=io.StringIO(), width=100)
    subject, case = Subject(kernel, rms_norm, torch.device("cpu")), parse_case(line)
    explanation = replace(explain_case(subject, case), smallest=line)
    print_run(Run((verify_case(subject, case),), explanations=(explanation,)), console, verbose=1)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def fields(text: str) -> dict[str, str]:
    """Label → text of the fields of the first finding; a paragraph is one line."""
    block = text[text.index("FAILED  my_rms_norm of") :].partition("\n  lastbit ")[0]
    found = re.findall(r"^  (\S.{10}) (.*(?:\n {14}.*)*)", block, re.MULTILINE)
    return {label.strip(): " ".join(said.split()) for label, said in found}


def test_the_table_has_the_columns_of_the_sample(printed: str) -> None:
    header = next(line for line in printed.splitlines() if line.startswith("  stage "))
    assert SAMPLE.splitlines()[0].split() == header.split()


def test_the_fields_of_the_finding_are_those_of_the_sample(printed: str) -> None:
    sample, now = fields(SAMPLE), fields(printed)
    assert list(sample) == list(now)
    for label in ("claims", "first wrong", "finding", "statistics", "rounding"):
        assert sample[label] == now[label]


def test_the_cases_of_the_sample_are_those_of_its_command(folder: Path) -> None:
    """As many of each dtype, and as many that pass; figures of processors differ in a bit here and there."""
    plan = make_plan(Config(folder="", profile="smoke", kernel_folders=(str(folder),)), "cpu")
    cases = [(item, case) for item in plan.items for case in draw(item.group, plan.cases_per_group)]
    verdicts = Counter(verify_case(item.subject, case, repeat=False, settled=None).verdict for item, case in cases)
    counts = f"{len(cases)} cases: {verdicts[Verdict.PASSED]} passed, {verdicts[Verdict.FAILED]} failed"
    assert re.findall(r"\d+ cases: .*", SAMPLE)[0] == counts
    dtypes = Counter(case.tensors[0].dtype for _, case in cases)
    assert dict(re.findall(r"^  output +(\w+) +(\d+)", SAMPLE, re.MULTILINE)) == {k: str(n) for k, n in dtypes.items()}
