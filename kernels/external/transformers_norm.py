"""`LlamaRMSNorm` of Transformers, which many models there copy; read and identified for 5.23.0."""

from __future__ import annotations

import torch
from norm_packages import upstream

from lastbit import kernel


@kernel("rms_norm", contract="native_multiply", name="transformers[LlamaRMSNorm]", takes="one dtype")
def llama_rms_norm(x, weight, *, eps):
    """Call `LlamaRMSNorm`, which rounds to x's dtype and multiplies in the one that torch promotes to."""
    module = upstream("transformers.models.llama.modeling_llama", "transformers").LlamaRMSNorm(len(weight), eps)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module(x)
