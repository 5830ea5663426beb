"""`lastbit explain --trace`: the worst element's way, where it leaves the contract, and what is printed."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import triton
from in_this_process import InThisProcess

from lastbit.case import parse_case
from lastbit.commands import explain as command
from lastbit.commands import parsers
from lastbit.diagnosing.steps import element, folded
from lastbit.diagnosing.trace import MOST_PROGRAMS, judged_to_explain, trace_case, worst_of
from lastbit.interpret import install
from lastbit.interpret.numpy_formats import BFLOAT16
from lastbit.kernel import Kernel, load_kernels
from lastbit.reports.why import KernelTrace, Step
from lastbit.result import OF_FORMULA, Verdict
from lastbit.verify.check import Subject
from lastbit.verify.worker import WorkerEnded
from tests.faults import hunt

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

BF16 = "rms_norm x=bf16[3,40] weight=bf16[40] eps=1e-06 seed=1"

TRITON = """
import torch
import triton
import triton.language as tl

from lastbit.kernel import kernel


@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    variance = {variance}
    normalized = {normalized}
    tl.store(y_ptr + row * n + cols, (normalized * w).to(y_ptr.dtype.element_ty), mask=mask)


@kernel("rms_norm", contract="{contract}")
def mine(x, weight, *, eps):
    y = torch.empty_like(x)
    _norm[(x.shape[0],)](x, weight, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y
"""
RIGHT = {"variance": "tl.sum(x * x, axis=0) / n", "normalized": "x * tl.rsqrt(variance + eps)"}

TORCH = """
import torch
from lastbit.kernel import kernel

@kernel("rms_norm", contract="{contract}")
def mine(x, weight, *, eps):
    {body}
"""


def kernel_of(folder: Path, text: str, **parts: str) -> Kernel:
    folder.mkdir(exist_ok=True)
    (folder / "mine.py").write_text(text.format(**parts))
    [found] = load_kernels(folder)
    return found


def traced(kernel: Kernel, line: str = BF16, **options: bool | int) -> KernelTrace:
    subject = Subject(kernel, hunt.project().op(kernel.op), hunt.torch.device("cpu"))
    return trace_case(subject, parse_case(line), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("contract", "change", "stage", "text", "value"),
    [
        ("native_multiply", {}, "normalized", RIGHT["normalized"], "fp32"),
        (
            "fp32_multiply",
            {"variance": f"({RIGHT['variance']}).to(tl.bfloat16).to(tl.float32)"},
            "variance",
            f"({RIGHT['variance']}).to(tl.bfloat16)",
            "bf16",
        ),
        (
            "fp32_multiply",
            {"variance": "tl.sum(x * x, axis=0) / (n + 1)"},
            "variance",
            "tl.sum(x * x, axis=0) / (n + 1)",
            "fp32",
        ),
    ],
)
def test_the_line_at_which_a_triton_kernel_leaves_its_contract(
    tmp_path: Path, contract: str, change: dict[str, str], stage: str, text: str, value: str
) -> None:
    line = BF16 if "n + 1" not in text else BF16.replace("40", "100")
    found = traced(kernel_of(tmp_path, TRITON, contract=contract, **{**RIGHT, **change}), line)
    assert found.verdict is Verdict.FAILED and found.exit_code == 1
    left = found.leaves
    assert left is not None and left.match is not None
    assert (left.match.stage, left.text, left.dtype) == (stage, text, value)
    assert left.match.outside > left.match.of // 2
    assert found.steps[0].text.startswith("x[") and found.steps[-1].operation == "store"
    assert found.worst is not None
    assert float(found.steps[-1].first[0].decimal) == pytest.approx(found.worst.actual, rel=1e-8)
    assert not found.notes


def test_the_line_at_which_a_torch_kernel_leaves_its_contract(tmp_path: Path) -> None:
    body = "return (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps) * weight.float()).to(x.dtype)"
    found = traced(kernel_of(tmp_path, TORCH, contract="native_multiply", body=body))
    assert found.leaves is not None
    assert found.leaves.text == "x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps)"
    assert {step.launch for step in found.steps} == {""}


def test_a_wrong_formula_is_named_although_it_agrees_with_no_stage(tmp_path: Path) -> None:
    change = {**RIGHT, "normalized": "x * tl.rsqrt(variance * variance + eps)"}
    found = traced(kernel_of(tmp_path, TRITON, contract="fp32_multiply", **change))
    assert found.exit_code == 1 and found.wrong
    assert found.leaves is not None and "variance * variance" in found.leaves.code


def test_a_kernel_that_keeps_its_contract_leaves_it_nowhere(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, TRITON, contract="fp32_multiply", **RIGHT))
    assert (found.verdict, found.exit_code, found.leaves) == (Verdict.PASSED, 0, None)
    matched = {step.match.stage: step.text for step in found.steps if step.match}
    assert matched["variance"] == RIGHT["variance"]
    assert matched["inv_rms"] == "tl.rsqrt(variance + eps)"
    assert matched["normalized"] == RIGHT["normalized"]


def test_every_operation_of_the_program(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, TRITON, contract="fp32_multiply", **RIGHT), every=True)
    operations = [step.operation for step in found.all]
    assert {"make_range", "addptr", "load", "reduce", "store"} <= set(operations)
    assert len(operations) > len(found.steps)
    assert len({step.program for step in found.all}) == 1


def test_a_failing_stage_that_the_kernel_shows() -> None:
    def call(x, weight, *, eps, stages=()):  # type: ignore[no-untyped-def]
        variance = x.float().square().mean(-1, keepdim=True) * 1.01
        normalized = x.float() * (variance / 1.01 + eps).rsqrt()
        output = (normalized * weight.float()).to(x.dtype)
        return {"output": output, "variance": variance} if stages else output

    found = traced(Kernel("mine", "rms_norm", "fp32_multiply", call, stages=("variance",)))
    assert found.stage == "variance" and found.leaves is not None
    assert found.leaves.text == "x.float().square().mean(-1, keepdim=True) * 1.01"


def test_what_is_compiled_cannot_be_seen(tmp_path: Path) -> None:
    body = "y = torch.empty_like(x); y.view(torch.int16).numpy()[:] = 0; return y"
    found = traced(kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=body))
    assert found.exit_code == 2 and not found.steps
    assert "there is nothing to see inside" in found.reason and "torch.empty_like(x)" in found.reason


def test_memory_that_nothing_wrote_to_is_no_wrong_line(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, TORCH, contract="fp32_multiply", body="return torch.empty_like(x)"))
    assert found.blamed is None and "torch.empty_like(x)" in found.reason


def test_what_is_wrong_beside_values_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = "y = (x.float() * torch.rsqrt(x.float().square().mean(-1, True) + eps) * weight.float()).to(x.dtype)"
    kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=f"{body}; x.zero_(); return y")
    assert run(BF16, "mine", str(tmp_path)) == 1
    text = capsys.readouterr().out
    assert "as the contract allows" in text and "No step was found" not in text
    assert "→" in text.splitlines()[-2] and "x" in text.splitlines()[-2]


def test_memory_that_the_kernel_did_not_write_is_named(tmp_path: Path) -> None:
    body = "return (x.float() * torch.empty(x.shape[-1]) * weight.float()).to(x.dtype)"
    found = traced(kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=body))
    assert found.exit_code == 1
    assert any("torch.empty(x.shape[-1]) in line 7" in note for note in found.notes)


def test_a_kernel_that_raises_and_one_that_declines(tmp_path: Path) -> None:
    raising = traced(kernel_of(tmp_path / "a", TORCH, contract="fp32_multiply", body="raise ValueError('no')"))
    assert (raising.exit_code, raising.reason) == (2, "ValueError: no")
    declining = kernel_of(tmp_path / "b", TORCH, contract="fp32_multiply", body="return x")
    assert traced(declining, BF16.replace(" weight=bf16[40]", "")).exit_code == 3


SPLIT = """
import torch
import triton
import triton.language as tl

from lastbit.kernel import kernel


@triton.jit
def _part(x_ptr, sums_ptr, n):
    column = tl.program_id(0)
    x = tl.load(x_ptr + column).to(tl.float32)
    tl.atomic_add(sums_ptr, x * x)


@kernel("rms_norm", contract="fp32_multiply", unordered=("output",))
def mine(x, weight, *, eps):
    total = torch.zeros(1)
    _part[(x.shape[1],)](x, total, x.shape[1])
    return (x.float() * torch.rsqrt(total / x.shape[1] + eps) * weight.float()).to(x.dtype)
"""


def test_programs_that_wrote_what_was_read(tmp_path: Path) -> None:
    line = "rms_norm x=bf16[1,{n}] weight=bf16[{n}] eps=1e-06 seed=1"
    kernel = kernel_of(tmp_path, SPLIT)
    few = traced(kernel, line.format(n=MOST_PROGRAMS))
    assert not few.notes
    assert sum(step.operation == "atomic fadd" for step in few.steps) == MOST_PROGRAMS
    many = traced(kernel, line.format(n=MOST_PROGRAMS + 5))
    assert many.notes[0].startswith("5 more programs wrote what was read on the way")


def test_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lastbit.tracing.events.LIMIT", 1000)
    found = traced(kernel_of(tmp_path, TRITON, contract="fp32_multiply", **RIGHT))
    assert found.exit_code == 2 and "are the limit" in found.reason


def test_rounds_of_a_loop_are_folded() -> None:
    load, add = Step("load", file="f", line=3, launch="k"), Step("add", file="f", line=4, launch="k")
    before, after = replace(load, line=1), replace(load, line=9)
    steps = [before, *(s for _ in range(6) for s in (load, add)), after]
    shown = list(folded(steps))
    assert [(s.line, s.end_line, s.again) for s in shown] == [
        *((line, 0, 0) for line in (1, 3, 4)),
        (3, 4, 4),
        *((line, 0, 0) for line in (3, 4, 9)),
    ]
    assert list(folded([before, load, add, load, add, after])) == [before, load, add, load, add, after]


def test_an_element_of_another_formula_is_explained_before_the_farthest_one(tmp_path: Path) -> None:
    """In long sums of fp32 every value is allowed; the row with another eps is not the one with the largest error."""
    body = "rows = torch.tensor([[1.0], [1.0], [1.25]])"
    body += "; return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps * rows) * weight"
    kernel = kernel_of(tmp_path, TORCH, contract="fp32_multiply", body=body)
    subject = Subject(kernel, hunt.project().op(kernel.op), hunt.torch.device("cpu"))
    judged = judged_to_explain(subject, parse_case(BF16.replace("bf16", "fp32").replace("40", "400")))
    assert [finding.kind for finding in judged.result.findings] == [OF_FORMULA]
    assert judged.target is not None and judged.target[0] == "output"
    farthest = worst_of(judged.result)
    assert farthest is not None and farthest[1].index[0] != 2 == judged.target[1].index[0]
    assert judged.target[1].actual == float(judged.actual["output"][judged.target[1].index])


def test_numbers_in_decimal_and_as_bits() -> None:
    assert element(np.float32(0.1)) == element(np.array(0.1, np.float32)[()])
    assert (element(np.float32(0.1)).decimal, element(np.float32(0.1)).bits) == ("0.100000001", "0x3dcccccd")
    assert element(np.array([0.8359375], BFLOAT16)[0]).bits == "0x3f56"
    assert [element(np.float64(x)).decimal for x in (0.1, 0.5)] == ["0.10000000000000001", "0.5"]
    assert element(np.float64(-0.0)).bits == "0x8000000000000000"
    assert element(np.float32("nan")).decimal == "nan"
    assert (element(np.int64(-3)).decimal, element(np.bool_(True)).decimal) == ("-3", "True")


# The command


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Worker", InThisProcess)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    parsers.add_explain(parser)
    options = parser.parse_args([*arguments, "--trace"])
    return int(command.run(options, []))


def test_the_command_prints_lines_values_and_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT)
    assert run(BF16, "mine", str(tmp_path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mine on cpu  contract native_multiply")
    product = next(text.split() for text in lines if "✗ normalized" in text)
    assert product[0] == "17" and product[-6:-4] != []
    assert any("Program (" in text and "of _norm" in text for text in lines)
    assert any("→ The value leaves the contract in line 17, x * tl.rsqrt(variance + eps)" in text for text in lines)


def test_no_word_of_a_step_is_broken_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT)
    assert run(BF16, "mine", str(tmp_path)) == 1
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and "no room for: from" in shown
    assert re.search(r"^  \d+ .*  0x[0-9a-f]{8}  ✗ normalized$", shown, re.MULTILINE)


def test_the_command_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel_of(tmp_path, TRITON, contract="native_multiply", **RIGHT)
    assert run(BF16, "mine", str(tmp_path), "--format", "json", "--all") == 1
    [found] = json.loads(capsys.readouterr().out)
    left = next(step for step in found["steps"] if step["match"] and step["match"]["leaves"])
    assert (left["line"], left["text"], left["dtype"]) == (17, RIGHT["normalized"], "fp32")
    assert left["first"][0]["bits"].startswith("0x") and left["column"] == 17
    assert found["all"] and found["worst"]["index"]


def test_the_command_without_a_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(BF16, "eager[completion_mask]") == 3
    assert "no kernel of rms_norm is here" in capsys.readouterr().out


def test_a_kernel_that_ends_its_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Ended(InThisProcess):
        def do(self, work, *args, **kwargs):  # type: ignore[no-untyped-def]
            if command.trace_case in args:
                raise WorkerEnded("the process died without an exception", BF16)
            return super().do(work, *args, **kwargs)

    monkeypatch.setattr(command, "Worker", Ended)
    assert run(BF16, "eager[native_multiply+rounded_sum]") == 2
    assert "Nothing is traced: the process died" in capsys.readouterr().out
