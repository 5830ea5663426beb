"""SwiGLU and its gradient in PyTorch, written out for each contract.

references/swiglu.py says what the contracts mean. In fp32 all operations but those of the contract are fp32.
"""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from swiglu_arguments import SwigluParameters, check_arguments, gate_and_up
from swiglu_limit import limited_in_torch
from torch import Tensor

from lastbit import kernel

OF_ELEMENTS = ("rows", "permutation", "padding", "run to run")


def checked(x: Tensor, up: Tensor | None, options: SwigluParameters, **others: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up; raise unless they and the others fit together."""
    gate, up = gate_and_up(x, up, interleaved=options.interleaved)
    check_arguments({"gate": gate, "up": up, **others}, options)
    return gate, up


def forward(x: Tensor, up: Tensor | None, options: SwigluParameters, silu: str, *, rounded_shift: bool) -> Tensor:
    """Compute the output, of x's dtype."""
    values = checked(x, up, options)
    gate, up = limited_in_torch(*values, options.swiglu_limit)
    if silu == "fp32_silu":
        gate, up = gate.float(), up.float()
    if silu == "rounded_sigmoid":
        activated = gate * torch.sigmoid(gate if options.alpha == 1.0 else gate * options.alpha)
    elif options.alpha == 1.0:
        activated = F.silu(gate)
    else:
        wide = gate.float()
        activated = (wide * torch.sigmoid(wide * options.alpha)).to(gate.dtype)
    factor = up if rounded_shift or not options.up_offset else up.float()
    factor = factor + options.up_offset if options.up_offset else factor
    return (activated * factor).to(x.dtype)


@kernel("swiglu", contract="fp32_silu", name="eager[swiglu+fp32_silu]", invariant=OF_ELEMENTS)
def fp32_silu(x, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
    """Compute as FlashInfer and the Triton kernels of gpt-oss do."""
    options = SwigluParameters(interleaved, swiglu_limit, alpha, up_offset)
    return forward(x, up, options, "fp32_silu", rounded_shift=False)


@kernel("swiglu", contract="rounded_silu", name="eager[swiglu+rounded_silu]", invariant=OF_ELEMENTS)
def rounded_silu(x, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
    """Compute as `F.silu(gate) * up` and vLLM's CUDA kernel do."""
    options = SwigluParameters(interleaved, swiglu_limit, alpha, up_offset)
    return forward(x, up, options, "rounded_silu", rounded_shift=False)


@kernel(
    "swiglu", contract="rounded_sigmoid+rounded_shift", name="eager[swiglu+rounded_sigmoid]",
    invariant=OF_ELEMENTS,
)  # fmt: skip
def rounded_sigmoid(x, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
    """Compute as the experts of gpt-oss in Transformers do."""
    options = SwigluParameters(interleaved, swiglu_limit, alpha, up_offset)
    return forward(x, up, options, "rounded_sigmoid", rounded_shift=True)


def without_cut_off(of_gate: Tensor, of_up: Tensor, gate: Tensor, up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Set gradients to zero where gate or up was beyond the limit."""
    if limit == inf:
        return of_gate, of_up
    return torch.where(gate > limit, 0.0, of_gate), torch.where(up.abs() > limit, 0.0, of_up)


def gradients(x: Tensor, up: Tensor | None, gate: Tensor, of_up: Tensor, *, interleaved: bool) -> dict[str, Tensor]:
    """Return the gradients of gate and up as results: as they are for two tensors, else in their places in x."""
    gate, of_up = gate.to(x.dtype), of_up.to(x.dtype)
    if up is not None:
        return {"grad_gate": gate, "grad_up": of_up}
    return {"grad_x": torch.stack([gate, of_up], -1).flatten(-2) if interleaved else torch.cat([gate, of_up], -1)}


@kernel(
    "swiglu_backward", contract="fp32_silu+fp32_product", name="eager[swiglu_backward+fp32_silu]", invariant=OF_ELEMENTS
)
def backward_fp32(x, dy, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
    """Differentiate as Liger does, where it has the options."""
    options = SwigluParameters(interleaved, swiglu_limit, alpha, up_offset)
    values = [t.float() for t in checked(x, up, options, dy=dy)]
    gate, factor = limited_in_torch(*values, swiglu_limit)
    scaled = gate * alpha
    s, dy = torch.sigmoid(scaled), dy.float()
    of_gate = dy * (factor + up_offset if up_offset else factor) * (s * (1 + scaled * (1 - s)))
    of_up = dy * (gate * s)
    return gradients(x, up, *without_cut_off(of_gate, of_up, *values, swiglu_limit), interleaved=interleaved)


def autograd(
    x: Tensor, dy: Tensor, up: Tensor | None, options: SwigluParameters, silu: str, **rounding: bool
) -> dict[str, Tensor]:
    """Differentiate the eager forward pass by autograd."""
    leaves = [t.detach().requires_grad_() for t in checked(x, up, options, dy=dy)]
    with torch.enable_grad():
        output = forward(*leaves, options._replace(interleaved=False), silu, **rounding)
        of_gate, of_up = torch.autograd.grad(output, leaves, dy)
    return gradients(x, up, of_gate, of_up, interleaved=options.interleaved)


@kernel(
    "swiglu_backward", contract="rounded_silu+rounded_product", name="eager[swiglu_backward+rounded_silu]",
    invariant=OF_ELEMENTS,
)  # fmt: skip
def backward_rounded_silu(x, dy, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
    """Differentiate `F.silu(gate) * up` by autograd."""
    options = SwigluParameters(interleaved, swiglu_limit, alpha, up_offset)
    return autograd(x, dy, up, options, "rounded_silu", rounded_shift=False)


@kernel(
    "swiglu_backward", contract="rounded_sigmoid+rounded_product+rounded_shift",
    name="eager[swiglu_backward+rounded_sigmoid]", invariant=OF_ELEMENTS,
)  # fmt: skip
def backward_rounded_sigmoid(x, dy, up=None, *, interleaved=False, swiglu_limit=inf, alpha=1.0, up_offset=0.0):
    """Differentiate as autograd of gpt-oss's experts, but the sigmoid's slope rounds once in fp16 on a CPU, too."""
    options = SwigluParameters(interleaved, swiglu_limit, alpha, up_offset)
    values = checked(x, up, options, dy=dy)
    gate, factor = limited_in_torch(*values, swiglu_limit)
    s = torch.sigmoid(gate if alpha == 1.0 else gate * alpha)
    grad_silu = dy * (factor + up_offset if up_offset else factor)
    through = ((grad_silu * gate).float() * (1 - s.float()) * s.float()).to(x.dtype)
    of_gate = grad_silu * s + (through if alpha == 1.0 else through * alpha)
    of_up = dy * (gate * s)
    return gradients(x, up, *without_cut_off(of_gate, of_up, *values, swiglu_limit), interleaved=interleaved)
