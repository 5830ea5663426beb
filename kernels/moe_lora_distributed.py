"""`moe_lora` and `moe_lora_backward` of one rank of tensor parallelism, in their fused contract.

    mine = own(parameters)                                    or a shard that was loaded, in any tensors of its shapes
    results = forward(**inputs, **mine, scaling=2.0)
    saved = {name: results[name] for name in ("saved_gate", "saved_up", "intermediate")}
    gradients = backward(**inputs, **saved, **mine, grad_output=grad_output, scaling=2.0)

Arguments and results are those of the ops with `shards` = number of ranks, less what other ranks have:
moe_lora_shards.py says what that is. What every rank has whole is the same on all, in bits too: inputs, which the
caller sees to, and results. So equal optimizers keep the adapters equal that every rank holds whole.

Terms are added by an all-reduce in fp32, and the sum is rounded once. The order in which an all-reduce of more than two
ranks adds is up to its library, and may depend on the size of the tensor and on where the ranks are. The contract
leaves that order free: any such run keeps it, but two need not agree in every bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
import torch.distributed as dist
from moe_lora import forward_shard
from moe_lora_arguments import check_forward
from moe_lora_backward import Backward, backward_shard
from moe_lora_backward_arguments import ADDED, check_backward
from moe_lora_routing import route
from moe_lora_shards import DIMS, ShardPart, add, check_term, merge, part_of, shard
from moe_lora_weights import WEIGHTS, of_layer
from torch import Tensor

Group = dist.ProcessGroup | None
"""The ranks among which a layer is divided; None for all."""


def own(tensors: Mapping[str, Tensor], *, group: Group = None) -> dict[str, Tensor]:
    """Copy this rank's part of whole tensors.

    Raises:
        ValueError: an unknown name, or ranks that do not divide the intermediate dimension into whole elements, words
            of codes and groups.
    """
    cut = shard(tensors, dist.get_rank(group), dist.get_world_size(group))
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in cut.items()}


@torch.no_grad()
def forward(
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    *,
    scaling: float = 1.0,
    first_expert: int = 0,
    swiglu_limit: float = inf,
    group: Group = None,
    **parameters: Tensor,
) -> dict[str, Tensor]:
    """Return `output` [T, H], and the rank's columns of `saved_gate`, `saved_up` and `intermediate`.

    Raises:
        ValueError, TypeError, UnsupportedCase: as `moe_lora` does for a layer of the rank's size.
    """
    weights = of_layer(parameters).operands(x)
    numbers = {"scaling": scaling, "first_expert": first_expert, "shards": 1, "swiglu_limit": swiglu_limit}
    check_forward(x, expert_ids, routing_weights, weights, **numbers, stages=())
    routing = route(expert_ids, len(weights["gate_proj"]), first_expert)
    options = {"scaling": scaling, "swiglu_limit": swiglu_limit, "eager": False, "partial": True, "stages": ()}
    results = forward_shard(x, routing, routing_weights, weights, **options)
    return results | {"output": _added("output", results["output"], group).to(x.dtype)}


@torch.no_grad()
def backward(
    x: Tensor,
    *,
    scaling: float = 1.0,
    first_expert: int = 0,
    swiglu_limit: float = inf,
    group: Group = None,
    **tensors: Tensor,
) -> dict[str, Tensor]:
    """Return `grad_input` [T, H], `grad_routing_weights` [T, k], and the gradients of the rank's adapters.

    Args:
        tensors: inputs, saved tensors, parameters and old gradients by the names of `moe_lora_backward`; `grad_output`
            is the same on all ranks.

    Raises:
        ValueError, TypeError, UnsupportedCase: as `moe_lora_backward` does for a layer of the rank's size.
    """
    rows = {name: tensor for name, tensor in tensors.items() if name not in WEIGHTS}
    given = {"x": x} | rows | of_layer(tensors).operands(x)
    numbers = {"scaling": scaling, "first_expert": first_expert, "swiglu_limit": swiglu_limit}
    check_backward(given, (), **numbers, shards=1)
    old = {f"grad_{name}": given.pop(f"old_{name}", None) for name in ADDED}
    routing = route(given["expert_ids"], len(given["gate_proj"]), first_expert)
    step = Backward(routing, scaling, x.dtype, eager=False, swiglu_limit=swiglu_limit)
    found = backward_shard(step, given, partial=True)
    for name in (n for n in found if part_of(n) is ShardPart.ADDED):
        total = _added(name, found[name], group)
        total = total if old.get(name) is None else add(old[name].float(), total)
        found[name] = total if name == "grad_routing_weights" else total.to(x.dtype)
    return found


def gathered(tensors: Mapping[str, Tensor], *, group: Group = None) -> dict[str, Tensor]:
    """Gather whole parameters, gradients and saved tensors on every rank, by the names of the ops.

    Tensors that every rank has whole are returned as they are.
    """
    return {name: _side_by_side(name, t, group) if part_of(name) in DIMS else t for name, t in tensors.items()}


def _side_by_side(name: str, tensor: Tensor, group: Group) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return merge([{name: part} for part in parts])[name]


def _added(name: str, term: Tensor, group: Group) -> Tensor:
    """Add all ranks' terms, in the memory of this rank's."""
    check_term(name, term)
    dist.all_reduce(term, group=group)
    return term
