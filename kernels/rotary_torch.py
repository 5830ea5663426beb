"""Rotary position embedding in PyTorch: written out for each contract. rotary.py says what these mean."""

from __future__ import annotations

import torch
from rotary_arguments import check_heads, check_k
from torch import Tensor

from lastbit import kernel


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, *, rounded: bool) -> Tensor:
    """Rotate the first 2 · cos.shape[1] columns of every head of x [..., H, D]; tables are taken as they are.

    rounded: every operation in the dtype of x; otherwise in fp32, rounded once.
    """
    width = 2 * cos.shape[1]
    cosine, sine = (table[positions].float().unsqueeze(-2) for table in (cos, sin))
    value = x[..., :width].float()
    first, second = (value[..., ::2], value[..., 1::2]) if interleaved else value.chunk(2, -1)

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).to(x.dtype).float() if rounded else a * b

    pair = product(first, cosine) - product(second, sine), product(second, cosine) + product(first, sine)
    together = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([together.to(x.dtype), x[..., width:]], -1)


_HELD = ("run to run", "tokens", "permutation", "heads", "padding", "layout", "scaling")


def _declare(contract: str) -> None:
    rounded = contract.startswith("rounded_products")

    @kernel("rotary", contract=contract, name=f"eager[{contract}]", invariant=_HELD)
    def eager(q, cos, sin, positions, k=None, *, interleaved=False):
        check_heads(q, positions, cos=cos, sin=sin, k=k)
        check_k(q, k)
        if contract.endswith("rounded_table"):
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        both = {"q_rotated": q} | ({} if k is None else {"k_rotated": k})
        return {name: rotated(x, cos, sin, positions, interleaved, rounded=rounded) for name, x in both.items()}


for _contract in ("fp32_products", "rounded_products", "rounded_products+rounded_table"):
    _declare(_contract)
