"""Rotary position embedding in PyTorch: written out for each contract. rotary.py says what these mean."""

from __future__ import annotations

import torch
from rotary_arguments import check_heads, check_k
from torch import Tensor

from lastbit import kernel

ROUNDED = {
    "fp32_products": (False, False, False, False),
    "rounded_products": (True, True, True, True),
    "contracted_products": (False, True, False, True),
    "contracted_x1_products": (False, True, True, False),
}
"""Whether x1 · cos, x2 · sin, x2 · cos and x1 · sin are rounded to the dtype of x, for each option of `products`."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, products: str) -> Tensor:
    """Rotate the first 2 · cos.shape[1] columns of every head of x [..., H, D]; tables are taken as they are."""
    width = 2 * cos.shape[1]
    cosine, sine = (table[positions].float().unsqueeze(-2) for table in (cos, sin))
    value = x[..., :width].float()
    first, second = (value[..., ::2], value[..., 1::2]) if interleaved else value.chunk(2, -1)

    factors = (first, cosine), (second, sine), (second, cosine), (first, sine)
    a, b, c, d = (
        (number * table).to(x.dtype).float() if rounds else number * table
        for (number, table), rounds in zip(factors, ROUNDED[products], strict=True)
    )
    pair = a - b, c + d
    together = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([together.to(x.dtype), x[..., width:]], -1)


_HELD = ("run to run", "tokens", "permutation", "heads", "padding", "layout", "scaling")


def _declare(contract: str) -> None:
    products, _, table = contract.partition("+")

    @kernel("rotary", contract=contract, name=f"eager[{contract}]", invariant=_HELD)
    def eager(q, cos, sin, positions, k=None, *, interleaved=False):
        check_heads(q, positions, cos=cos, sin=sin, k=k)
        check_k(q, k)
        if table:
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        both = {"q_rotated": q} | ({} if k is None else {"k_rotated": k})
        return {name: rotated(x, cos, sin, positions, interleaved, products) for name, x in both.items()}


for _contract in (*ROUNDED, "rounded_products+rounded_table"):
    _declare(_contract)
