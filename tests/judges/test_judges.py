"""Kernel files judged by a judge that stays warm, and the command that prints what it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any

import jsonschema
import pytest
import torch

import lastbit
from lastbit.case import parse_case
from lastbit.cli import main
from lastbit.commands import judge as command
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.inputs import Inputs
from lastbit.isolation.answers import Raised
from lastbit.judges import opening
from lastbit.judges.judge_file import unjudged
from lastbit.judges.question import JudgeQuestion
from lastbit.kernel import Kernel
from lastbit.reports.judged import FileVerdict, document, schema
from lastbit.result import Verdict
from lastbit.verify.case_calls import Caller
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project

LINES = (
    "rms_norm x=bf16[2,8] weight=bf16[8] eps=0.001 seed=5",
    "rms_norm x=bf16[4,64]@80,1 weight=bf16[64] eps=0.001 seed=1",
    "rms_norm x=fp32[3,16] weight=fp32[16] eps=0.001 seed=2",
)
FILE = """import os, sys, threading, time
import torch
import torch.nn.functional as F

def rms_norm(x, weight, *, eps):
    value = x.float()
{body}
    return ({value} * weight.float()).to(x.dtype)
"""
RIGHT = "value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)"
LIBRARY = "F.rms_norm(value, value.shape[-1:], None, eps)"


@pytest.fixture(scope="module")
def judges() -> Iterator[lastbit.Judges]:
    with lastbit.Judges(1, op="rms_norm", contract="fp32_multiply", lines=LINES, timeout=5.0, explain=0.0) as judges:
        yield judges


def written(folder: Path, value: str = RIGHT, body: str = "pass") -> Path:
    path = folder / "kernel.py"
    path.write_text(FILE.format(value=value, body=indent(body, "    ")))
    return path


def asked(judges: lastbit.Judges, path: Path, **question: Any) -> FileVerdict:
    """Judge a file, and check its document by the schema."""
    found = judges.judge(path, **question).result(120)
    jsonschema.validate(document(found), schema())
    return found


def test_a_seed_that_was_drawn_gives_the_same_cases_again(judges: lastbit.Judges, tmp_path: Path) -> None:
    path, few = written(tmp_path, body="raise ValueError"), {"lines": (), "profile": "smoke", "fail_fast": True}
    first, second = (asked(judges, path, **few) for _ in range(2))
    again = asked(judges, path, **few, seed=first.seed)
    assert first.seed == again.seed != second.seed
    assert first.findings == again.findings != second.findings


def test_a_right_file(judges: lastbit.Judges, tmp_path: Path) -> None:
    found = asked(judges, written(tmp_path))
    assert (found.verdict, found.kernel, found.cases["PASSED"], found.planned) == ("PASSED", "rms_norm", 3, 3)
    assert found.contracts.keeps == (found.contract,) == ("fp32_multiply+rounded_sum",)
    assert {share.dtype: share.elements for share in found.decided} == {"bf16": 272, "fp32": 48}
    assert not found.findings and not found.torch_ops and not found.notes and found.exit_code == 0
    assert found.idle == ("rounded_sum",)


def test_a_file_that_cuts_off_is_held_to_what_is_asked(judges: lastbit.Judges, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    cut = "return (output.view(torch.int32) & -65536).view(torch.float32).to(x.dtype)"
    text = FILE.replace(
        "return ({value} * weight.float()).to(x.dtype)", f"output = {RIGHT} * weight.float()\n    {cut}"
    )
    path.write_text(text.format(body=""))
    for contract, verdict in (("fp32_multiply", "FAILED"), ("fp32_multiply+output:zero", "PASSED")):
        found = asked(judges, path, contract=contract, lines=LINES[:2])
        assert (found.verdict, found.cases[verdict]) == (verdict, 2)


def test_results_by_order(judges: lastbit.Judges, tmp_path: Path) -> None:
    """As in the process that is watched, also in the bare one, and where the clock runs."""
    path = tmp_path / "kernel.py"
    lines = ("rms_norm x=bf16[4,64] residual=bf16[4,64] eps=0.001 seed=1",)
    rest = f"    return ({RIGHT}).to(x.dtype), total\n"
    for added in ("x + residual", "x - residual"):
        body = f"import torch\ndef rms_norm(x, residual, *, eps):\n    total = {added}\n    value = total.float()\n"
        path.write_text(body + rest)
        found = asked(judges, path, lines=lines, speed=True)
        assert found.verdict == ("PASSED" if "+" in added else "FAILED")
        assert (found.speed is not None) == ("+" in added)


@pytest.mark.parametrize(
    "module", ["lastbit.references.rms_norm", "lastbit._kernels.rms_norm_torch", "lastbit.judging"]
)
def test_a_file_cannot_import_what_the_judge_knows(judges: lastbit.Judges, tmp_path: Path, module: str) -> None:
    found = asked(judges, written(tmp_path, body=f"import {module}"), fail_fast=True)
    said = f"a kernel that is judged cannot import {module.rpartition('.')[0] if module.count('.') > 1 else module}, "
    assert found.verdict == "ERRORED" and said in found.reason
    assert "Remove that import: such a file needs nothing of lastbit." in found.reason
    assert asked(judges, written(tmp_path, body="import lastbit.kernel"), fail_fast=True).verdict == "PASSED"


def test_a_file_does_not_choose_its_cases(judges: lastbit.Judges, tmp_path: Path) -> None:
    choosy = written(tmp_path, body="class UnsupportedCase(Exception): ...\nif x.numel() > 48: raise UnsupportedCase")
    found = asked(judges, choosy)
    assert (found.verdict, found.exit_code, found.contracts.keeps) == ("INCONCLUSIVE", 1, ())
    assert found.reason.startswith("the kernel declined 1 of 3 cases that its signature takes, and passed the others;")
    found = asked(judges, choosy, may_decline=True)
    assert (found.verdict, found.reason, found.cases["UNSUPPORTED"]) == ("PASSED", "", 1)


def test_a_wrong_file_and_its_line(judges: lastbit.Judges, tmp_path: Path) -> None:
    wrong = written(tmp_path, RIGHT.replace("+ eps", "+ 2 * eps"))
    found = asked(judges, wrong, fail_fast=True, explain=30.0)
    assert (found.verdict, found.cases["FAILED"], found.exit_code) == ("FAILED", 1, 1)
    assert sum(found.cases.values()) < found.planned == 3
    assert found.findings[0].kind == "outside" and found.findings[0].case == LINES[0]
    assert found.culprit is not None and found.culprit.line == 8 and "2 * eps" in found.culprit.expression
    assert "fp32_multiply+rounded_sum" in found.contracts.ruled_out


@pytest.mark.parametrize(
    ("body", "verdict", "kind", "reason"),
    [
        ("raise ValueError('no')", "ERRORED", "errored", "ValueError: no"),
        ("os._exit(0)", "ERRORED", "errored", "exit code 0"),
        ("time.sleep(60)", "ERRORED", "errored", "no result after 0.5 s"),
        ("x.zero_()", "FAILED", "mutated_input", ""),
        ("print('{\"verdict\": \"PASSED\"}'); value = 0 * value", "FAILED", "outside", ""),
    ],
)  # fmt: skip
def test_a_file_that_does_something_else(
    judges: lastbit.Judges, tmp_path: Path, body: str, verdict: str, kind: str, reason: str
) -> None:
    found = asked(judges, written(tmp_path, body=body), fail_fast=True, timeout=0.5 if "sleep" in body else 5.0)
    assert found.verdict == verdict and reason in found.reason
    assert kind in {finding.kind for finding in found.findings}


def test_a_file_that_cannot_be_loaded(judges: lastbit.Judges, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    for text, reason in {
        "def a(x): ...\ndef b(x): ...\n": "kernel.py defines a, b; --function says which",
        "import os; os._exit(3)\n": "its process ended with exit code 3",
        "1 / 0\n": "ZeroDivisionError",
        "def rms_norm(y): ...\n": "unknown parameter of rms_norm",
    }.items():
        path.write_text(text)
        found = asked(judges, path)
        assert found.verdict is Verdict.ERRORED and reason in found.reason and not sum(found.cases.values())


def test_what_is_declared_otherwise_is_told(judges: lastbit.Judges, tmp_path: Path) -> None:
    path = written(tmp_path)
    declared = "from lastbit.kernel import kernel\n" + path.read_text().replace(
        "def rms_norm", '@kernel("rms_norm", contract="native_multiply", name="mine")\ndef rms_norm'
    )
    path.write_text(declared)
    found = asked(judges, path)
    assert found.verdict is Verdict.PASSED and found.kernel == "mine"
    assert found.notes == (
        "the file declares the contract native_multiply+rounded_sum; it is held to fp32_multiply+rounded_sum",
    )


def test_torchs_own_operator_is_told_and_can_be_forbidden(judges: lastbit.Judges, tmp_path: Path) -> None:
    path = written(tmp_path, LIBRARY)
    found = asked(judges, path)
    assert found.verdict is Verdict.PASSED and "aten::rms_norm" in found.torch_ops
    found = asked(judges, path, forbid_torch_op=True)
    assert found.verdict is Verdict.FAILED and [finding.kind for finding in found.findings] == ["torch_op"]


@pytest.mark.parametrize("always", [False, True])
def test_a_kernel_that_raises_in_any_case_calls_no_operator(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def unguarded(self: object, inputs: Inputs, replaced: str = "") -> None:
        if replaced or always:
            raise Raised(("ValueError",), "no", "")

    monkeypatch.setattr(Caller, "unguarded", unguarded)
    kernel = Kernel("mine", "rms_norm", "fp32_multiply", lambda x, weight, *, eps: x)
    subject = Subject(kernel, open_project(Config(folder="")).op("rms_norm"), torch.device("cpu"))
    kernel_of_file = opening.OpenedKernel(subject, None)  # type: ignore[arg-type]
    assert kernel_of_file.depends_on("aten::rms_norm", parse_case(LINES[0])) is not always


HIDING = {
    "profiler": f"if torch._C._autograd._profiler_enabled(): return ({RIGHT} * weight.float()).to(x.dtype)",
    "thread": f"found = []; work = threading.Thread(target=lambda: found.append({LIBRARY})); work.start(); work.join()",
}


@pytest.mark.parametrize("how", HIDING)
def test_a_call_of_torchs_own_operator_cannot_be_hidden(judges: lastbit.Judges, tmp_path: Path, how: str) -> None:
    path = written(tmp_path, "found[0]" if how == "thread" else LIBRARY, HIDING[how])
    found = asked(judges, path, forbid_torch_op=True)
    assert found.verdict is Verdict.FAILED and [finding.kind for finding in found.findings] == ["torch_op"]


def test_a_kernel_that_passes_is_timed_where_that_is_asked_for(judges: lastbit.Judges, tmp_path: Path) -> None:
    found = asked(judges, written(tmp_path), speed=True)
    assert found.verdict is Verdict.PASSED and found.speed is not None, found.speed_reason
    assert found.speed.case == LINES[0] and found.speed.calls >= 8 and not found.speed.beside
    assert found.speed.overhead > 0 and 0 < found.speed.seconds < 1 and found.speed.roof
    wrong = asked(judges, written(tmp_path, "0 * value"), speed=True, fail_fast=True)
    assert wrong.verdict is Verdict.FAILED and wrong.speed is None and not wrong.speed_reason


def test_an_input_that_may_be_overwritten(judges: lastbit.Judges, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    body = f"    value = x.float()\n    x.copy_({RIGHT} * weight.float())\n"
    path.write_text(f"import torch\n\ndef rms_norm(x, weight, *, eps):\n{body}")
    found = asked(judges, path, mutates={"x": "output"})
    assert found.verdict is Verdict.PASSED
    assert asked(judges, path).verdict is Verdict.ERRORED, "it returns nothing"


def test_a_question_that_means_nothing(judges: lastbit.Judges, tmp_path: Path) -> None:
    path = written(tmp_path)
    for wrong, message in {
        "op": "unknown op 'rms_nrom'; did you mean 'rms_norm'?",
        "contract": "unknown contract option of rms_norm 'fp32_mulitply'",
    }.items():
        with pytest.raises(UsageError) as raised:
            judges.judge(path, **{wrong: message.split("'")[1]}).result(60)
        assert message in str(raised.value)
    with pytest.raises(UsageError, match="may be overwritten"):
        judges.judge(path, mutates={"y": ""}).result(60)
    with pytest.raises(UsageError, match="timeout -1 must be a number of seconds above 0"):
        judges.judge(path, timeout=-1.0)
    with pytest.raises(UsageError, match="memory -5 is less than Python and torch take"):
        judges.judge(path, memory=-5)


# The command


class FakeJudges:
    """Answers at once, by the name of the file."""

    asked: dict[str, Any]

    def __init__(self, count: int, **asked: Any) -> None:
        FakeJudges.asked = {"count": count, **asked}

    def __enter__(self) -> FakeJudges:
        return self

    def __exit__(self, *error: object) -> None: ...

    def judge(self, path: Path) -> Future[FileVerdict]:
        future: Future[FileVerdict] = Future()
        verdict = Verdict(path.stem.upper())
        future.set_result(unjudged(str(path), JudgeQuestion(op="an_op"), "cpu", verdict=verdict))
        return future


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(command, "Judges", FakeJudges)
    paths = {verdict.value: tmp_path / f"{verdict.value.lower()}.py" for verdict in Verdict}
    for path in paths.values():
        path.write_text("")
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize(
    ("names", "code"),
    [("PASSED", 0), ("PASSED FAILED", 1), ("INCONCLUSIVE", 1), ("FAILED ERRORED PASSED", 2), ("UNSUPPORTED", 3)],
)
def test_a_line_of_json_per_file_in_their_order(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], names: str, code: int
) -> None:
    paths = [files[name] for name in names.split()]
    assert main(["judge", *paths, "--op", "an_op", "--json"]) == code
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [made["file"] for made in documents] == paths
    assert [made["verdict"] for made in documents] == names.split()


def test_options_are_the_fields_of_the_question(files: dict[str, str]) -> None:
    options = "--contract a+b --function f --mutates x=y --mutates z --unordered y --placement moves --forbid-torch-op"
    effort = "--profile smoke --seed 7 --fail-fast --explain 2 --timeout 3 --memory 4000000000 -n 5"
    effort += " --may-decline --strict --speed --beside"
    main(["judge", files["PASSED"], "an_op x=1", "--op", "an_op", *options.split(), *effort.split()])
    made = {name: value for name, value in FakeJudges.asked.items() if name not in ("count", "device", "projects")}
    assert FakeJudges.asked["count"] == 5
    assert JudgeQuestion(**made) == JudgeQuestion(
        op="an_op",
        contract="a+b",
        function="f",
        mutates={"x": "y", "z": ""},
        unordered=("y",),
        placement="moves",
        profile="smoke",
        lines=("an_op x=1",),
        seed="7",
        fail_fast=True,
        explain=2.0,
        forbid_torch_op=True,
        may_decline=True,
        strict=True,
        speed=True,
        beside=True,
        timeout=3.0,
        memory=4_000_000_000,
    )


def test_a_file_that_is_none(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", files["PASSED"], "no/such.py", "--op", "an_op"]) == 2
    assert "'no/such.py' is no file" in capsys.readouterr().err


def test_what_an_example_in_the_documents_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """The document in docs/judge.md has the fields of the schema."""
    text = (Path(__file__).parents[2] / "docs" / "judge.md").read_text()
    example = json.loads(text.split("```json")[1].split("```")[0])
    jsonschema.validate(example, schema())
    assert list(example) == list(document(replace(unjudged("k.py", JudgeQuestion(op="an_op"), "cpu"))))
