"""The reference of the mixture of experts: exact values, roundings, shards, and pairs of no expert."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.expected import Trace
from lastbit.judging.problem import Problem
from lastbit.references._layer_weights import WEIGHTS, OpWeights
from lastbit.references.moe_lora import moe_lora
from lastbit.references.moe_lora_backward import moe_lora_backward
from tests.moe_lora_exact import ADAPTERS, STORED, forward, problem, whole_numbers, without_adapters

BF16, FP16 = torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")
SCALINGS = (0.0, 1.0, -0.5, float(torch.tensor(0.3)))


def trace(tensors: dict[str, Tensor], contract: str = "fused", **params: Any) -> Trace:
    return Problem(moe_lora, moe_lora.contract(contract), tensors, {"scaling": 0.5, **params}).evaluate()


def assert_exact(found: Trace, expected: dict[str, Tensor]) -> None:
    """‖difference‖ ≤ 1e-12 · ‖expected‖, which is no more than Σ|terms|."""
    assert sorted(found.results) == sorted(["output", "saved_gate", "saved_up", "intermediate"])
    for name in (*found.results, *({"expert_output"} & found.stages.keys())):
        exact = found.enclosure(name).exact
        exact = exact.sum(-1) if exact.ndim == 4 else exact  # one part per shard
        assert exact.shape == expected[name].shape
        assert (exact - expected[name]).norm() <= 1e-12 * expected[name].norm(), name


# Exact values


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("contract", ["fused", "eager"])
def test_exact_values_are_those_of_the_formula(contract: str, shards: int, scaling: float) -> None:
    tensors = problem()
    expected = forward(tensors, scaling=scaling)
    assert_exact(trace(tensors, contract, scaling=scaling, shards=shards), expected)


@pytest.mark.parametrize("first_expert", [0, 5, -2])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_count_from_the_first_expert(first_expert: int, dtype: torch.dtype) -> None:
    tensors = problem(first_expert=first_expert)
    expected = forward(tensors, scaling=0.5, first_expert=first_expert)
    tensors["expert_ids"] = tensors["expert_ids"].to(dtype)
    assert_exact(trace(tensors, first_expert=first_expert), expected)


@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("shards", [1, 4])
def test_exact_values_with_quantized_weights(storage: str, shards: int) -> None:
    tensors = problem(storage=storage)
    assert_exact(trace(tensors, shards=shards), forward(tensors, scaling=0.5))


@pytest.mark.parametrize("storage", ["", *STORED])
@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("contract", ["fused", "eager", "per_matrix"])
def test_exact_values_without_adapters(contract: str, shards: int, storage: str) -> None:
    tensors = without_adapters(problem(storage=storage))
    found = trace(tensors, contract, shards=shards)
    assert_exact(found, forward(tensors, scaling=0.5))
    assert not [name for name in found.stages if "lora" in name or "scaled" in name]


@pytest.mark.parametrize("storage", ["", "int8"])
@pytest.mark.parametrize("contract", ["fused", "eager"])
def test_adapters_of_zeros_change_nothing(contract: str, storage: str) -> None:
    tensors = problem(dtype=BF16, storage=storage)
    zeros = {name: torch.zeros_like(tensors[name]) for name in ADAPTERS}
    plain, zero = (trace(t, contract) for t in (without_adapters(tensors), tensors | zeros))
    for name in plain.results:
        assert torch.equal(plain.enclosure(name).value, zero.enclosure(name).value), name


def test_some_adapters_are_none() -> None:
    some = {name: tensor for name, tensor in problem().items() if name != "up_lora_b"}
    with pytest.raises(UsageError, match="given, but not up_lora_b; give all adapters or none"):
        trace(some)


def test_the_weights_are_inputs_by_their_own_names() -> None:
    named = {field.name for field in fields(OpWeights)}
    assert named == set(WEIGHTS) == moe_lora.plain == moe_lora_backward.plain
    assert moe_lora.optional == named - {"gate_proj", "up_proj", "down_proj"}
    assert [name for name in moe_lora.inputs if name in named] == sorted(named, key=WEIGHTS.index)


def test_an_id_that_occurs_twice_counts_twice() -> None:
    tensors = problem(tokens=2, slots=2)
    once = tensors | {"expert_ids": torch.tensor([[1, -1], [1, -1]])}
    twice = tensors | {"expert_ids": torch.tensor([[1, 1], [1, 1]]), "routing_weights": torch.ones(2, 2)}
    once["routing_weights"] = twice["routing_weights"]
    single, double = (trace(t).enclosure("output").exact for t in (once, twice))
    assert torch.allclose(double, 2 * single, rtol=1e-13)
    assert bool((single != 0).all())


# Roundings


def test_contracts_round_where_the_specification_says() -> None:
    results = {"saved_gate", "saved_up", "intermediate", "output"}
    middles = {f"{name}_lora_mid" for name in ("gate", "up", "down")}
    parts = {f"{name}_{part}" for name in ("gate", "up", "down") for part in ("base", "lora", "scaled")}
    eager = {"gate", "up", "silu", "expert_output", "weighted"}
    assert moe_lora.contract("fused").rounds.keys() == results | middles
    assert moe_lora.contract("eager").rounds.keys() == results | middles | parts | eager
    assert moe_lora.contract() == moe_lora.contract("fused")
    assert set(moe_lora.contract("eager").rounds.values()) == {"x"}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("contract", ["fused", "eager", "per_matrix"])
def test_the_value_lies_between_the_ends(dtype: torch.dtype, contract: str) -> None:
    found = trace(problem(dtype=dtype), contract, scaling=0.3, shards=2)
    for name in found.stages:
        stage = found.enclosure(name)
        assert bool(((stage.lo <= stage.value) & (stage.value <= stage.hi)).all()), name
        assert bool((stage.hi - stage.lo <= 0.02 * stage.exact.abs() + 0.05).all()), name


# Shards


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("seed", [4, 5, 20, 39])
def test_whole_numbers_leave_one_result_for_every_number_of_shards(dtype: torch.dtype, seed: int) -> None:
    tensors = whole_numbers(dtype=dtype, seed=seed)
    del tensors["grad_output"]
    whole, *sharded = (trace(tensors, scaling=2.0, shards=shards) for shards in (1, 2, 4))
    for found in (whole, *sharded):
        middle = found.enclosure("down_lora_mid")
        assert torch.equal(middle.exact, middle.value), "a middle that is rounded may differ between shards"
        for name in found.results:
            one, other = whole.enclosure(name), found.enclosure(name)
            assert torch.equal(one.lo, one.hi)
            assert torch.equal(one.full[1:], other.full[1:]), name
    assert whole.enclosure("output").value.count_nonzero() > 20
    halves = sharded[0].enclosure("down_lora_mid").value
    assert (halves != 0).all(-1).any(), "both shards add to a middle"


@pytest.mark.usefixtures("no_tensor_cores")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_middle_that_each_shard_rounds_for_itself_shows(dtype: torch.dtype) -> None:
    """With 2 or 4 shards some elements of the output have no value in common with that of none; with fp32 all have."""
    found: dict[str, list[int]] = {"fused": [], "fused+fp32_middle": []}
    for seed in range(3):
        tensors = problem(6, 2, dtype=dtype, seed=seed)
        for contract, counts in found.items():
            whole, *sharded = (trace(tensors, contract, scaling=0.3, shards=shards) for shards in (1, 2, 4))
            counts += [disjoint(whole, other, "output") for other in sharded]
            assert not any(disjoint(whole, other, n) for other in sharded for n in ("saved_gate", "intermediate"))
    assert sum(found["fused"]) > (100 if dtype is BF16 else 20), "of 6 × 192"
    assert sum(found["fused+fp32_middle"]) == 0


def disjoint(one: Trace, other: Trace, name: str) -> int:
    """Elements that no kernel can give to please both."""
    a, b = one.enclosure(name), other.enclosure(name)
    return int(((a.lo > b.hi) | (b.lo > a.hi)).sum())


# Pairs that no expert takes


@pytest.mark.parametrize("contract", ["fused", "eager"])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_skipped_pair_is_zero_whatever_it_holds(contract: str, shards: int, bad: float) -> None:
    tensors = problem(dtype=BF16)
    tensors["expert_ids"] = torch.tensor([[-1, 3, 2**40], [0, -7, 1], [-(2**62), 2**62, 3], [0, 1, 2], [2, 2, -1]])
    skipped = (tensors["expert_ids"] < 0) | (tensors["expert_ids"] >= 3)
    clean = trace(tensors, contract, shards=shards)
    tensors["x"][skipped.all(1)] = bad
    tensors["routing_weights"][skipped] = bad
    found = trace(tensors, contract, shards=shards)
    for name in found.stages:
        assert torch.equal(found.enclosure(name).full, clean.enclosure(name).full), name
        if name != "output":
            assert not found.enclosure(name).full[:, skipped].any(), name
    assert not found.enclosure("output").full[:, skipped.all(1)].any()


def test_a_pair_that_is_taken_does_pass_on_what_it_holds() -> None:
    tensors = problem(dtype=BF16)
    tensors["expert_ids"][:] = 0
    tensors["x"][1, 3], tensors["routing_weights"][2, 1] = NAN, NAN
    output = trace(tensors).enclosure("output")
    assert output.lo.isnan().any(1).tolist() == [False, True, True, False, False]
    assert output.lo[1:3].isnan().all()


@pytest.mark.parametrize("shards", [1, 2])
def test_without_tokens_results_are_empty(shards: int) -> None:
    tensors = problem(dtype=BF16)
    tensors |= {name: tensors[name][:0] for name in ("x", "expert_ids", "routing_weights")}
    found = trace(tensors, shards=shards)
    assert found.enclosure("output").shape == (0, 32)
    assert found.enclosure("intermediate").shape == (0, 3, 32)


def test_weights_of_an_expert_without_tokens_do_not_matter() -> None:
    tensors = problem(dtype=BF16)
    tensors["expert_ids"].clamp_(max=1)
    before = trace(tensors).enclosure("output")
    for name in ("gate_proj", "down_proj", *ADAPTERS):
        tensors[name][2] = NAN
    assert torch.equal(trace(tensors).enclosure("output").full, before.full)


# Arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routing_weights": torch.ones(5, 2)}, r"routing_weights has shape \(5, 2\); .* must be \(5, 3\)"),
        ({"expert_ids": torch.zeros(5, dtype=torch.int64)}, r"expert_ids \(5,\)"),
        ({"expert_ids": torch.zeros(5, 3)}, r"expert_ids of moe_lora is torch.float32"),
        ({"gate_proj": torch.ones(3, 31, 32)}, r"gate_proj has shape \(3, 31, 32\)"),
        ({"up_proj": torch.ones(3, 32, 31)}, r"up_proj has shape \(3, 32, 31\); .* must be \(3, 32, 32\)"),
        ({"down_proj": torch.ones(2, 32, 32)}, r"down_proj has shape \(2, 32, 32\)"),
        ({"gate_lora_a": torch.ones(3, 0, 32)}, r"gate_lora_a has shape \(3, 0, 32\)"),
        ({"up_lora_b": torch.ones(3, 32, 5)}, r"up_lora_b has shape \(3, 32, 5\); .* must be \(3, 32, 4\)"),
        ({"gate_scale": torch.ones(3, 32)}, "scale is given with a weight of"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace(problem(dtype=BF16) | change)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"shards": 3}, "shards=3 does not divide 32"),
        ({"shards": 0}, "shards=0"),
        ({"scaling": INF}, "scaling=inf is no number in fp32"),
        ({"scaling": NAN}, "scaling=nan is no number in fp32"),
        ({"scaling": -1e39}, r"scaling=-1e\+39 is no number in fp32"),
    ],
)
def test_parameters_that_make_no_sense_are_named(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace(problem(dtype=BF16), **params)
