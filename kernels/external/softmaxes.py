"""Softmax of liger-kernel and of Transformers' eager attention, and one that torch.compile compiles.

Read and identified for liger-kernel 0.8.5 and transformers 5.23.0. Liger's source leaves x in its dtype; `tl.max`
gives the maximum of 16-bit numbers in fp32, so that the difference, exp and the sum are fp32. Its kernel for rows of
several blocks is never launched: the block always covers the row, and rows of more than 65,536 columns raise.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from norm_packages import refuse_elsewhere, upstream
from torch_norms import run

from lastbit import UnsupportedCase, kernel


@kernel("softmax", contract="fp32_scores", name="liger[softmax]", takes="non-empty", refuses=(RuntimeError,))
def liger(x):
    return upstream("liger_kernel.ops.softmax", "liger-kernel").LigerSoftmaxFunction.apply(x)


@kernel(
    "softmax", contract="rounded_scores", name="transformers[eager]",
    takes={"tensors": ("one dtype", "packed rows", "non-empty"), "x columns": range(1, 4097)},
)  # fmt: skip
def transformers_eager(x, mask=None, *, scale=1.0):
    """Call `eager_attention_forward` of Llama, whose weights are the softmax of query · keyᵀ · scaling + mask.

    A query of [M, N] and keys that are the identity [N, N] give x as the products: each is a sum of one number and
    zeros.
    """
    refuse_elsewhere(x, mask=mask)
    forward = upstream("transformers.models.llama.modeling_llama", "transformers").eager_attention_forward
    if not x.isfinite().all():
        raise UnsupportedCase("x is not finite: its product with an identity is NaN")
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    keys = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)[None, None]
    return forward(module, x[None, None], keys, keys, mask if mask is None else mask[None, None], scale)[1][0, 0]


def source(x, mask, keep, scale):
    scores = x.float() * scale
    scores = scores if mask is None else scores + mask.float()
    scores = scores if keep is None else scores.masked_fill(~keep, -math.inf)
    return torch.softmax(scores, dim=-1).to(x.dtype)


@kernel("softmax", contract="fp32_scores", name="torch.compile[softmax]", takes=("packed rows", "non-empty"))
def compiled(x, mask=None, keep=None, *, scale=1.0):
    return run(source, x, mask, keep, scale)
