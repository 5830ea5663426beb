"""SwiGLU and its gradient in other forms and orders, all of which keep the contracts in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from lastbit.kernel import kernel

LOG2_E = math.log2(math.e)
Form = Callable[[Tensor, Tensor, float, float], Tensor]


def halves(x: Tensor, up: Tensor | None, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up in fp32, before the limit."""
    if up is None:
        x, up = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    return x.float(), up.float()


def limited(gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    return (gate, up) if limit == inf else (gate.clamp(max=limit), up.clamp(-limit, limit))


def quotient_last(gate: Tensor, up: Tensor, alpha: float, offset: float) -> Tensor:
    """As swigluoai_and_mul of vLLM."""
    return (up + offset if offset else up) * gate / (1 + torch.exp(-gate * alpha))


def fused_offset(gate: Tensor, up: Tensor, alpha: float, offset: float) -> Tensor:
    """As the Triton kernels of gpt-oss, where up + 1 is not computed."""
    silu = gate / (1 + torch.exp(-alpha * gate))
    return torch.addcmul(silu * offset, silu, up) if offset else silu * up


def folded_constants(gate: Tensor, up: Tensor, alpha: float, offset: float) -> Tensor:
    return gate * (1 / (1 + torch.exp2(gate * (-LOG2_E * alpha)))) * (up + offset if offset else up)


def up_first(gate: Tensor, up: Tensor, alpha: float, offset: float) -> Tensor:
    return ((up + offset if offset else up) * torch.sigmoid(gate * alpha)) * gate


def declare(form: Form) -> None:
    @kernel("swiglu", contract="fp32_silu", name=f"order[swiglu+{form.__name__}]")
    def forward(x, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
        gate, factor = limited(*halves(x, up, interleaved=interleaved), swiglu_limit)
        return form(gate, factor, alpha, up_offset).to(x.dtype)


for _form in (quotient_last, fused_offset, folded_constants, up_first):
    declare(_form)


def expanded(dy: Tensor, up: Tensor, gate: Tensor, scaled: Tensor, s: Tensor, alpha: float) -> Tensor:
    """As Liger, where alpha is 1."""
    return dy * (scaled * s * (1 - s) + s) * up


def left_to_right(dy: Tensor, up: Tensor, gate: Tensor, scaled: Tensor, s: Tensor, alpha: float) -> Tensor:
    """As fla-core."""
    return dy * s * (1 + scaled * (1 - s)) * up


def two_ways(dy: Tensor, up: Tensor, gate: Tensor, scaled: Tensor, s: Tensor, alpha: float) -> Tensor:
    """As autograd, in fp32."""
    product = dy * up
    return product * s + (product * gate) * (1 - s) * s * alpha


def declare_gradient(form: Callable[..., Tensor]) -> None:
    @kernel("swiglu_backward", contract="fp32_silu+fp32_product", name=f"order[swiglu_backward+{form.__name__}]")
    def backward(x, dy, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
        values = halves(x, up, interleaved=interleaved)
        gate, factor = limited(*values, swiglu_limit)
        scaled, grad = gate * alpha, dy.float()
        s = torch.sigmoid(scaled)
        of_gate = form(grad, factor + up_offset if up_offset else factor, gate, scaled, s, alpha)
        of_up = grad * gate * s
        if swiglu_limit != inf:
            of_gate = torch.where(values[0] <= swiglu_limit, of_gate, 0.0)
            of_up = torch.where(values[1].abs() <= swiglu_limit, of_up, 0.0)
        of_gate, of_up = of_gate.to(x.dtype), of_up.to(x.dtype)
        if up is not None:
            return {"grad_gate": of_gate, "grad_up": of_up}
        return torch.stack([of_gate, of_up], -1).flatten(-2) if interleaved else torch.cat([of_gate, of_up], -1)


for _gradient in (expanded, left_to_right, two_ways):
    declare_gradient(_gradient)
