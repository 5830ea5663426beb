"""Three kernels that claim to be the chain: one is, and two leave out a rounding each."""

from __future__ import annotations

import torch

from lastbit import kernel


def declare(name, *, store_sum, store_output):
    """Register a kernel that rounds the sum over the ranks, and the output, to bf16 before it goes on, or does not."""

    @kernel("all_reduce_rms_norm_codes", contract="fp32_multiply", name=name)
    def fused(x, peer_1, weight, residual, scale, *, eps):
        total = x.float() + peer_1.float()
        total = total.to(x.dtype).float() if store_sum else total
        residual_sum = (total + residual.float()).to(x.dtype)
        value = residual_sum.float()
        output = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()
        output = output.to(x.dtype).float() if store_output else output
        codes = (output * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"codes": codes, "residual_sum": residual_sum}


declare("as the chain", store_sum=True, store_output=True)
declare("without the rounded sum", store_sum=False, store_output=True)
declare("without the rounded output", store_sum=True, store_output=False)
