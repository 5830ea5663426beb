"""Kernels that cut off, or round ties away from zero: faults under their contracts, and right where they claim it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lastbit.case import parse_case
from lastbit.kernel import Kernel
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import verify_case
from lastbit.verify.formula_check import with_formula
from tests.faults import hunt
from tests.faults.catalogue import FAULTS
from tests.faults.plant import planted
from tests.rms_norm_contract import INTERPRETED  # installs the bit-faithful interpreter

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are followed where Triton is interpreted")

GRADIENT = "layer_norm_gated_backward x=bf16[8,70] dy=bf16[8,70] weight=bf16[70] rstd=fp32[8,1]:ones seed=1"
PLANTED = {  # name → case, direction, and whether residues follow it: Triton's casts, and no bits
    "rms_norm: store truncates": ("rms_norm x=bf16[8,70] weight=bf16[70] eps=1e-06 seed=1", "output:zero", True),
    "rms_norm: ties away from zero": (
        "rms_norm x=bf16[8,70] weight=bf16[70] eps=1e-06 seed=1",
        "product:ties_away",
        False,
    ),
    "swiglu: output truncated": ("swiglu x=fp16[8,70] up=fp16[8,70] seed=1", "output:zero", True),
    "softmax: store truncates": ("softmax x=fp16[8,70] seed=1", "output:zero", True),
    "layer_norm_gated_backward: dx truncated": (GRADIENT, "dx:zero", False),
}


def judged(kernel: Kernel, line: str, more: str = "") -> CaseResult:
    """Judge a kernel that claims a direction beside its contract, by both oracles."""
    subject = hunt.subject_of(replace(kernel, contract=f"{kernel.contract}{more}"), torch.device("cpu"))
    case = parse_case(line)
    return with_formula(subject, case, verify_case(subject, case, repeat=False))


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_right_where_it_is_declared(name: str) -> None:
    line, direction, followed = PLANTED[name]
    fault = next(one for one in FAULTS if str(one) == name)
    with planted(fault) as kernel:
        own, declared = judged(kernel, line), judged(kernel, line, f"+{direction}")
    assert own.verdict is Verdict.FAILED and declared.verdict is Verdict.PASSED, declared.findings
    output = next(stage for stage in declared.stages if stage.name in ("output", "dx"))
    assert output.equal == (output.cumulative.numel if followed else 0)
    assert bool(declared.opaque) is not followed
    wrong = judged(hunt.clean(fault), line, f"+{direction}")
    assert wrong.verdict is Verdict.FAILED
