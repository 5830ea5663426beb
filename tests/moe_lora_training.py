"""Twenty steps of training a small MoE-LoRA layer: by the Triton kernels, and exactly in fp64.

The target is fixed and random, the loss is mean squared error. The adapters are trained as is usual: parameters in
bf16, of which AdamW holds master copies in fp32, which are rounded into the parameters after each step. The exact
training starts from the same numbers and rounds nothing. B starts at zero, as LoRA does: Hu et al. 2021, arXiv
2106.09685, section 4.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.result import Verdict
from tests.faults.plant import Edit, Fault, planted
from tests.judged import judged
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, normals

TOKENS, SLOTS, EXPERTS, HIDDEN, WIDTH, RANK = 16, 2, 4, 32, 32, 4
STEPS, LEARNING_RATE, SCALING = 20, 0.01, 2.0
LORA = ("gate_lora_a", "gate_lora_b", "up_lora_a", "up_lora_b", "down_lora_a", "down_lora_b")
SAVED = ("saved_gate", "saved_up", "intermediate")


@dataclass(frozen=True, eq=False)
class Problem:
    """What a training starts from.

    Attributes:
        inputs: x [T, H] in bf16, expert_ids and routing_weights [T, k].
        weights: base weights and adapters by name, in bf16.
        target: of the output, [T, H] in fp32.
    """

    inputs: dict[str, Tensor]
    weights: dict[str, Tensor]
    target: Tensor


def problem(seed: int = 0) -> Problem:
    """Every expert has tokens, and a token has two different ones, with softmax weights."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, generator=generator)
    top, ids = logits.softmax(-1).topk(SLOTS)
    shapes = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
    for side in ("gate", "up", "down"):
        outputs, inputs = shapes[f"{side}_proj"]
        shapes |= {f"{side}_lora_a": (RANK, inputs), f"{side}_lora_b": (outputs, RANK)}
    weights = {
        name: normals(EXPERTS, *shape, seed=seed + at) / shape[-1] ** 0.5 * (not name.endswith("_b"))
        for at, (name, shape) in enumerate(shapes.items(), 1)
    }
    inputs = {"x": normals(TOKENS, HIDDEN, dtype=BF16, seed=seed + 20), "expert_ids": ids.to(DEVICE)}
    inputs["routing_weights"] = (top / top.sum(-1, keepdim=True)).to(DEVICE)
    target = normals(TOKENS, HIDDEN, seed=seed + 21)
    return Problem(inputs, {n: w.to(BF16) for n, w in weights.items()}, target)


@dataclass(frozen=True, eq=False)
class Step:
    """One step, seen before the optimizer's part of it.

    Attributes:
        loss: in fp64, of the output as it was.
        output: [T, H].
        masters: the adapters as the optimizer holds them, copied.
        arguments, results: of the forward, copied; empty for the exact training.
        grad_output, gradients: of the backward, by the names of the op.
    """

    loss: float
    output: Tensor
    masters: dict[str, Tensor]
    arguments: Mapping[str, Any]
    results: Mapping[str, Tensor]
    grad_output: Tensor
    gradients: Mapping[str, Tensor]


def mean_squared_error(output: Tensor, target: Tensor) -> tuple[float, Tensor]:
    """Compute the loss in fp64, and its gradient: in fp32 at least, in the dtype of the output."""
    difference = output.to(torch.promote_types(output.dtype, FLOAT)) - target
    gradient = (2 / difference.numel() * difference).to(output.dtype)
    return float(F.mse_loss(output.double(), target.double())), gradient


def train(api: Any, start: Problem, *, shards: int = 1, steps: int = STEPS) -> Iterator[Step]:
    """Training with `forward` and `backward` of `api`, as moe_lora_state.py has them."""
    weights = {name: weight.clone() for name, weight in start.weights.items()}
    parameters = api.Parameters(**weights, scaling=SCALING)
    masters = {name: weights[name].float() for name in LORA}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    for _ in range(steps):
        output, state = api.forward(*start.inputs.values(), parameters, shards=shards)
        saved = {name: getattr(state, name).clone() for name in SAVED}
        loss, grad_output = mean_squared_error(output, start.target)
        gradients = api.backward(grad_output, state)
        results = {f"grad_{name}": gradients.lora[name] for name in LORA}
        yield Step(
            loss,
            output,
            copies(masters),
            {**start.inputs, **copies(weights), "scaling": SCALING, "shards": shards},
            {"output": output, **saved},
            grad_output,
            {"grad_input": gradients.x, "grad_routing_weights": gradients.routing_weights, **results},
        )
        for name, master in masters.items():
            master.grad = gradients.lora[name].float()
        optimizer.step()
        for name, master in masters.items():
            weights[name].copy_(master)  # in place: the parameters are the trainer's own tensors


def train_exactly(start: Problem, *, steps: int = STEPS) -> Iterator[Step]:
    """Train in fp64, with gradients by automatic differentiation of `layer`."""
    weights = {name: weight.double() for name, weight in start.weights.items()}
    masters = {name: weights[name].requires_grad_() for name in LORA}
    optimizer = torch.optim.AdamW(masters.values(), lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        output = layer(**start.inputs, weights=weights)
        F.mse_loss(output, start.target.double()).backward()
        loss, grad_output = mean_squared_error(output.detach(), start.target)
        gradients = {f"grad_{name}": master.grad.clone() for name, master in masters.items()}
        yield Step(loss, output.detach(), copies(masters), {}, {}, grad_output, gradients)
        optimizer.step()


def layer(x: Tensor, expert_ids: Tensor, routing_weights: Tensor, *, weights: Mapping[str, Tensor]) -> Tensor:
    """Compute the output in fp64: every expert computes every token, and those that it has not chosen weigh zero."""
    weight = {
        side: weights[f"{side}_proj"] + SCALING * weights[f"{side}_lora_b"] @ weights[f"{side}_lora_a"]
        for side in ("gate", "up", "down")
    }
    gate, up = (torch.einsum("th,enh->etn", x.double(), weight[side]) for side in ("gate", "up"))
    outputs = torch.einsum("etn,ehn->teh", F.silu(gate) * up, weight["down"])
    share = torch.zeros(outputs.shape[:2], dtype=outputs.dtype, device=x.device)
    share = share.scatter_add(1, expert_ids, routing_weights.double())
    return (share[..., None] * outputs).sum(1)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """‖one − other‖ over all tensors, in fp64."""
    return sum(float((one[name].double() - other[name].double()).square().sum()) for name in one) ** 0.5


# Planted faults

NO_ADAPTER_IN_GRADIENT = Fault(
    "M23",
    "leaves out what the down adapter adds to the gradient of the activated rows",
    (Edit('((grad_mid, turned(t["down_lora_a"])),)', "()", file="moe_lora_backward.py"),),
    exposed="grad_intermediate",
    hidden="grad_input",
    op="moe_lora_backward",
    variant="moe_lora_backward+fused",
)


def api_of_last_load() -> Any:
    """moe_lora_state.py of the folder of kernels that was loaded last."""
    return next(module for name, module in reversed(sys.modules.items()) if name.endswith(".moe_lora_state"))


@contextmanager
def without_adapter_in_gradient() -> Iterator[Any]:
    """Yield the API of kernels with the fault."""
    with planted(NO_ADAPTER_IN_GRADIENT):
        yield api_of_last_load()


class StaleShards:
    """The API of kernels whose shards of adapters are copied at the first forward, and not after a step (M18)."""

    def __init__(self, api: Any) -> None:
        self.Parameters, self.backward, self._forward, self._copied = api.Parameters, api.backward, api.forward, {}

    def forward(self, *inputs: Any, shards: int) -> tuple[Tensor, Any]:
        *rows, parameters = inputs
        sliced = ("gate_lora_b", "up_lora_b", "down_lora_a")
        self._copied = self._copied or copies({name: getattr(parameters, name) for name in sliced})
        return self._forward(*rows, replace(parameters, **self._copied), shards=shards)


def verdict(step: Step) -> dict[str, tuple[str, ...]]:
    """Op → results that it cannot have under the contract with the parameters of the step; empty if there are none."""
    saved = {name: step.results[name] for name in SAVED}
    backward = {**step.arguments, **saved, "grad_output": step.grad_output}
    judgements = {
        "moe_lora": judged("moe_lora", step.results, contract="fused", **step.arguments),
        "moe_lora_backward": judged("moe_lora_backward", step.gradients, contract="fused", **backward),
    }
    return {
        op: tuple(finding.stage for finding in judgement.findings)
        for op, judgement in judgements.items()
        if judgement.verdict is Verdict.FAILED
    }
