"""What the tests of the operator that moe_lora was modelled on would say of a fault.

They are `test_moe_sft_amx.py` and `test_moe_sft_amx_no_tp.py` of ktransformers: how tensors are drawn, what is
compared, with what, and within which bounds. Only sizes are smaller here; x is larger by as much as that makes gates
smaller.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.inputs import guarded_allocations
from lastbit.kernel import Kernel
from tests.faults import hunt
from tests.faults.plant import Fault, kernel_of
from tests.quantizers import encoded

TOKENS, SLOTS, EXPERTS, HIDDEN, INTERMEDIATE, RANK, SCALING = 4, 8, 32, 256, 128, 16, 2.0
THEIR_HIDDEN = 7168
BOUNDS = {"moe_lora": 0.05, "moe_lora_backward": 0.10}
FOUR_BIT_BOUNDS = {"moe_lora": 0.35, "moe_lora_backward": 0.40}
GROUPS = {"int8": None, "int4_symmetric": 32, "int4_asymmetric": 32, "mxfp4": 32, "mxfp4_bf16": 32}
COMPARED = {
    "moe_lora": ("output",),
    "moe_lora_backward": (
        "grad_input",
        *(f"grad_{name}_lora_{part}" for name in ("gate", "up", "down") for part in "ab"),
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What such a test measures.

    Attributes:
        error: the greatest of mean |difference| / mean |expected| over all tensors that are compared.
        bound: what it must be below.
    """

    error: float
    bound: float

    @property
    def passes(self) -> bool:
        return self.error < self.bound  # not if it is NaN

    def __str__(self) -> str:
        return f"{'passes' if self.passes else 'fails'}, {100 * self.error:.2g} %"


def outcome(kernel: Kernel, fault: Fault, device: torch.device, *, balanced: bool) -> Outcome:
    """Compare the kernel with PyTorch in bf16, with tensors drawn as upstream, or so that adapters matter."""
    tensors, wanted = problem(fault.op, device, balanced=balanced)
    storage = fault.options if fault.options in GROUPS else ""
    quantized = codes(tensors, storage) if storage else {}
    actual = call(kernel, tensors | quantized, shards=2 if fault.options == "shards" else 1)
    experts = tensors["expert_ids"].unique()
    errors = [relative_error(actual[n], wanted[n], experts if "lora" in n else None) for n in COMPARED[fault.op]]
    bounds = BOUNDS if storage in ("", "int8") else FOUR_BIT_BOUNDS
    return Outcome(max(errors, key=lambda e: math.inf if math.isnan(e) else e), bounds[fault.op])


@functools.cache
def problem(op: str, device: torch.device, *, balanced: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make the arguments of the op, and what is expected."""
    tensors = {name: t.to(device) for name, t in drawn(balanced=balanced).items()}
    grad_output = tensors.pop("grad_output")
    results = call(reference("moe_lora"), tensors, shards=1)
    if op == "moe_lora":
        return tensors, results
    del results["output"]
    tensors |= results | {"grad_output": grad_output}
    return tensors, call(reference(op), tensors, shards=1)


def reference(op: str) -> Kernel:
    return kernel_of(hunt.clean_kernels(), f"{op}+eager", family="eager")


def call(kernel: Kernel, tensors: Mapping[str, Tensor], *, shards: int) -> dict[str, Tensor]:
    with guarded_allocations(0):
        return dict(kernel.call(**tensors, scaling=SCALING, shards=shards))


def drawn(*, balanced: bool) -> dict[str, Tensor]:
    """Draw what both ops take; each token has other experts, and its weights add to 1."""
    generator = torch.Generator().manual_seed(42)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    sides = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    activations = 1.0 if balanced else math.sqrt(THEIR_HIDDEN / HIDDEN) / 100
    tensors = {name: normal(TOKENS, HIDDEN, scale=activations) for name in ("x", "grad_output")}
    for name, (outputs, inputs) in sides.items():
        base, a, b = (inputs**-0.5, inputs**-0.5, RANK**-0.5) if balanced else (1.0, 0.01, 0.01)
        tensors[f"{name}_proj"] = normal(EXPERTS, outputs, inputs, scale=base)
        tensors[f"{name}_lora_a"] = normal(EXPERTS, RANK, inputs, scale=a)
        tensors[f"{name}_lora_b"] = normal(EXPERTS, outputs, RANK, scale=b)
    ids = [torch.randperm(EXPERTS, generator=generator)[:SLOTS] for _ in range(TOKENS)]
    weights = torch.rand(TOKENS, SLOTS, generator=generator)
    return tensors | {"expert_ids": torch.stack(ids), "routing_weights": weights / weights.sum(-1, keepdim=True)}


def codes(tensors: Mapping[str, Tensor], storage: str) -> dict[str, Tensor]:
    """Return the base weights in codes; what they are compared with is the weights before."""
    scheme, group = storage.removesuffix("_bf16"), GROUPS[storage]
    scale_dtype = torch.bfloat16 if storage.endswith("_bf16") else None
    found = {}
    for name in ("gate", "up", "down"):
        stored = encoded(tensors[f"{name}_proj"], scheme, group, scale_dtype=scale_dtype)
        parts = zip(("proj", "scale", "zero"), stored, strict=True)
        found |= {f"{name}_{part}": tensor for part, tensor in parts if tensor is not None}
    return found


def relative_error(actual: Tensor, wanted: Tensor, experts: Tensor | None) -> float:
    """mean |actual − wanted| / mean |wanted|, for adapters over the experts that have tokens."""
    if experts is not None:
        actual, wanted = actual[experts], wanted[experts]
    return float((actual.double() - wanted.double()).abs().mean() / wanted.double().abs().mean())
