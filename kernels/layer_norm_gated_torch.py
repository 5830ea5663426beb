"""The gated LayerNorm and its gradient in PyTorch, written out for each contract, and the library function.

layer_norm_gated.py says what the contracts mean.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from layer_norm_gated_arguments import check_backward, check_forward, check_stepwise
from torch import Tensor

from lastbit import kernel


def activate(z: Tensor, activation: str) -> Tensor:
    """Return z · sigmoid(z), or sigmoid(z), in fp32."""
    z = z.float()
    return z * torch.sigmoid(z) if activation == "silu" else torch.sigmoid(z)


def slope(z: Tensor, activation: str) -> Tensor:
    """Return the derivative of the activation, in fp32."""
    z = z.float()
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s)) if activation == "silu" else s * (1 - s)


def normalize(value: Tensor, eps: float, group_size: int, *, is_rms_norm: bool) -> Tensor:
    """Return (value - mean) / sqrt(variance + eps) over each group of columns, the variance in two passes; all fp32."""
    grouped = value.unflatten(-1, (-1, group_size))
    centered = grouped if is_rms_norm else grouped - grouped.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return (centered * torch.rsqrt(variance + eps)).flatten(-2)


@kernel("layer_norm_gated", contract="single_rounding", name="eager[single_rounding]", invariant=("run to run",))
def eager_single_rounding(
    x, weight, bias=None, z=None,
    *, eps, group_size=None, norm_before_gate=True, is_rms_norm=False, activation="silu",
):  # fmt: skip
    size = check_forward(x, weight, bias, z, group_size, activation, ())
    gate = 1.0 if z is None else activate(z.reshape(x.shape), activation)
    value = x.float() if norm_before_gate else x.float() * gate
    affine = normalize(value, eps, size, is_rms_norm=is_rms_norm) * weight.float()
    if bias is not None:
        affine = affine + bias.float()
    return (affine * gate if norm_before_gate else affine).to(x.dtype)


@kernel("layer_norm_gated", contract="stepwise", name="eager[stepwise]", invariant=("run to run",))
def eager_stepwise(x, weight, z=None, *, eps, group_size=None, norm_before_gate=True, is_rms_norm=False):
    """Compute as Qwen3NextRMSNormGated, and MambaRMSNormGated where the gate comes first, do in Transformers."""
    size = check_forward(x, weight, None, z, group_size, "silu", ())
    check_stepwise(x, weight, is_rms_norm=is_rms_norm)
    gate = 1.0 if z is None else activate(z.reshape(x.shape), "silu")
    value = x.float() if norm_before_gate else x.float() * gate
    affine = weight * normalize(value, eps, size, is_rms_norm=True).to(x.dtype)
    return (affine * gate if norm_before_gate else affine).to(x.dtype)


def with_statistics(x, weight, bias, eps, stages):
    """Return the output of `F.layer_norm`, and as stages mean and rstd, where torch returns them as computed."""
    if not stages:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    output, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    saved = {"mean": mean, "rstd": rstd} if mean.dtype is torch.float32 else {}
    return {"output": output, **{name: saved[name] for name in stages if name in saved}}


@kernel(
    "layer_norm_gated",
    contract="single_rounding+welford",
    name="F.layer_norm",
    stages=("mean", "rstd"),
    devices=("cuda",),
    invariant=("run to run",),
    takes="one dtype",
)
def library_layer_norm(x, weight, bias=None, *, eps, stages=()):
    """Call the library on a GPU: Welford by threads; the normalized value is (x - mean) · rstd."""
    return with_statistics(x, weight, bias, eps, stages)


@kernel(
    "layer_norm_gated",
    contract="single_rounding+welford",
    name="F.layer_norm[fp32]",
    stages=("mean", "rstd"),
    devices=("cpu",),
    invariant=("run to run",),
    takes={"x dtype": "fp32", "weight dtype": "fp32", "bias dtype": "fp32"},  # torch wants one dtype
)
def library_layer_norm_of_fp32(x, weight, bias=None, *, eps, stages=()):
    """Call the library in fp32 on the CPU: Welford by chunks of vectors; the normalized value is (x - mean) · rstd."""
    return with_statistics(x, weight, bias, eps, stages)


@kernel(
    "layer_norm_gated",
    contract="single_rounding+welford+distributed",
    name="F.layer_norm[halves]",
    stages=("mean", "rstd"),
    devices=("cpu",),
    invariant=("run to run",),
    takes={"x dtype": ("bf16", "fp16"), "bias dtype": "weight dtype"},  # torch wants those two of one
)
def library_layer_norm_of_halves(x, weight, bias=None, *, eps, stages=()):
    """Call the library in bf16 or fp16 on the CPU: Welford, then fma(x, rstd, -(mean · rstd)), all in fp32."""
    return with_statistics(x, weight, bias, eps, stages)


def through_norm(dnormalized: Tensor, normalized: Tensor, rstd: Tensor, group_size: int, *, centered: bool) -> Tensor:
    """Return the gradient of the norm's input from the gradient of the normalized value; rstd is [..., G]."""
    d, n = (t.unflatten(-1, (-1, group_size)) for t in (dnormalized, normalized))
    shift = n * (n * d).mean(-1, keepdim=True)
    if centered:
        shift = shift + d.mean(-1, keepdim=True)
    return ((d - shift) * rstd.unsqueeze(-1)).flatten(-2)


@kernel("layer_norm_gated_backward", name="eager[gated_backward]", invariant=("run to run",))
def eager_backward(
    x, dy, weight, rstd, mean=None, bias=None, z=None,
    *, norm_before_gate=True, activation="silu", recompute_output=False,
):  # fmt: skip
    size = check_backward(x, dy, weight, rstd, mean, bias, z, activation, ())
    value, dy, gated = x.float(), dy.reshape(x.shape).float(), z is not None
    gate = activate(z.reshape(x.shape), activation) if gated else torch.ones_like(value)
    before, after = gated and not norm_before_gate, gated and norm_before_gate
    rstd = rstd.reshape(*x.shape[:-1], rstd.shape[-1])
    grouped = (value * gate if before else value).unflatten(-1, (-1, size))
    centered = grouped if mean is None else grouped - mean.reshape(rstd.shape).unsqueeze(-1)
    normalized = (centered * rstd.unsqueeze(-1)).flatten(-2)
    affine = normalized * weight.float() + (0.0 if bias is None else bias.float())
    daffine = dy * gate if after else dy
    dvalue = through_norm(daffine * weight.float(), normalized, rstd, size, centered=mean is not None)

    results = {"dx": (dvalue * gate if before else dvalue).to(x.dtype)}
    results["dw"] = (daffine * normalized).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if bias is not None:
        results["db"] = daffine.reshape(-1, x.shape[-1]).sum(0).to(bias.dtype)
    if gated:
        dgate = dvalue * value if before else dy * affine
        results["dz"] = (dgate * slope(z.reshape(x.shape), activation)).to(z.dtype).reshape(z.shape)
    if recompute_output:
        results["output"] = (affine * gate if after else affine).to(x.dtype)
    return results
