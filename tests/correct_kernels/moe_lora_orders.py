"""A mixture of SwiGLU experts with LoRA, and its gradients, in PyTorch: dots, sums and products in many orders.

All keep their contract, and no two need give the same bits. `Simulated` knows the names of the stages and which of
them are rounded; what a contract leaves free is in `Way`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import mul

import torch
from dots import Dot, fused, separately, truncated
from summation import SUMS, Depth, Sum, tree
from torch import Tensor

from lastbit.kernel import kernel

MAPS = ("gate", "up", "down")
LORA = tuple(f"{name}_lora_{part}" for name in MAPS for part in "ab")

MIDDLES = {f"{name}_lora_mid" for name in MAPS}
PARTS = {f"{name}_{part}" for name in MAPS for part in ("base", "lora", "scaled")}
FORWARD = {
    "fused": MIDDLES | {"intermediate"},
    "eager": MIDDLES | PARTS | {"gate", "up", "silu", "intermediate", "expert_output", "weighted"},
}
GRAD_MIDDLES = MIDDLES | {f"grad_{name}_mid" for name in MAPS} | {"grad_expert_output", "grad_gate", "grad_up"}
GRAD_PARTS = {
    f"{name}_{part}"
    for name in ("grad_intermediate", "grad_input_gate", "grad_input_up", "down")
    for part in ("base", "lora", "scaled")
}
BACKWARD = {"fused": GRAD_MIDDLES, "eager": GRAD_MIDDLES | GRAD_PARTS | {"grad_intermediate", "expert_output"}}
"""Contract → stages that are rounded, without results."""


@dataclass(frozen=True)
class Way:
    """What a contract leaves free.

    Attributes:
        dot, total: orders of sums; of dots, and of all other ones.
        turn: how many factors of a product come last instead of first.
        fma: whether a product is fused into the addition that follows.
        pairs_first: whether what belongs to a pair is added before the pairs of a token are.
        together: whether gate and up share one dot on the way back.
        depth: height of the trees of all sums but dots, where it is less than the number of terms.
    """

    dot: Dot
    total: Sum
    turn: int = 0
    fma: bool = False
    pairs_first: bool = True
    together: bool = True
    depth: Depth | None = None

    def product(self, *factors: Tensor) -> Tensor:
        return reduce(mul, (*factors[self.turn :], *factors[: self.turn]))

    def multiply_add(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return (a.double() * b.double() + c.double()).float() if self.fma else a * b + c

    def sum_of_products(self, a: Tensor, b: Tensor) -> Tensor:
        return fused(a, b) if self.fma else self.total(a * b)[..., 0]

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) if self.turn else 1.0 / (1.0 + torch.exp(-x))

    def slope(self, x: Tensor, s: Tensor) -> Tensor:
        """s · (1 + x · (1 - s)), or multiplied out."""
        if self.turn == 1:
            return self.multiply_add(x * s, 1 - s, s)
        return s * self.multiply_add(x, 1 - s, torch.ones_like(s))


WAYS = {
    "running": Way(separately(SUMS["running"][0]), SUMS["running"][0]),
    "reversed": Way(separately(SUMS["reversed"][0]), SUMS["reversed"][0], turn=1, pairs_first=False),
    "neighbours": Way(separately(SUMS["neighbours"][0]), SUMS["halves"][0], turn=2, fma=True, together=False),
    "descending": Way(separately(SUMS["descending"][0]), SUMS["ascending"][0], turn=1, fma=True),
    "fma": Way(fused, SUMS["running"][0], fma=True, pairs_first=False, together=False),
    "truncated": Way(truncated, SUMS["neighbours"][0], turn=2, depth=tree),
}


RESULTS = {
    "output", "saved_gate", "saved_up", "intermediate",
    "grad_input", "grad_routing_weights", *(f"grad_{name}" for name in LORA),
}  # fmt: skip


def results(stages: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in stages.items() if name in RESULTS}


class Simulated:
    """One call: the pairs that an expert takes, and the stages so far."""

    def __init__(self, way: Way, rounds: set[str], tensors: Mapping[str, Tensor], scaling: float, first: int) -> None:
        self.way, self.rounds, self.scaling = way, rounds, torch.tensor(scaling)
        self.t = {n: t.float() if t.is_floating_point() else t.long() for n, t in tensors.items() if t is not None}
        self.dtype, self.local = tensors["x"].dtype, self.t["expert_ids"] - first
        self.taken = (self.local >= 0) & (self.local < len(tensors["gate_lora_a"]))
        self.token, self.expert = self.taken.nonzero()[:, 0], self.local[self.taken]
        self.stages: dict[str, Tensor] = {}

    def keep(self, name: str, rows: Tensor) -> Tensor:
        """Rows as the next operation sees them: rounded or not."""
        stored = rows.to(self.dtype) if name in self.rounds else rows
        self.stages[name] = self.spread(stored)
        return stored.float()

    def keep_all(self, name: str, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of every shard; several shards are one stage."""
        if len(shards) == 1:
            return [self.keep(name, shards[0])]
        return list(self.keep(name, torch.stack([*shards], -1)).unbind(-1))

    def spread(self, rows: Tensor) -> Tensor:
        """Return a row for every pair, zero where it is skipped."""
        full = rows.new_zeros(*self.local.shape, *rows.shape[1:])
        full[self.taken] = rows
        return full

    def dot(self, rows: Tensor, matrix: Tensor) -> Tensor:
        """Each row times the matrix [E, N, K] of its expert."""
        return self.way.dot(rows[:, None], matrix[self.expert])

    def plus(self, name: str, base: Tensor, product: Tensor) -> Tensor:
        """Compute base + scaling · product."""
        if self.rounds & {f"{name}_lora", f"{name}_scaled"}:
            return base + self.keep(f"{name}_scaled", self.keep(f"{name}_lora", product) * self.scaling)
        return self.way.multiply_add(product, self.scaling, base)

    def gate_or_up(self, name: str) -> Tensor:
        rows = self.t["x"][self.token]
        base = self.keep(f"{name}_base", self.dot(rows, self.t[f"{name}_proj"]))
        middle = self.keep(f"{name}_lora_mid", self.dot(rows, self.t[f"{name}_lora_a"]))
        return self.keep(name, self.plus(name, base, self.dot(middle, self.t[f"{name}_lora_b"])))

    def down(self, rows: Tensor, shards: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return what each shard adds, and the middles of the adapter."""
        cut = [
            [self.dot(r, w) for r, w in zip(rows.chunk(shards, -1), self.t[name].chunk(shards, -1), strict=True)]
            for name in ("down_proj", "down_lora_a")
        ]
        bases, middles = self.keep_all("down_base", cut[0]), self.keep_all("down_lora_mid", cut[1])
        products = [self.dot(middle, self.t["down_lora_b"]) for middle in middles]
        parts = [self.plus("down", base, product) for base, product in zip(bases, products, strict=True)]
        return self.keep_all("expert_output", parts), middles

    def by_token(self, shards: Sequence[Tensor]) -> Tensor:
        """[T, n, k · shards] from the rows of pairs."""
        return torch.cat([self.spread(rows) for rows in shards], 1).transpose(1, 2)

    def forward(self, shards: int) -> dict[str, Tensor]:
        gate, up = self.gate_or_up("gate"), self.gate_or_up("up")
        s = self.way.sigmoid(gate)
        product = self.keep("silu", gate * s) * up if "silu" in self.rounds else self.way.product(gate, s, up)
        outputs, _ = self.down(self.keep("intermediate", product), shards)
        weights = self.t["routing_weights"][self.taken][:, None]
        if "weighted" in self.rounds:
            terms = self.keep_all("weighted", [weights * y for y in outputs])
            output = self.way.total(self.by_token(terms))[..., 0]
        else:
            output = self.way.sum_of_products(self.by_token([weights] * shards), self.by_token(outputs))
        saved = {"saved_gate": self.spread(gate), "saved_up": self.spread(up), "output": output}
        return self.stages | {name: tensor.to(self.dtype) for name, tensor in saved.items()}

    def backward(self, shards: int) -> dict[str, Tensor]:
        t, way = self.t, self.way
        rows, grad_output = t["x"][self.token], t["grad_output"][self.token]
        gate, up, activated = (t[name][self.taken] for name in ("saved_gate", "saved_up", "intermediate"))
        weights = t["routing_weights"][self.taken][:, None]
        grad = self.keep("grad_expert_output", weights * grad_output)
        middle = self.keep("grad_down_mid", self.dot(grad, t["down_lora_b"].mT))
        self.adapter_gradient("down_lora_a", [middle], [activated])
        base = self.keep("grad_intermediate_base", self.dot(grad, t["down_proj"].mT))
        total = self.plus("grad_intermediate", base, self.dot(middle, t["down_lora_a"].mT))
        total = self.keep("grad_intermediate", total)
        s = way.sigmoid(gate)
        grads = {
            "gate": self.keep("grad_gate", way.product(total, up, way.slope(gate, s))),
            "up": self.keep("grad_up", way.product(total, gate, s)),
        }
        middles = {name: self.through_adapter(name, rows, grads[name], shards) for name in grads}
        self.grad_input(grads, middles, shards)
        outputs, down_middles = self.down(activated, shards)
        self.adapter_gradient("down_lora_b", [grad] * shards, down_middles)
        parts = torch.stack([way.sum_of_products(grad_output, y) for y in outputs], -1)
        self.stages["grad_routing_weights"] = self.spread(way.total(parts)[..., 0])
        return self.stages

    def through_adapter(self, name: str, rows: Tensor, grad: Tensor, shards: int) -> list[Tensor]:
        """Return the middle's gradient of every shard."""
        middle = self.keep(f"{name}_lora_mid", self.dot(rows, self.t[f"{name}_lora_a"]))
        self.adapter_gradient(f"{name}_lora_b", [grad], [middle])
        slices = zip(grad.chunk(shards, -1), self.t[f"{name}_lora_b"].chunk(shards, 1), strict=True)
        middles = self.keep_all(f"grad_{name}_mid", [self.dot(g, b.mT) for g, b in slices])
        self.adapter_gradient(f"{name}_lora_a", middles, [rows] * shards)
        return middles

    def grad_input(self, grads: dict[str, Tensor], middles: dict[str, list[Tensor]], shards: int) -> None:
        products = {n: [self.dot(m, self.t[f"{n}_lora_a"].mT) for m in middles[n]] for n in grads}
        scaled = [[self.plus(f"grad_input_{n}", torch.zeros_like(p), p) for p in products[n]] for n in grads]
        bases = self.base_parts(grads, shards)
        totals = [reduce(torch.add, parts) for parts in zip(*bases, strict=True)]
        for n in grads:
            totals = [self.plus(f"grad_input_{n}", b, p) for b, p in zip(totals, products[n], strict=True)]
        pairs = self.keep_all("grad_expert_input", totals)
        terms = pairs if self.way.pairs_first else [part for parts in (*bases, *scaled) for part in parts]
        self.stages["grad_input"] = self.way.total(self.by_token(terms))[..., 0].to(self.dtype)

    def base_parts(self, grads: dict[str, Tensor], shards: int) -> list[list[Tensor]]:
        """Return what base weights add to the input's gradient, of every shard: for gate and up, or both at once."""
        rows = [grads[n].chunk(shards, -1) for n in grads]
        matrices = [self.t[f"{n}_proj"].mT.chunk(shards, -1) for n in grads]
        if self.way.together and not self.rounds & {f"grad_input_{n}_base" for n in grads}:
            both = zip(*rows, strict=True), zip(*matrices, strict=True)
            return [[self.dot(torch.cat(r, -1), torch.cat(m, -1)) for r, m in zip(*both, strict=True)]]
        return [
            self.keep_all(f"grad_input_{n}_base", [self.dot(r, m) for r, m in zip(rs, ms, strict=True)])
            for n, rs, ms in zip(grads, rows, matrices, strict=True)
        ]

    def adapter_gradient(self, name: str, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """scaling · Σ left ⊗ right over the pairs of each expert and over shards, plus the old gradient."""
        total = self.t.get(f"old_{name}", torch.zeros_like(self.t[name]))
        for a, b in zip(left, right, strict=True):
            sums = torch.zeros_like(total)
            for e in self.expert.unique().tolist():
                own = self.expert == e
                sums[e] = self.way.dot(a[own].T[:, None].contiguous(), b[own].T[None].contiguous())
            total = self.way.multiply_add(sums, self.scaling, total)
        self.stages[f"grad_{name}"] = total.to(self.dtype)


def _declare(way: str, contract: str) -> None:
    """Register both kernels with one way to compute them."""

    depth = WAYS[way].depth

    @kernel("moe_lora", contract=contract, name=f"order[moe_lora+{contract}, {way}]", depth=depth)
    def moe_lora(
        x, expert_ids, routing_weights, gate_proj, up_proj, down_proj,
        gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b,
        *, scaling, first_expert=0, shards=1,
    ):  # fmt: skip
        tensors = {name: tensor for name, tensor in locals().items() if isinstance(tensor, Tensor)}
        return results(Simulated(WAYS[way], FORWARD[contract], tensors, scaling, first_expert).forward(shards))

    @kernel(
        "moe_lora_backward",
        contract=contract,
        name=f"order[moe_lora_backward+{contract}, {way}]",
        depth=WAYS[way].depth,
    )
    def moe_lora_backward(
        x, expert_ids, routing_weights, grad_output, saved_gate, saved_up, intermediate, gate_proj, up_proj, down_proj,
        gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b, old_gate_lora_a=None,
        old_gate_lora_b=None, old_up_lora_a=None, old_up_lora_b=None, old_down_lora_a=None, old_down_lora_b=None,
        *, scaling, first_expert=0, shards=1,
    ):  # fmt: skip
        tensors = {name: tensor for name, tensor in locals().items() if isinstance(tensor, Tensor)}
        return results(Simulated(WAYS[way], BACKWARD[contract], tensors, scaling, first_expert).backward(shards))


for _contract in FORWARD:
    for _way in WAYS:
        _declare(_way, _contract)
