"""Stages found among the expressions of a kernel that stores none, and the line that is named for each mistake."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import triton

from lastbit.case import parse_case
from lastbit.diagnosing.trace import stages_of_case, trace_case
from lastbit.interpret import install
from lastbit.kernel import Kernel, load_kernels
from lastbit.reports.explanation import computed
from lastbit.reports.why import KernelTrace
from lastbit.result import Verdict
from lastbit.verify.check import Subject
from tests.faults import hunt

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

LINE = "rms_norm x=bf16[3,40] weight=bf16[40] eps=0.01 seed=1"
STRIDED = "rms_norm x=bf16[3,40]@64,1 weight=bf16[40] eps=0.01 seed=1"

TRITON = """
import torch
import triton
import triton.language as tl
from lastbit.kernel import kernel

@triton.jit
def _norm(x_ptr, w_ptr, y_ptr, n, stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride + cols, mask=mask, other=0.0).to(tl.float32)
    squares = x * x
    total = tl.sum(squares, axis=0)
    var = total / n
    shifted = var + eps
    rstd = tl.rsqrt(shifted)
    xhat = (x * rstd).to(x_ptr.dtype.element_ty)
    w = tl.load(w_ptr + cols, mask=mask, other=0.0)
    y = xhat * w
    tl.store(y_ptr + row * n + cols, y, mask=mask)

@kernel("rms_norm", contract="native_multiply")
def mine(x, weight, *, eps):
    y = torch.empty(x.shape, dtype=x.dtype)
    _norm[(x.shape[0],)](x, weight, y, x.shape[1], x.stride(0), eps, BLOCK=64)
    return y
"""

TORCH = """
import torch
from lastbit.kernel import kernel

@kernel("rms_norm", contract="native_multiply")
def mine(x, weight, *, eps):
    squares = x.float().square()
    var = squares.mean(-1, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    xhat = (x.float() * rstd).to(x.dtype)
    return (xhat * weight).to(x.dtype)
"""

MASK = """
import torch
import triton
import triton.language as tl
from lastbit.kernel import kernel

@triton.jit
def _mask(ids_ptr, eos_ptr, mask_ptr, n, truncated, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row * n + cols, mask=cols < n, other=0)
    is_eos = ids == tl.load(eos_ptr)
    index = tl.min(tl.where(is_eos & (cols < n), cols, n), axis=0)
    last = tl.where((index == n) & (truncated != 0), -1, index)
    tl.store(mask_ptr + row * n + cols, (cols <= last).to(tl.int32), mask=cols < n)

@kernel("completion_mask")
def mine(ids, eos_ids, *, mask_truncated=False):
    mask = torch.empty(ids.shape, dtype=torch.int32)
    _mask[(ids.shape[0],)](ids, eos_ids, mask, ids.shape[1], int(mask_truncated), BLOCK=64)
    return mask
"""
GAP = """
import torch
import triton
import triton.language as tl
from lastbit.kernel import kernel

@triton.jit
def _norm(x_ptr, weight_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    inv_rms = tl.rsqrt(tl.sum(x * x) / columns + eps)
    weight = tl.load(weight_ptr + column, mask=inside)
    tl.store(y_ptr + row * columns + column, x * inv_rms * weight, mask=inside)

@kernel("rms_norm", contract="native_multiply")
def mine(x, weight, *, eps):
    y = torch.empty_like(x)
    _norm[(x.shape[0],)](x, weight, y, x.shape[1], eps, BLOCK=64)
    return y
"""
STRIDED = "rms_norm x=bf16[3,64]@72,1 weight=bf16[64] eps=1e-06 seed=3"
IDS = "completion_mask ids=int64[4,30]:sequences_1 eos_ids=int64[1]:counting mask_truncated=True seed=4"


def kernel_of(folder: Path, text: str, old: str = "", new: str = "") -> Kernel:
    assert not old or text.count(old) == 1
    (folder / "mine.py").write_text(text.replace(old, new) if old else text)
    [found] = load_kernels(folder)
    return found


def subject_of(kernel: Kernel) -> Subject:
    return Subject(kernel, hunt.project().op(kernel.op), hunt.torch.device("cpu"))


def traced(kernel: Kernel, line: str = LINE) -> KernelTrace:
    return trace_case(subject_of(kernel), parse_case(line))


@pytest.mark.parametrize(
    ("old", "new", "wrong", "code"),
    [
        ("(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd", "normalized", "xhat = x * rstd"),
        ("tl.rsqrt(shifted)", "tl.rsqrt(shifted).to(tl.bfloat16).to(tl.float32)", "inv_rms", "rstd = "),
        ("squares = x * x", "squares = (x * x).to(tl.bfloat16).to(tl.float32)", "variance", "squares = "),
        ("total / n", "total / (n - 1)", "variance", "var = total / (n - 1)"),
        ("squares = x * x", "squares = tl.where(cols < n - 1, x * x, 0.0)", "variance", "squares = tl.where"),
        ("var + eps", "var + 0.5", "inv_rms", "shifted = var + 0.5"),
        ("y = xhat * w", "y = xhat * (w + 1)", "output", "y = xhat * (w + 1)"),
        ("row * stride + cols", "row * stride + (cols + 1) % n", "normalized", "x = tl.load"),
        ("w = tl.load(w_ptr + cols", "w = tl.load(w_ptr + n - 1 - cols", "output", "w = tl.load"),
    ],
)
def test_the_line_of_a_mistake_in_triton(tmp_path: Path, old: str, new: str, wrong: str, code: str) -> None:
    found = traced(kernel_of(tmp_path, TRITON, old, new))
    assert found.verdict is Verdict.FAILED and found.wrong == wrong
    assert found.blamed is not None and found.blamed.code.startswith(code) and found.blamed.mend
    assert found.leaves == found.blamed


def test_rows_taken_to_be_contiguous(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, TRITON, "row * stride + cols", "row * n + cols"), STRIDED)
    assert found.blamed is not None and found.blamed.code.startswith("x = tl.load")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("(x.float() * rstd).to(x.dtype)", "x.float() * rstd", "xhat = "),
        ("torch.rsqrt(var + eps)", "torch.rsqrt(var) + eps", "rstd = "),
        ("x.float().square()", "x.square().float()", "squares = "),
    ],
)
def test_the_line_of_a_mistake_in_pytorch(tmp_path: Path, old: str, new: str, code: str) -> None:
    found = traced(kernel_of(tmp_path, TORCH, old, new))
    assert found.blamed is not None and found.blamed.code.startswith(code)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("cols <= last", "cols < last", "tl.store(mask_ptr"),
        ("(index == n) & (truncated != 0)", "index >= n - 30", "last = "),
    ],
)
def test_where_a_case_tells_no_line_one_with_other_numbers_may(tmp_path: Path, old: str, new: str, code: str) -> None:
    found = traced(kernel_of(tmp_path, MASK, old, new), IDS)
    assert found.blamed is not None and found.blamed.code.startswith(code)
    assert found.case.endswith("seed=4") and found.by.endswith("seed=5")


def test_no_line_is_named_for_a_mistake_in_integers(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, MASK, "cols, n), axis=0)", "cols, n), axis=0) + 1"), IDS)
    assert found.blamed is None and not found.mended and not found.by
    assert found.leaves is not None and found.leaves.code.startswith("tl.store(mask_ptr")


def test_what_nothing_wrote_since_it_was_filled_blames_no_line(tmp_path: Path) -> None:
    text = TRITON.replace("torch.empty(x.shape, dtype=x.dtype)", "torch.zeros_like(x)")
    found = traced(kernel_of(tmp_path, text, "y, mask=mask)", "y, mask=cols < n - 1)"))
    assert found.verdict is Verdict.FAILED and found.blamed is None and not found.mended
    line = text.splitlines().index("    y = torch.zeros_like(x)") + 1
    assert (
        f"Nothing that can be seen wrote the element since torch.zeros_like(x) in line {line} filled it." in found.notes
    )


def test_findings_that_are_not_of_values_name_the_store(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, TRITON, "y, mask=mask)", "y, mask=cols < n + 1)"))
    assert found.blamed is not None and found.blamed.code.startswith("tl.store(y_ptr")


def test_stages_of_kernels_that_store_none(tmp_path: Path) -> None:
    wanted = {"variance": "var", "inv_rms": "rstd", "normalized": "xhat"}
    for folder, text in ((tmp_path / "a", TRITON), (tmp_path / "b", TORCH)):
        folder.mkdir()
        found = stages_of_case(subject_of(kernel_of(folder, text)), parse_case(LINE))
        lines = {step.match.stage: step for step in found.stages if step.match}
        assert {name: lines[name].code.split()[0] for name in wanted} == wanted
        assert [step.match.outside for step in found.stages if step.match] == [0] * len(found.stages)
        normalized = lines["normalized"].match
        assert normalized is not None and normalized.format == lines["normalized"].dtype == "bf16"
        assert normalized.error == normalized.contract_error > 1e-3
        assert not found.steps and found.leaves is None


def test_stages_of_integers(tmp_path: Path) -> None:
    found = stages_of_case(subject_of(kernel_of(tmp_path, MASK)), parse_case(IDS))
    codes = {step.match.stage: step.code for step in found.stages if step.match}
    assert codes["is_eos"].startswith("is_eos") and codes["eos_index"].startswith("index")


def test_stages_with_equal_values_are_different_expressions(tmp_path: Path) -> None:
    ones = LINE.replace("weight=bf16[40]", "weight=bf16[40]:ones")
    found = stages_of_case(subject_of(kernel_of(tmp_path, TRITON)), parse_case(ones))
    codes = {step.match.stage: step.code for step in found.stages if step.match}
    assert codes["normalized"].startswith("xhat") and codes["product"].startswith("y = ")


def test_nothing_is_said_of_a_kernel_that_passes(tmp_path: Path) -> None:
    found = traced(kernel_of(tmp_path, TRITON))
    assert found.verdict is Verdict.PASSED and not found.wrong
    assert found.leaves is None and replace(found, steps=()).stages


def test_a_line_that_a_finding_names_is_the_line(tmp_path: Path) -> None:
    """Where the values alone do not say which it is: the rounding of the product is wrong, too."""
    trace = traced(kernel_of(tmp_path, GAP), STRIDED)
    assert "in a gap of x_ptr" in trace.notes[0]
    assert trace.blamed is not None and trace.blamed.text.startswith("tl.load(x_ptr") and trace.leaves == trace.blamed
    assert not trace.between and not trace.until
    assert computed(trace.blamed).endswith(": the finding is about this line")


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        (
            "half = x.shape[1] // 2\n    y = torch.empty_like(x)\n    low = xhat[:, :half] + weight[:half].sin()\n"
            "    y[:, :half] = low * low\n    y[:, half:] = xhat[:, half:] * weight[half:]\n    return y",
            "low = ",
            "y[:, half:]",
        )
    ],
)
def test_the_lines_of_all_parts_of_a_result(tmp_path: Path, text: str, first: str, last: str) -> None:
    whole = TORCH.replace("return (xhat * weight).to(x.dtype)", text)
    found = traced(kernel_of(tmp_path, whole))
    [between] = found.between
    a, _, b = between.rpartition(":")[2].partition(" to ")
    lines = whole.splitlines()
    assert found.since == ("normalized",)
    assert lines[int(a) - 1].strip().startswith(first) and lines[int(b) - 1].strip().startswith(last)


def test_one_number_is_no_stage_in_place_of_another(tmp_path: Path) -> None:
    whole = TORCH.replace("return (xhat * weight)", "return (xhat - xhat)")
    found = traced(kernel_of(tmp_path, whole), "rms_norm x=bf16[1,1]:zeros weight=bf16[1] eps=0.01 seed=1")
    assert not found.held


def test_a_mistake_that_other_numbers_show_is_told_with_their_case(tmp_path: Path) -> None:
    """Where x is 0, two are wrong at once; with other numbers the factor is wrong alone."""
    whole = TORCH.replace(
        "return (xhat * weight).to(x.dtype)",
        "odd = torch.where(x == 0, xhat.cos() * 3 - weight.sin(), xhat)\n    return (odd * (weight + 1)).to(x.dtype)",
    )
    found = traced(kernel_of(tmp_path, whole), "rms_norm x=bf16[3,40]:zeros weight=bf16[40] eps=0.01 seed=1")
    assert found.blamed is not None and found.blamed.text == "weight + 1"
    assert found.by == "rms_norm x=bf16[3,40] weight=bf16[40] eps=0.01 seed=1"
