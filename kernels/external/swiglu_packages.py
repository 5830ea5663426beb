"""SwiGLU and its gradient as people call them: torch, Liger 0.8.5, fla-core 0.6.0 and FlashInfer; read and identified.

Liger rounds silu in its forward pass and not in its backward pass, so that the gradient is that of another function.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from norm_packages import as_rows, refuse_elsewhere, upstream

from lastbit import UnsupportedCase, kernel

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


def refuse_other_options(interleaved, swiglu_limit, alpha, up_offset):
    if (interleaved, swiglu_limit, alpha, up_offset) != (True, *GPT_OSS.values()):
        raise UnsupportedCase(
            f"interleaved={interleaved}, swiglu_limit={swiglu_limit}, alpha={alpha}, up_offset={up_offset}: "
            f"upstream has interleaved=True and {GPT_OSS}"
        )


@kernel("swiglu", contract="rounded_sigmoid+rounded_shift", name="transformers[GptOssExperts]")
def experts(x, *, interleaved, swiglu_limit, alpha, up_offset):
    refuse_other_options(interleaved, swiglu_limit, alpha, up_offset)
    return gpt_oss(x)


def declare_experts_backward(contract, name, *, rounded_slope):
    @kernel("swiglu_backward", contract=contract, name=name)
    def experts_backward(x, dy, *, interleaved, swiglu_limit, alpha, up_offset):
        """Call autograd: on a GPU and in fp16 torch rounds every step of a sigmoid's slope, in bf16 on a CPU none."""
        refuse_other_options(interleaved, swiglu_limit, alpha, up_offset)
        refuse_elsewhere(x, dy=dy)
        if rounded_slope is not (x.is_cuda or x.dtype is torch.float16):
            raise UnsupportedCase(f"x is {x.dtype} on {x.device.type}, where torch's sigmoid_backward rounds otherwise")
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(gpt_oss(leaf), leaf, dy)[0]


EXPERTS_BACKWARD = "rounded_sigmoid+rounded_product+rounded_shift"
declare_experts_backward(EXPERTS_BACKWARD, "autograd[GptOssExperts]", rounded_slope=False)
declare_experts_backward(f"{EXPERTS_BACKWARD}+rounded_slope", "autograd[GptOssExperts,slope]", rounded_slope=True)


@kernel("swiglu_backward", contract="rounded_silu+rounded_product", name="autograd[F.silu]")
def silu_backward(x, dy, up):
    refuse_elsewhere(x, dy=dy, up=up)
    leaves = [t.detach().requires_grad_() for t in (x, up)]
    with torch.enable_grad():
        gate, of_up = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, dy)
    return {"grad_gate": gate, "grad_up": of_up}


@kernel("swiglu", contract="rounded_silu", name="liger[swiglu]")
def liger(x, up):
    refuse_elsewhere(x, up=up)
    return upstream(*LIGER).swiglu_forward(as_rows(x), as_rows(up), 1.0)[-1].reshape(x.shape)


@kernel("swiglu_backward", contract="fp32_silu+fp32_product", name="liger[swiglu_backward]")
def liger_backward(x, dy, up):
    """Call Liger's backward pass on copies: it writes the gradients over gate and up."""
    refuse_elsewhere(x, dy=dy, up=up)
    gate, of_up = upstream(*LIGER).swiglu_backward(as_rows(x).clone(), as_rows(up).clone(), as_rows(dy), 1.0)
    return {"grad_gate": gate.reshape(x.shape), "grad_up": of_up.reshape(x.shape)}


def refuse_cpu(x):
    if not x.is_cuda:
        raise UnsupportedCase(f"x is on {x.device}: upstream tunes its launch, or is compiled for an accelerator")


@kernel("swiglu", contract="fp32_silu", name="fla[swiglu]")
def fla(x, up):
    refuse_elsewhere(x, up=up)
    return upstream(*FLA).swiglu_fwd(as_rows(x), as_rows(up)).reshape(x.shape)


@kernel("swiglu_backward", contract="fp32_silu+fp32_product", name="fla[swiglu_backward]")
def fla_backward(x, dy, up):
    refuse_elsewhere(x, dy=dy, up=up)
    gate, of_up = upstream(*FLA).swiglu_fwdbwd(as_rows(x), as_rows(up), as_rows(dy))
    return {"grad_gate": gate.reshape(x.shape), "grad_up": of_up.reshape(x.shape)}


@kernel("swiglu", contract="fp32_silu", name="flashinfer[silu_and_mul]")
def flashinfer(x):
    module = upstream("flashinfer.activation", "flashinfer-python")
    refuse_cpu(x)
    if x.dtype is torch.float32 or x.shape[-1] * x.element_size() % 32:
        raise UnsupportedCase(f"x is {x.dtype} {tuple(x.shape)}: upstream takes 16 bits, and halves of whole vectors")
    return module.silu_and_mul(as_rows(x)).reshape(*x.shape[:-1], x.shape[-1] // 2)
