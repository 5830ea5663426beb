"""A line is named where a replay of what the kernel did, with that line mended, is right; otherwise none is."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import triton
from rich.console import Console

from lastbit.interpret import install
from lastbit.reports.explanation import print_explanation
from lastbit.reports.why import Explanation
from tests.diagnosing.test_explain_command import explained
from tests.diagnosing.test_mends_culprits import STRIDED, TORCH, TRITON, kernel_of

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

LINE = "rms_norm x=bf16[3,1000] weight=bf16[1000] eps=0.01 seed=1"


def found(folder: Path, text: str, old: str, new: str, line: str = LINE) -> Explanation:
    return explained(kernel_of(folder, text.replace("BLOCK=64", "BLOCK=1024"), old, new), line)


def printed(explanation: Explanation) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_explanation(explanation, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("text", "old", "new", "code", "mend"),
    [
        (TRITON, "(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd", "xhat = x * rstd", "rounded to bf16"),
        (TRITON, "squares = x * x", "squares = (x * x).to(tl.bfloat16).to(tl.float32)", "squares =", "not rounded"),
        (TRITON, "total / n", "total / (n - 1)", "var = total / (n - 1)", "with 1000 in place of 999"),
        (TRITON, "y = xhat * w", "y = xhat / w", "y = xhat / w", "multiplied"),
        (TRITON, "var + eps", "var - eps", "shifted = var - eps", "added"),
        (
            TRITON,
            "w_ptr + cols,",
            "w_ptr + n - 1 - cols,",
            "w = tl.load",
            "with the elements of weight that belong there",
        ),
        (TORCH, "x.float().square()", "x.float().square().bfloat16().float()", "squares =", "not rounded"),
        (TORCH, "(x.float() * rstd).to(x.dtype)", "x.float() * rstd", "xhat = x.float() * rstd", "rounded to bf16"),
    ],
)
def test_the_line_whose_mending_makes_every_element_right(
    tmp_path: Path, text: str, old: str, new: str, code: str, mend: str
) -> None:
    explanation = found(tmp_path, text, old, new)
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)
    assert explanation.culprit.mend == mend
    assert f"should be: {explanation.culprit.mend}; done again so, every element is right" in printed(explanation)


@pytest.mark.parametrize(
    ("condition", "chosen", "mend"),
    [
        ("weight < 0.5", "scaled, xhat", "always its first value"),
        ("rstd < 1.0", "second, first", "with the condition the other way round"),
    ],
)
def test_the_side_that_a_choice_should_have_taken(tmp_path: Path, condition: str, chosen: str, mend: str) -> None:
    """The condition is broadcast, and residues are chosen as the values are."""
    choice = f"""scaled, taken = xhat * weight, {condition}
    first, second = torch.where(taken, scaled, -scaled), torch.where(taken, -scaled, scaled)
    return torch.where(taken, {chosen})"""
    line = "rms_norm x=bf16[4,4] weight=bf16[4] eps=0.01 seed=1"
    explanation = found(tmp_path, TORCH, "return (xhat * weight).to(x.dtype)", choice, line)
    assert explanation.culprit is not None and explanation.culprit.code.startswith("return torch.where")
    assert explanation.culprit.mend == mend


def test_no_line_is_named_where_two_are_wrong(tmp_path: Path) -> None:
    """Neither of two wrong lines can be mended alone; the stage before them is right."""
    text = TRITON.replace("y = xhat * w\n", "gain = w - 0.25\n    y = (xhat * gain) + 0.125\n")
    explanation = found(tmp_path, text, "", "")
    assert explanation.culprit is None
    lines = text.splitlines()
    first, last = (next(n for n, line in enumerate(lines, 1) if part in line) for part in ("w = tl.load", "0.125"))
    [between] = explanation.trace.between
    a, _, b = between.rpartition(":")[2].partition(" to ")
    assert first <= int(a) < int(b) and int(b) >= last
    said = printed(explanation)
    assert "line      not found; it is between normalized, which is right, and " in said
    assert "the kernel gives" in said and f"line {last} gives" not in said


def test_a_cast_that_changes_nothing_is_never_named(tmp_path: Path) -> None:
    """The load of strided rows as if they were contiguous is; the cast in its line reads what it was given."""
    explanation = found(tmp_path, TRITON, "row * stride + cols", "row * n + cols", STRIDED)
    assert explanation.culprit is not None and explanation.culprit.code.startswith("x = tl.load")
    both = TORCH.replace("(x.float() * rstd)", "(x.float() * rstd * (1.0 + rstd))")
    explanation = found(tmp_path, both, "(xhat * weight)", "(xhat * weight.float() * 3.0)")
    assert explanation.culprit is None or "rstd" in explanation.culprit.text or "3.0" in explanation.culprit.text


def test_one_wrong_element_is_enough(tmp_path: Path) -> None:
    """Any rounding mends the value of one element by chance, but not its residue."""
    one = "rms_norm x=bf16[1,2]:values(-1.5,1) weight=bf16[2]:values(1.25,1) eps=1e-06 seed=0"
    explanation = found(tmp_path, TRITON, "(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd", one)
    assert explanation.culprit is not None and explanation.culprit.code == "xhat = x * rstd"
    assert [step.mend for step in explanation.trace.mended] == ["rounded to bf16"]


def test_the_contract_that_is_kept_leads(tmp_path: Path) -> None:
    said = printed(found(tmp_path, TRITON, "(x * rstd).to(x_ptr.dtype.element_ty)", "x * rstd")).splitlines()
    assert said[3].startswith("  keeps     fp32_multiply: this contract of the op allows every bit")
    assert said[3].endswith("; it claims native_multiply")


HELPERS = """
@triton.jit
def rounded(value, dtype: tl.constexpr, ROUND: tl.constexpr):
    if ROUND:
        value = value.to(dtype).to(tl.float32)
    return value

@triton.jit
def root(z, DIVIDES: tl.constexpr):
    if DIVIDES:
        return tl.div_rn(1.0, tl.sqrt_rn(z)) + 0.0 * z
    return tl.rsqrt(z)

@triton.jit
def _norm("""

CALLS = TRITON.replace("\n@triton.jit\ndef _norm(", HELPERS).replace(
    "(x * rstd).to(x_ptr.dtype.element_ty)", "rounded(x * rstd, x_ptr.dtype.element_ty, ROUND)"
)
CALLS = CALLS.replace("BLOCK: tl.constexpr", "ROUND: tl.constexpr, BLOCK: tl.constexpr")
CALLS = CALLS.replace("BLOCK=64", "ROUND=True, BLOCK=64").replace("y = xhat * w", "y = xhat.to(tl.float32) * w")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("element_ty, ROUND)", "element_ty, False)", "xhat = rounded("),
        ("squares = x * x", "squares = rounded(x * x, tl.bfloat16, True)", "squares = rounded("),
        ("ROUND=True", "ROUND=False", "_norm[(x.shape[0],)]("),
    ],
)
def test_what_passes_a_flag_is_named_and_not_the_helper(tmp_path: Path, old: str, new: str, code: str) -> None:
    explanation = found(tmp_path, CALLS, old, new)
    assert explanation.trace.mended
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)


def test_what_several_operations_of_a_function_are_passed(tmp_path: Path) -> None:
    text = CALLS.replace("tl.rsqrt(shifted)", "root(shifted, True)")
    explanation = found(tmp_path, text, "root(shifted, True)", "root(var, True)")
    assert explanation.culprit is not None and explanation.culprit.code == "rstd = root(var, True)"


@pytest.mark.parametrize(
    ("old", "new", "code", "mend"),
    [
        ("mask = cols < n", "mask = cols < n - 1", "mask = cols < n - 1", "with 0 in place of 1"),
    ],
)
def test_a_number_in_a_mask(tmp_path: Path, old: str, new: str, code: str, mend: str) -> None:
    text = TRITON.replace(
        "tl.store(y_ptr + row * n + cols, y, mask=mask)", "tl.store(y_ptr + row * n + cols, y, mask=cols < n)"
    )
    explanation = found(tmp_path, text, old, new)
    assert explanation.culprit is not None and explanation.culprit.code.startswith(code)
    assert explanation.culprit.mend == mend


def test_a_number_that_the_launch_is_given_is_not_the_fault_of_the_line(tmp_path: Path) -> None:
    """It was worked out before the launch, from what the case does not have."""
    text = TRITON.replace("    y = torch", "    [given] = map(float, [eps])\n    y = torch").replace(
        "), eps, B", "), given, B"
    )
    explanation = found(tmp_path, text, "[eps]", "[2 * eps]")
    assert explanation.culprit is None and "perhaps" in printed(explanation)
