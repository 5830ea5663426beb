"""MoE-LoRA in fp64, pair by pair, and what the tests of its kernels share.

`formula` rounds where the contract says and leaves everything else in fp64. With `lattice` arguments every sum is exact
in any order and every gate above 17, so that its result is the only legal one. The tests also run on a GPU, with
TRITON_INTERPRET=0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastbit.kernel import Kernel
from lastbit.numerics.formats import FP32, cast, format_of, round_to
from tests.rms_norm_contract import BF16, DEVICE, FLOAT, LOADED, assert_bits, normals

KERNELS = {k.name: k for k in LOADED if k.op == "moe_lora"}
TRITON = KERNELS["triton[moe_lora+fused]"]
RESULTS = ("output", "saved_gate", "saved_up", "intermediate")
H, W, R, E, K = 24, 40, 4, 5, 3  # hidden and intermediate dimension, rank, experts, slots
NAN = float("nan")


def every_stage(one: Kernel) -> dict[str, Any]:
    """Return the argument that asks for all stages that a kernel can store."""
    return {"stages": one.stages} if one.stages else {}


def small(*shape: int, most: int = 2, least: int | None = None, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Integers of at most `most` in magnitude, or from `least` on."""
    generator = torch.Generator().manual_seed(seed)
    low = -most if least is None else least
    return torch.randint(low, most + 1, shape, generator=generator).to(dtype).to(DEVICE)


def some_ids(tokens: int, *, first: int = 0, seed: int = 0) -> Tensor:
    """Ids of which a part is not held."""
    return small(tokens, K, least=-1, most=E, dtype=torch.int64, seed=seed) + first


def lattice(tokens: int, dtype: torch.dtype = BF16, *, ids: Tensor | None = None) -> dict[str, Any]:
    """Arguments whose sums are exact in any order, with gates above 17, where the sigmoid is 1."""
    new = {"dtype": dtype}
    one_column = torch.arange(W, device=DEVICE) == 21  # so that the middle is exact in every shard
    return {
        "x": small(tokens, H, least=1, most=7, seed=1, **new),
        "expert_ids": some_ids(tokens) if ids is None else ids,
        "routing_weights": 2.0 ** small(tokens, K, least=-2, most=0, dtype=FLOAT, seed=2),
        "gate_proj": small(E, W, H, least=1, most=6, seed=3, **new),
        "up_proj": small(E, W, H, most=1, seed=4, **new) / 8,
        "down_proj": small(E, H, W, most=1, seed=5, **new),
        "gate_lora_a": small(E, R, H, least=0, most=1, seed=6, **new),
        "gate_lora_b": small(E, W, R, least=0, most=3, seed=7, **new),
        "up_lora_a": small(E, R, H, most=1, seed=8, **new),
        "up_lora_b": small(E, W, R, most=3, seed=10, **new) / 8,
        "down_lora_a": small(E, R, W, most=1, seed=9, **new) * one_column,
        "down_lora_b": small(E, H, R, most=1, seed=11, **new),
        "scaling": 0.5,
    }


def ordinary(tokens: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Draw normal values, of which matrices have about unit gain, at a rank that is no power of two."""
    shapes = {name: t.shape for name, t in lattice(tokens).items() if isinstance(t, Tensor)}
    shapes = {name: tuple(7 if n == R else n for n in shape) for name, shape in shapes.items()}
    made = {
        name: normals(*shape, seed=seed) / (shape[-1] ** 0.5 if len(shape) == 3 else 1)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    arguments = {name: t if name == "routing_weights" else t.to(dtype) for name, t in made.items()}
    return arguments | {"expert_ids": some_ids(tokens), "scaling": 0.3}


def exact(x: Tensor) -> Tensor:
    """x, which fp32 must hold: otherwise the case has more than one legal result."""
    assert torch.equal(round_to(x, FP32), x)
    return x


def formula(
    contract: str, x: Tensor, expert_ids: Tensor, routing_weights: Tensor, *, scaling: float, first_expert: int = 0,
    swiglu_limit: float = float("inf"),    fp32: Callable[[Tensor], Tensor] = exact, **parameters: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """All stages in fp64, pair by pair, rounded to the dtype of x where the contract says."""
    fmt = format_of(x.dtype)
    low = (lambda v: round_to(fp32(v), fmt)) if contract == "eager" else fp32
    rank = parameters["gate_lora_a"].shape[1]
    widths = {name: R if name.endswith("mid") else W for name in (*RESULTS, *TRITON.stages)}
    widths |= {"expert_output": H, "output": H} | {n: rank for n in widths if n.endswith("mid")}
    found = {n: torch.zeros(*expert_ids.shape, w, dtype=torch.float64, device=x.device) for n, w in widths.items()}
    for t, j in torch.cartesian_prod(*(torch.arange(n) for n in expert_ids.shape)).tolist():
        e = int(expert_ids[t, j]) - first_expert
        if not 0 <= e < len(parameters["gate_proj"]):
            continue
        own = {name: p[e].double() for name, p in parameters.items()}
        pair: dict[str, Tensor] = {}

        def project(name: str, rows: Tensor, pair: dict = pair, own: dict = own) -> Tensor:
            pair[f"{name}_base"] = low(own[f"{name}_proj"] @ rows)
            pair[f"{name}_lora_mid"] = round_to(fp32(own[f"{name}_lora_a"] @ rows), fmt)
            scaled = low(scaling * low(own[f"{name}_lora_b"] @ pair[f"{name}_lora_mid"]))
            return low(pair[f"{name}_base"] + scaled)

        pair["gate"], pair["up"] = (project(name, x[t].double()) for name in ("gate", "up"))
        gate, up = pair["gate"].clamp(max=swiglu_limit), pair["up"].clamp(-swiglu_limit, swiglu_limit)
        silu = low(gate * fp32(torch.sigmoid(gate).float().double()))
        pair["intermediate"] = round_to(fp32(silu * up), fmt)
        pair["expert_output"] = project("down", pair["intermediate"])
        pair["output"] = low(routing_weights[t, j].double() * pair["expert_output"])
        pair |= {f"saved_{name}": round_to(pair[name], fmt) for name in ("gate", "up")}
        for name, rows in found.items():
            rows[t, j] = pair[name]
    return found | {"output": round_to(fp32(found["output"].sum(1)), fmt)}


def assert_results(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Equal bits: results in `dtype`, stages as the kernel stores them."""
    for name, value in actual.items():
        assert_bits(value, cast(expected[name], dtype if name in RESULTS else value.dtype), name)
