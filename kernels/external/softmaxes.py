"""Softmax of liger-kernel and of Transformers' eager attention, and one that torch.compile compiles.

Read and identified for liger-kernel 0.8.5 and transformers 5.23.0. Liger's source leaves x in its dtype; `tl.max`
gives the maximum of 16-bit numbers in fp32, so that the difference, exp and the sum are fp32. Its kernel for rows of
several blocks is never launched: the block always covers the row, and rows of more than 65,536 columns raise.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from norm_packages import as_rows, refuse_elsewhere, upstream
from torch_norms import run

from lastbit import UnsupportedCase, kernel

LONGEST_BLOCK = 65536


@kernel("softmax", contract="fp32_scores", name="liger[softmax]")
def liger(x):
    function = upstream("liger_kernel.ops.softmax", "liger-kernel").LigerSoftmaxFunction
    if x.shape[-1] > LONGEST_BLOCK:
        raise UnsupportedCase(f"rows of {x.shape[-1]} columns: upstream takes up to {LONGEST_BLOCK}")
    return function.apply(as_rows(x)).reshape(x.shape)


@kernel("softmax", contract="rounded_scores", name="transformers[eager]", takes="one dtype")
def transformers_eager(x, mask=None, *, scale=1.0):
    """Call `eager_attention_forward` of Llama, whose weights are the softmax of query · keyᵀ · scaling + mask.

    A query of [..., N] and keys that are the identity give x as the products: each is a sum of one number and zeros.
    """
    refuse_elsewhere(x, mask=mask)
    forward = upstream("transformers.models.llama.modeling_llama", "transformers").eager_attention_forward
    rows = as_rows(x)
    if not rows.isfinite().all():
        raise UnsupportedCase("x is not finite: its product with an identity is NaN")
    module = SimpleNamespace(num_key_value_groups=1, training=False)
    keys = torch.eye(rows.shape[-1], dtype=x.dtype, device=x.device)[None, None]
    added = None if mask is None else as_rows(mask)[None, None]
    return forward(module, rows[None, None], keys, keys, added, scale)[1].reshape(x.shape)


def source(x, mask, keep, scale):
    scores = x.float() * scale
    scores = scores if mask is None else scores + mask.float()
    scores = scores if keep is None else scores.masked_fill(~keep, -math.inf)
    return torch.softmax(scores, dim=-1).to(x.dtype)


@kernel("softmax", contract="fp32_scores", name="torch.compile[softmax]")
def compiled(x, mask=None, keep=None, *, scale=1.0):
    return run(source, as_rows(x), *(None if t is None else as_rows(t) for t in (mask, keep)), scale).reshape(x.shape)
