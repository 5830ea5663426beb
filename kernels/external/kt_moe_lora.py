"""MoE-LoRA of kt-kernel, a CPU library of the ktransformers project, as kernels under test.

    KT_KERNEL_CPU_VARIANT=avx2 lastbit verify --kernels kernels/external --op moe_lora

kt-kernel loads one build per process, the best for the CPU unless KT_KERNEL_CPU_VARIANT names another. The builds
differ in where they round, so each has its own kernels here. Those whose build is not loaded are unsupported.

Its classes that quantize activations (AMXInt8_SFT_MOE, AMXInt4_SFT_MOE, AMXInt4_KGroup_SFT_MOE) keep no contract of the
op and are no kernels here; docs/measurements/kt_kernel.py measures them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from kt_experts import ADAPTERS, GROUP_SIZE, MATRICES, SCALES, Experts, local, package
from torch import Tensor
from torch.nn.functional import pad

from harness.kernel import UnsupportedCase, kernel

WIDE = ("avx512_bf16", "amx")
GATE = 64.0
"""Its sigmoid is 1, up to a last bit, so that the gradient of silu(GATE) · up by GATE is up, up to a few last bits."""


def checked(name: str, x: Tensor, base: Mapping[str, Tensor], width: int, shards: int) -> None:
    """Raise UnsupportedCase for what the class cannot do; some of it would end the process."""
    if x.dtype != torch.bfloat16:
        raise UnsupportedCase(f"x is {x.dtype}; kt-kernel takes bfloat16")
    if shards > 2 and name == "MXFP4_SFT_MOE":
        raise UnsupportedCase(f"{name} has one shard or two, not {shards}")
    if x.shape[-1] % GROUP_SIZE or width % (GROUP_SIZE * shards):
        raise UnsupportedCase(f"{name} needs H and I / shards divisible by {GROUP_SIZE}")
    for key in SCALES:
        if key in base and not is_power_of_two(base[key]).all():
            raise UnsupportedCase(f"{key} has other numbers than powers of two; kt-kernel takes E8M0 scales")


def is_power_of_two(scale: Tensor) -> Tensor:
    """Where a bf16 number is one that E8M0 has, 2^-127 to 2^127."""
    bits = scale.view(torch.int16)
    return (bits == 0x0040) | ((bits > 0) & (bits < 0x7F80) & (bits & 0x7F == 0))


def check_build(builds: tuple[str, ...]) -> None:
    """Raise UnsupportedCase if another build is loaded."""
    if (loaded := package().__cpu_variant__) not in builds:
        raise UnsupportedCase(f"the {loaded} build is loaded, not {builds[0]}; KT_KERNEL_CPU_VARIANT chooses one")


def native(name: str, matrices: Mapping[str, Tensor], scales: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Base weights in the layout of the class; an UnsupportedCase if it has none for them."""
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
    """E8M0 codes as the same powers of two in bf16: exponents take the place of exponents."""
    if scale.dtype != torch.uint8:
        return scale.to(torch.bfloat16).contiguous()
    exponent = scale.to(torch.int16)
    bits = torch.where(exponent == 0, 0x0040, exponent << 7)  # 2^-127 is subnormal
    return torch.where(exponent == 255, 0x7FC0, bits).to(torch.int16).view(torch.bfloat16).contiguous()


def encoded(name: str, key: str, dense: Tensor) -> dict[str, Tensor]:
    """A matrix in the layout of the class; in each group of 32 columns, a row has zeros and one power of two."""
    if name != "MXFP4_SFT_MOE":
        return {f"{key}_proj": dense}
    one = 2
    codes = torch.where(dense == 0, 0, one).to(torch.uint8)
    scale = dense.unflatten(-1, (-1, GROUP_SIZE)).amax(-1)
    scale = torch.where(scale == 0, 1.0, scale).to(torch.bfloat16)
    return {f"{key}_proj": codes[..., ::2] | codes[..., 1::2] << 4, f"{key}_scale": scale}


class States:
    """What kt-kernel's forward leaves to its backward, seen through other runs of it: it returns none of that.

    With an identity as the down projection, the output is `intermediate`. With a gate that looks at nothing but a
    column of ones beside x, the gradient of the gate is what was saved of up; more columns beside x, of zeros, bring it
    out through an identity in the gate projection. With the gate projection in the place of up, the same shows what was
    saved of gate. Each pair is a token of its own. Zeros beside what is there change no sum, and what is read is far
    closer to a number of bf16 than to the next.
    """

    def __init__(self, name, base, adapters, x, ids, scaling, shards) -> None:
        self.experts, self.width, self.rank = adapters["gate_lora_b"].shape
        self.name, self.base, self.adapters, self.ids, self.scaling, self.shards = (
            name,
            base,
            adapters,
            ids,
            scaling,
            shards,
        )
        self.one = x.shape[-1]
        self.shown = slice(self.one + GROUP_SIZE, self.one + GROUP_SIZE + self.width)
        self.beside = GROUP_SIZE + self.width
        self.hidden = self.one + self.beside
        self.pairs = pad(x, (0, self.beside)).repeat_interleave(ids.shape[1], 0)
        self.pairs[:, self.one] = 1

    def results(self) -> dict[str, Tensor]:
        """saved_gate, saved_up and intermediate, [T, k, I]."""
        rows = {
            "saved_gate": self._saved(self._moved("gate", "up")),
            "saved_up": self._saved(self._moved("up", "up")),
            "intermediate": self._intermediate(),
        }
        return {key: r.reshape(*self.ids.shape, self.width).contiguous() for key, r in rows.items()}

    def _intermediate(self) -> Tensor:
        return self._run(self._moved("gate", "gate"), self._moved("up", "up"))[1][:, : self.width]

    def _saved(self, up: Mapping[str, Tensor]) -> Tensor:
        gate = torch.zeros(self.experts, self.width, self.hidden, dtype=torch.bfloat16)
        gate[:, :, self.one] = GATE
        gate[:, :, self.shown] = torch.eye(self.width)
        layer, _ = self._run(encoded(self.name, "gate", gate), up, save=True)
        ones = torch.zeros(len(self.pairs), self.hidden, dtype=torch.bfloat16)
        ones[:, : self.width] = 1
        return layer.backward(ones).grad_input[:, self.shown]

    def _moved(self, source: str, target: str) -> dict[str, Tensor]:
        """A projection of x, zero for the columns beside it, in the place of another."""
        per_byte = 2 if self.name == "MXFP4_SFT_MOE" else 1
        moved = {
            f"{target}_lora_a": pad(self.adapters[f"{source}_lora_a"], (0, self.beside)),
            f"{target}_lora_b": self.adapters[f"{source}_lora_b"],
            f"{target}_proj": pad(self.base[f"{source}_proj"], (0, self.beside // per_byte)),
        }
        if f"{source}_scale" in self.base:
            moved[f"{target}_scale"] = pad(self.base[f"{source}_scale"], (0, self.beside // GROUP_SIZE), value=1.0)
        return moved

    def _run(
        self, gate: Mapping[str, Tensor], up: Mapping[str, Tensor], *, save: bool = False
    ) -> tuple[Experts, Tensor]:
        """The layer with these projections and an identity as the third, and its output."""
        identity = torch.eye(self.hidden, self.width, dtype=torch.bfloat16).expand(self.experts, -1, -1).contiguous()
        given = {**encoded(self.name, "down", identity), **gate, **up}
        shapes = {"gate_lora_a": (self.rank, self.hidden), "gate_lora_b": (self.width, self.rank)}
        shapes |= {"down_lora_a": (self.rank, self.width), "down_lora_b": (self.hidden, self.rank)}
        none = {key: torch.zeros(self.experts, *shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
        adapters = {key: given[key] if key in given else none[key] for key in ADAPTERS}
        base = {key: t for key, t in given.items() if key not in ADAPTERS}
        sizes = {"slots": 1, "tokens": len(self.pairs), "scaling": self.scaling, "shards": self.shards}
        layer = Experts(self.name, base, adapters, **sizes)
        weights = torch.ones(len(self.pairs), 1)
        return layer, layer.forward(self.pairs, self.ids.reshape(-1, 1), weights, save=save)


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def forward(name, builds, x, expert_ids, routing_weights, matrices, scales, adapters, scaling, first_expert, shards):
    check_build(builds)
    base, adapters = native(name, matrices, scales), contiguous(adapters)
    experts, width, _ = adapters["gate_lora_b"].shape
    checked(name, x, base, width, shards)
    x, ids = x.contiguous(), local(expert_ids, first_expert, experts)
    layer = Experts(name, base, adapters, slots=ids.shape[1], tokens=len(x), scaling=scaling, shards=shards)
    output = layer.forward(x, ids, routing_weights.contiguous())
    return {"output": output, **States(name, base, adapters, x, ids, scaling, shards).results()}


def backward(
    name, builds, x, expert_ids, routing_weights, grad_output, saved, matrices, scales, adapters, old,
    scaling, first_expert, shards,
):  # fmt: skip
    """The backward of kt-kernel reads what its own forward left, so that the case's state must be the same."""
    check_build(builds)
    base, adapters = native(name, matrices, scales), contiguous(adapters)
    experts, width, _ = adapters["gate_lora_b"].shape
    checked(name, x, base, width, shards)
    x, ids = x.contiguous(), local(expert_ids, first_expert, experts)
    for key, own in States(name, base, adapters, x, ids, scaling, shards).results().items():
        if others := int((own != saved[key]).sum()):
            raise UnsupportedCase(f"{key} is not what kt-kernel's own forward leaves: {others} of {own.numel()} differ")
    layer = Experts(name, base, adapters, slots=ids.shape[1], tokens=len(x), scaling=scaling, shards=shards)
    written = {key: torch.empty_like(t) for key, t in adapters.items()}
    for accumulate in (False, True) if old else (False,):  # tensors that a layer has not written to, it clears first
        if accumulate:
            for key, tensor in written.items():
                tensor.copy_(old[key])
        layer.forward(x, ids, routing_weights.contiguous(), save=True)
        gradients = layer.backward(grad_output.contiguous(), written, accumulate=accumulate)
    results = {"grad_input": gradients.grad_input, "grad_routing_weights": gradients.grad_routing_weights}
    return results | {f"grad_{key}": tensor for key, tensor in gradients.adapters.items()}


def declare(name: str, builds: tuple[str, ...], contract: str, contract_of_backward: str) -> None:
    """Register both directions of a class, as the given builds compute them."""

    @kernel("moe_lora", contract=contract, name=f"kt-kernel[{name},{builds[0]}]", devices=("cpu",))
    def forward_of_class(
        x, expert_ids, routing_weights, gate_proj, up_proj, down_proj,
        gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b,
        gate_scale=None, up_scale=None, down_scale=None, *, scaling, first_expert=0, shards=1,
    ):  # fmt: skip
        matrices = dict(zip(MATRICES, (gate_proj, up_proj, down_proj), strict=True))
        scales = dict(zip(SCALES, (gate_scale, up_scale, down_scale), strict=True))
        values = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b)
        adapters = dict(zip(ADAPTERS, values, strict=True))
        return forward(
            name, builds, x, expert_ids, routing_weights, matrices, scales, adapters, scaling, first_expert, shards
        )

    @kernel(
        "moe_lora_backward",
        contract=contract_of_backward,
        name=f"kt-kernel[{name},{builds[0]}]_backward",
        devices=("cpu",),
    )
    def backward_of_class(
        x, expert_ids, routing_weights, grad_output, saved_gate, saved_up, intermediate, gate_proj, up_proj, down_proj,
        gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b,
        gate_scale=None, up_scale=None, down_scale=None,
        old_gate_lora_a=None, old_gate_lora_b=None, old_up_lora_a=None, old_up_lora_b=None,
        old_down_lora_a=None, old_down_lora_b=None, *, scaling, first_expert=0, shards=1,
    ):  # fmt: skip
        matrices = dict(zip(MATRICES, (gate_proj, up_proj, down_proj), strict=True))
        scales = dict(zip(SCALES, (gate_scale, up_scale, down_scale), strict=True))
        values = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b)
        adapters = dict(zip(ADAPTERS, values, strict=True))
        previous = (old_gate_lora_a, old_gate_lora_b, old_up_lora_a, old_up_lora_b, old_down_lora_a, old_down_lora_b)
        old = {} if old_gate_lora_a is None else dict(zip(ADAPTERS, previous, strict=True))
        saved = {"saved_gate": saved_gate, "saved_up": saved_up, "intermediate": intermediate}
        return backward(
            name, builds, x, expert_ids, routing_weights, grad_output, saved, matrices, scales, adapters, old,
            scaling, first_expert, shards,
        )  # fmt: skip


declare("MXFP4_SFT_MOE", ("avx2",), "fused+fp32_middle", "fused+fp32_middle+rounded_expert")
declare("MXFP4_SFT_MOE", WIDE, "per_matrix", "per_matrix")
declare("AMXBF16_SFT_MOE", WIDE, "per_matrix", "per_matrix")
