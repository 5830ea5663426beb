"""A mixture of experts with adapters under the contract `fused`, in which a function says how each dot is added."""

from __future__ import annotations

import torch


def dot(rows, weight, lanes):
    """rows · weightᵀ in fp32: term i is added to lane i modulo `lanes`, then the lanes one after the other."""
    rows, weight = rows.float(), weight.float()
    sums = [rows.new_zeros(len(rows), len(weight)) for _ in range(lanes)]
    for i in range(rows.shape[1]):
        sums[i % lanes] = sums[i % lanes] + rows[:, i, None] * weight[:, i]
    total = sums[0]
    for further in sums[1:]:
        total = total + further
    return total


def projected(rows, weight, lora_a, lora_b, scaling, lanes):
    """rows · weightᵀ + scaling · (rows · lora_aᵀ) · lora_bᵀ; the product in the middle is rounded."""
    base = dot(rows, weight, lanes)
    if lora_a is None:
        return base
    middle = dot(rows, lora_a, 1).to(rows.dtype)
    return base + scaling * dot(middle, lora_b, 1)


def one_expert(rows, factors, weights, scaling, lanes):
    """What an expert adds to the output of the rows given, in fp32."""

    def project(x, name):
        return projected(x, *(weights.get(f"{name}_{part}") for part in ("proj", "lora_a", "lora_b")), scaling, lanes)

    gate, up = project(rows, "gate"), project(rows, "up")
    intermediate = (gate * torch.sigmoid(gate) * up).to(rows.dtype)
    return factors * project(intermediate, "down")


def mixture(x, expert_ids, routing_weights, weights, scaling, first_expert, lanes_of):
    """The output; `lanes_of(expert, pairs)` gives the lanes of each pair of an expert, [pairs]."""
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    parts = x.new_zeros(*expert_ids.shape, x.shape[1], dtype=torch.float32)
    for expert in range(len(weights["gate_proj"])):
        tokens, slots = (expert_ids == first_expert + expert).nonzero(as_tuple=True)
        own = {name: tensor[expert] for name, tensor in weights.items()}
        lanes = torch.tensor(lanes_of(expert, len(tokens)), dtype=torch.int64).reshape(-1)
        for count in lanes.unique().tolist():
            token, slot = (index[lanes == count] for index in (tokens, slots))
            factors = routing_weights[token, slot, None].float()
            parts[token, slot] = one_expert(x[token], factors, own, scaling, count)
    output = parts[:, 0]
    for slot in range(1, parts.shape[1]):
        output = output + parts[:, slot]
    return output.to(x.dtype)
