"""Inputs of one sign decide long dots and sums over rows, which random numbers leave open; no kernel is interpreted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.calibrate import load_premises
from lastbit.case import Case, TensorSpec, parse_case
from lastbit.cases import layer_norm_gated_backward
from lastbit.cases._experts import Sizes
from lastbit.cases.layer_norm_gated_backward import ONE_SIGN
from lastbit.cases.moe_lora_backward import _REGIMES, _saved
from lastbit.inputs import build
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.result import Judgement, Verdict
from tests.faults.hunt import clean_kernels, op_of
from tests.faults.plant import without_faults

CPU = torch.device("cpu")
SIZES = Sizes(tokens=2, slots=2, experts=2, hidden=2048, intermediate=128, rank=16)


def layer(op: str, kind: str) -> Case:
    """Draw a layer of that kind of values, those of the forward pass being among those of the gradients."""
    regimes = _REGIMES[kind]
    shapes: dict[str, tuple[int, ...]] = {"x": (SIZES.tokens, SIZES.hidden), **SIZES.matrices(), **SIZES.adapters()}
    if op == "moe_lora_backward":
        shapes |= {"grad_output": shapes["x"], **_saved(SIZES)}
    ids = TensorSpec("expert_ids", "int64", SIZES.pairs, regime=f"below_{SIZES.experts}")
    weights = TensorSpec("routing_weights", "fp32", SIZES.pairs, regime=regimes["routing_weights"][0])
    tensors = (TensorSpec(name, "bf16", shape, regime=regimes[name][0]) for name, shape in shapes.items())
    return Case(op, (ids, weights, *tensors), {"scaling": 0.7}, 1)


def judged(case: Case, run: Callable[..., Mapping[str, Tensor]] | None = None) -> Judgement:
    """Judge PyTorch's kernel, or another function of the inputs, under the contract of the former."""
    kernel = next(k for k in clean_kernels() if k.op == case.op and k.name.startswith("eager["))
    op, tensors = op_of(case.op), build(case, "cpu").tensors
    problem = Problem(op, op.contract(kernel.contract), tensors, case.params, load_premises(CPU))
    returned: Any = (run or kernel.call)(**tensors, **case.params)
    return judge(problem, returned, alternatives=False)


def shares(judgement: Judgement) -> dict[str, float]:
    """Return result of 16 bits → share of its elements that have one legal value, seen from the inputs."""
    found = (stage for stage in judgement.stages if stage.result and stage.dtype == "bf16")
    return {stage.name: stage.cumulative.decided / stage.cumulative.numel for stage in found}


@pytest.mark.parametrize("op", ["moe_lora", "moe_lora_backward"])
def test_long_dots_are_decided(op: str) -> None:
    random, one_sign = (judged(layer(op, kind)) for kind in ("balanced", "one_sign"))
    assert one_sign.verdict is Verdict.PASSED
    before, after = shares(random), shares(one_sign)
    assert len(after) >= 4
    assert min(after.values()) > 0.8, after
    # the sums over pairs are short here, whatever their signs
    assert all(share < 0.2 for name, share in before.items() if not name.startswith("grad_down_lora")), before


def test_half_of_the_results_are_negative() -> None:
    tensors = build(layer("moe_lora_backward", "one_sign"), "cpu").tensors
    for name in ("x", "grad_output", "saved_gate", "gate_proj", "down_lora_b"):
        assert 0.3 < (tensors[name] < 0).float().mean() < 0.7, name


def gate_rounded(rows: Tensor, weight: Tensor, expert: dict[str, Tensor], *, scaling: float) -> tuple[Tensor, ...]:
    """Compute an expert that rounds gate and up before they are activated."""
    torch_kernels = without_faults().modules["moe_lora_torch"]
    adapted = partial(torch_kernels._adapted, torch_kernels.adapted_fused, scaling=scaling, expert=expert)
    gate, up = (adapted(rows, name=name).to(rows.dtype) for name in ("gate", "up"))
    intermediate = (gate.float() * torch.sigmoid(gate.float()) * up.float()).to(rows.dtype)
    return weight * adapted(intermediate, name="down"), gate, up, intermediate


def with_rounded_gates(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, *, scaling: float, **parameters: Tensor
) -> dict[str, Tensor]:
    expert = partial(gate_rounded, scaling=scaling)
    forward = without_faults().modules["moe_lora_torch"]._forward
    found: dict[str, Tensor] = forward(expert, x, expert_ids, routing_weights, parameters, 0)
    return found | {"output": found["output"].to(x.dtype)}


def test_a_rounding_that_random_numbers_hide() -> None:
    assert judged(layer("moe_lora", "balanced"), with_rounded_gates).verdict is not Verdict.FAILED
    assert judged(layer("moe_lora", "one_sign"), with_rounded_gates).verdict is Verdict.FAILED


def norm(regimes: Mapping[str, tuple[str, ...]], gate: str) -> Case:
    """Gradients of a layer norm with many rows."""
    rows, width = 4000, 16
    words = [
        f"{name}=bf16[{rows},{width}]:{regimes[name][0]}" for name in ("x", "dy", "z")[: 2 if gate == "none" else 3]
    ]
    words += [f"{name}=bf16[{width}]:{regimes[name][0]}" for name in ("weight", "bias")]
    words += [f"{name}=fp32[{rows},1]:{regimes[name][0]}" for name in ("rstd", "mean")]
    before = "norm_before_gate=False" if gate == "before" else ""
    return parse_case(f"layer_norm_gated_backward {' '.join(words)} {before} seed=1")


@pytest.mark.parametrize("gate", ["none", "after", "before"])
def test_sums_over_many_rows_are_decided(gate: str) -> None:
    random, one_sign = (judged(norm(regimes, gate)) for regimes in (layer_norm_gated_backward._ANY, ONE_SIGN[gate]))
    before, after = shares(random), shares(one_sign)
    assert one_sign.verdict is Verdict.PASSED
    assert min(after.values()) > 0.8, after
    assert before["dw"] + before["db"] < 0.5, before


@pytest.mark.parametrize("gate", ["none", "after", "before"])
def test_terms_of_the_sums_of_a_norm_have_one_sign(gate: str) -> None:
    """Those of dw and db down each column, those of c1 and c2 along each row."""
    t = {name: value.double() for name, value in build(norm(ONE_SIGN[gate], gate), "cpu").tensors.items()}
    act = torch.nn.functional.silu(t["z"]) if gate != "none" else torch.ones(())
    normalized = t["x"] * (act if gate == "before" else 1) - t["mean"]
    daffine = t["dy"] * (act if gate == "after" else 1)
    for terms, dim in ((daffine * normalized, 0), (daffine, 0), (normalized * daffine * t["weight"], 1)):
        assert ((terms > 0).all(dim) | (terms < 0).all(dim)).all()
    assert (daffine * t["weight"] > 0).all()
