"""Gradients of the MoE-LoRA layer in PyTorch: one expert after the other, written out for each contract.

moe_lora_backward.py says what the contracts mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf

import torch
from moe_lora_backward_arguments import LORA, SAVED, WEIGHTS, check_backward, shards_of
from moe_lora_shards import merge
from moe_lora_torch import INVARIANT, sound_products
from moe_lora_weights import LayerWeights, OldGradients, named
from swiglu_limit import limited_in_torch
from torch import Tensor

from lastbit import kernel

Product = Callable[[Tensor, Tensor], Tensor]


def product_fused(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b in fp32. Numbers of 16 bits are exact in tf32 too, so that torch may use it or not."""
    return a.float() @ b.float()


def product_eager(a: Tensor, b: Tensor) -> Tensor:
    """Return a · b, rounded to the dtype of both."""
    return a @ b


def through_down(product: Product, t: Mapping[str, Tensor], scaling: float) -> dict[str, Tensor]:
    """Return the stages of an expert's down projection: rows of its pairs, by name."""
    dtype = t["x"].dtype
    grad = (t["routing_weights"] * t["grad_output"].float()).to(dtype)
    found = {
        "grad_expert_output": grad,
        "grad_intermediate": product(grad, t["down_proj"]),
        "expert_output": product(t["intermediate"], t["down_proj"].t()),
    }
    if "down_lora_a" not in t:
        return found
    found["grad_down_mid"] = product(grad, t["down_lora_b"]).to(dtype)
    found["down_lora_mid"] = product(t["intermediate"], t["down_lora_a"].t()).to(dtype)
    found["grad_intermediate"] += product(found["grad_down_mid"], t["down_lora_a"]) * scaling
    found["expert_output"] += product(found["down_lora_mid"], t["down_lora_b"].t()) * scaling
    return found


def through_swiglu(grad: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for that of gate · sigmoid(gate) · up, both limited, in gate's dtype."""
    g, u = limited_in_torch(gate.float(), up.float(), limit)
    grad, s = grad.float(), torch.sigmoid(g)
    grads = grad * u * (s * (1 + g * (1 - s))), grad * (g * s)
    cut = gate > limit, up.abs() > limit
    return tuple(grad.masked_fill(beyond, 0).to(gate.dtype) for grad, beyond in zip(grads, cut, strict=True))


def through_gate_or_up(
    product: Product, name: str, grad: Tensor, t: Mapping[str, Tensor], scaling: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the stages of the gate or up adapter, and the projection's part of the input's gradient, in fp32."""
    base = product(grad, t[f"{name}_proj"]).float()
    if f"{name}_lora_a" not in t:
        return {f"grad_{name}": grad}, base
    a, b = t[f"{name}_lora_a"], t[f"{name}_lora_b"]
    grad_mid = product(grad, b).to(grad.dtype)
    mid = product(t["x"], a.t()).to(grad.dtype)
    stages = {f"grad_{name}": grad, f"grad_{name}_mid": grad_mid, f"{name}_lora_mid": mid}
    return stages, base + (product(grad_mid, a) * scaling).float()


def expert_gradients(product: Product, t: Mapping[str, Tensor], scaling: float, limit: float) -> dict[str, Tensor]:
    """Return the results of one expert in fp32; `t` holds the rows of its n pairs and its weights.

    `grad_input` is [n, H] and `grad_routing_weights` [n].
    """
    stages = dict(t) | through_down(product, t, scaling)
    grads = through_swiglu(stages["grad_intermediate"], t["saved_gate"], t["saved_up"], limit)
    inputs = []
    for name, grad in zip(("gate", "up"), grads, strict=True):
        found, grad_input = through_gate_or_up(product, name, grad, t, scaling)
        stages |= found
        inputs.append(grad_input)
    factors = {
        "gate_lora_a": ("grad_gate_mid", "x"),
        "gate_lora_b": ("grad_gate", "gate_lora_mid"),
        "up_lora_a": ("grad_up_mid", "x"),
        "up_lora_b": ("grad_up", "up_lora_mid"),
        "down_lora_a": ("grad_down_mid", "intermediate"),
        "down_lora_b": ("grad_expert_output", "down_lora_mid"),
    }
    return {
        "grad_input": inputs[0] + inputs[1],
        "grad_routing_weights": (t["grad_output"].float() * stages["expert_output"].float()).sum(-1),
        **{
            f"grad_{name}": scaling * product_fused(stages[a].t(), stages[b])
            for name, (a, b) in factors.items()
            if name in t
        },
    }


def shard_gradients(
    product: Product, t: Mapping[str, Tensor], *, scaling: float, first_expert: int, swiglu_limit: float
) -> dict[str, Tensor]:
    """Return all results of one shard in fp32, with the old gradients of the adapters added."""
    ids = t["expert_ids"]
    shapes = {"grad_input": (*ids.shape, t["x"].shape[1]), "grad_routing_weights": ids.shape}
    results = {name: torch.zeros(shape, device=ids.device) for name, shape in shapes.items()}
    for name in (name for name in LORA if name in t):
        old = t.get(f"old_{name}", torch.zeros_like(t[name]))
        results[f"grad_{name}"] = torch.empty(old.shape, device=ids.device).copy_(old)
    for e in range(len(t["gate_proj"])):
        token, slot = (ids == first_expert + e).nonzero(as_tuple=True)
        if not len(token):
            continue
        own = {"x": t["x"][token], "grad_output": t["grad_output"][token]}
        own["routing_weights"] = t["routing_weights"][token, slot, None]
        own |= {name: t[name][token, slot] for name in SAVED} | {name: t[name][e] for name in WEIGHTS if name in t}
        for name, value in expert_gradients(product, own, scaling, swiglu_limit).items():
            if name in shapes:
                results[name][token, slot] = value
            else:
                results[name][e] += value
    return results | {"grad_input": results["grad_input"].sum(1)}


def _declare(contract: str, product: Product) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that keeps `contract`."""

    @kernel("moe_lora_backward", contract=contract, name=f"eager[moe_lora_backward+{contract}]", invariant=INVARIANT)
    def moe_lora_backward(
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        grad_output: Tensor,
        saved_gate: Tensor,
        saved_up: Tensor,
        intermediate: Tensor,
        weights: LayerWeights,
        old: OldGradients | None = None,
        *,
        scaling: float = 1.0,
        first_expert: int = 0,
        shards: int = 1,
        swiglu_limit: float = inf,
    ) -> dict[str, Tensor]:
        rows = {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights, "grad_output": grad_output}
        saved = {"saved_gate": saved_gate, "saved_up": saved_up, "intermediate": intermediate}
        tensors = rows | saved | weights.operands(x) | named(old)
        numbers = {"scaling": scaling, "first_expert": first_expert, "swiglu_limit": swiglu_limit}
        check_backward(tensors, (), **numbers, shards=shards)
        with sound_products():
            whole = merge([shard_gradients(product, part, **numbers) for part in shards_of(tensors, shards)])
        return {name: t if name == "grad_routing_weights" else t.to(x.dtype) for name, t in whole.items()}

    return moe_lora_backward


backward_fused = _declare("fused", product_fused)
backward_eager = _declare("eager", product_eager)
