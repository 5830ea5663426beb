"""The gated LayerNorm and its gradient in fp64, and what the tests of their kernels share.

With `fp32=rounded` every operation is rounded to fp32 and every stage as its contract says. The result is the only
legal one where sums are exact in any order and sigmoids are 0.5 or 1: the tests use small integers, means that are
whole numbers, and gates of 0 or above 17. The tests also run on a GPU, with TRITON_INTERPRET=0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lastbit.numerics.formats import FP32, format_of, round_to
from tests.rms_norm_contract import DEVICE, FLOAT, LOADED, integers, normals

KERNELS = {k.name: k for k in LOADED if k.op.startswith("layer_norm_gated")}
OPTIONS = [
    {"norm_before_gate": first, "is_rms_norm": rms, "activation": activation}
    for first in (True, False)
    for rms in (True, False)
    for activation in ("silu", "sigmoid")
]


def call(name: str) -> Any:
    return KERNELS[name].call


def option_id(options: dict[str, Any]) -> str:
    order = "norm_first" if options["norm_before_gate"] else "gate_first"
    return f"{order}-{'rms' if options['is_rms_norm'] else 'layer'}-{options['activation']}"


def exactly(x: Tensor) -> Tensor:
    return x


def rounded(x: Tensor) -> Tensor:
    return round_to(x, FP32)


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "silu",
    stepwise: bool = False,
    fp32: Callable[[Tensor], Tensor] = exactly,
) -> dict[str, Tensor]:
    """All stages and the output, in fp64; of groups where the stage has one value per group."""
    low = (lambda v, like: round_to(v, format_of(like.dtype))) if fp32 is rounded else (lambda v, like: v)
    size = group_size or x.shape[-1]
    stages: dict[str, Tensor] = {}
    value, gate = x.double(), None
    if z is not None:
        sigmoid = fp32(torch.sigmoid(z.double()))
        gate = stages["gate"] = fp32(z.double() * sigmoid) if activation == "silu" else sigmoid
        if not norm_before_gate:
            value = stages["gated_input"] = fp32(value * gate)
    grouped = value.reshape(*x.shape[:-1], -1, size)
    if not is_rms_norm:
        mean = fp32(grouped.mean(-1))
        stages["mean"] = mean
        grouped = fp32(grouped - mean[..., None])
    stages["variance"] = fp32(fp32(grouped.square()).sum(-1) / size)
    added = fp32(stages["variance"] + torch.tensor(eps).double().to(x.device))
    stages["rstd"] = fp32(1 / fp32(added.sqrt()))
    y = fp32(grouped * stages["rstd"][..., None]).reshape(x.shape)
    stages["normalized"] = low(y, x) if stepwise else y
    y = fp32(stages["normalized"] * weight.double())
    y = y if bias is None else fp32(y + bias.double())
    y = stages["affine"] = low(y, weight) if stepwise else y
    if gate is not None and norm_before_gate:
        y = fp32(y * gate)
    stages["output"] = low(y, x)
    return stages


def gradients(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    rstd: Tensor,
    mean: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    *,
    norm_before_gate: bool = True,
    activation: str = "silu",
    recompute_output: bool = False,
    fp32: Callable[[Tensor], Tensor] = exactly,
) -> dict[str, Tensor]:
    """All stages and results of the gradient, in fp64; only sigmoids are rounded."""
    x, dy, weight, rstd = (t.double() for t in (x, dy, weight, rstd))
    grouped = (*rstd.shape, -1)
    found: dict[str, Tensor] = {}
    value, slope = x, torch.ones_like(x)
    after, before = z is not None and norm_before_gate, z is not None and not norm_before_gate
    if z is not None:
        s = fp32(torch.sigmoid(z.double()))
        found["gate"] = z.double() * s if activation == "silu" else s
        slope = s * (1 + z.double() * (1 - s)) if activation == "silu" else s * (1 - s)
    if before:
        value = found["gated_input"] = x * found["gate"]
    centered = value.reshape(grouped) - (0.0 if mean is None else mean.double()[..., None])
    normalized = centered * rstd[..., None]
    found["normalized"] = normalized.reshape(x.shape)
    affine = found["normalized"] * weight + (0.0 if bias is None else bias.double())
    if after or recompute_output:
        found["affine"] = affine
    if after:
        found["daffine"] = dy * found["gate"]
        found["dz"] = dy * affine * slope
    if recompute_output:
        found["output"] = affine * found["gate"] if after else affine
    daffine = found.get("daffine", dy)
    found["dw"] = (daffine * found["normalized"]).reshape(-1, x.shape[-1]).sum(0)
    if bias is not None:
        found["db"] = daffine.reshape(-1, x.shape[-1]).sum(0)
    found["dnormalized"] = daffine * weight
    d = found["dnormalized"].reshape(grouped)
    found["c1"] = (normalized * d).mean(-1)
    shift = normalized * found["c1"][..., None]
    if mean is not None:
        found["c2"] = d.mean(-1)
        shift = shift + found["c2"][..., None]
    dvalue = ((d - shift) * rstd[..., None]).reshape(x.shape)
    if before:
        found["dgated_input"] = dvalue
        found["dz"] = dvalue * x * slope
    found["dx"] = dvalue * found["gate"] if before else dvalue
    return found


def assert_near(actual: Tensor, expected: Tensor, name: str, *, relative: float) -> None:
    """Check for the same shape, and no element further off than `relative` times the largest magnitude."""
    assert actual.shape == expected.shape, name
    if actual.numel():
        error = (actual.double() - expected).abs().max().item()
        assert error <= relative * expected.abs().max().item(), f"{name}: off by {error}"


def scaled_groups(*shape: int, groups: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    """Draw normal values around 2 whose groups of columns have very different scales."""
    scale = torch.logspace(-1, 1, groups, device=DEVICE).repeat_interleave(shape[-1] // groups)
    return ((normals(*shape, seed=seed) + 2) * scale).to(dtype)


def centred_integers(*shape: int, groups: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers whose groups have whole numbers as means: the second half is the first one turned about it."""
    half = integers(*shape[:-1], groups, shape[-1] // groups // 2, seed=seed) * 8
    center = integers(*shape[:-1], groups, 1, most=3, seed=seed + 100) * 8
    return torch.cat([center + half, center - half], -1).reshape(shape).to(dtype)


def saturated(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Gates of which the sigmoid is exactly 0.5 or, in fp32, exactly 1: 0 and whole numbers from 18 to 33."""
    eighths = integers(*shape, seed=seed)
    return torch.where(eighths < -0.5, 0.0, 25 + 8 * eighths.clamp(-0.875)).to(dtype)
