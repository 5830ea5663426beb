"""A fault in one launch of many is named, though the kernel shows no stage and the stages are reduced over."""

from __future__ import annotations

import pytest
import torch
import triton

from lastbit.case import parse_case
from lastbit.diagnosing.trace import trace_case
from lastbit.interpret import install
from lastbit.reports.why import KernelTrace
from tests.faults import hunt
from tests.faults.catalogue import FAULTS
from tests.faults.held_out import HELD_OUT
from tests.faults.plant import planted

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the traces are of the interpreter")

if triton.knobs.runtime.interpret:
    install()

SIDES = {
    **{f"{name}_proj": "[2,32,24]:fractions" for name in ("gate", "up")},
    "down_proj": "[2,24,32]:fractions",
    **{f"{name}_lora_a": "[2,3,24]:quarters" for name in ("gate", "up")},
    **{f"{name}_lora_b": "[2,32,3]:quarters" for name in ("gate", "up")},
    "down_lora_a": "[2,3,32]:quarters",
    "down_lora_b": "[2,24,3]:quarters",
}
CASE = (
    "moe_lora x=bf16[4,24]:few expert_ids=int64[4,2]:experts_2 routing_weights=fp32[4,2]:uniform "
    + " ".join(f"{name}=bf16{rest}" for name, rest in SIDES.items())
    + " scaling=0.75 seed=3"
)


def traced(name: str, line: str = CASE) -> KernelTrace:
    fault = next(f for f in (*FAULTS, *HELD_OUT) if str(f) == name)
    with planted(fault) as kernel:
        return trace_case(hunt.subject_of(hunt.without_stages(kernel), torch.device("cpu")), parse_case(line))


def test_a_read_of_another_matrix_is_the_culprit() -> None:
    found = traced("moe_lora: up with A of gate")
    assert found.wrong == "up"
    assert found.blamed is None or (found.blamed.operation, found.blamed.function) == ("load", "load_weight")


def test_a_rounding_too_many_is_the_culprit() -> None:
    found = traced("moe_lora: sigmoid rounded")
    assert found.wrong == "intermediate"
    assert found.blamed is not None and found.blamed.text == "tl.sigmoid(gate).to(A)"
