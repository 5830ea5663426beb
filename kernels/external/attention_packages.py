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

WIDE_TILE = 64  # widest head for which flash attention on a GPU takes 128 keys at a time


def visible(q, k):
    """Return a mask [T, S]: query i sees the keys up to i + S - T."""
    queries, keys = q.shape[1], k.shape[1]
    if queries > keys:
        raise UnsupportedCase(f"{queries} queries and {keys} keys: what a query gives that sees no key is not promised")
    return torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)


def refuse_empty(q, v):
    """Raise UnsupportedCase where there is nothing to compute."""
    if not q.numel() or not v.numel():
        raise UnsupportedCase(f"q has shape {tuple(q.shape)} and v {tuple(v.shape)}: nothing to attend")


def of_torch(backend, q, k, v, *, scale, causal):
    """Call the function with one backend alone; torch's `is_causal` aligns the first query with the first key."""
    refuse_elsewhere(q, k=k, v=v)
    refuse_empty(q, v)
    square = q.shape[1] == k.shape[1]
    mask = visible(q, k) if causal and not square else None
    with sdpa_kernel([backend]):
        output = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, is_causal=causal and square, scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
    return output.transpose(1, 2)


@kernel("attention", contract="math", name="F.scaled_dot_product_attention[math]")
def sdpa_math(q, k, v, *, scale, causal=False):
    return of_torch(SDPBackend.MATH, q, k, v, scale=scale, causal=causal)


@kernel(
    "attention", contract="flash", name="F.scaled_dot_product_attention[cpu]", devices=("cpu",), takes="contiguous rows"
)
def sdpa_cpu(q, k, v, *, scale, causal=False):
    """Call torch's flash attention of the CPU: 512 keys at a time (`FlashAttentionKernel.cpp`)."""
    if k.shape[1] > 512 or q.shape[3] != v.shape[3]:
        raise UnsupportedCase(f"{k.shape[1]} keys, {q.shape[3]} and {v.shape[3]} numbers: more than a tile, or unequal")
    return of_torch(SDPBackend.FLASH_ATTENTION, q, k, v, scale=scale, causal=causal)


def on_gpu(contract, *, wide):
    @kernel("attention", contract=contract, name=f"F.scaled_dot_product_attention[{contract}]", devices=("cuda",))
    def sdpa_flash(q, k, v, *, scale, causal=False):
        """Call flash attention 2: the last keys first (`flash_fwd_kernel.h`, `flash_fwd_launch_template.h`)."""
        if (q.shape[3] <= WIDE_TILE) != wide or q.shape[3] > 128 or q.shape[3] != v.shape[3]:
            raise UnsupportedCase(f"heads of {q.shape[3]} and {v.shape[3]} numbers have tiles of another size")
        if q.dtype == torch.float32 or (causal and q.shape[1] != k.shape[1]):
            raise UnsupportedCase(f"{q.dtype}, {q.shape[1]} queries and {k.shape[1]} keys: no such kernel of torch")
        return of_torch(SDPBackend.FLASH_ATTENTION, q, k, v, scale=scale, causal=causal)


on_gpu("flash+tiles_128+backwards", wide=True)
on_gpu("flash+tiles_64+backwards", wide=False)


def of_transformers(model, q, k, v, sinks, scale, causal, **options):
    """Call `eager_attention_forward` of a model, which takes a mask of numbers to add."""
    refuse_elsewhere(q, k=k, v=v, sinks=sinks)
    refuse_empty(q, v)
    forward = upstream(f"transformers.models.{model}.modeling_{model}", "transformers").eager_attention_forward
    module = SimpleNamespace(num_key_value_groups=q.shape[2] // k.shape[2], training=False, sinks=sinks)
    mask = None
    if causal:
        hidden = ~visible(q, k)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
    heads = (x.transpose(1, 2) for x in (q, k, v))
    return forward(module, *heads, mask if mask is None else mask[None, None], scaling=scale, dropout=0.0, **options)[0]


@kernel("attention", contract="eager", name="transformers[llama]")
def llama_attention(q, k, v, *, scale, causal=False):
    return of_transformers("llama", q, k, v, None, scale, causal)


@kernel("attention", contract="eager", name="transformers[gemma2]")
def gemma2_attention(q, k, v, *, scale, causal=False, cap=None):
    return of_transformers("gemma2", q, k, v, None, scale, causal, softcap=cap)


@kernel("attention", contract="eager+rounded_shift", name="transformers[gpt_oss]", takes="one dtype")
def gpt_oss_attention(q, k, v, sinks, *, scale, causal=False):
    return of_transformers("gpt_oss", q, k, v, sinks, scale, causal)
