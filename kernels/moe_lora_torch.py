"""A mixture of SwiGLU experts with LoRA in PyTorch: one expert after the other, written out for each contract.

moe_lora.py says what the contracts mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf

import torch
import torch.nn.functional as F
from moe_lora_arguments import check_forward
from moe_lora_shards import merge, shard
from moe_lora_weights import LayerWeights
from swiglu_limit import limited_in_torch
from torch import Tensor

from lastbit import kernel

# Each expert's rows are products of their own, in calls of torch whose shapes follow from the number of its rows.
INVARIANT = ("relabelling", "zero adapter", "capacity", "scaling", "run to run")

Step = Callable[..., tuple[Tensor, ...]]


def adapted_fused(
    rows: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, *, scaling: float
) -> Tensor:
    """Return rows · weightᵀ + scaling · (rows · lora_aᵀ) · lora_bᵀ in fp32; only the middle product is rounded.

    Without an adapter it is the first product alone. Numbers of 16 bits are exact in tf32 too, so that it does not
    matter whether torch may use it.
    """
    base = rows.float() @ weight.float().t()
    if lora_a is None or lora_b is None:
        return base
    middle = (rows.float() @ lora_a.float().t()).to(rows.dtype)
    return base + scaling * (middle.float() @ lora_b.float().t())


def adapted_eager(
    rows: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, *, scaling: float
) -> Tensor:
    """Compute as `adapted_fused`, but in the dtype of the rows, in the order of `peft.tuners.lora.Linear.forward`."""
    if lora_a is None or lora_b is None:
        return F.linear(rows, weight)
    return F.linear(rows, weight) + F.linear(F.linear(rows, lora_a), lora_b) * scaling


def expert_fused(
    x: Tensor, weight: Tensor, expert: dict[str, Tensor], *, scaling: float, limit: float
) -> tuple[Tensor, ...]:
    """Return one expert's part of the output of its pairs, [n, H] in fp32, saved gate, saved up and intermediate.

    x holds a row per pair, `weight` [n, 1] their routing weights.
    """
    gate, up = (_adapted(adapted_fused, x, name, expert, scaling) for name in ("gate", "up"))
    active, factor = limited_in_torch(gate, up, limit)
    intermediate = (active * torch.sigmoid(active) * factor).to(x.dtype)
    weighted = weight * _adapted(adapted_fused, intermediate, "down", expert, scaling)
    return weighted, gate.to(x.dtype), up.to(x.dtype), intermediate


def expert_eager(
    x: Tensor, weight: Tensor, expert: dict[str, Tensor], *, scaling: float, limit: float
) -> tuple[Tensor, ...]:
    """Compute as `expert_fused`, but with every operation rounded to the dtype of x."""
    gate, up = (_adapted(adapted_eager, x, name, expert, scaling) for name in ("gate", "up"))
    active, factor = limited_in_torch(gate, up, limit)
    intermediate = F.silu(active) * factor
    weighted = (weight * _adapted(adapted_eager, intermediate, "down", expert, scaling)).to(x.dtype)
    return weighted.float(), gate, up, intermediate


def _adapted(linear: Callable[..., Tensor], rows: Tensor, name: str, expert: dict[str, Tensor], scaling: float):
    return linear(rows, *(expert.get(f"{name}_{part}") for part in ("proj", "lora_a", "lora_b")), scaling=scaling)


@contextmanager
def sound_products() -> Iterator[None]:
    """Keep torch's products within the contracts: without two ways to multiply that no contract here allows.

    cuBLAS may round each part of a split dot to the dtype of the operands. oneDNN before 3.12, which torch before 2.13
    has, makes the bf16 row before a NaN row NaN on CPUs with AMX: docs/measurements/findings.md.
    """
    cuda, onednn = torch.backends.cuda.matmul, torch.backends.mkldnn
    switches = [(cuda, f"allow_{dtype}_reduced_precision_reduction") for dtype in ("bf16", "fp16")]
    if torch.__version__ < (2, 13):
        switches.append((onednn, "enabled"))
    before = [getattr(backend, name) for backend, name in switches]
    try:
        for backend, name in switches:
            setattr(backend, name, False)
        yield
    finally:
        for (backend, name), value in zip(switches, before, strict=True):
            setattr(backend, name, value)


def _forward(
    expert: Step,
    x: Tensor,
    expert_ids: Tensor,
    routing_weights: Tensor,
    parameters: dict[str, Tensor],
    first_expert: int,
) -> dict[str, Tensor]:
    """Return the results of one shard, the output in fp32; pairs that no expert takes stay zero."""
    hidden, width = x.shape[1], parameters["gate_proj"].shape[1]
    names = {"output": hidden, "saved_gate": width, "saved_up": width, "intermediate": width}
    results = {
        name: x.new_zeros(*expert_ids.shape, n, dtype=torch.float32 if name == "output" else x.dtype)
        for name, n in names.items()
    }
    for e in range(len(parameters["gate_proj"])):
        token, slot = (expert_ids == first_expert + e).nonzero(as_tuple=True)
        if not len(token):
            continue
        own = {name: parameter[e] for name, parameter in parameters.items()}
        values = expert(x[token], routing_weights[token, slot, None], own)
        for result, value in zip(results.values(), values, strict=True):
            result[token, slot] = value
    return results | {"output": results["output"].sum(1)}


def _declare(contract: str, expert: Step) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that keeps `contract`."""

    @kernel("moe_lora", contract=contract, name=f"eager[moe_lora+{contract}]", invariant=INVARIANT)
    def moe_lora(
        x: Tensor,
        expert_ids: Tensor,
        routing_weights: Tensor,
        weights: LayerWeights,
        *,
        scaling: float = 1.0,
        first_expert: int = 0,
        shards: int = 1,
        swiglu_limit: float = inf,
    ) -> dict[str, Tensor]:
        parameters = weights.operands(x)
        numbers = {"scaling": scaling, "first_expert": first_expert, "shards": shards, "swiglu_limit": swiglu_limit}
        check_forward(x, expert_ids, routing_weights, parameters, **numbers, stages=())
        step = partial(expert, scaling=scaling, limit=swiglu_limit)
        with sound_products():
            parts = [
                _forward(step, x, expert_ids, routing_weights, shard(parameters, p, shards), first_expert)
                for p in range(shards)
            ]
        return merge(parts, {"output": x.dtype})

    return moe_lora


eager_fused = _declare("fused", expert_fused)
eager_eager = _declare("eager", expert_eager)
