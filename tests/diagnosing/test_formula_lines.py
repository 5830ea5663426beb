"""The line of another formula, in long sums of fp32, where the kernel gives nothing but allowed values."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from lastbit.case import parse_case
from lastbit.diagnosing.explainer import explain_case
from lastbit.interpret import install
from lastbit.result import Verdict
from tests.diagnosing.test_mends_culprits import TORCH, TRITON, kernel_of, subject_of

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

LONG = "rms_norm x=fp32[2,4096] weight=fp32[4096] eps=1e-06 seed=1"
WIDE = TRITON.replace("BLOCK=64", "BLOCK=4096")


@pytest.mark.parametrize(
    ("text", "old", "new", "mend"),
    [
        (WIDE, "var = total / n", "var = total / (n - 1)", "with 4096 in place of 4095"),
        (WIDE, "shifted = var + eps", "shifted = var + 10 * eps", "with 1e-06 in place of 9.99999975e-06"),
        (WIDE, "rstd = tl.rsqrt(shifted)", "rstd = tl.rsqrt(var)", "of its operand plus eps"),
        (TORCH, "var + eps", "var + 10 * eps", "with 1e-06 in place of 1e-05"),
    ],
)
def test_the_line_is_named_though_every_value_is_allowed(
    tmp_path: Path, text: str, old: str, new: str, mend: str
) -> None:
    found = explain_case(subject_of(kernel_of(tmp_path, text, old, new)), parse_case(LONG))
    assert found.verdict is Verdict.FAILED and found.worst is not None and found.worst.is_allowed
    assert found.culprit is not None
    assert new in found.culprit.code or "(var + 10" in found.culprit.code
    assert mend in {step.mend for step in found.trace.mended}


def test_a_right_kernel_passes(tmp_path: Path) -> None:
    found = explain_case(subject_of(kernel_of(tmp_path, WIDE)), parse_case(LONG))
    assert found.verdict is Verdict.PASSED and found.culprit is None and not found.trace.mended


def test_another_formula_that_rounds_alike_has_its_line_too(tmp_path: Path) -> None:
    one = "rms_norm x=bf16[1,1] eps=1e-06 seed=5"
    text = TORCH.replace("(x, weight, *, eps)", "(x, *, eps)").replace("(xhat * weight)", "(xhat)")
    found = explain_case(subject_of(kernel_of(tmp_path, text, "var + eps", "var + 2 * eps")), parse_case(one))
    assert found.verdict is Verdict.FAILED and found.culprit is not None
    assert [step.mend for step in found.trace.mended] == ["with 1e-06 in place of 2e-06"]
