"""What the mixture of experts leaves free, such as the order of a dot, and that every rounding is told from none."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.judging.expected import Trace
from lastbit.judging.problem import Problem
from lastbit.judging.torch_compare import outside_mask
from lastbit.kernel import load_kernels
from lastbit.numerics import Enclosure, Premises, dot, using
from lastbit.ops import Op
from lastbit.references.moe_lora import moe_lora
from lastbit.references.moe_lora_backward import moe_lora_backward
from tests.moe_lora_exact import problem, with_gradient

BF16, FP16 = torch.bfloat16, torch.float16
FOLDER = Path(__file__).parents[1] / "correct_kernels"
ORDERS = {k.name: k for k in load_kernels(FOLDER) if k.op.startswith("moe_lora")}
orders = sys.modules[ORDERS["order[moe_lora+fused, fma]"].call.__module__]
ROUNDED = {"moe_lora": orders.FORWARD, "moe_lora_backward": orders.BACKWARD}
KINDS = ("normal", "scaled", "tensors far apart", "elements far apart", "special", "long")
SCALINGS = (0.0, 1.0, -2.0, 0.3, -1e-3)

every_dtype = pytest.mark.parametrize("dtype", [BF16, FP16])
every_contract = pytest.mark.parametrize("contract", ["fused", "eager"])


def drawn(kind: str, dtype: torch.dtype, draw: random.Random) -> dict[str, Tensor]:
    """Draw inputs of the forward pass, and `grad_output`."""
    sizes = {"hidden": draw.choice((1, 8, 17, 32)), "width": draw.choice((4, 16, 36)), "rank": draw.choice((1, 4, 17))}
    if kind == "long":
        sizes = {"hidden": 160, "width": 144, "rank": 4}
    rows = {"tokens": draw.choice((1, 4, 7)), "slots": draw.choice((1, 2, 4)), "experts": draw.choice((1, 3))}
    seed = draw.randrange(2**30)
    tensors = problem(**rows, **sizes, dtype=dtype, seed=seed)
    tensors["grad_output"] = torch.randn(tensors["x"].shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return {n: t if n == "expert_ids" else changed(t, kind, draw) for n, t in tensors.items()}


def changed(x: Tensor, kind: str, draw: random.Random) -> Tensor:
    """Leave normal values as they are, put them on other scales, or put zeros, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(draw.randrange(2**30))
    most = 6 if x.dtype is FP16 else 40
    if kind == "special":
        bad = torch.tensor(draw.choice((0.0, math.inf, -math.inf, math.nan)), dtype=x.dtype)
        return torch.where(torch.rand(x.shape, generator=generator) < draw.choice((0.0, 0.02)), bad, x)
    exponent = torch.zeros(())
    if kind == "scaled":
        exponent = torch.tensor(float(draw.choice((0, 0, most // 2, -most))))
    elif kind == "tensors far apart":
        exponent = torch.tensor(float(draw.randint(-most, most)))
    elif kind == "elements far apart":
        exponent = torch.randint(-most // 3, most // 3, x.shape, generator=generator)
    return (x.double() * 2.0**exponent).to(torch.float32).to(x.dtype)


def simulated(
    op: Op, rounds: Collection[str], way: str, tensors: dict[str, Tensor], params: dict[str, Any]
) -> dict[str, Tensor]:
    """Every stage, of one way to compute `op` that rounds at these stages."""
    call = orders.Simulated(orders.WAYS[way], set(rounds), tensors, params["scaling"], params.get("first_expert", 0))
    return (call.forward if op is moe_lora else call.backward)(params.get("shards", 1))


def traced(op: Op, contract: str, tensors: dict[str, Tensor], params: dict[str, Any], given: Any = None) -> Trace:
    return Problem(op, op.contract(contract), tensors, params).evaluate(given)


def assert_inside(
    op: Op, contract: str, way: str, tensors: dict[str, Tensor], params: dict[str, Any]
) -> dict[str, Tensor]:
    """One way to compute `op` lies within, stage by stage: from its inputs, and from its own earlier stages."""
    actual = simulated(op, ROUNDED[op.name][contract], way, tensors, params)
    with using(Premises(depth=orders.WAYS[way].depth)):
        whole = traced(op, contract, tensors, params)
        seen = {n: t for n, t in actual.items() if n in whole.stages and t.shape == whole.stages[n].shape}
        assert seen.keys() >= set(whole.results)
        for found in (whole, traced(op, contract, tensors, params, seen)):
            for name, tensor in seen.items():
                mask = found.stages[name].outside(tensor)
                assert not mask.any(), (name, params, mask.nonzero()[0].tolist())
    return actual


# Freedoms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", orders.WAYS)
@every_contract
def test_every_way_to_compute_it_lies_within(contract: str, way: str, kind: str) -> None:
    draw = random.Random(f"{contract} {way} {kind}")
    for dtype in (BF16, FP16):
        tensors = drawn(kind, dtype, draw)
        params = {"scaling": draw.choice(SCALINGS), "shards": draw.choice((1, 1, 2, 4))}
        grad = tensors.pop("grad_output")
        saved = assert_inside(moe_lora, contract, way, tensors, params)
        tensors = with_gradient(tensors | {"grad_output": grad}, saved, old=draw.random() < 0.5)
        assert_inside(moe_lora_backward, contract, way, tensors, params)


def test_the_ways_differ() -> None:
    """Otherwise they would test one and the same."""
    tensors = problem(dtype=BF16)
    results = [simulated(moe_lora, orders.FORWARD["fused"], way, tensors, {"scaling": 0.3}) for way in orders.WAYS]
    for i, one in enumerate(results):
        assert not any(torch.equal(one["gate"], other["gate"]) for other in results[:i])


@pytest.mark.parametrize("kernel", ORDERS.values(), ids=lambda k: k.name)
def test_the_kernels_give_the_results(kernel: Any) -> None:
    tensors = problem(dtype=BF16)
    op, contract = (moe_lora_backward, moe_lora)["backward" not in kernel.op], kernel.contract
    if op is moe_lora_backward:
        saved = simulated(moe_lora, orders.FORWARD[contract], "fma", tensors, {"scaling": 0.3})
        tensors = with_gradient(tensors, saved, old=True)
    found = traced(op, contract, tensors, {"scaling": 0.3, "shards": 2})
    results = kernel.call(**tensors, scaling=0.3, shards=2)
    assert results.keys() == set(found.results)
    assert {n: t.dtype for n, t in results.items()} == {n: found.formats[n].dtype for n in results}
    assert not any(found.stages[n].outside(t).any() for n, t in results.items())


# Products that are fused into an addition, or not


def of_ones(slots: int = 1, **values: float | list[float]) -> dict[str, Tensor]:
    """One token, an expert per slot, and dimensions of 1: ones, but zeros in all adapters, and other `values`.

    The gate is 32, where its sigmoid is 1. A list has one value per expert.
    """
    shapes: dict[str, tuple[int, ...]] = {"x": (1, 1), "grad_output": (1, 1), "routing_weights": (1, slots)}
    shapes |= dict.fromkeys(("saved_gate", "saved_up", "intermediate"), (1, slots, 1))
    shapes |= {f"{name}_{part}": (slots, 1, 1) for name in orders.MAPS for part in ("proj", "lora_a", "lora_b")}
    made = {name: torch.full(shape, 0.0 if "lora" in name else 1.0) for name, shape in shapes.items()}
    defaults: dict[str, float | list[float]] = {"gate_proj": 32.0, "up_proj": 1 / 32, "saved_gate": 32.0}
    for name, value in (defaults | values).items():
        shape = shapes.get(name, (slots, 1, 1))
        made[name] = torch.full(shape, value) if isinstance(value, float) else torch.tensor(value).reshape(shape)
    low = {name: t if name == "routing_weights" else t.to(BF16) for name, t in made.items()}
    return low | {"expert_ids": torch.arange(slots)[None]}


def within(op: Op, name: str, tensors: dict[str, Tensor], scaling: float, result: float, **params: Any) -> bool:
    """Return whether every element of a stage may be `result`."""
    taken = {n: t for n, t in tensors.items() if n in op.inputs}
    found = Problem(op, op.contract("fused"), taken, {"scaling": scaling, **params}).evaluate().enclosure(name)
    return not outside_mask(torch.full(found.shape, result), found).any()


THIRD = 1 / 3  # in fp32, 3 · THIRD is 1 + 2**-25: rounded 1, and not rounded it leaves 2**-25 when 1 is subtracted
FUSIBLE: list[tuple[Op, str, dict[str, Any]]] = [
    (moe_lora, "saved_gate", {"gate_proj": -1.0, "gate_lora_a": 1.0, "gate_lora_b": 3.0}),
    (moe_lora, "saved_up", {"up_proj": -1.0, "up_lora_a": 1.0, "up_lora_b": 3.0}),
    (moe_lora, "output", {"down_proj": -1.0, "down_lora_a": 1.0, "down_lora_b": 3.0}),
    (moe_lora, "output", {"slots": 2, "down_proj": [3.0, -1.0], "routing_weights": [THIRD, 1.0]}),
    (moe_lora_backward, "grad_intermediate", {"down_proj": -1.0, "down_lora_a": 3.0, "down_lora_b": 1.0}),
    (moe_lora_backward, "grad_input", {"gate_proj": -1.0, "up_proj": 0.0, "gate_lora_a": 3.0, "gate_lora_b": 1.0}),
    (moe_lora_backward, "grad_gate_lora_b", {"gate_lora_a": 3.0, "old_gate_lora_b": -1.0}),
    (moe_lora_backward, "grad_down_lora_b", {"down_lora_a": 3.0, "old_down_lora_b": -1.0}),
    (moe_lora_backward, "expert_output", {"down_proj": -1.0, "down_lora_a": 1.0, "down_lora_b": 3.0}),
]


@pytest.mark.parametrize(("op", "name", "values"), FUSIBLE, ids=[f"{name}-{len(v)}" for _, name, v in FUSIBLE])
def test_a_product_may_be_fused_into_the_addition_that_follows(op: Op, name: str, values: dict[str, Any]) -> None:
    tensors = of_ones(**values)
    assert within(op, name, tensors, THIRD, 0.0)
    assert within(op, name, tensors, THIRD, 2.0**-25)
    assert not within(op, name, tensors, THIRD, 2.0**-20)
    assert not within(op, name, tensors, THIRD, -(2.0**-20))


def test_the_terms_of_all_slots_may_be_added_in_any_order() -> None:
    """261 is a tie between bf16 numbers; 16 terms of less than half an ulp of it add up, or are lost one by one."""
    small = 2.0**-16 * (1 - 2.0**-7)
    first = {"gate_proj": [29.0] + [0.0] * 7, "saved_up": 9.0, "up_proj": 0.0}
    adapters = {"gate_lora_b": 1.0, "gate_lora_a": small / 9, "up_lora_b": 1.0, "up_lora_a": small / 32}
    tensors = of_ones(slots=8, **first, **adapters)
    parts = [grad * tensors[f"{name}_lora_a"][0].float().item() for name, grad in (("gate", 9), ("up", 32))]
    terms = torch.tensor([9.0 * 29.0, *parts * 8])
    assert orders.SUMS["running"][0](terms).item() == 261.0
    assert terms.double().sum().item() > 261.0002
    assert within(moe_lora_backward, "grad_input", tensors, 1.0, 260.0)
    assert within(moe_lora_backward, "grad_input", tensors, 1.0, 262.0)
    assert not within(moe_lora_backward, "grad_input", tensors, 1.0, 264.0)


# Sums that a tensor core makes


@pytest.mark.parametrize("terms", [2, 3, 16, 17, 64, 256, 1024])
@pytest.mark.parametrize("small", [2.0**-23, 2.0**-24, 2.0**-25])
def test_small_products_that_a_tensor_core_loses_lie_within(terms: int, small: float) -> None:
    """1 and then terms just below `small`, of which at least a half is lost: what an H200 gives too."""
    row = torch.tensor([1.0] + [small * (1 - 2.0**-8)] * (terms - 1))
    actual = orders.truncated(torch.ones(terms), row)
    lost = (row.double().sum() - actual.double()) / row.double().sum() * 2.0**24
    assert terms < 16 or lost > terms / 3, "in units of u"
    ones = Enclosure.point(torch.ones(1, terms))
    for depth in (None, orders.tree):
        with using(Premises(depth=depth)):
            assert not outside_mask(actual.reshape(1, 1), dot(ones, Enclosure.point(row[:, None]))).any()


def test_a_subnormal_operand_counts_for_the_smallest_normal_number() -> None:
    """58 of 63 small products of fp16 are left beside one that is larger by its exponents: what an H200 gives too."""
    left, right = torch.full((64,), 3 * 2.0**-24), torch.full((64,), 2.0**-13)
    right[0] = 8.0
    actual = orders.truncated(left, right)
    assert (actual.double() - 3 * 2.0**-21).item() / (3 * 2.0**-37) == 58
    for depth in (None, orders.tree):
        with using(Premises(depth=depth)):
            found = dot(Enclosure.point(left[None]), Enclosure.point(right[:, None]))
            assert not outside_mask(actual.reshape(1, 1), found).any()


# Every rounding shows


def points(op: Op) -> list[str]:
    """Stages that some contract rounds, without results, whose rounding the dtype shows."""
    always = [name for name in op.rounds if name in ("intermediate", "grad_expert_output", "grad_gate", "grad_up")]
    return sorted({*always, *(s for choices in op.axes.values() for rounds in choices.values() for s in rounds)})


PARAMS = {"scaling": 0.3}  # a power of two would make the product exact, and its rounding would not show


@pytest.fixture(params=[moe_lora, moe_lora_backward], ids=lambda o: o.name)
def op(request: pytest.FixtureRequest) -> Op:
    return request.param


def inputs(op: Op, contract: str, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = problem(6, 2, dtype=dtype)
    if op is moe_lora:
        return tensors
    return with_gradient(tensors, simulated(moe_lora, orders.FORWARD[contract], "running", tensors, PARAMS))


def outside(found: Trace, actual: dict[str, Tensor]) -> dict[str, int]:
    """Elements of the results that are not allowed."""
    return {name: int(found.stages[name].outside(actual[name]).sum()) for name in found.results}


@pytest.mark.usefixtures("no_tensor_cores")
@every_dtype
@every_contract
def test_every_rounding_is_told_from_none(op: Op, contract: str, dtype: torch.dtype) -> None:
    """By the results alone, of a kernel that rounds at one point more or less than its contract."""
    tensors = inputs(op, contract, dtype)
    found = traced(op, contract, tensors, PARAMS)
    own = ROUNDED[op.name][contract]
    assert not any(outside(found, simulated(op, own, "running", tensors, PARAMS)).values())
    for point in points(op):
        counts = outside(found, simulated(op, own ^ {point}, "running", tensors, PARAMS))
        assert sum(counts.values()) >= 3, (point, counts)


@every_dtype
@every_contract
def test_every_alternative_is_told_apart(op: Op, contract: str, dtype: torch.dtype) -> None:
    tensors = inputs(op, contract, dtype)
    found = traced(op, contract, tensors, PARAMS)
    for other in op.alternatives(op.contract(contract)):
        actual = simulated(op, other.rounds, "running", tensors, PARAMS)
        assert sum(outside(found, actual).values()) >= 3, str(other)
        assert not any(outside(Problem(op, other, tensors, PARAMS).evaluate(), actual).values()), str(other)
