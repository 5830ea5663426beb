"""SwiGLU and its gradient as people call them: torch, Liger 0.8.5, fla-core 0.6.0 and FlashInfer; read and identified.

Liger rounds silu in its forward pass and not in its backward pass, so that the gradient is that of another function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from norm_packages import refuse_elsewhere, upstream

from lastbit import kernel

LIGER = ("liger_kernel.ops.swiglu", "liger-kernel")
FLA = ("fla.modules.activations", "fla-core einops")
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0}


@kernel("swiglu", contract="rounded_silu", name="F.silu")
def silu(x, up):
    """Compute `act_fn(gate) * up` as the MLPs of Transformers; one rounding for each of the two calls."""
    refuse_elsewhere(x, up=up)
    return F.silu(x) * up


def gpt_oss(x):
    """Call the experts of gpt-oss in Transformers (modeling_gpt_oss.py), with gate and up that alternate."""
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(max=GPT_OSS["limit"]), up.clamp(-GPT_OSS["limit"], GPT_OSS["limit"])
    return (up + GPT_OSS["offset"]) * (gate * torch.sigmoid(gate * GPT_OSS["alpha"]))


EXPERTS = {"interleaved": True, "swiglu_limit": GPT_OSS["limit"], "alpha": GPT_OSS["alpha"], "up_offset": 1.0}


@kernel("swiglu", contract="rounded_sigmoid+rounded_shift", name="transformers[GptOssExperts]", takes=EXPERTS)
def experts(x, *, interleaved, swiglu_limit, alpha, up_offset):
    return gpt_oss(x)


def declare_experts_backward(name, device, rounding="", takes=EXPERTS):
    contract = f"rounded_sigmoid+rounded_product+rounded_shift{rounding}"

    @kernel("swiglu_backward", contract=contract, name=f"autograd[{name}]", devices=(device,), takes=takes)
    def experts_backward(x, dy, *, interleaved, swiglu_limit, alpha, up_offset):
        """Call autograd: on a GPU and in fp16 torch rounds every step of a sigmoid's slope, in bf16 on a CPU none."""
        refuse_elsewhere(x, dy=dy)
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(gpt_oss(leaf), leaf, dy)[0]


declare_experts_backward("GptOssExperts", "cpu", takes={**EXPERTS, "x dtype": ("bf16", "fp32")})
declare_experts_backward("GptOssExperts,fp16", "cpu", "+rounded_slope", {**EXPERTS, "x dtype": "fp16"})
declare_experts_backward("GptOssExperts,slope", "cuda", "+rounded_slope")


@kernel("swiglu_backward", contract="rounded_silu+rounded_product", name="autograd[F.silu]")
def silu_backward(x, dy, up):
    refuse_elsewhere(x, dy=dy, up=up)
    leaves = [t.detach().requires_grad_() for t in (x, up)]
    with torch.enable_grad():
        gate, of_up = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, dy)
    return {"grad_gate": gate, "grad_up": of_up}


ROWS = ("packed rows", "non-empty")
WHOLE_ROWS = {"takes": ("contiguous", "non-empty"), "refuses": (RuntimeError,)}
"""Liger refuses rows of over 65,536 columns."""


@kernel("swiglu", contract="rounded_silu", name="liger[swiglu]", **WHOLE_ROWS)
def liger(x, up):
    refuse_elsewhere(x, up=up)
    return upstream(*LIGER).swiglu_forward(x, up, 1.0)[-1]


@kernel(
    "swiglu_backward", contract="fp32_silu+fp32_product", name="liger[swiglu_backward]",
    mutates={"x": "grad_gate", "up": "grad_up"}, **WHOLE_ROWS,
)  # fmt: skip
def liger_backward(x, dy, up):
    refuse_elsewhere(x, dy=dy, up=up)
    upstream(*LIGER).swiglu_backward(x, up, dy, 1.0)


@kernel("swiglu", contract="fp32_silu", name="fla[swiglu]", takes=ROWS)
def fla(x, up):
    refuse_elsewhere(x, up=up)
    return upstream(*FLA).swiglu_fwd(x, up)


@kernel("swiglu_backward", contract="fp32_silu+fp32_product", name="fla[swiglu_backward]", takes=ROWS)
def fla_backward(x, dy, up):
    refuse_elsewhere(x, dy=dy, up=up)
    return upstream(*FLA).swiglu_fwdbwd(x, up, dy)


@kernel(
    "swiglu", contract="fp32_silu", name="flashinfer[silu_and_mul]", devices=("cuda",),
    takes={"tensors": ROWS, "x dtype": ("bf16", "fp16"), "x columns": range(16, 65537, 16)},
)  # fmt: skip
def flashinfer(x):
    """Call upstream with halves of whole vectors."""
    return upstream("flashinfer.activation", "flashinfer-python").silu_and_mul(x)
