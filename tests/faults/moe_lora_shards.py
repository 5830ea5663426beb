"""Faults of the mixture of experts, and of its gradients, in shards along the intermediate dimension."""

from __future__ import annotations

from functools import partial

from tests.faults import moe_lora_backward
from tests.faults.moe_lora import fault
from tests.faults.plant import Edit

_shards = partial(Edit, file="moe_lora_shards.py")
_forward = partial(fault, options="shards")
_backward = partial(moe_lora_backward.fault, options="shards")

ADDED = "grad_gate_lora_a or grad_up_lora_a or grad_input or grad_down_lora_b or grad_routing_weights"
_DIM = "    dim = DIMS[kind]\n"
_SUM = "total = reduce(add, parts)"
_JOIN = "torch.cat(parts, DIMS[kind])"
_RETURN = f"return torch.stack(parts, -1) if kind is ShardPart.OWN else {_JOIN}"
_CHUNK = "return tensor.chunk(parts, dim)[part]"
_CONTIGUOUS = "        return tensor.reshape(len(tensor), parts, tensor.shape[1], -1)[:, part]\n"


def _cut_as(name: str, how: str) -> tuple[Edit, ...]:
    """Cut one tensor in another way."""
    return (_shards(_DIM, f'{_DIM}    if name == "{name}":\n{how}'),)


ROUNDED_TERMS = (_shards(_SUM, "total = reduce(add, [term.bfloat16().float() for term in parts])"),)
SWAPPED = (_shards(_JOIN, _JOIN.replace("parts", "parts[::-1]")),)
LOCAL_OFFSET = (
    _shards(
        _DIM,
        f'{_DIM}    if name in ("gate_lora_b", "up_lora_b"):\n'
        "        return tensor.reshape(len(tensor) * parts, -1, tensor.shape[2])[part : part + len(tensor)]\n",
    ),
)
WRITTEN_AT_LOCAL_OFFSET = (
    _shards(
        _RETURN,
        'if name in ("grad_gate_lora_b", "grad_up_lora_b"):\n'
        "        blocks = parts[0].new_zeros(len(parts) * len(parts[0]), *parts[0].shape[1:])\n"
        "        for number, part in enumerate(parts):\n"
        "            blocks[number : number + len(part)] = part\n"
        f"        return blocks.view(len(parts[0]), -1, parts[0].shape[2])\n    {_RETURN}",
    ),
)
WHOLE = (
    _shards("if parts == 1 or kind is ShardPart.SAME:", "if kind is not ShardPart.OWN:"),
    _shards("if len(parts) == 1 or kind is ShardPart.SAME or", "if kind is not ShardPart.OWN or"),
)

FORWARD = (
    _forward("not cut", "computes all of I in every shard (M2)", WHOLE, "down_lora_mid", "output"),
    _forward("only the first part", "takes the first shard's output (M50)",
             (_shards(_SUM, "total = parts[0]"),), "output", "output"),
    _forward(
        "blocks of down_proj", "cuts down_proj into contiguous blocks, where slices of every row are due (M51)",
        _cut_as("down_proj", _CONTIGUOUS), "expert_output", "output",
    ),
    _forward(
        "blocks of A of down", "cuts A of down into contiguous blocks, where slices of every row are due (M51)",
        _cut_as("down_lora_a", _CONTIGUOUS), "down_lora_mid", "output",
    ),
    _forward(
        "experts at local offsets", "steps from expert to expert of all of B by the size of a shard (M15)",
        LOCAL_OFFSET, "gate", "saved_gate",
    ),
    _forward(
        "adapters of the first shard", "gives every shard the part of B of the first one (M48)",
        (_shards(_CHUNK, _CHUNK.replace("[part]", '[0 if name.endswith("lora_b") else part]')),), "gate", "saved_gate",
    ),
    _forward("columns swapped", "joins the shards in the wrong order (M52)", SWAPPED, "gate_base", "saved_gate"),
    _forward("terms rounded", "rounds each shard's output before they are added", ROUNDED_TERMS, "output", "output"),
)  # fmt: skip

BACKWARD = (
    _backward("not cut", "computes all of I in every shard (M2)", WHOLE, "grad_gate_mid", "grad_gate_lora_a"),
    _backward(
        "last shard wins", "takes the last shard's term of what is a sum over shards (M41)",
        (_shards(_SUM, "total = parts[-1]"),), "grad_gate_lora_a", "grad_gate_lora_a",
    ),
    _backward(
        "blocks of down_proj", "cuts down_proj into contiguous blocks, where slices of every row are due (M51)",
        _cut_as("down_proj", _CONTIGUOUS), "grad_intermediate", "grad_gate_lora_b",
    ),
    _backward(
        "blocks of A of down", "cuts A of down into contiguous blocks, where slices of every row are due (M51)",
        _cut_as("down_lora_a", _CONTIGUOUS), "grad_intermediate", "grad_gate_lora_b",
    ),
    _backward(
        "experts at local offsets", "steps from expert to expert of all of B by the size of a shard (M15)",
        LOCAL_OFFSET, "grad_gate_mid", "grad_gate_lora_a",
    ),
    _backward(
        "gradients at local offsets", "steps from expert to expert of B's gradient by the size of a shard (M17)",
        WRITTEN_AT_LOCAL_OFFSET, "grad_gate_lora_b", "grad_gate_lora_b",
    ),
    _backward(
        "gradients swapped", "joins the shards in the wrong order (M52)",
        SWAPPED, "grad_down_lora_a", "grad_down_lora_a",
    ),
    _backward(
        "terms rounded", "rounds the terms of what is a sum over shards before they are added",
        ROUNDED_TERMS, ADDED, ADDED,
    ),
    _backward(
        "old gradients in every shard", "adds the old gradients once per shard",
        (Edit("for part in parts[1:]:", "for part in ():", file="moe_lora_backward_arguments.py"),),
        "grad_gate_lora_a or grad_down_lora_b", "grad_gate_lora_a or grad_down_lora_b",
    ),
)  # fmt: skip

FAULTS = (*FORWARD, *BACKWARD)
