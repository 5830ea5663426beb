"""Softmax in PyTorch: written out for each contract, as attention modules call it, and the library function.

softmax.py says what the contracts mean.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit import kernel


def scores_of(x: Tensor, mask: Tensor | None, keep: Tensor | None, scale: float) -> Tensor:
    """Return x · scale + mask in the dtype of x, -inf where it is not kept."""
    scores = x if scale == 1.0 else x * scale
    scores = scores if mask is None else (scores + mask).to(x.dtype)
    return scores if keep is None else scores.masked_fill(~keep, -math.inf)


@kernel("softmax", contract="rounded_scores", name="eager[rounded_scores]", invariant=("run to run",))
def rounded_scores(x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Compute as eager attention of Transformers: scores in x's dtype, the softmax of them in fp32, rounded once."""
    return F.softmax(scores_of(x, mask, keep, scale), dim=-1, dtype=torch.float32).to(x.dtype)


@kernel("softmax", contract="fp32_scores+base2+zero_rows", name="eager[base2]", invariant=("run to run",))
def base2(x: Tensor, mask: Tensor | None = None, keep: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    """Compute with log2(e) folded into the scale where there is no mask, and multiply by the inverse of the sum."""
    factor = scale * math.log2(math.e)
    scores = x.float() * factor if mask is None else (x.float() * scale + mask.float()) * math.log2(math.e)
    scores = scores if keep is None else scores.masked_fill(~keep, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    empty = torch.isneginf(largest)
    terms = torch.exp2(scores - largest.masked_fill(empty, 0.0))
    return (terms * terms.sum(-1, keepdim=True).masked_fill(empty, 1.0).reciprocal()).to(x.dtype)


@kernel("softmax", contract="fp32_scores", name="F.softmax", invariant=("run to run",))
def library_softmax(x: Tensor, *, fp32_output: bool = False) -> Tensor | dict[str, Tensor]:
    """Call torch's softmax, which computes bf16 and fp16 in fp32, and rounds once unless it is asked for fp32."""
    if fp32_output:
        return {"probabilities": F.softmax(x, dim=-1, dtype=torch.float32)}
    return F.softmax(x, dim=-1)
