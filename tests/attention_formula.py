"""Attention in fp64, one query at a time: what kernels and the reference are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    causal: bool = False,
    cap: float | None = None,
) -> dict[str, Tensor]:
    """Output [B, T, H, E] and lse [B, H, T]."""
    batch, queries, heads, _ = q.shape
    keys, groups = k.shape[1:3]
    output = torch.zeros(batch, queries, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, queries), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for head in range(heads):
            group = head * groups // heads
            for token in range(queries):
                seen = min(keys, token + keys - queries + 1) if causal else keys
                scores = scale * (k[b, : max(seen, 0), group].double() @ q[b, token, head].double())
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                every = scores if sinks is None else torch.cat([scores, sinks[head : head + 1].double()])
                if every.numel():
                    lse[b, head, token] = torch.logsumexp(every, 0)
                    weights = torch.exp(scores - lse[b, head, token])
                    output[b, token, head] = weights @ v[b, : max(seen, 0), group].double()
    return {"output": output, "lse": lse}
