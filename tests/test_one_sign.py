"""Inputs of one sign decide long dots and sums over rows, which random numbers leave open; no kernel is interpreted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from cases._experts import BALANCED, ONE_SIGN, Regimes, Sizes
from cases.layer_norm_gated_backward import ONE_SIGN as NORM_OF_ONE_SIGN
from cases.moe_lora_backward import _REGIMES, _saved
from harness.case import Case, TensorSpec
from harness.inputs import build
from harness.judging.judge import judge
from harness.judging.problem import Problem
from harness.result import Comparison, Judgement, Verdict
from tests.faults.hunt import clean_kernels, op_of
from tests.faults.plant import without_faults

SIZES = Sizes(tokens=4, slots=2, experts=2, hidden=1024, intermediate=512, rank=16)


def layer(op: str, regimes: Regimes) -> Case:
    shapes: dict[str, tuple[int, ...]] = {"x": (SIZES.tokens, SIZES.hidden), **SIZES.matrices(), **SIZES.adapters()}
    if op == "moe_lora_backward":
        shapes |= {"grad_output": shapes["x"], **_saved(SIZES)}
    ids = TensorSpec("expert_ids", "int64", SIZES.pairs, regime=f"below_{SIZES.experts}")
    weights = TensorSpec("routing_weights", "fp32", SIZES.pairs, regime=regimes["routing_weights"][0])
    tensors = (TensorSpec(name, "bf16", shape, regime=regimes[name][0]) for name, shape in shapes.items())
    return Case(op, (ids, weights, *tensors), {"scaling": 0.7}, 1)


def judged(case: Case, run: Any = None) -> Judgement:
    """The judgement of PyTorch's kernel, or of another function of the tensors, under the contract of the former."""
    kernel = next(k for k in clean_kernels() if k.op == case.op and k.name.startswith("eager["))
    op, tensors = op_of(case.op), build(case, "cpu").tensors
    problem = Problem(op, op.contract(kernel.contract), tensors, case.params)
    return judge(problem, (run or kernel.call)(**tensors, **case.params), alternatives=False)


def shares(judgement: Judgement) -> dict[str, float]:
    """Result → share of its elements that have one legal value, seen from the inputs."""
    return {s.name: s.cumulative.decided / s.cumulative.numel for s in judgement.stages if s.result}


@pytest.mark.parametrize("op", ["moe_lora", "moe_lora_backward"])
def test_experts_are_decided_at_any_width(op: str) -> None:
    random, one_sign = (
        judged(layer(op, regimes))
        for regimes in ((BALANCED, ONE_SIGN) if op == "moe_lora" else (_REGIMES["balanced"], _REGIMES["one_sign"]))
    )
    assert random.verdict is not Verdict.FAILED
    assert one_sign.verdict is Verdict.PASSED
    before, after = shares(random), shares(one_sign)
    print(before, after)
    of_16_bits = [s.name for s in one_sign.stages if s.result and s.dtype == "bf16"]
    assert len(of_16_bits) >= 4
