"""The reference of the gradients against automatic differentiation of the exact forward pass, both in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.expected import Trace
from lastbit.judging.problem import Problem
from lastbit.references.moe_lora import moe_lora
from lastbit.references.moe_lora_backward import moe_lora_backward
from tests.moe_lora_exact import (
    ADAPTERS,
    SAVED,
    STORED,
    forward,
    gradients,
    problem,
    whole_numbers,
    with_gradient,
    without_adapters,
)

BF16, FP16 = torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")
SCALINGS = (0.0, 1.0, -0.5, float(torch.tensor(0.3)))
RESULTS = ("grad_input", "grad_routing_weights", *(f"grad_{name}" for name in ADAPTERS))


def trace(tensors: dict[str, Tensor], contract: str = "fused", **params: Any) -> Trace:
    return Problem(
        moe_lora_backward, moe_lora_backward.contract(contract), tensors, {"scaling": 0.5, **params}
    ).evaluate()


def exact_problem(
    old: bool = False, scaling: float = 0.5, first_expert: int = 0, storage: str = "", swiglu_limit: float = INF
) -> dict[str, Tensor]:
    """fp64 inputs with the exact values of what the forward pass saves."""
    tensors = problem(first_expert=first_expert, storage=storage)
    options = {"scaling": scaling, "first_expert": first_expert, "swiglu_limit": swiglu_limit}
    return with_gradient(tensors, forward(tensors, **options), old=old)


def rounded_problem(
    dtype: torch.dtype = BF16, old: bool = False, seed: int = 0, scaling: float = 0.5
) -> dict[str, Tensor]:
    """Draw inputs of the activation dtype, with what the forward pass saves under the contract `fused`."""
    tensors = problem(dtype=dtype, seed=seed)
    found = Problem(moe_lora, moe_lora.contract("fused"), tensors, {"scaling": scaling}).evaluate()
    return with_gradient(tensors, {name: found.enclosure(name).value for name in SAVED}, old=old)


def assert_exact(found: Trace, expected: dict[str, Tensor]) -> None:
    """‖difference‖ ≤ 1e-12 · ‖gradient‖, which is no more than Σ|terms|."""
    assert sorted(found.results) == sorted(RESULTS)
    for name in RESULTS:
        exact = found.enclosure(name).exact
        assert exact.shape == expected[name].shape
        assert (exact - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


# Exact values


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("contract", ["fused", "eager"])
def test_gradients_are_those_of_automatic_differentiation(
    contract: str, old: bool, shards: int, scaling: float
) -> None:
    tensors = exact_problem(old, scaling)
    assert_exact(trace(tensors, contract, scaling=scaling, shards=shards), gradients(tensors, scaling=scaling))


@pytest.mark.parametrize("storage", ["", "int4_asymmetric"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("contract", ["fused", "eager"])
def test_gradients_without_adapters(contract: str, shards: int, storage: str) -> None:
    plain = without_adapters(problem(storage=storage))
    tensors = with_gradient(plain, forward(plain, scaling=0.5))
    found, expected = trace(tensors, contract, shards=shards), gradients(tensors, scaling=0.5)
    assert sorted(found.results) == sorted(expected) == ["grad_input", "grad_routing_weights"]
    for name in found.results:
        exact = found.enclosure(name).exact
        assert (exact - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


def test_old_gradients_of_adapters_that_are_not_there() -> None:
    tensors = without_adapters(exact_problem()) | {"old_up_lora_b": exact_problem(old=True)["old_up_lora_b"]}
    with pytest.raises(UsageError, match="old_up_lora_b is given, but there are no adapters"):
        trace(tensors)


@pytest.mark.parametrize("first_expert", [5, -2])
def test_ids_count_from_the_first_expert(first_expert: int) -> None:
    tensors = exact_problem(first_expert=first_expert)
    expected = gradients(tensors, scaling=0.5, first_expert=first_expert)
    tensors["expert_ids"] = tensors["expert_ids"].to(torch.int32)
    assert_exact(trace(tensors, first_expert=first_expert), expected)


@pytest.mark.parametrize("limit", [0.5, 1.5])
@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_limited_values(limit: float, shards: int) -> None:
    tensors = exact_problem(swiglu_limit=limit)
    gate, up = tensors["saved_gate"], tensors["saved_up"]
    assert all(int(cut.sum()) > 10 for cut in (gate > limit, gate < -limit, up > limit, up < -limit))
    found = trace(tensors, swiglu_limit=limit, shards=shards)
    assert_exact(found, gradients(tensors, scaling=0.5, swiglu_limit=limit))
    gradient, factor = found.enclosure("grad_gate"), found.enclosure("grad_up")
    assert not gradient.full[:, gate > limit].any() and not factor.full[:, up.abs() > limit].any()


def test_a_value_at_the_limit_may_have_been_cut_off() -> None:
    tensors = rounded_problem()
    tensors["saved_gate"][0, 0], tensors["saved_up"][0, 0] = 0.5, -0.5
    free, limited = trace(tensors), trace(tensors, swiglu_limit=0.5)
    for name in ("grad_gate", "grad_up"):
        at, before = limited.enclosure(name)[0, 0], free.enclosure(name)[0, 0]
        assert before.value.all() and torch.equal(at.value, before.value)
        assert torch.equal(at.lo, before.lo.clamp(max=0)) and torch.equal(at.hi, before.hi.clamp(min=0))


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("shards", [1, 4])
def test_gradients_with_quantized_weights(storage: str, shards: int) -> None:
    tensors = exact_problem(storage=storage)
    assert_exact(trace(tensors, shards=shards), gradients(tensors, scaling=0.5))


@pytest.mark.parametrize("ids", [[[1, 1, 1]] * 5, [[0, 0, 2], [7, 7, 0], [-1, -1, -1], [2, 1, 2], [0, 1, 2]]])
def test_gradients_where_ids_occur_several_times(ids: list[list[int]]) -> None:
    tensors = problem()
    tensors["expert_ids"] = torch.tensor(ids)
    tensors = with_gradient(tensors, forward(tensors, scaling=0.5))
    assert_exact(trace(tensors, shards=2), gradients(tensors, scaling=0.5))


# Roundings


def test_contracts_round_where_the_specification_says() -> None:
    operands = {"grad_expert_output", "grad_down_mid", "grad_gate", "grad_up", "grad_gate_mid", "grad_up_mid"}
    operands |= {f"{name}_lora_mid" for name in ("gate", "up", "down")}
    results = {"grad_input", *(f"grad_{name}" for name in ADAPTERS)}  # that of the routing weights stays in fp32
    dots = ("grad_intermediate", "grad_input_gate", "grad_input_up", "down")
    eager = {f"{name}_{part}" for name in dots for part in ("base", "lora", "scaled")}
    eager |= {"grad_intermediate", "expert_output"}
    assert moe_lora_backward.contract("fused").rounds.keys() == operands | results
    assert moe_lora_backward.contract("eager").rounds.keys() == operands | results | eager
    assert moe_lora_backward.contract() == moe_lora_backward.contract("fused")
    rounds = moe_lora_backward.contract("eager").rounds
    assert all(rounds[f"grad_{name}"] == name for name in ADAPTERS), "the gradient of a parameter has its dtype"


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("contract", ["fused", "eager", "per_matrix"])
def test_the_value_lies_between_the_ends(dtype: torch.dtype, contract: str) -> None:
    found = trace(rounded_problem(dtype, old=True), contract, scaling=0.3, shards=2)
    for name in found.stages:
        stage = found.enclosure(name)
        assert bool(((stage.lo <= stage.value) & (stage.value <= stage.hi)).all()), name
        assert bool((stage.hi - stage.lo <= 0.02 * stage.exact.abs() + 0.1).all()), name


# Shards


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("seed", [4, 5, 20, 39])
def test_whole_numbers_leave_one_gradient_for_every_number_of_shards(dtype: torch.dtype, seed: int) -> None:
    tensors = whole_numbers(dtype=dtype, seed=seed)
    forward_inputs = {name: t for name, t in tensors.items() if name != "grad_output"}
    saved = Problem(moe_lora, moe_lora.contract("fused"), forward_inputs, {"scaling": 2.0}).evaluate()
    tensors = with_gradient(tensors, {name: saved.enclosure(name).value for name in SAVED})
    whole, *sharded = (trace(tensors, scaling=2.0, shards=shards) for shards in (1, 2, 4))
    for found in (whole, *sharded):
        for name in ("down_lora_mid", "grad_gate_mid", "grad_up_mid"):
            middle = found.enclosure(name)
            assert torch.equal(middle.exact, middle.value), "a middle that is rounded may differ between shards"
            if found is sharded[0]:
                assert (middle.value != 0).all(-1).any(), "both shards add to a middle"
        for name in RESULTS:
            one, other = whole.enclosure(name), found.enclosure(name)
            assert torch.equal(one.lo, one.hi), name
            assert torch.equal(one.full[1:], other.full[1:]), name
            assert one.value.count_nonzero() > 4, name


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_middles_that_each_shard_rounds_for_itself_show(dtype: torch.dtype) -> None:
    """In the sums over shards, where some elements have no value in common; with middles in fp32 all have."""
    summed = {"grad_input", "grad_gate_lora_a", "grad_up_lora_a", "grad_down_lora_b", "grad_routing_weights"}
    differing: dict[str, set[str]] = {"fused": set(), "fused+fp32_middle": set()}
    for seed in range(3):
        tensors = rounded_problem(dtype, seed=seed, scaling=0.3)
        for contract, names in differing.items():
            whole, *sharded = (trace(tensors, contract, scaling=0.3, shards=shards) for shards in (1, 2, 4))
            names |= {name for name in RESULTS if any(disjoint(whole, found, name) for found in sharded)}
    assert differing == {"fused": summed, "fused+fp32_middle": set()}


def disjoint(one: Trace, other: Trace, name: str) -> int:
    """Elements that no kernel can give to please both."""
    a, b = one.enclosure(name), other.enclosure(name)
    return int(((a.lo > b.hi) | (b.lo > a.hi)).sum())


# Pairs that no expert takes, experts that take no pair


@pytest.mark.parametrize("contract", ["fused", "eager"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_skipped_pair_gives_nothing_whatever_it_holds(contract: str, shards: int, bad: float) -> None:
    tensors = rounded_problem()
    tensors["expert_ids"] = torch.tensor([[-1, 3, 2**40], [0, -7, 1], [-(2**62), 2**62, 3], [0, 1, 2], [2, 2, -1]])
    skipped = (tensors["expert_ids"] < 0) | (tensors["expert_ids"] >= 3)
    clean = trace(tensors, contract, shards=shards)
    for name in ("x", "grad_output"):
        tensors[name][skipped.all(1)] = bad
    for name in ("routing_weights", *SAVED):
        tensors[name][skipped] = bad
    found = trace(tensors, contract, shards=shards)
    for name in found.stages:
        stage = found.enclosure(name)
        assert torch.equal(stage.full, clean.enclosure(name).full), name
        if stage.shape[:2] == skipped.shape:
            assert not stage.full[:, skipped].any(), name
    assert not found.enclosure("grad_input").full[:, skipped.all(1)].any()


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("shards", [1, 2])
def test_an_expert_without_tokens_keeps_its_gradient(old: bool, shards: int) -> None:
    tensors = rounded_problem(old=old)
    tensors["expert_ids"].clamp_(max=1)
    for name in ("gate_proj", "down_proj", *ADAPTERS):
        tensors[name][2] = NAN
    found = trace(tensors, shards=shards, scaling=-3.0)
    for name in ADAPTERS:
        before = tensors[f"old_{name}"][2].double() if old else torch.zeros_like(tensors[name][2]).double()
        gradient = found.enclosure(f"grad_{name}")
        assert all(torch.equal(part, before) for part in gradient.full[:, 2]), name
        assert gradient.value[:2].count_nonzero() > 100, name


@pytest.mark.parametrize("shards", [1, 2])
def test_without_tokens_gradients_are_zero(shards: int) -> None:
    tensors = rounded_problem(old=True)
    tensors |= {name: tensors[name][:0] for name in ("x", "expert_ids", "routing_weights", "grad_output", *SAVED)}
    found = trace(tensors, shards=shards)
    assert found.enclosure("grad_input").shape == (0, 32)
    assert found.enclosure("grad_routing_weights").shape == (0, 3)
    for name in ADAPTERS:
        assert torch.equal(found.enclosure(f"grad_{name}").value, tensors[f"old_{name}"].double())


# Arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_output": torch.ones(5, 31)}, r"grad_output has shape \(5, 31\); .* must be \(5, 32\)"),
        ({"saved_gate": torch.ones(5, 3, 31)}, r"saved_gate has shape \(5, 3, 31\); .* must be \(5, 3, 32\)"),
        ({"intermediate": torch.ones(15, 32)}, r"intermediate has shape \(15, 32\)"),
        ({"down_lora_b": torch.ones(3, 32, 5)}, r"down_lora_b has shape \(3, 32, 5\); .* must be \(3, 32, 4\)"),
        ({"old_gate_lora_a": torch.ones(1, 4, 32)}, r"old_gate_lora_a has shape \(1, 4, 32\); .* must be \(3, 4, 32\)"),
        ({"old_down_lora_b": torch.ones(3, 4, 32)}, r"old_down_lora_b has shape \(3, 4, 32\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace(rounded_problem(old=True) | change)
