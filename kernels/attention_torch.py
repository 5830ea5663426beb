"""Attention in PyTorch, written out for each contract: all scores of a row at once.

attention.py says what the contracts mean.
"""

from __future__ import annotations

import math

import torch
from attention_arguments import check_arguments
from torch import Tensor

from lastbit import UnsupportedCase, kernel


def by_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as [B, H, tokens, numbers], keys and values once for every head of q."""
    shared = q.shape[2] // k.shape[2]
    keys, values = (x.transpose(1, 2).repeat_interleave(shared, 1) for x in (k, v))
    return q.transpose(1, 2), keys, values


def visible_keys(queries: int, keys: int, device: torch.device, *, causal: bool) -> Tensor:
    """Return a mask [T, S] of the keys that each query sees: with `causal`, query i sees keys up to i + S - T."""
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    return every.tril(keys - queries) if causal else every


def hidden_scores(scores: Tensor, *, causal: bool) -> Tensor:
    """Set scores to -inf where a query does not see a key."""
    visible = visible_keys(*scores.shape[-2:], scores.device, causal=causal)
    return scores.masked_fill(~visible, -math.inf)


def exponentials(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(score - largest), the sum of a row, 1 where it is empty, and lse; the sink counts in both."""
    largest = scores.amax(-1, keepdim=True)
    if sink is not None:
        largest = torch.maximum(largest, sink)
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    weights = torch.exp(scores - shift)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - shift)
    return weights, total.masked_fill(total == 0, 1.0), (shift + torch.log(total))[..., 0]


def as_result(x: Tensor, like: Tensor) -> Tensor:
    """Return x as [B, T, H, E], contiguous, in the dtype of q."""
    return x.transpose(1, 2).to(like.dtype).contiguous()


@kernel("attention", contract="flash", name="eager[attention+flash]", invariant=("run to run",))
def flash(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, causal: bool = False,
    cap: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Compute as flash attention whose first tile has all keys: weights are rounded before division by their sum."""
    check_arguments(q, k, v, sinks, scale=scale, cap=cap)
    queries, keys, values = by_head(q, k, v)
    scores = (queries.float() @ keys.float().mT) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    column = None if sinks is None else sinks.float()[:, None, None]
    weights, total, lse = exponentials(hidden_scores(scores, causal=causal), column)
    return {"output": as_result((weights.to(v.dtype).float() @ values.float()) / total, q), "lse": lse}


@kernel(
    "attention", contract="eager+rounded_shift", name="eager[attention+eager]", stages=("products", "probabilities"),
    invariant=("run to run",),
)  # fmt: skip
def eager(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, causal: bool = False,
    cap: float | None = None, stages: tuple[str, ...] = (),
) -> dict[str, Tensor]:  # fmt: skip
    """Compute as models of Transformers without a fused kernel: every step is a tensor of the dtype of q.

    Products of 16-bit numbers are taken in fp32, because on a GPU torch may add parts of them in 16 bits. Where there
    are sinks, the argument of the softmax is relative to its largest number and rounded, as in gpt-oss.
    """
    check_arguments(q, k, v, sinks, scale=scale, cap=cap)
    if sinks is not None and sinks.dtype != q.dtype:
        raise UnsupportedCase(f"sinks are {sinks.dtype} and scores {q.dtype}: put together they are of another dtype")
    queries, keys, values = by_head(q, k, v)
    products = (queries.float() @ keys.float().mT).to(q.dtype)
    scores = products * scale
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = hidden_scores(scores, causal=causal)
    if sinks is not None:
        scores = torch.cat([sinks[:, None, None].expand(*scores.shape[:-1], 1), scores], -1)
        scores = scores - scores.amax(-1, keepdim=True)
    weights, total, _ = exponentials(scores.float(), None)
    probabilities = (weights / total).to(v.dtype)
    first = probabilities.shape[-1] - keys.shape[-2]
    output = as_result(probabilities[..., first:].float() @ values.float(), q)
    shown = {"products": products, "probabilities": probabilities}
    return {"output": output, **{name: shown[name] for name in stages}}


@kernel("attention", contract="math", name="eager[attention+math]", invariant=("run to run",))
def math_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, causal: bool = False
) -> Tensor:
    """Compute as the plain path of torch's scaled_dot_product_attention: q and k times √scale, all in fp32."""
    check_arguments(q, k, v, sinks, scale=scale)
    queries, keys, values = (x.float() for x in by_head(q, k, v))
    scores = (queries * math.sqrt(scale)) @ (keys * math.sqrt(scale)).mT
    column = None if sinks is None else sinks.float()[:, None, None]
    weights, total, _ = exponentials(hidden_scores(scores, causal=causal), column)
    return as_result((weights / total) @ values, q)
