"""Two processes with a shard of MoE-LoRA each: whatever they compute together keeps the contract with two shards."""

from __future__ import annotations

import pytest
import torch

from lastbit.result import Judgement, Verdict
from tests.judged import judged
from tests.moe_lora_ranks import LEARNING_RATE, LORA, SCALING, STALE, Record, Sizes, problem, trained
from tests.rms_norm_contract import INTERPRETED, LOADED, assert_bits

KERNELS = {k.op: k for k in LOADED if k.name.startswith("triton[moe_lora") and k.contract == "fused"}
FORWARD, BACKWARD, ACCUMULATED, NEXT_FORWARD, NEXT_BACKWARD = range(5)

needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="Triton compiles here; the CPU needs TRITON_INTERPRET=1")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
BACKENDS = [
    pytest.param("gloo", marks=[needs_interpreter, pytest.mark.slow]),
    pytest.param("nccl", marks=[pytest.mark.gpu, needs_two]),
]


@pytest.fixture(scope="module", params=BACKENDS)
def ranks(request, tmp_path_factory):
    """Train on both ranks, and return their records."""
    return trained(2, request.param, Sizes(), tmp_path_factory.mktemp("ranks"), faults=True)


def judge(record: Record) -> Judgement:
    return judged(record["op"], record["results"], contract="fused", **record["arguments"], scaling=SCALING, shards=2)


def test_every_result_keeps_the_contract(ranks):
    for record in ranks[0]["correct"]:
        assert judge(record).verdict is not Verdict.FAILED


def test_gathered_shards_are_the_whole_parameters(ranks):
    arguments = ranks[0]["correct"][FORWARD]["arguments"]
    _, whole, _ = problem(Sizes(), arguments["x"].device)
    for name, tensor in whole.items():
        assert_bits(arguments[name], tensor, name)


def test_all_ranks_have_the_same_bits(ranks):
    """Results of sums, and adapters that every rank holds whole and has stepped for itself."""
    for one, other in zip(*(rank["correct"] for rank in ranks), strict=True):
        for part in ("arguments", "results"):
            for name, tensor in one[part].items():
                if tensor.is_floating_point():
                    assert_bits(other[part][name], tensor, name)


def test_a_sum_of_two_has_one_order(ranks):
    """So one process with two shards gives the same bits."""
    for record in ranks[0]["correct"]:
        alone = KERNELS[record["op"]].call(**record["arguments"], scaling=SCALING, shards=2)
        for name, tensor in alone.items():
            assert_bits(record["results"][name], tensor, name)


def test_a_step_of_shards_is_the_shards_of_a_step(ranks):
    records = ranks[0]["correct"]
    masters = {name: records[FORWARD]["arguments"][name].float() for name in LORA}
    for name, master in masters.items():
        master.grad = records[ACCUMULATED]["results"][f"grad_{name}"].float()
    torch.optim.AdamW(masters.values(), lr=LEARNING_RATE).step()
    for name, master in masters.items():
        stepped = records[NEXT_FORWARD]["arguments"][name]
        assert_bits(stepped, master.to(stepped.dtype), name)
        assert not torch.equal(stepped, records[FORWARD]["arguments"][name])


# Planted faults

ADDED = {f"grad_{name}" for name in ("input", "routing_weights", "gate_lora_a", "up_lora_a", "down_lora_b")}


def outside(record: Record) -> set[str]:
    """Results that are not possible."""
    judgement = judge(record)
    assert judgement.verdict is Verdict.FAILED
    return {stage.name for stage in judgement.stages if stage.result and stage.cumulative.outside}


def test_terms_that_are_rounded_before_they_are_added_are_found(ranks):
    records = ranks[0]["terms are rounded before they are added"]
    assert outside(records[FORWARD]) == {"output"}
    assert outside(records[BACKWARD]) <= ADDED


def test_gradients_that_are_not_added_are_found(ranks):
    faulty = [rank["gradients are not added"] for rank in ranks]
    assert outside(faulty[0][BACKWARD]) == ADDED
    one, other = (records[NEXT_FORWARD]["arguments"]["gate_lora_a"] for records in faulty)
    assert not torch.equal(one, other)  # the ranks go apart


def test_a_step_that_is_not_seen_is_found(ranks):
    records = ranks[0][STALE]
    for number in (FORWARD, BACKWARD, ACCUMULATED):
        assert judge(records[number]).verdict is not Verdict.FAILED
    assert outside(records[NEXT_FORWARD]) == set(records[NEXT_FORWARD]["results"])
