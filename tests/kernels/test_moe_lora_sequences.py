"""Forwards, backwards and optimizer steps of two MoE-LoRA layers in any order: every result keeps the contract.

The faults planted at the end are those of operators that keep state between calls; the same sequences find each.
"""

from __future__ import annotations

import sys
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, multiple, rule, run_state_machine_as_test
from torch import Tensor

from lastbit.inputs.overlap import overlaps
from lastbit.kernel import load_kernels
from tests.judged import assert_kept
from tests.rms_norm_contract import BF16, DEVICE, FOLDER, assert_bits, needs_device, normals

pytestmark = needs_device

load_kernels(FOLDER)
API = next(module for name, module in reversed(sys.modules.items()) if name.endswith(".moe_lora_state"))
LORA, KEPT, SAVED = API.LORA, API.KEPT, API.SAVED
TOKENS, SLOTS, EXPERTS, SIZE, RANK = 3, 2, 2, 8, 2

seeds = st.integers(0, 99)
EXAMPLES, STEPS = 6, 8  # enough to find each of the planted faults


def parameters(seed: int) -> Any:
    shapes = {"proj": (SIZE, SIZE), "lora_a": (RANK, SIZE), "lora_b": (SIZE, RANK)}
    parts = [(f"{side}_{part}", shapes[part]) for side in ("gate", "up", "down") for part in shapes]
    tensors = {n: normals(EXPERTS, *shape, dtype=BF16, seed=100 * seed + i) for i, (n, shape) in enumerate(parts)}
    return API.Parameters(**tensors, scaling=0.75, first_expert=1)


def given(seed: int) -> dict[str, Tensor]:
    """x, the ids of one expert here that not every token uses and of one that is not here, and routing weights."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": normals(TOKENS, SIZE, dtype=BF16, seed=seed),
        "expert_ids": torch.randint(0, EXPERTS + 1, (TOKENS, SLOTS), generator=generator).to(DEVICE),
        "routing_weights": normals(TOKENS, SLOTS, seed=seed + 1),
    }


def grad(seed: int) -> Tensor:
    return normals(TOKENS, SIZE, dtype=BF16, seed=1000 + seed)


def earlier_gradients(layer: Any) -> dict[str, Tensor]:
    return {name: normals(*getattr(layer, name).shape, dtype=BF16, seed=7) for name in LORA}


def arguments(layer: Any) -> dict[str, Any]:
    """Copy the parameters by name: what they are at this moment."""
    values = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in values.items()}


@dataclass(frozen=True, eq=False)
class Done:
    """A forward, and copies of all that its backward depends on."""

    layer: int
    steps: int
    state: Any
    arguments: dict[str, Any]


class Sequences(RuleBasedStateMachine):
    """Two layers with the real API; a subclass overrides `forward` or `backward` with a faulty one."""

    done = Bundle("done")

    def __init__(self) -> None:
        super().__init__()
        self.layers = [parameters(0), parameters(1)]
        self.steps = [0, 0]
        self.gradients = [earlier_gradients(layer) for layer in self.layers]

    def forward(self, *tensors: Tensor, shards: int) -> tuple[Tensor, Any]:
        return API.forward(*tensors, shards=shards)

    def backward(self, grad_output: Tensor, state: Any, accumulate_into: dict[str, Tensor] | None) -> Any:
        return API.backward(grad_output, state, accumulate_into=accumulate_into)

    @initialize(target=done, seed=seeds)
    def run_both(self, seed: int) -> Any:
        return multiple(*(self.run_forward(layer, seed, 2, step=False) for layer in (0, 1)))

    @rule(target=done, layer=st.integers(0, 1), seed=seeds, shards=st.integers(1, 2), step=st.booleans())
    def run_forward(self, layer: int, seed: int, shards: int, step: bool) -> Done:
        """Run a forward; often, as in training, it follows a step."""
        if step:
            self.run_optimizer(layer)
        tensors = given(seed)
        problem = arguments(self.layers[layer]) | {n: t.clone() for n, t in tensors.items()} | {"shards": shards}
        output, state = self.forward(*tensors.values(), self.layers[layer], shards=shards)
        saved = {name: getattr(state, name).clone() for name in SAVED}
        assert_kept("moe_lora", {"output": output, **saved}, contract="fused", **problem)
        return Done(layer, self.steps[layer], state, problem | saved)

    @rule(one=done, seed=seeds, accumulate=st.booleans())
    def run_backward(self, one: Done, seed: int, accumulate: bool) -> None:
        into = self.gradients[one.layer] if accumulate else None
        if self.steps[one.layer] != one.steps:
            return self.check_refused(grad(seed), one.state)
        old = {} if into is None else {f"old_{name}": tensor.clone() for name, tensor in into.items()}
        found = self.backward(grad(seed), one.state, into)
        if into is not None:
            assert all(found.lora[name] is into[name] for name in LORA)
        results = {f"grad_{name}": tensor for name, tensor in found.lora.items()}
        results |= {"grad_input": found.x, "grad_routing_weights": found.routing_weights}
        assert_kept("moe_lora_backward", results, **one.arguments, **old, grad_output=grad(seed), contract="fused")
        return None

    def check_refused(self, grad_output: Tensor, state: Any) -> None:
        try:
            self.backward(grad_output, state, None)
        except ValueError as error:
            assert "gate_lora_a" in str(error)
        else:
            raise AssertionError("the backward of a forward before the last step was not refused")

    @rule(layer=st.integers(0, 1))
    def run_optimizer(self, layer: int) -> None:
        """Take a step in place, with what has been accumulated; it is bounded, so that values stay ordinary."""
        for name, gradient in self.gradients[layer].items():
            getattr(self.layers[layer], name).sub_(gradient.clamp(-1, 1) / 2 + 0.25)
            gradient.zero_()
        self.steps[layer] += 1


def search(machine: type[Sequences]) -> None:
    """Run sequences until one fails; it is not shrunk."""
    length = {"max_examples": EXAMPLES, "stateful_step_count": STEPS}
    run_state_machine_as_test(machine, settings=settings(**length, phases=[Phase.generate], report_multiple_bugs=False))


@pytest.mark.slow
def test_any_sequence_keeps_the_contract():
    search(Sequences)


# The state


def forward(seed: int = 0, *, layer: Any = None, shards: int = 2) -> tuple[Tensor, Any]:
    return API.forward(*given(seed).values(), layer or parameters(0), shards=shards)


def test_backwards_in_any_order_and_twice_give_the_same_bits():
    states = [forward(seed, layer=parameters(seed % 2))[1] for seed in range(3)]
    alone = [API.backward(grad(i), forward(i, layer=parameters(i % 2))[1]) for i in range(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 1, 0)):
        for i in order:
            found = API.backward(grad(i), states[i])
            for field in fields(found):
                assert_bits(getattr(found, field.name), getattr(alone[i], field.name), field.name)


def test_no_two_tensors_share_memory():
    tensors = {}
    for i in range(2):
        output, state = forward(i, layer=parameters(0))
        found = API.backward(grad(0), state)
        tensors |= {f"{i} output": output, **{f"{i} {n}": getattr(state, n) for n in KEPT}}
        tensors |= {f"{i} grad {f.name}": getattr(found, f.name) for f in fields(found)}
    assert overlaps(tensors) == []


@pytest.mark.parametrize("name", [*KEPT, "gate_proj", "up_proj", "down_proj", *LORA])
def test_a_tensor_that_changed_after_the_forward_is_refused(name):
    _, state = forward()
    owner = state if name in KEPT else state.parameters
    API.backward(grad(0), state)
    getattr(owner, name)[:1] *= 1
    with pytest.raises(ValueError, match=f"changed in place after the forward .*: {name} "):
        API.backward(grad(0), state)


def test_a_parameter_that_got_other_memory_is_refused_and_cannot_be_replaced():
    _, state = forward()
    state.parameters.up_lora_a.data = state.parameters.up_lora_a.data.clone()
    with pytest.raises(ValueError, match="up_lora_a"):
        API.backward(grad(0), state)
    with pytest.raises(FrozenInstanceError):
        state.x = grad(0)
    with pytest.raises(FrozenInstanceError):
        state.parameters.up_lora_a = grad(0)


def test_a_gradient_of_another_output_is_refused():
    _, state = forward()
    wrong = [
        (grad(0)[:2], ValueError, r"grad_output has shape \(2, 8\), but the output had \(3, 8\)"),
        (grad(0).float(), TypeError, r"grad_output is torch\.float32, but the output was torch\.bfloat16"),
        (grad(0).to("meta"), ValueError, f"grad_output is on meta, but the output was on {DEVICE}"),
    ]
    for grad_output, error, message in wrong:
        with pytest.raises(error, match=message):
            API.backward(grad_output, state)
    with pytest.raises(ValueError, match="accumulate_into holds up_lora_a; it needs gate_lora_a"):
        API.backward(grad(0), state, accumulate_into={"up_lora_a": grad(0)})


def test_tensors_of_which_changes_are_not_counted_are_refused():
    with torch.inference_mode():
        layer = parameters(0)
    with pytest.raises(ValueError, match=r"gate_proj was made under torch\.inference_mode"):
        forward(layer=layer)


def test_autograd_gives_the_same_bits():
    tensors, layer = given(0), parameters(0)
    leaves = {n: getattr(layer, n).requires_grad_() for n in LORA}
    leaves |= {n: tensors[n].requires_grad_() for n in ("x", "routing_weights")}
    API.moe_lora_autograd(*tensors.values(), layer, shards=2).backward(grad(0))
    output, state = API.forward(*tensors.values(), layer, shards=2)
    assert not output.requires_grad
    wanted = API.backward(grad(0), state)
    for name, leaf in leaves.items():
        assert_bits(leaf.grad, getattr(wanted, name), name)
    again = API.moe_lora_autograd(*tensors.values(), layer)
    with torch.no_grad():
        layer.up_lora_b.add_(1)
    with pytest.raises(ValueError, match="up_lora_b"):
        again.backward(grad(0))


# Planted faults: each is found by the sequences above


class StaleShards(Sequences):
    """The slices of the adapters are copied at the first sharded forward, and not after a step."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, Any] = {}

    def forward(self, *tensors: Any, shards: int) -> tuple[Tensor, Any]:
        *rows, layer = tensors
        if shards > 1:
            sliced = {name: getattr(layer, name).clone() for name in ("gate_lora_b", "up_lora_b", "down_lora_a")}
            layer = replace(layer, **self.copies.setdefault(id(layer), sliced))
        return API.forward(*rows, layer, shards=shards)


class SharedScratch(Sequences):
    """All forwards save into one buffer; torch does not see the writes, as it would not those of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(TOKENS, SLOTS, SIZE, dtype=BF16, device=DEVICE)

    def forward(self, *tensors: Any, shards: int) -> tuple[Tensor, Any]:
        output, state = API.forward(*tensors, shards=shards)
        self.buffer.data.copy_(state.intermediate)
        mark = API.WriteMark(self.buffer.data_ptr(), self.buffer._version)
        return output, replace(state, intermediate=self.buffer, marks={**state.marks, "intermediate": mark})


class LastInFirstOut(Sequences):
    """A backward takes the state of the last forward that has had none, whichever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[Any] = []

    def forward(self, *tensors: Any, shards: int) -> tuple[Tensor, Any]:
        output, state = API.forward(*tensors, shards=shards)
        self.stack.append(state)
        return output, state

    def backward(self, grad_output: Tensor, state: Any, accumulate_into: dict[str, Tensor] | None) -> Any:
        state = self.stack.pop() if self.stack else state
        return API.backward(grad_output, state, accumulate_into=accumulate_into)


class OverwrittenSlices(Sequences):
    """With shards, the gradients that are put side by side are overwritten, and only the others accumulated."""

    def backward(self, grad_output: Tensor, state: Any, accumulate_into: dict[str, Tensor] | None) -> Any:
        if accumulate_into is not None and state.shards > 1:
            for name in ("gate_lora_b", "up_lora_b", "down_lora_a"):
                accumulate_into[name].zero_()
        return API.backward(grad_output, state, accumulate_into=accumulate_into)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [StaleShards, SharedScratch, LastInFirstOut, OverwrittenSlices])
def test_the_sequences_find(fault):
    with pytest.raises((AssertionError, ValueError)):
        search(fault)
