"""Checks of the arguments of the MoE-LoRA gradients, and their parts for each shard."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from moe_lora_arguments import check_forward, check_tensors
from moe_lora_shards import ShardPart, part_of, shard
from moe_lora_weights import ADAPTERS as LORA
from moe_lora_weights import WEIGHTS
from quantized_weights import QuantizedWeight
from torch import Tensor

SAVED = ("saved_gate", "saved_up", "intermediate")
OLD = tuple(f"old_{name}" for name in LORA)
ADDED = tuple(name for name in LORA if part_of(f"grad_{name}") is ShardPart.ADDED)
"""Adapters whose gradients are sums over the shards."""

STAGES = (
    *("grad_expert_output", "grad_down_mid", "grad_intermediate", "grad_gate", "grad_up", "grad_gate_mid"),
    *("grad_up_mid", "grad_expert_input", "gate_lora_mid", "up_lora_mid", "down_lora_mid", "expert_output"),
)  # fmt: skip


def check_backward(tensors: Mapping[str, Tensor | QuantizedWeight], stages: Collection[str], **numbers: Any) -> None:
    """Raise for arguments that do not fit together; `tensors` are all that are given, by name.

    Raises:
        ValueError, TypeError, UnsupportedCase: as `check_forward` does, or for old gradients of adapters that are not
            there, or not all of them.
    """
    x, ids, weights = (tensors[name] for name in ("x", "expert_ids", "routing_weights"))
    parameters = {name: tensor for name, tensor in tensors.items() if name in WEIGHTS}
    check_forward(x, ids, weights, parameters, **numbers, stages=stages, known_stages=STAGES)
    rows = (*ids.shape, parameters["gate_proj"].shape[1])
    shapes = {"grad_output": tuple(x.shape), **dict.fromkeys(SAVED, rows)}
    old = [name for name in OLD if name in tensors]
    if old and len(old) != len(OLD):
        missing = ", ".join(name for name in OLD if name not in tensors)
        raise ValueError(f"{', '.join(old)} given, but not {missing}; give all old gradients or none")
    if old and LORA[0] not in parameters:
        raise ValueError(f"{', '.join(old)} given, but there are no adapters")
    shapes |= {name: tuple(parameters[name.removeprefix("old_")].shape) for name in old}
    check_tensors(x, {name: (tensors[name], shape, (x.dtype,)) for name, shape in shapes.items()})


def shards_of(
    tensors: Mapping[str, Tensor | QuantizedWeight], shards: int
) -> list[dict[str, Tensor | QuantizedWeight]]:
    """Return the tensors of each shard; the first one adds to the old gradients that are sums over shards."""
    parts = [shard(tensors, part, shards) for part in range(shards)]
    for part in parts[1:]:
        for name in ADDED:
            part.pop(f"old_{name}", None)
    return parts
