"""`LlamaRMSNorm` of Transformers, which many models there copy; read and identified for 5.23.0."""

from __future__ import annotations

import torch
from norm_packages import upstream

from lastbit import UnsupportedCase, kernel


@kernel("rms_norm", contract="native_multiply", name="transformers[LlamaRMSNorm]")
def llama_rms_norm(x, weight, *, eps):
    """Call `LlamaRMSNorm`: its product has the dtype that torch promotes to, so an fp32 weight gives fp32."""
    if torch.promote_types(x.dtype, weight.dtype) != x.dtype:
        raise UnsupportedCase(f"x is {x.dtype} and weight {weight.dtype}: upstream's output has the weight's dtype")
    module = upstream("transformers.models.llama.modeling_llama", "transformers").LlamaRMSNorm(len(weight), eps)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module(x)
