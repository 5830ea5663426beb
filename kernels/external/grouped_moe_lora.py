"""The mixture of experts with LoRA on `torch._grouped_mm`, as eager PyTorch rounds: bf16 between every two operations.

Pairs are sorted by expert once, and every product is one call for all experts. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from norm_packages import refuse_elsewhere
from torch import Tensor

from lastbit import kernel

WIDTHS = range(8, 65537, 8)
"""Sizes of matrices of which rows begin at multiples of 16 bytes."""
TAKES = {
    "tensors": ("contiguous", "non-empty"), "x dtype": "bf16", "gate_proj dtype": "bf16",
    "x columns": WIDTHS, "gate_proj size 1": WIDTHS, "gate_lora_a size 1": WIDTHS,
}  # fmt: skip
POWERS = tuple(2.0**power for power in range(-8, 9))
"""Scalings that round nothing: the product rounds gradients before they are scaled."""


class SortedPairs:
    """Pairs of tokens and slots in the order of their experts; those of no expert here come last."""

    def __init__(self, expert_ids: Tensor, experts: int, first_expert: int):
        ids = expert_ids.reshape(-1).long()
        here = (ids >= first_expert) & (ids < first_expert + experts)
        self.shape = expert_ids.shape
        sorted_ids, self.order = torch.where(here, ids - first_expert, experts).sort(stable=True)
        numbers = torch.arange(experts, device=ids.device)
        self.ends = torch.searchsorted(sorted_ids, numbers, right=True, out_int32=True)
        self.here = (sorted_ids < experts)[:, None]
        self.token = self.order // self.shape[1]

    def product(self, rows: Tensor, matrices: Tensor) -> Tensor:
        """Multiply rows [P, K] by the matrices [K, N] of their experts; rows of no expert give zero."""
        return torch.where(self.here, torch._grouped_mm(rows, matrices, offs=self.ends), 0)

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Return Σ left ⊗ right over the pairs of each expert, [E, M, N]; zero where there are none."""
        counts = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        found = torch._grouped_mm(left.t(), right, offs=self.ends)
        return torch.where((counts > 0)[:, None, None], found, 0)

    def adapted(self, rows: Tensor, weights: dict[str, Tensor], name: str, scaling: float) -> tuple[Tensor, Tensor]:
        """Apply the linear maps of the experts with their adapters; return also the middle of the adapter."""
        base, a, b = (weights[f"{name}_{part}"].transpose(-2, -1) for part in ("proj", "lora_a", "lora_b"))
        middle = self.product(rows, a)
        return self.product(rows, base) + self.product(middle, b) * scaling, middle

    def back(
        self, grad: Tensor, weights: dict[str, Tensor], name: str, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take a gradient back through a map: return the terms of base and adapter, and the gradient of the middle."""
        middle = self.product(grad, weights[f"{name}_lora_b"])
        adapter = self.product(middle, weights[f"{name}_lora_a"]) * scaling
        return self.product(grad, weights[f"{name}_proj"]), adapter, middle

    def scattered(self, rows: Tensor) -> Tensor:
        """Put rows [P, N] in the order of tokens: [T, k, N]."""
        return torch.empty_like(rows).index_copy_(0, self.order, rows).view(*self.shape, -1)


def by_name(*maps: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Name the matrices of gate, up and down as the op does."""
    named = zip(("gate", "up", "down"), maps, strict=True)
    parts = ("proj", "lora_a", "lora_b")
    return {f"{name}_{part}": t for name, own in named for part, t in zip(parts, own, strict=True)}


@kernel("moe_lora", contract="eager", name="torch._grouped_mm[moe_lora]", takes=TAKES)
def moe_lora(
    x, expert_ids, routing_weights, gate_proj, up_proj, down_proj,
    gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b, *, scaling, first_expert=0,
):  # fmt: skip
    gate, up = (gate_proj, gate_lora_a, gate_lora_b), (up_proj, up_lora_a, up_lora_b)
    weights = by_name(gate, up, (down_proj, down_lora_a, down_lora_b))
    refuse_elsewhere(x, expert_ids=expert_ids, routing_weights=routing_weights, **weights)
    pairs = SortedPairs(expert_ids, len(gate_proj), first_expert)
    rows = x[pairs.token]
    gate, up = (pairs.adapted(rows, weights, name, scaling)[0] for name in ("gate", "up"))
    intermediate = F.silu(gate) * up
    expert, _ = pairs.adapted(intermediate, weights, "down", scaling)
    factors = routing_weights.reshape(-1, 1)[pairs.order]
    weighted = torch.where(pairs.here, (factors * expert).to(x.dtype), 0)
    output = pairs.scattered(weighted).sum(1, dtype=torch.float32).to(x.dtype)
    saved = {"saved_gate": gate, "saved_up": up, "intermediate": intermediate}
    return {"output": output, **{name: pairs.scattered(t) for name, t in saved.items()}}


def through_swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up for the gradient of silu(gate) · up, in fp32 and rounded once."""
    grad, g, u = grad.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    return (grad * u * (s * (1 + g * (1 - s)))).to(gate.dtype), (grad * (g * s)).to(gate.dtype)


@kernel(
    "moe_lora_backward", contract="eager", name="torch._grouped_mm[moe_lora_backward]",
    takes={**TAKES, "scaling": POWERS},
)  # fmt: skip
def moe_lora_backward(
    x, expert_ids, routing_weights, grad_output, saved_gate, saved_up, intermediate, gate_proj, up_proj, down_proj,
    gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b, *, scaling, first_expert=0,
):  # fmt: skip
    gate, up = (gate_proj, gate_lora_a, gate_lora_b), (up_proj, up_lora_a, up_lora_b)
    weights = by_name(gate, up, (down_proj, down_lora_a, down_lora_b))
    refuse_elsewhere(x, expert_ids=expert_ids, routing_weights=routing_weights, grad_output=grad_output, **weights)
    pairs = SortedPairs(expert_ids, len(gate_proj), first_expert)
    rows, upper = x[pairs.token], grad_output[pairs.token]
    own = [t.reshape(-1, t.shape[-1])[pairs.order] for t in (saved_gate, saved_up, intermediate)]
    grad = torch.where(pairs.here, (routing_weights.reshape(-1, 1)[pairs.order] * upper.float()).to(x.dtype), 0)

    base, adapter, down_middle = pairs.back(grad, weights, "down", scaling)
    expert, middle = pairs.adapted(own[2], weights, "down", scaling)
    results = {"grad_down_lora_a": pairs.outer(down_middle, own[2]), "grad_down_lora_b": pairs.outer(grad, middle)}
    inputs = []
    for name, own_grad in zip(("gate", "up"), through_swiglu(base + adapter, *own[:2]), strict=True):
        base, adapter, own_middle = pairs.back(own_grad, weights, name, scaling)
        inputs.append(base.float() + adapter.float())
        middle = pairs.product(rows, weights[f"{name}_lora_a"].transpose(-2, -1))
        results[f"grad_{name}_lora_a"] = pairs.outer(own_middle, rows)
        results[f"grad_{name}_lora_b"] = pairs.outer(own_grad, middle)
    results = {name: gradient * scaling for name, gradient in results.items()}
    products = torch.where(pairs.here, upper.float() * expert.float(), 0).sum(-1, keepdim=True)
    results["grad_input"] = pairs.scattered(inputs[0] + inputs[1]).sum(1).to(x.dtype)
    results["grad_routing_weights"] = pairs.scattered(products)[..., 0]
    return results
