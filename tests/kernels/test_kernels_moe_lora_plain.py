"""A layer of experts without adapters, forward and backward, and one description of its weights on both sides."""

from __future__ import annotations

import sys
from dataclasses import fields
from inspect import unwrap
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit import assert_contract
from lastbit.references._layer_weights import OpWeights
from lastbit.references.moe_lora import moe_lora
from lastbit.references.moe_lora_backward import PreviousGradients, moe_lora_backward
from tests.moe_lora_formula import lattice
from tests.quantized_weights import stored
from tests.rms_norm_contract import BF16, LOADED, assert_bits, needs_device, normals

pytestmark = needs_device

KERNELS = {k.name: k for k in LOADED if k.op in ("moe_lora", "moe_lora_backward")}
FORWARD = unwrap(KERNELS["triton[moe_lora+fused]"].call).__globals__
BACKWARD = unwrap(KERNELS["triton[moe_lora_backward+fused]"].call).__globals__
SAVED = ("saved_gate", "saved_up", "intermediate")
ADAPTERS = tuple(name for name in lattice(1) if "_lora_" in name)
every_kernel = pytest.mark.parametrize("name", sorted(KERNELS))


def case(name: str, tokens: int = 5) -> dict[str, Any]:
    """Arguments of a kernel, with adapters."""
    arguments = lattice(tokens) | {"first_expert": 1}
    if KERNELS[name].op == "moe_lora":
        return arguments
    rows = (tokens, *arguments["expert_ids"].shape[1:], arguments["gate_proj"].shape[1])
    saved = {saved: normals(*rows, dtype=BF16, seed=seed) for seed, saved in enumerate(SAVED)}
    return arguments | saved | {"grad_output": normals(*arguments["x"].shape, dtype=BF16, seed=9)}


def plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the adapters away."""
    return {name: value for name, value in arguments.items() if name not in (*ADAPTERS, "scaling")}


@pytest.mark.parametrize("shards", [1, 2])
@every_kernel
def test_without_adapters_the_contract_is_the_same(name: str, shards: int) -> None:
    one, arguments = KERNELS[name], plain(case(name)) | {"shards": shards}
    asked = {"stages": one.stages} if one.stages else {}
    results = one.call(**arguments, **asked)
    assert not [stage for stage in results if "lora" in stage or "_mid" in stage]
    assert_contract(one.op, results, contract=one.contract, depth=one.depth, order=one.order, **arguments)


@every_kernel
def test_adapters_of_zeros_change_nothing(name: str) -> None:
    one, arguments = KERNELS[name], case(name)
    zeros = {adapter: torch.zeros_like(arguments[adapter]) for adapter in ADAPTERS}
    expected = one.call(**arguments | zeros)
    actual = one.call(**plain(arguments))
    gone = {f"grad_{adapter}" for adapter in ADAPTERS}
    assert actual.keys() == expected.keys() - gone
    for result, tensor in actual.items():
        assert_bits(tensor + 0.0, expected[result] + 0.0, result)


@every_kernel
def test_codes_need_no_adapters(name: str) -> None:
    one, arguments = KERNELS[name], plain(case(name))
    codes: dict[str, Tensor] = {}
    for side in ("gate", "up", "down"):
        kept = stored("int8", arguments[f"{side}_proj"].float())
        codes |= {f"{side}_proj": kept.codes, f"{side}_scale": kept.scale}
    assert_contract(one.op, one.call(**arguments | codes), contract=one.contract, **arguments | codes)


@every_kernel
def test_some_adapters_are_none(name: str) -> None:
    arguments = case(name)
    del arguments["up_lora_b"]
    with pytest.raises(ValueError, match="given, but not up_lora_b; give all adapters or none"):
        KERNELS[name].call(**arguments)


@pytest.mark.parametrize("name", sorted(name for name, k in KERNELS.items() if k.op == "moe_lora_backward"))
def test_old_gradients_need_adapters(name: str) -> None:
    arguments = case(name)
    old = {f"old_{adapter}": arguments[adapter] for adapter in ADAPTERS}
    with pytest.raises(ValueError, match=r"old_gate_lora_a, .* given, but there are no adapters"):
        KERNELS[name].call(**plain(arguments), **old)
    del old["old_up_lora_a"]
    with pytest.raises(ValueError, match="given, but not old_up_lora_a; give all of them or none"):
        KERNELS[name].call(**arguments, **old)


def test_states_of_layers_without_adapters() -> None:
    """Gradients are those of the kernel, and torch's graph gets them."""
    api = next(module for name, module in reversed(sys.modules.items()) if name.endswith(".moe_lora_state"))
    arguments = plain(case("triton[moe_lora_backward+fused]"))
    inputs = [arguments[name] for name in ("x", "expert_ids", "routing_weights")]
    layer = api.Parameters(**{n: t for n, t in arguments.items() if n.endswith("_proj")}, first_expert=1)
    grad = arguments["grad_output"]
    output, state = api.forward(*inputs, layer)
    found = api.backward(grad, state)
    saved = {name: getattr(state, name) for name in SAVED}
    expected = KERNELS["triton[moe_lora_backward+fused]"].call(**arguments | saved)
    assert not found.lora and expected.keys() == {"grad_input", "grad_routing_weights"}
    assert_bits(found.x, expected["grad_input"], "x")
    leaf = inputs[0].clone().requires_grad_()
    again = api.moe_lora_autograd(leaf, *inputs[1:], layer)
    assert_bits(again.detach(), output, "output")
    again.backward(grad)
    assert_bits(leaf.grad, found.x, "x")


def test_kernels_and_references_describe_the_same_tensors() -> None:
    names = [field.name for field in fields(OpWeights)]
    assert [field.name for field in fields(FORWARD["LayerWeights"])] == names
    assert BACKWARD["LayerWeights"] is FORWARD["LayerWeights"]
    old = [field.name for field in fields(PreviousGradients)]
    assert [field.name for field in fields(BACKWARD["OldGradients"])] == old == [f"old_{name}" for name in ADAPTERS]
    for op in (moe_lora, moe_lora_backward):
        for kernel in (k for k in KERNELS.values() if k.op == op.name):
            assert kernel.accepts == {*op.inputs, *op.params}
