"""Rotary position embedding in PyTorch: written out for each contract. rotary.py says what these mean."""

from __future__ import annotations

import torch
from rotary_arguments import check_heads, check_k
from torch import Tensor

from lastbit import kernel


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, products: str) -> Tensor:
    """Rotate the first 2 · cos.shape[1] columns of every head of x [..., H, D]; tables are taken as they are.

    products: `rounded_products` rounds both to the dtype of x, `contracted_products` that with the sine.
    """
    width = 2 * cos.shape[1]
    cosine, sine = (table[positions].float().unsqueeze(-2) for table in (cos, sin))
    value = x[..., :width].float()
    first, second = (value[..., ::2], value[..., 1::2]) if interleaved else value.chunk(2, -1)

    def of_cosine(a: Tensor) -> Tensor:
        return (a * cosine).to(x.dtype).float() if products == "rounded_products" else a * cosine

    def of_sine(a: Tensor) -> Tensor:
        return a * sine if products == "fp32_products" else (a * sine).to(x.dtype).float()

    pair = of_cosine(first) - of_sine(second), of_cosine(second) + of_sine(first)
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


for _contract in ("fp32_products", "rounded_products", "rounded_products+rounded_table", "contracted_products"):
    _declare(_contract)
