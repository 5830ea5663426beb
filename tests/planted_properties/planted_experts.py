"""A mixture of experts with adapters under the contract `fused`, in which a function says how each dot is added."""

from __future__ import annotations

import torch

RESULTS = ("saved_gate", "saved_up", "intermediate", "output")


def dot(rows, weight, by_sign):
    """rows · weightᵀ in fp32, term after term; `by_sign` adds positive and negative terms apart from each other.

    Apart from each other they grow larger, so that roundings differ in more elements than by any other two orders.
    """
    rows, weight = rows.float(), weight.float()
    total = rows.new_zeros(len(rows), len(weight))
    negative = torch.zeros_like(total)
    for i in range(rows.shape[1]):
        term = rows[:, i, None] * weight[:, i]
        if by_sign:
            total, negative = total + term.clamp(min=0), negative + term.clamp(max=0)
        else:
            total = total + term
    return total + negative


def projected(rows, weight, lora_a, lora_b, scaling, by_sign):
    """rows · weightᵀ + scaling · (rows · lora_aᵀ) · lora_bᵀ; the product in the middle is rounded."""
    base = dot(rows, weight, by_sign)
    if lora_a is None:
        return base
    middle = dot(rows, lora_a, by_sign=False).to(rows.dtype)
    return base + scaling * dot(middle, lora_b, by_sign=False)


def one_expert(rows, factors, weights, scaling, by_sign):
    """Gate, up and intermediate of the rows given, and what an expert adds to their output, in fp32."""

    def project(x, name):
        own = (weights.get(f"{name}_{part}") for part in ("proj", "lora_a", "lora_b"))
        return projected(x, *own, scaling, by_sign)

    gate, up = project(rows, "gate"), project(rows, "up")
    intermediate = (gate * torch.sigmoid(gate) * up).to(rows.dtype)
    return gate, up, intermediate, factors * project(intermediate, "down")


def mixture(x, expert_ids, routing_weights, weights, scaling, first_expert, by_sign_of):
    """All results; `by_sign_of(expert, pairs)` says of each pair of an expert how its dots are added."""
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    inner, pairs = weights["gate_proj"].shape[1], expert_ids.shape
    widths = zip(RESULTS, (inner, inner, inner, x.shape[1]), strict=True)
    parts = {name: x.new_zeros(*pairs, n, dtype=torch.float32 if name == "output" else x.dtype) for name, n in widths}
    for expert in range(len(weights["gate_proj"])):
        tokens, slots = (expert_ids == first_expert + expert).nonzero(as_tuple=True)
        own = {name: tensor[expert] for name, tensor in weights.items()}
        signs = torch.tensor(by_sign_of(expert, len(tokens)), dtype=torch.bool, device=x.device).reshape(-1)
        for by_sign in (False, True):
            token, slot = (index[signs == by_sign] for index in (tokens, slots))
            found = one_expert(x[token], routing_weights[token, slot, None].float(), own, scaling, by_sign)
            for part, values in zip(parts.values(), found, strict=True):
                part[token, slot] = values.to(part.dtype)
    output = parts["output"][:, 0]
    for slot in range(1, pairs[1]):
        output = output + parts["output"][:, slot]
    return parts | {"output": output.to(x.dtype)}
