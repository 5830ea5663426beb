"""Checks of the arguments of MoE-LoRA, with an error for each that is not allowed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from moe_lora_shards import shard
from swiglu_limit import check_limit
from torch import Tensor

from lastbit import UnsupportedCase

STAGES = ("gate_base", "up_base", "gate_lora_mid", "up_lora_mid", "gate", "up", "down_lora_mid", "expert_output")
ACTIVATIONS = (torch.bfloat16, torch.float16)
IDS = (torch.int64, torch.int32)
MOST_TERMS = 64  # of the sums over slots and over shards, one after the other; `depth` holds for these up to here

Expected = Mapping[str, tuple[Tensor, tuple[int, ...], tuple[torch.dtype, ...]]]
"""Name → tensor, the shape and the dtypes that it may have."""


def check_forward(
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    parameters: Mapping[str, Tensor],
    *,
    scaling: float,
    first_expert: int,
    shards: int,
    swiglu_limit: float,
    stages: Collection[str],
    known_stages: Collection[str] = STAGES,
) -> None:
    """Raise for arguments that do not fit together; `parameters` are the base weights by name, and adapters if any.

    Raises:
        ValueError: a shape, a device, an option or a number.
        TypeError: a dtype.
        UnsupportedCase: more slots or shards than are added one after the other.
    """
    check_tensors(x, {"x": (x, _matrix("x", x, "[T, H]", 2), ACTIVATIONS)})
    slots = _matrix("expert_ids", expert_ids, "[T, k]", 2)[1]
    width = _matrix("gate_proj", parameters["gate_proj"], "[E, I, H]", 3)[1]
    expected: Expected = {
        "expert_ids": (expert_ids, (len(x), slots), IDS),
        "routing_weights": (routing_weights, (len(x), slots), (torch.float32,)),
    }
    check_tensors(x, {**expected, **_expected_parameters(x, parameters)})
    _check_options(scaling, first_expert, shards, width, stages, known_stages)
    check_limit(swiglu_limit, x.dtype)
    if slots > MOST_TERMS or shards > MOST_TERMS:
        raise UnsupportedCase(f"{slots} slots and {shards} shards; up to {MOST_TERMS} of each are supported")
    shard(parameters, 0, shards)  # raises where codes cannot be cut


def existing(stages: Collection[str], parameters: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return those of the stages that a layer has: without adapters it has no middles."""
    return tuple(stage for stage in stages if "gate_lora_a" in parameters or not stage.endswith("_mid"))


def check_tensors(x: Tensor, expected: Expected) -> None:
    """Raise ValueError or TypeError unless every tensor has its shape and one of its dtypes, and lies where x does."""
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; with the other tensors it must be {shape}")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}: move it there")


def _matrix(name: str, tensor: Tensor, meaning: str, dims: int) -> tuple[int, ...]:
    """Return the shape; raise ValueError for another number of dimensions than `dims`, or an empty one but T."""
    if tensor.dim() != dims or 0 in tensor.shape[1:] or (dims == 3 and len(tensor) == 0):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {meaning}, with no dimension of 0 but T")
    return tuple(tensor.shape)


def _expected_parameters(x: Tensor, parameters: Mapping[str, Tensor]) -> Expected:
    experts, width, _ = parameters["gate_proj"].shape
    first = parameters.get("gate_lora_a")
    rank = 0 if first is None else _matrix("gate_lora_a", first, "[E, r, H]", 3)[1]
    hidden = x.shape[1]
    into, out = (experts, width, hidden), (experts, hidden, width)
    shapes = {
        **{"gate_proj": into, "up_proj": into, "down_proj": out},
        **{f"{name}_lora_a": (experts, rank, hidden) for name in ("gate", "up")},
        **{f"{name}_lora_b": (experts, width, rank) for name in ("gate", "up")},
        **{"down_lora_a": (experts, rank, width), "down_lora_b": (experts, hidden, rank)},
    }
    return {name: (tensor, shapes[name], (x.dtype,)) for name, tensor in parameters.items()}


def _check_options(
    scaling: float, first_expert: int, shards: int, width: int, stages: Collection[str], known: Collection[str]
) -> None:
    if not abs(scaling) <= torch.finfo(torch.float32).max:
        raise ValueError(f"scaling={scaling} is not finite in fp32; pass alpha / r")
    if first_expert < 0:
        raise ValueError(f"first_expert={first_expert} is negative; pass the id of the first expert that is held here")
    if shards < 1 or width % shards:
        raise ValueError(f"shards={shards} does not divide the intermediate dimension, which is {width}")
    for stage in stages:
        if stage not in known:
            raise ValueError(f"stages: {stage!r} is not one of {', '.join(map(repr, known))}")
