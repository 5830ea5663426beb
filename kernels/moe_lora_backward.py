"""Gradients of the MoE-LoRA layer in Triton, from the tensors that its forward saved.

Both contracts round what must be an operand of a dot, and each result once. `eager` also rounds every product of
matrices, as separate operations in the activation dtype do. Sums over shards, slots or pairs are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from grouped_linear import INVARIANT, LARGEST_BLOCK_K, Factors, grouped_linear, grouped_pair
from grouped_linear import depth as dot_depth
from moe_lora import combine
from moe_lora_arguments import existing
from moe_lora_backward_arguments import ADDED, STAGES, check_backward, shards_of
from moe_lora_gradients import column_depth, pair_dot, swiglu_backward, weigh
from moe_lora_outer import grouped_outer, pair_depth
from moe_lora_routing import Routing, route
from moe_lora_shards import merge
from moe_lora_weights import LayerWeights, OldGradients, named
from torch import Tensor

from lastbit import kernel

Tensors = Mapping[str, Tensor]


def depth(n: int) -> int:
    """Return the greatest number of additions between a term and the sum of n of them."""
    return max(dot_depth(n), column_depth(n), pair_depth(n))


@dataclass(frozen=True)
class Backward:
    """The parameters that all steps of one call share.

    Attributes:
        routing: the expert of each pair.
        scaling: of the adapters.
        dtype: of the activations.
        eager: the contract.
        swiglu_limit: of gate and up.
    """

    routing: Routing
    scaling: float
    dtype: torch.dtype
    eager: bool
    swiglu_limit: float = inf

    def operand(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return rows · weight[e]ᵀ, rounded: the operand of another dot."""
        return grouped_linear(((rows, weight),), self.routing, out_dtype=self.dtype)

    def adapted(
        self, operands: tuple[Factors, ...], lora: tuple[Factors, ...], *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return Σ rows · weight[e]ᵀ + Σ scaling · middle · lora[e]ᵀ; by default rounded if the contract is eager."""
        return grouped_linear(
            operands, self.routing, lora=lora, scaling=self.scaling,
            out_dtype=out_dtype or (self.dtype if self.eager else torch.float32),
            round_base=self.eager, round_lora=self.eager,
        )  # fmt: skip


def through_down(step: Backward, t: Tensors) -> dict[str, Tensor]:
    """Return the stages of the down projection, from the gradient of the output to that of the activated rows."""
    rows, grad = t["intermediate"], weigh(t["grad_output"], t["routing_weights"], step.routing)
    found, lora, lora_back = {"grad_expert_output": grad}, (), ()
    if "down_lora_a" in t:
        grad_mid, mid = step.operand(grad, turned(t["down_lora_b"])), step.operand(rows, t["down_lora_a"])
        found |= {"grad_down_mid": grad_mid, "down_lora_mid": mid}
        lora, lora_back = ((mid, t["down_lora_b"]),), ((grad_mid, turned(t["down_lora_a"])),)
    found["grad_intermediate"] = step.adapted(((grad, turned(t["down_proj"])),), lora_back)
    found["expert_output"] = step.adapted(((rows, t["down_proj"]),), lora)
    return found


def through_gate_and_up(step: Backward, t: Tensors, grad_intermediate: Tensor) -> dict[str, Tensor]:
    """Return the stages from the gradient of the activated rows to that of the input of each pair."""
    names, found, base, lora = ("gate", "up"), {}, [], []
    saved = t["saved_gate"], t["saved_up"]
    grads = swiglu_backward(grad_intermediate, *saved, step.routing, limit=step.swiglu_limit)
    if "gate_lora_a" in t:
        mids = grouped_pair(t["x"], (t["gate_lora_a"], t["up_lora_a"]), step.routing)
        found |= {f"{name}_lora_mid": mid for name, mid in zip(names, mids, strict=True)}
    for name, grad in zip(names, grads, strict=True):
        found[f"grad_{name}"] = grad
        base.append((grad, turned(t[f"{name}_proj"])))
        if f"{name}_lora_mid" in found:
            grad_mid = step.operand(grad, turned(t[f"{name}_lora_b"]))
            found[f"grad_{name}_mid"] = grad_mid
            lora.append((grad_mid, turned(t[f"{name}_lora_a"])))
    return found | {"grad_expert_input": step.adapted(tuple(base), tuple(lora), out_dtype=torch.float32)}


def turned(weight: Tensor) -> Tensor:
    """Transpose a weight [E, N, K] to [E, K, N], for the way back."""
    return weight.transpose(1, 2)


def lora_gradients(step: Backward, t: Tensors, *, partial: bool) -> dict[str, Tensor]:
    """Return the gradients of the present adapters, plus the old ones, from the tensors and stages of one shard."""
    factors = {
        ("gate_lora_a", "up_lora_a"): (("grad_gate_mid", "grad_up_mid"), "x"),
        ("gate_lora_b",): (("grad_gate",), "gate_lora_mid"),
        ("up_lora_b",): (("grad_up",), "up_lora_mid"),
        ("down_lora_a",): (("grad_down_mid",), "intermediate"),
        ("down_lora_b",): (("grad_expert_output",), "down_lora_mid"),
    }
    found = {}
    for names, (lefts, right) in factors.items():
        if names[0] not in t:
            continue
        results = grouped_outer(
            [t[left] for left in lefts], t[right], step.routing, scaling=step.scaling,
            olds=[t.get(f"old_{name}") for name in names],
            out_dtype=torch.float32 if partial and names[0] in ADDED else step.dtype,
        )  # fmt: skip
        found |= {f"grad_{name}": result for name, result in zip(names, results, strict=True)}
    return found


def backward_shard(step: Backward, t: Tensors, *, partial: bool, stages: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return results and stages of one shard; with `partial`, terms of sums over shards are left in fp32."""
    found = through_down(step, t)
    found |= through_gate_and_up(step, t, found["grad_intermediate"])
    out_dtype = torch.float32 if partial else step.dtype
    return {
        "grad_input": combine(found["grad_expert_input"], None, step.routing, out_dtype),
        **lora_gradients(step, {**t, **found}, partial=partial),
        "grad_routing_weights": pair_dot(t["grad_output"], found["expert_output"], step.routing),
        **{name: found[name] for name in stages},
    }


def _declare(contract: str) -> Callable[..., dict[str, Tensor]]:
    """Register the kernel that keeps `contract`."""

    @kernel(
        "moe_lora_backward", contract=contract, name=f"triton[moe_lora_backward+{contract}]", stages=STAGES,
        depth=depth, order=LARGEST_BLOCK_K, invariant=INVARIANT,
    )  # fmt: skip
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
        stages: tuple[str, ...] = (),
    ) -> dict[str, Tensor]:
        """Compute the gradients of `moe_lora` for the gradient of its output; base weights are frozen and have none.

        Args:
            x, expert_ids, routing_weights, weights, scaling, first_expert, swiglu_limit: as `moe_lora` took them. What
                the limit has cut off has a gradient of 0.
            grad_output: [T, H], of x's dtype; any strides, as all tensors.
            saved_gate, saved_up, intermediate: [T, k, I], as `moe_lora` returned them.
            old: to which the new gradients of the adapters are added in fp32.
            shards: parts of I that are computed one after the other from views of the weights; what they all add to is
                summed in fp32, then rounded.
            stages: which of `STAGES` to return too, as far as the layer has them. With several shards, those of which
                each shard has one of its own are [T, k, n, shards].

        Returns:
            `grad_input` [T, H]; where there are adapters, `grad_gate_lora_a` and the other five, of the adapter's shape
            and dtype, 0 or the old gradient for an expert without pairs; `grad_routing_weights` [T, k], fp32, 0 for
            pairs that count for nothing.

        Raises:
            ValueError, TypeError: arguments that do not fit together, or on different devices.
            UnsupportedCase: more than 64 slots or shards.
        """
        rows = {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights, "grad_output": grad_output}
        saved = {"saved_gate": saved_gate, "saved_up": saved_up, "intermediate": intermediate}
        tensors = rows | saved | weights.operands(x) | named(old)
        numbers = {"scaling": scaling, "first_expert": first_expert, "swiglu_limit": swiglu_limit}
        check_backward(tensors, stages, **numbers, shards=shards)
        routing = route(expert_ids, len(weights.gate_proj), first_expert)
        step = Backward(routing, scaling, x.dtype, contract == "eager", swiglu_limit)
        asked = existing(stages, tensors)
        parts = [backward_shard(step, t, partial=shards > 1, stages=asked) for t in shards_of(tensors, shards)]
        return merge(parts, dict.fromkeys(("grad_input", *(f"grad_{name}" for name in ADDED)), x.dtype))

    return moe_lora_backward


moe_lora_backward = _declare("fused")
moe_lora_backward_eager = _declare("eager")
