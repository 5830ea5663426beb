"""Twenty steps of training: each keeps the contract, and together they go where exact training goes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from lastbit.kernel import load_kernels
from tests.moe_lora_training import (
    LORA,
    StaleShards,
    api_of_last_load,
    distance,
    problem,
    train,
    train_exactly,
    verdict,
    without_adapter_in_gradient,
)
from tests.rms_norm_contract import FOLDER, needs_device

pytestmark = needs_device

load_kernels(FOLDER)
API = api_of_last_load()


@pytest.mark.slow
def test_training_keeps_the_contract_and_follows_exact_training():
    """No tolerance: a step is nearer to the same step of the exact training than to any other step of it."""
    start = problem()
    exact, steps = list(train_exactly(start)), list(train(API, start, shards=2))
    for number, step in enumerate(steps):
        assert not verdict(step), f"step {number}"
        apart = [distance(step.masters, other.masters) for other in exact]
        assert apart.index(min(apart)) == number
        apart = [abs(step.loss - other.loss) for other in exact]
        assert apart.index(min(apart)) == number
    for training in (exact, steps):
        assert all(later.loss < sooner.loss for sooner, later in pairwise(training))


def test_exact_training_starts_at_the_same_numbers_and_moves_every_adapter():
    first, *_, last = train_exactly(problem(), steps=3)
    start = next(train(API, problem(), steps=1))
    assert distance(first.masters, start.masters) == 0
    for name in LORA:
        assert distance({name: last.masters[name]}, {name: first.masters[name]}) > 0


def test_a_missing_adapter_in_the_gradient_is_found_as_soon_as_it_is_not_zero():
    """B starts at zero, so that the first step cannot show it: a test of one step after the initialization is blind."""
    with without_adapter_in_gradient() as api:
        first, second = (verdict(step) for step in train(api, problem(), steps=2))
    assert not first
    assert second.keys() == {"moe_lora_backward"}
    assert {"grad_input", "grad_gate_lora_a", "grad_up_lora_b"} <= set(second["moe_lora_backward"])


def test_stale_shards_are_found_after_the_first_step():
    first, second = (verdict(step) for step in train(StaleShards(API), problem(), shards=2, steps=2))
    assert not first
    assert second.keys() == {"moe_lora", "moe_lora_backward"}
