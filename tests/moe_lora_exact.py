"""A mixture of SwiGLU experts with LoRA in fp64, one token and slot after the other, and inputs for its tests.

Torch differentiates it. Nothing here is shared with the reference.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from tests.quantizers import encoded

MAPS = ("gate", "up", "down")
ADAPTERS = tuple(f"{name}_lora_{part}" for name in MAPS for part in "ab")
SAVED = ("saved_gate", "saved_up", "intermediate")
STORED = {  # scheme, group size, dtype of the scale
    "int8": ("int8", None, torch.float32),
    "int4_symmetric": ("int4_symmetric", 16, torch.bfloat16),
    "int4_asymmetric": ("int4_asymmetric", 8, torch.float16),
    "int4_asymmetric in bf16": ("int4_asymmetric", 32, torch.bfloat16),
    "mxfp4": ("mxfp4", 32, torch.uint8),
    "mxfp4 in bf16": ("mxfp4", 32, torch.bfloat16),
}
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def forward(
    t: dict[str, Tensor], *, scaling: float, first_expert: int = 0, swiglu_limit: float = inf
) -> dict[str, Tensor]:
    """All results, and `expert_output`, from tensors of which floating-point ones are fp64."""
    base = {name: weight(t, name) for name in MAPS}
    tokens, slots = t["expert_ids"].shape
    width = t["gate_proj"].shape[1]
    rows: dict[str, list[Tensor]] = {name: [] for name in (*SAVED, "expert_output")}
    output = []
    for token in range(tokens):
        combined = torch.zeros_like(t["x"][token])
        for slot in range(slots):
            expert = int(t["expert_ids"][token, slot]) - first_expert
            if 0 <= expert < len(t["gate_proj"]):
                gate, up = (adapted(t, base, name, expert, t["x"][token], scaling) for name in ("gate", "up"))
                active, factor = limited(gate, -inf, swiglu_limit), limited(up, -swiglu_limit, swiglu_limit)
                intermediate = active / (1 + torch.exp(-active)) * factor
                value = adapted(t, base, "down", expert, intermediate, scaling)
                combined = combined + t["routing_weights"][token, slot] * value
            else:
                gate = up = intermediate = t["x"].new_zeros(width)
                value = torch.zeros_like(combined)
            for name, row in zip(rows, (gate, up, intermediate, value), strict=True):
                rows[name].append(row)
        output.append(combined)
    found = {name: torch.stack(row).unflatten(0, (tokens, slots)) for name, row in rows.items()}
    return {"output": torch.stack(output), **found}


def limited(x: Tensor, low: float, high: float) -> Tensor:
    """x within the limits, at which its gradient is whole: that of torch.clamp is 0 there from torch 2.15 on."""
    return torch.where(x > high, high, torch.where(x < low, low, x))


def gradients(
    t: dict[str, Tensor], *, scaling: float, first_expert: int = 0, swiglu_limit: float = inf
) -> dict[str, Tensor]:
    """Let torch differentiate the forward pass for `grad_output`; add old gradients where there are any."""
    names = ("x", "routing_weights", *(name for name in ADAPTERS if name in t))
    leaves = {name: t[name].clone().requires_grad_() for name in names}
    options = {"scaling": scaling, "first_expert": first_expert, "swiglu_limit": swiglu_limit}
    output = forward(t | leaves, **options)["output"]
    if output.requires_grad:
        output.backward(t["grad_output"])
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    found = {"grad_input": grads["x"], "grad_routing_weights": grads["routing_weights"]}
    return found | {f"grad_{name}": grads[name] + t.get(f"old_{name}", 0) for name in names[2:]}


def adapted(
    t: dict[str, Tensor], base: dict[str, Tensor], name: str, expert: int, row: Tensor, scaling: float
) -> Tensor:
    if f"{name}_lora_a" not in t:
        return base[name][expert] @ row
    product = t[f"{name}_lora_b"][expert] @ (t[f"{name}_lora_a"][expert] @ row)
    return base[name][expert] @ row + scaling * product


def weight(t: dict[str, Tensor], name: str) -> Tensor:
    """Return the base weight [E, N, K] in fp64, whatever it is stored as."""
    codes, scale, zero = (t.get(f"{name}_{part}") for part in ("proj", "scale", "zero"))
    assert codes is not None
    if scale is None:
        return codes
    if codes.dtype == torch.int8:
        return codes.double() * scale.double()[..., None]
    bits = 32 if codes.dtype == torch.int32 else 8
    nibbles = torch.stack([codes.long() >> shift & 15 for shift in range(0, bits, 4)], -1).flatten(-2)
    if codes.dtype == torch.uint8:
        level = torch.tensor(E2M1, dtype=torch.float64)[nibbles & 7] * torch.where(nibbles > 7, -1, 1)
    else:
        level = nibbles.double()
    size = level.shape[-1] // scale.shape[-1]
    middle = 0 if codes.dtype == torch.uint8 else 8 if zero is None else zero.repeat_interleave(size, -1)
    scales = 2.0 ** (scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    return (level - middle) * scales.repeat_interleave(size, -1)


def problem(
    tokens: int = 5, slots: int = 3, experts: int = 3, hidden: int = 32, width: int = 32, rank: int = 4, *,
    first_expert: int = 0, dtype: torch.dtype = torch.float64, storage: str = "", seed: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Draw normal numbers of fp32, and ids below, among and above those of the experts; the first row has one id only.

    With `storage` the base weights are quantised as `STORED` says.
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int, variance: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * variance**0.5).to(dtype)

    ids = torch.randint(first_expert - 1, first_expert + experts + 1, (tokens, slots), generator=draw)
    ids[:1] = first_expert + experts - 1
    t = {"x": normal(tokens, hidden), "expert_ids": ids}
    exact = dtype == torch.float64
    t["routing_weights"] = torch.randn(tokens, slots, generator=draw).to(torch.float64 if exact else torch.float32)
    for name in MAPS:
        n, k = (hidden, width) if name == "down" else (width, hidden)
        t[f"{name}_proj"] = normal(experts, n, k, variance=1 / k)
        t[f"{name}_lora_a"] = normal(experts, rank, k, variance=1 / k)
        t[f"{name}_lora_b"] = normal(experts, n, rank, variance=1 / rank)
        if storage:
            scheme, size, scale = STORED[storage]
            stored = encoded(t[f"{name}_proj"].float(), scheme, size, scale_dtype=scale)
            parts = dict(zip(("proj", "scale", "zero"), stored, strict=True))
            t |= {f"{name}_{part}": tensor for part, tensor in parts.items() if tensor is not None}
    return t


def whole_numbers(
    tokens: int = 6, slots: int = 2, experts: int = 2, hidden: int = 8, width: int = 8, rank: int = 2, *,
    dtype: torch.dtype, seed: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Small integers, `grad_output` among them; gates are about 64, where a sigmoid is exactly 1 in fp32."""
    draw = torch.Generator().manual_seed(seed)

    def integers(*shape: int, density: float) -> Tensor:
        values = torch.randint(-1, 2, shape, generator=draw).double()
        return torch.where(torch.rand(shape, generator=draw) < density, values, 0.0).to(dtype)

    t = {"x": integers(tokens, hidden, density=1.0)}
    t["x"][:, 0] = 1
    t["expert_ids"] = torch.randint(0, experts + 1, (tokens, slots), generator=draw)
    t["routing_weights"] = torch.randint(1, 3, (tokens, slots), generator=draw).float()
    for name in MAPS:
        n, k = (hidden, width) if name == "down" else (width, hidden)
        t[f"{name}_proj"] = integers(experts, n, k, density=0.3)
        t[f"{name}_lora_a"] = integers(experts, rank, k, density=0.3)
        t[f"{name}_lora_b"] = integers(experts, n, rank, density=0.5)
    for name in ("gate_proj", "gate_lora_a"):
        t[name] = t[name] * 8
    t["gate_proj"][:, :, 0], t["gate_lora_a"][:, :, 0] = 64, 0
    return t | {"grad_output": integers(tokens, hidden, density=0.7)}


def without_adapters(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """Build the layer as a plain mixture of experts."""
    return {name: tensor for name, tensor in t.items() if "lora" not in name}


def with_gradient(
    t: dict[str, Tensor], saved: dict[str, Tensor], *, old: bool = False, seed: int = 1
) -> dict[str, Tensor]:
    """Return what the backward pass takes: inputs, what the forward pass saved, and a gradient of the output."""
    draw = torch.Generator().manual_seed(seed)

    def like(x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=draw).to(x.dtype)

    found = {"grad_output": like(t["x"])} | t
    found |= {name: saved[name].detach().to(t["x"].dtype) for name in SAVED}
    return found | ({f"old_{name}": like(t[name]) for name in ADAPTERS} if old else {})
