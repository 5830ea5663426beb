"""MoE-LoRA for training: forward returns a state, backward takes one, and nothing is kept anywhere else.

    output, state = forward(x, expert_ids, routing_weights, parameters)
    gradients = backward(grad_output, state)

A state belongs to one forward. States can be kept for as long as wanted and used in any order, more than once or not at
all. Shards are views of the parameters, made by each call: there are no copies to go stale. A state whose tensors have
changed since its forward is refused, because its gradients would be those of no forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from moe_lora import moe_lora
from moe_lora_backward import moe_lora_backward
from moe_lora_backward_arguments import LORA, SAVED
from moe_lora_weights import LayerWeights, OldGradients, named
from torch import Tensor
from torch.autograd.function import once_differentiable

KEPT = ("x", "expert_ids", "routing_weights", *SAVED)


@dataclass(frozen=True, eq=False, kw_only=True)
class Parameters(LayerWeights):
    """The weights of one layer, the trainer's own tensors and not copies, and its numbers, as `moe_lora` takes them."""

    scaling: float = 1.0
    first_expert: int = 0
    swiglu_limit: float = inf

    @property
    def numbers(self) -> dict[str, float]:
        """The parameters that are no tensors, by name."""
        return {"scaling": self.scaling, "first_expert": self.first_expert, "swiglu_limit": self.swiglu_limit}


@dataclass(frozen=True)
class WriteMark:
    """A mark that tells whether a tensor was written to: its address, and torch's count of the writes.

    Torch does not count what is written through `tensor.data`, or by a kernel that it does not know.
    """

    address: int
    version: int


@dataclass(frozen=True, eq=False)
class State:
    """The tensors that one forward leaves to its backward; no two that the forward made share memory.

    Attributes:
        x, expert_ids, routing_weights: the caller's own tensors, in token order.
        saved_gate, saved_up, intermediate: [T, k, I], made by the forward.
        parameters: the layer's, as they were given.
        shards: number of shards along I in which the forward ran.
        marks: for each of these tensors, its mark when the forward had ended.
    """

    x: Tensor
    expert_ids: Tensor
    routing_weights: Tensor
    saved_gate: Tensor
    saved_up: Tensor
    intermediate: Tensor
    parameters: Parameters
    shards: int
    marks: Mapping[str, WriteMark]


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of one layer's inputs and LoRA parameters, each of the shape and dtype of its tensor."""

    x: Tensor
    routing_weights: Tensor
    gate_lora_a: Tensor | None = None
    gate_lora_b: Tensor | None = None
    up_lora_a: Tensor | None = None
    up_lora_b: Tensor | None = None
    down_lora_a: Tensor | None = None
    down_lora_b: Tensor | None = None

    @property
    def lora(self) -> dict[str, Tensor]:
        """The LoRA gradients by name, as `backward` takes them to accumulate into; none without adapters."""
        return {name: getattr(self, name) for name in LORA if getattr(self, name) is not None}


@torch.no_grad()
def forward(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, parameters: Parameters, *, shards: int = 1
) -> tuple[Tensor, State]:
    """Return the output [T, H] of `moe_lora` under the fused contract, and the state that `backward` needs.

    Raises:
        ValueError, TypeError: arguments that do not fit together, or a tensor whose changes torch does not count.
    """
    given = {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights}
    results = moe_lora(**given, weights=parameters, **parameters.numbers, shards=shards)
    output = results.pop("output")
    kept = given | results
    return output, State(**kept, parameters=parameters, shards=shards, marks=_marks(kept, parameters))


@torch.no_grad()
def backward(grad_output: Tensor, state: State, *, accumulate_into: Mapping[str, Tensor] | None = None) -> Gradients:
    """Return the gradients of the forward that made `state`, for the gradient of its output.

    Args:
        grad_output: shape, dtype and device of that output, with any strides.
        accumulate_into: the six LoRA gradients of earlier backwards by name. The new ones are added to them in fp32,
            rounded once and written to them; the result holds these same tensors.

    Raises:
        ValueError: a tensor of the state or a parameter was changed after the forward, or grad_output or
            accumulate_into does not fit.
        TypeError: dtypes that do not fit.
    """
    _check_unchanged(state)
    _check_grad_output(grad_output, state.x)
    saved = {name: getattr(state, name) for name in KEPT}
    weights, old = state.parameters, _old_gradients(accumulate_into)
    given = saved | {"grad_output": grad_output, "weights": weights, "old": old}
    results = moe_lora_backward(**given, **weights.numbers, shards=state.shards)
    lora = {name: results[f"grad_{name}"] for name in LORA if f"grad_{name}" in results}
    if accumulate_into is not None:
        lora = {name: accumulate_into[name].copy_(gradient) for name, gradient in lora.items()}
    return Gradients(results["grad_input"], results["grad_routing_weights"], **lora)


def moe_lora_autograd(
    x: Tensor, expert_ids: Tensor, routing_weights: Tensor, parameters: Parameters, *, shards: int = 1
) -> Tensor:
    """Return the output of `forward`, differentiable once by x, routing_weights and the six LoRA parameters."""
    lora = [tensor for name, tensor in named(parameters).items() if name in LORA]
    return _MoeLora.apply(x, expert_ids, routing_weights, parameters, shards, *lora)


class _MoeLora(torch.autograd.Function):
    """`forward` and `backward` as a node of torch's graph; the LoRA parameters are inputs so that torch sees them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, expert_ids: Tensor, routing_weights: Tensor, parameters: Parameters, shards: int, *lora
    ):
        output, ctx.state = forward(x, expert_ids, routing_weights, parameters, shards=shards)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor):
        gradients = backward(grad_output, ctx.state)
        return gradients.x, None, gradients.routing_weights, None, None, *gradients.lora.values()


def _marks(kept: Mapping[str, Tensor], parameters: Parameters) -> dict[str, WriteMark]:
    return {name: _mark(name, tensor) for name, tensor in (kept | named(parameters)).items()}


def _mark(name: str, tensor: Tensor) -> WriteMark:
    if tensor.is_inference():
        raise ValueError(
            f"{name} was made under torch.inference_mode, where torch does not count changes; "
            "make it under torch.no_grad, or call moe_lora, which keeps no state"
        )
    return WriteMark(tensor.data_ptr(), tensor._version)


def _check_unchanged(state: State) -> None:
    """Raise ValueError if a tensor was written to, or got other memory, after the forward."""
    now = _marks({name: getattr(state, name) for name in KEPT}, state.parameters)
    changed = [name for name, mark in state.marks.items() if now[name] != mark]
    if changed:
        found = ", ".join(f"{name} (version {now[name].version}, then {state.marks[name].version})" for name in changed)
        raise ValueError(
            f"changed in place after the forward that made this state: {found}. Its gradients would be those of no "
            "forward; run every backward of a forward before the optimizer's step, or run the forward again"
        )


def _check_grad_output(grad_output: Tensor, x: Tensor) -> None:
    """Raise ValueError or TypeError unless grad_output has the shape, dtype and device of the output, which are x's."""
    belongs = "pass the gradient of the output of the forward that made this state"
    if grad_output.shape != x.shape:
        raise ValueError(
            f"grad_output has shape {tuple(grad_output.shape)}, but the output had {tuple(x.shape)}; {belongs}"
        )
    if grad_output.dtype != x.dtype:
        raise TypeError(f"grad_output is {grad_output.dtype}, but the output was {x.dtype}; {belongs}")
    if grad_output.device != x.device:
        raise ValueError(f"grad_output is on {grad_output.device}, but the output was on {x.device}; {belongs}")


def _old_gradients(accumulate_into: Mapping[str, Tensor] | None) -> OldGradients | None:
    """Return the gradients to which others are added; ValueError unless these are all of them."""
    if accumulate_into is None:
        return None
    if set(accumulate_into) != set(LORA):
        raise ValueError(
            f"accumulate_into holds {', '.join(sorted(accumulate_into)) or 'nothing'}; it needs {', '.join(LORA)}"
        )
    return OldGradients(**{f"old_{name}": gradient for name, gradient in accumulate_into.items()})
