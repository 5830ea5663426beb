"""Attention of torch's `scaled_dot_product_attention`, a backend at a time, and of Transformers without a fused kernel.

Contracts were read in the sources (docs/contracts/attention.md) and are judged here. torch's flash attention on a
GPU may cut the keys of few rows into parts, of which each has a largest score of its own: such cases are refused.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from norm_packages import refuse_elsewhere, upstream
from torch.nn.attention import SDPBackend, sdpa_kernel

from lastbit import UnsupportedCase, kernel


def visible(q, k):
    """Return a mask [T, S]: query i sees the keys up to i + S - T."""
    queries, keys = q.shape[1], k.shape[1]
    if queries > keys:
        raise UnsupportedCase(f"{queries} queries and {keys} keys: what a query gives that sees no key is not promised")
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


def of_torch(backend, q, k, v, *, scale, causal):
    """Call the function with one backend alone; torch's `is_causal` aligns the first query with the first key."""
    refuse_elsewhere(q, k=k, v=v)
    square = q.shape[1] == k.shape[1]
    mask = visible(q, k) if causal and not square else None
    with sdpa_kernel([backend]):
        output = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=causal and square, scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
    return output.transpose(1, 2)


@kernel("attention", contract="math", name="F.scaled_dot_product_attention[math]", takes="non-empty")
def sdpa_math(q, k, v, *, scale, causal=False):
    return of_torch(SDPBackend.MATH, q, k, v, scale=scale, causal=causal)


@kernel(
    "attention", contract="flash", name="F.scaled_dot_product_attention[cpu]", devices=("cpu",),
    takes={"tensors": ("contiguous rows", "non-empty"), "k size 1": range(1, 513), "v columns": "q columns"},
)  # fmt: skip
def sdpa_cpu(q, k, v, *, scale, causal=False):
    """Call torch's flash attention of the CPU: 512 keys at a time (`FlashAttentionKernel.cpp`).

    It rounds some weights to the wrong neighbour, and fails for that: docs/contracts/attention.md.
    """
    return of_torch(SDPBackend.FLASH_ATTENTION, q, k, v, scale=scale, causal=causal)


def on_gpu(contract, widths):
    takes = {"tensors": "non-empty", "q dtype": ("bf16", "fp16"), "q columns": widths, "v columns": "q columns"}

    @kernel(
        "attention", contract=contract, name=f"F.scaled_dot_product_attention[{contract}]", devices=("cuda",),
        takes=takes, refuses=(RuntimeError,),
    )  # fmt: skip
    def sdpa_flash(q, k, v, *, scale, causal=False):
        """Call flash attention 2: the last keys first (`flash_fwd_kernel.h`, `flash_fwd_launch_template.h`)."""
        if causal and q.shape[1] != k.shape[1]:
            raise UnsupportedCase(f"{q.shape[1]} queries and {k.shape[1]} keys: no kernel of torch has this mask")
        return of_torch(SDPBackend.FLASH_ATTENTION, q, k, v, scale=scale, causal=causal)


on_gpu("flash+tiles_128+backwards", range(1, 65))
on_gpu("flash+tiles_64+backwards", range(65, 129))


def of_transformers(model, q, k, v, sinks, scale, causal, **options):
    """Call `eager_attention_forward` of a model, which takes a mask of numbers to add."""
    refuse_elsewhere(q, k=k, v=v, sinks=sinks)
    forward = upstream(f"transformers.models.{model}.modeling_{model}", "transformers").eager_attention_forward
    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False, sinks=sinks)
    mask = None
    if causal:
        hidden = ~visible(q, k)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return forward(module, *heads, mask if mask is None else mask[None, None], scaling=scale, dropout=0.0, **options)[0]


@kernel("attention", contract="eager", name="transformers[llama]", takes="non-empty")
def llama_attention(q, k, v, *, scale, causal=False):
    return of_transformers("llama", q, k, v, None, scale, causal)


@kernel("attention", contract="eager", name="transformers[gemma2]", takes="non-empty")
def gemma2_attention(q, k, v, *, scale, causal=False, cap=None):
    return of_transformers("gemma2", q, k, v, None, scale, causal, softcap=cap)


@kernel("attention", contract="eager+rounded_shift", name="transformers[gpt_oss]", takes=("one dtype", "non-empty"))
def gpt_oss_attention(q, k, v, sinks, *, scale, causal=False):
    return of_transformers("gpt_oss", q, k, v, sinks, scale, causal)
