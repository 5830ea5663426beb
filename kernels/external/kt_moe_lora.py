"""MoE-LoRA of kt-kernel, a CPU library of the ktransformers project, as kernels under test.

    KT_KERNEL_CPU_VARIANT=avx2 lastbit verify kernels/external --op moe_lora

kt-kernel loads one build per process, the best for the CPU unless KT_KERNEL_CPU_VARIANT names another. The builds
differ in where they round, so each has its own kernels here. Those whose build is not loaded are unsupported.

Its classes that quantize activations (AMXInt8_SFT_MOE, AMXInt4_SFT_MOE, AMXInt4_KGroup_SFT_MOE) keep no contract of the
op and are no kernels here; docs/measurements/kt_kernel.py measures them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from kt_experts import ADAPTERS, GROUP_SIZE, MATRICES, NO_LIMIT, SCALES, Experts, local, package
from kt_room import Room
from torch import Tensor
from torch.nn.functional import pad

from lastbit import UnsupportedCase, kernel

WIDE = ("avx512_bf16", "amx")
SAVED = ("saved_gate", "saved_up", "intermediate")
"""What the forward leaves in the library; it returns none of that."""

GATE = 64.0
"""Its sigmoid is 1, up to a last bit, so that the gradient of silu(GATE) · up by GATE is up, up to a few last bits."""


@dataclass(frozen=True, eq=False)
class KtWeights:
    """The weights of a layer, all of which have adapters in these classes."""

    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor
    gate_lora_a: Tensor
    gate_lora_b: Tensor
    up_lora_a: Tensor
    up_lora_b: Tensor
    down_lora_a: Tensor
    down_lora_b: Tensor
    gate_scale: Tensor | None = None
    up_scale: Tensor | None = None
    down_scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class KtOldGradients:
    """The gradients of the adapters to which new ones are added."""

    old_gate_lora_a: Tensor
    old_gate_lora_b: Tensor
    old_up_lora_a: Tensor
    old_up_lora_b: Tensor
    old_down_lora_a: Tensor
    old_down_lora_b: Tensor


def room_for(name: str, x: Tensor, base: Mapping[str, Tensor], width: int, shards: int, limit: float) -> Room:
    """Return the dimensions that the class gets; raise UnsupportedCase where it cannot, which may end the process."""
    room = Room(x.shape[-1], width, shards, GROUP_SIZE)
    if x.dtype != torch.bfloat16:
        raise UnsupportedCase(f"x is {x.dtype}; kt-kernel takes bfloat16")
    if shards > 2 and name == "MXFP4_SFT_MOE":
        raise UnsupportedCase(f"{name} has one shard or two, not {shards}")
    if name == "MXFP4_SFT_MOE" and (x.shape[-1] % GROUP_SIZE or room.wider):
        raise UnsupportedCase(f"{name} needs H and I / shards divisible by {GROUP_SIZE}")
    if limit != inf and name != "MXFP4_SFT_MOE":
        raise UnsupportedCase(f"{name} has no swiglu_limit")
    for key in SCALES:
        if key in base and not is_power_of_two(base[key]).all():
            raise UnsupportedCase(f"{key} has other numbers than powers of two; kt-kernel takes E8M0 scales")
    return room


def is_power_of_two(scale: Tensor) -> Tensor:
    """Return a mask of the bf16 numbers that E8M0 has, 2^-127 to 2^127."""
    bits = scale.view(torch.int16)
    return (bits == 0x0040) | ((bits > 0) & (bits < 0x7F80) & (bits & 0x7F == 0))


def check_build(builds: tuple[str, ...]) -> None:
    """Raise UnsupportedCase if another build is loaded."""
    if (loaded := package().__cpu_variant__) not in builds:
        raise UnsupportedCase(f"the {loaded} build is loaded, not {builds[0]}; KT_KERNEL_CPU_VARIANT chooses one")


def native(name: str, matrices: Mapping[str, Tensor], scales: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Convert base weights to the layout of the class; raise UnsupportedCase if it has none for them."""
    codes = torch.uint8 if name == "MXFP4_SFT_MOE" else torch.bfloat16
    if wrong := [f"{key} is {t.dtype}" for key, t in matrices.items() if t.dtype != codes]:
        raise UnsupportedCase(f"{name} takes base weights of {codes}; {wrong[0]}")
    plain = {key: t.contiguous() for key, t in matrices.items()}
    if codes == torch.bfloat16:
        return plain
    for (key, scale), matrix in zip(scales.items(), matrices.values(), strict=True):
        if scale is None or scale.shape[-1] * GROUP_SIZE != matrix.shape[-1] * 2:
            raise UnsupportedCase(f"{key} is not one scale for {GROUP_SIZE} codes, as {name} takes them")
    return plain | {key: as_bf16(t) for key, t in scales.items()}


def as_bf16(scale: Tensor) -> Tensor:
    """Convert E8M0 codes to bf16, bit by bit: the code becomes the exponent."""
    if scale.dtype != torch.uint8:
        return scale.to(torch.bfloat16).contiguous()
    exponent = scale.to(torch.int16)
    bits = torch.where(exponent == 0, 0x0040, exponent << 7)  # 2^-127 is subnormal
    return torch.where(exponent == 255, 0x7FC0, bits).to(torch.int16).view(torch.bfloat16).contiguous()


def encoded(name: str, key: str, dense: Tensor) -> dict[str, Tensor]:
    """Encode a matrix in the layout of the class; in each group of 32 columns, a row has zeros and one power of two."""
    if name != "MXFP4_SFT_MOE":
        return {f"{key}_proj": dense}
    one = 2
    codes = torch.where(dense == 0, 0, one).to(torch.uint8)
    scale = dense.unflatten(-1, (-1, GROUP_SIZE)).amax(-1)
    scale = torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)
    return {f"{key}_proj": codes[..., ::2] | codes[..., 1::2] << 4, f"{key}_scale": scale}


class States:
    """The tensors that kt-kernel's forward saves for its backward and does not return, made visible by further runs.

    With an identity as the down projection, the output is `intermediate`. With a gate that looks at nothing but a
    column of ones beside x, the gradient of the gate is what was saved of up; more columns beside x, of zeros, bring it
    out through an identity in the gate projection. With the gate projection in the place of up, the same shows what was
    saved of gate. Each pair is a token of its own. Zeros beside what is there change no sum, and what is read is far
    closer to a number of bf16 than to the next.
    """

    def __init__(self, layer: KtLayer) -> None:
        self.layer, x, ids = layer, layer.x, layer.ids
        self.experts, self.width, self.rank = layer.adapters["gate_lora_b"].shape
        self.one = x.shape[-1]
        self.shown = slice(self.one + GROUP_SIZE, self.one + GROUP_SIZE + self.width)
        self.beside = GROUP_SIZE + self.width
        self.hidden = self.one + self.beside
        self.pairs = pad(x, (0, self.beside)).repeat_interleave(ids.shape[1], 0)
        self.pairs[:, self.one] = 1

    def seen(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return those of saved_gate, saved_up and intermediate, [T, k, I], that are finite; others spread in sums."""
        ways = {
            "saved_gate": lambda: self._saved(self._moved("gate", "up")),
            "saved_up": lambda: self._saved(self._moved("up", "up")),
            "intermediate": self._intermediate,
        }
        rows = {name: ways[name]().reshape(*self.layer.ids.shape, self.width).contiguous() for name in names}
        return {name: r for name, r in rows.items() if r.isfinite().all()}

    def _intermediate(self) -> Tensor:
        return self._run(self._moved("gate", "gate"), self._moved("up", "up"))[1][:, : self.width]

    def _saved(self, up: Mapping[str, Tensor]) -> Tensor:
        gate = torch.zeros(self.experts, self.width, self.hidden, dtype=torch.bfloat16)
        gate[:, :, self.one] = GATE
        gate[:, :, self.shown] = torch.eye(self.width)
        layer, _ = self._run(encoded(self.layer.name, "gate", gate), up, save=True, swiglu_limit=NO_LIMIT)
        ones = torch.zeros(len(self.pairs), self.hidden, dtype=torch.bfloat16)
        ones[:, : self.width] = 1
        return layer.backward(ones).grad_input[:, self.shown]

    def _moved(self, source: str, target: str) -> dict[str, Tensor]:
        """Put a projection of x, with zeros for the columns beside it, in the place of another."""
        name, base, adapters = self.layer.name, self.layer.base, self.layer.adapters
        per_byte = 2 if name == "MXFP4_SFT_MOE" else 1
        moved = {
            f"{target}_lora_a": pad(adapters[f"{source}_lora_a"], (0, self.beside)),
            f"{target}_lora_b": adapters[f"{source}_lora_b"],
            f"{target}_proj": pad(base[f"{source}_proj"], (0, self.beside // per_byte)),
        }
        if f"{source}_scale" in base:
            moved[f"{target}_scale"] = pad(base[f"{source}_scale"], (0, self.beside // GROUP_SIZE), value=1.0)
        return moved

    def _run(
        self, gate: Mapping[str, Tensor], up: Mapping[str, Tensor], *, save: bool = False, **numbers: float
    ) -> tuple[Experts, Tensor]:
        """Run the layer with these projections and an identity as the third; return it and its output."""
        identity = torch.eye(self.hidden, self.width, dtype=torch.bfloat16).expand(self.experts, -1, -1).contiguous()
        given = {**encoded(self.layer.name, "down", identity), **gate, **up}
        shapes = {"gate_lora_a": (self.rank, self.hidden), "gate_lora_b": (self.width, self.rank)}
        shapes |= {"down_lora_a": (self.rank, self.width), "down_lora_b": (self.hidden, self.rank)}
        none = {key: torch.zeros(self.experts, *shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        adapters = {key: given[key] if key in given else none[key] for key in ADAPTERS}
        base = {key: t for key, t in given.items() if key not in ADAPTERS}
        layer = Experts(
            self.layer.name, base, adapters, slots=1, tokens=len(self.pairs), **{**self.layer.numbers, **numbers}
        )
        weights = torch.ones(len(self.pairs), 1)
        return layer, layer.forward(self.pairs, self.layer.ids.reshape(-1, 1), weights, save=save)


@dataclass(frozen=True, eq=False)
class KtLayer:
    """A case as kt-kernel takes it: filled up to its tiles, in its layouts, with ids from 0 on.

    Attributes:
        numbers: arguments of `Experts` besides tensors and sizes.
    """

    name: str
    base: Mapping[str, Tensor]
    adapters: Mapping[str, Tensor]
    x: Tensor
    ids: Tensor
    weights: Tensor
    room: Room
    numbers: Mapping[str, Any]

    @classmethod
    def of(cls, name: str, builds: tuple[str, ...], t: Mapping[str, Any], first_expert: int, **numbers: Any) -> KtLayer:
        """Make the layer of a case with these tensors; raise UnsupportedCase if the class or build cannot take it."""
        check_build(builds)
        base = native(name, {k: t[k] for k in MATRICES}, {k: t[k] for k in SCALES})
        experts, width, _ = t["gate_lora_b"].shape
        limit = numbers.pop("swiglu_limit")
        room = room_for(name, t["x"], base, width, numbers["shards"], limit)
        return cls(
            name, room.filled(base), room.filled({k: t[k] for k in ADAPTERS}), room.filled({"x": t["x"]})["x"],
            local(t["expert_ids"], first_expert, experts), t["routing_weights"].contiguous(), room,
            {**numbers, "swiglu_limit": min(limit, NO_LIMIT)},
        )  # fmt: skip

    def experts(self) -> Experts:
        sizes = {"slots": self.ids.shape[1], "tokens": len(self.x)}
        return Experts(self.name, self.base, self.adapters, **sizes, **self.numbers)


def forward(layer: KtLayer, stages: Collection[str]) -> dict[str, Tensor]:
    output = layer.experts().forward(layer.x, layer.ids, layer.weights)
    return layer.room.cut({"output": output, **(States(layer).seen(stages) if stages else {})})


def backward(layer: KtLayer, given: Mapping[str, Tensor], old: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients; `given` holds the gradient of the output, and the state.

    The backward of kt-kernel reads what its own forward left, so that the state must be the same.
    """
    state = layer.room.cut(States(layer).seen(SAVED))
    if infinite := [key for key in SAVED if key not in state]:
        raise UnsupportedCase(f"{infinite[0]} of kt-kernel's own forward is not finite, and cannot be compared")
    for key, own in state.items():
        if others := int((own != given[key]).sum()):
            raise UnsupportedCase(f"{key} is not what kt-kernel's own forward leaves: {others} of {own.numel()} differ")
    experts, old = layer.experts(), layer.room.filled(old)
    grad_output = layer.room.filled({"grad_output": given["grad_output"]})["grad_output"]
    written = {key: torch.empty_like(t) for key, t in layer.adapters.items()}
    for accumulate in (False, True) if old else (False,):  # tensors that a layer has not written to, it clears first
        if accumulate:
            for key, tensor in written.items():
                tensor.copy_(old[key])
        experts.forward(layer.x, layer.ids, layer.weights, save=True)
        gradients = experts.backward(grad_output, written, accumulate=accumulate)
    results = {"grad_input": gradients.grad_input, "grad_routing_weights": gradients.grad_routing_weights}
    return layer.room.cut(results | {f"grad_{key}": tensor for key, tensor in gradients.adapters.items()})


def declare(name: str, builds: tuple[str, ...], contract: str, contract_of_backward: str) -> None:
    """Register both directions of a class, as the given builds compute them."""
    devices = ("cpu",)

    @kernel("moe_lora", contract=contract, name=f"kt-kernel[{name},{builds[0]}]", devices=devices, stages=SAVED)
    def forward_of_class(
        x, expert_ids, routing_weights, weights: KtWeights, *, scaling, first_expert=0, shards=1, swiglu_limit=inf,
        stages=(),
    ):  # fmt: skip
        return forward(KtLayer.of(name, builds, **of_case(locals())), stages)

    named = f"kt-kernel[{name},{builds[0]}]_backward"

    @kernel("moe_lora_backward", contract=contract_of_backward, name=named, devices=devices)
    def backward_of_class(
        x, expert_ids, routing_weights, grad_output, saved_gate, saved_up, intermediate, weights: KtWeights,
        old: KtOldGradients | None = None, *, scaling, first_expert=0, shards=1, swiglu_limit=inf,
    ):  # fmt: skip
        given = locals()
        before = {} if old is None else {key.removeprefix("old_"): tensor for key, tensor in vars(old).items()}
        return backward(KtLayer.of(name, builds, **of_case(given)), given, before)


def of_case(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the arguments of a kernel to those of `Layer.of`."""
    numbers = ("scaling", "first_expert", "shards", "swiglu_limit")
    tensors = {key: arguments[key] for key in ("x", "expert_ids", "routing_weights")} | vars(arguments["weights"])
    return {"t": tensors, **{key: arguments[key] for key in numbers}}


declare("MXFP4_SFT_MOE", ("avx2",), "fused+fp32_middle", "fused+fp32_middle+rounded_expert")
declare("MXFP4_SFT_MOE", WIDE, "per_matrix", "per_matrix")
declare("AMXBF16_SFT_MOE", WIDE, "per_matrix", "per_matrix")
