"""Tensor parallelism of MoE-LoRA along the intermediate dimension I: a shard's part of every tensor.

`PARTS` is the whole rule. `shard` cuts inputs, as views; `merge` makes results whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from functools import reduce

import torch
from quantized_weights import QuantizedWeight
from torch import Tensor


class ShardPart(Enum):
    """The part of a tensor that a shard has."""

    ROWS = "a part of dimension 1: of each expert a contiguous block"
    COLUMNS = "a part of dimension 2: a slice of every row"
    SAME = "all of it, as every shard"
    ADDED = "a term of it in fp32; the terms are added, and the sum is rounded once"
    OWN = "one of its own; together they have the shards in a last dimension"


DIMS = {ShardPart.ROWS: 1, ShardPart.COLUMNS: 2}
"""The dimension that is cut."""

PARAMETERS: Mapping[str, ShardPart] = {
    **dict.fromkeys(("gate_proj", "up_proj", "gate_lora_b", "up_lora_b"), ShardPart.ROWS),
    **dict.fromkeys(("down_proj", "down_lora_a"), ShardPart.COLUMNS),
    **dict.fromkeys(("gate_lora_a", "up_lora_a", "down_lora_b"), ShardPart.SAME),
    **dict.fromkeys(("gate_scale", "up_scale", "gate_zero", "up_zero"), ShardPart.ROWS),
    **dict.fromkeys(("down_scale", "down_zero"), ShardPart.COLUMNS),
}

PARTS: Mapping[str, ShardPart] = {
    **PARAMETERS,
    **{f"old_{name}": part for name, part in PARAMETERS.items() if "lora" in name},
    **{f"grad_{n}": ShardPart.ADDED if p is ShardPart.SAME else p for n, p in PARAMETERS.items() if "lora" in n},
    **dict.fromkeys(("x", "expert_ids", "routing_weights", "grad_output"), ShardPart.SAME),
    **dict.fromkeys(("output", "grad_input", "grad_routing_weights"), ShardPart.ADDED),
    **dict.fromkeys(("saved_gate", "saved_up", "intermediate"), ShardPart.COLUMNS),
    **dict.fromkeys(("gate_base", "up_base", "gate", "up"), ShardPart.COLUMNS),
    **dict.fromkeys(("grad_intermediate", "grad_gate", "grad_up"), ShardPart.COLUMNS),
    **dict.fromkeys(("gate_lora_mid", "up_lora_mid", "grad_expert_output", "grad_down_mid"), ShardPart.SAME),
    **dict.fromkeys(("down_lora_mid", "expert_output"), ShardPart.OWN),
    **dict.fromkeys(("grad_gate_mid", "grad_up_mid", "grad_expert_input"), ShardPart.OWN),
}
"""Every tensor, result and stage of `moe_lora` and `moe_lora_backward`."""


def part_of(name: str) -> ShardPart:
    """Return the part that a shard has of the tensor; ValueError for a name that neither op has."""
    if name not in PARTS:
        raise ValueError(f"{name!r} is no tensor of moe_lora or moe_lora_backward; known are {', '.join(PARTS)}")
    return PARTS[name]


def shard(
    tensors: Mapping[str, Tensor | QuantizedWeight], part: int, parts: int
) -> dict[str, Tensor | QuantizedWeight]:
    """Cut one shard's parts from whole tensors, as views of them.

    Args:
        tensors: by name. Codes, scales and zero points may come as tensors, or as a weight that stands for them.
        part: which of the shards, from 0 on.

    Raises:
        ValueError: a name or a part that does not exist, a result that is added, or a dimension that the shards do not
            divide into whole elements, words of codes and groups.
    """
    if not 0 <= part < parts:
        raise ValueError(f"part={part} of parts={parts} does not exist; parts are counted from 0")
    return {name: _cut(name, tensor, part, parts) for name, tensor in tensors.items()}


def merge(shards: Sequence[Mapping[str, Tensor]], dtypes: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    """Make whole tensors from those of all shards, in the order of the parts.

    Args:
        dtypes: of results that are added; one that is not named stays in the dtype of its terms.

    Raises:
        ValueError: a name that does not exist, or shards that have not the same tensors.
        TypeError: terms that have been rounded before they are added.
    """
    for number, other in enumerate(shards):
        if other.keys() != shards[0].keys():
            raise ValueError(f"shard {number} has {', '.join(other)}, but shard 0 has {', '.join(shards[0])}")
    dtypes = dtypes or {}
    return {name: _whole(name, [one[name] for one in shards], dtypes.get(name)) for name in shards[0]}


def add(total: Tensor, term: Tensor) -> Tensor:
    """Return total + term; a term of zero changes nothing, not even the sign of a zero."""
    return torch.where(term == 0, total, total + term)


def check_term(name: str, term: Tensor) -> None:
    """Raise TypeError for a term of a sum over shards that is not fp32."""
    if term.dtype != torch.float32:
        raise TypeError(f"{name} of a shard is {term.dtype}; terms must stay in fp32 until they are added")


def _cut(name: str, tensor: Tensor | QuantizedWeight, part: int, parts: int) -> Tensor | QuantizedWeight:
    kind = part_of(name)
    if kind is ShardPart.ADDED:
        raise ValueError(f"{name} is a sum over the shards, of which there are no parts")
    if parts == 1 or kind is ShardPart.SAME:
        return tensor
    if kind is ShardPart.OWN:
        return tensor.unbind(-1)[part]
    dim = DIMS[kind]
    if tensor.dim() == dim:  # scales of whole rows have no columns
        return tensor
    if tensor.shape[dim] % parts:
        raise ValueError(
            f"{name} has {tensor.shape[dim]} {_unit(name, tensor, dim)} in dimension {dim}, which {parts} shards do "
            "not divide; choose shards that hold whole ones"
        )
    return tensor.chunk(parts, dim)[part]


def _unit(name: str, tensor: Tensor | QuantizedWeight, dim: int) -> str:
    """Name the units that dimension `dim` counts."""
    if dim == DIMS[ShardPart.ROWS]:
        return "rows"
    if name.endswith(("_scale", "_zero")):
        return "groups of columns"
    return "words of codes" if tensor.dtype in (torch.int32, torch.uint8) else "columns"


def _whole(name: str, parts: list[Tensor], dtype: torch.dtype | None) -> Tensor:
    kind = part_of(name)
    if kind is ShardPart.ADDED:
        if len(parts) > 1:
            for term in parts:
                check_term(name, term)
        total = reduce(add, parts)
        return total if dtype is None else total.to(dtype)
    if len(parts) == 1 or kind is ShardPart.SAME or parts[0].dim() <= DIMS.get(kind, 0):
        return parts[0]
    return torch.stack(parts, -1) if kind is ShardPart.OWN else torch.cat(parts, DIMS[kind])
