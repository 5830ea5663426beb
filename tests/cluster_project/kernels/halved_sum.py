"""Ten kernels of halved_sum: seven keep their contracts, two do not, and one raises."""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.kernel import kernel


@kernel("halved_sum", contract="fp32_sum")
def by_product(x: Tensor, y: Tensor) -> Tensor:
    return ((x.float() + y.float()) * 0.5).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum")
def by_quotient(x: Tensor, y: Tensor) -> Tensor:
    return ((x.float() + y.float()) / 2).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum")
def exchanged(x: Tensor, y: Tensor) -> Tensor:
    return ((y.float() + x.float()) * 0.5).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum")
def row_by_row(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([by_product(*rows) for rows in zip(x, y, strict=True)])


@kernel("halved_sum", contract="rounded_sum")
def rounded(x: Tensor, y: Tensor) -> Tensor:
    return ((x + y).float() * 0.5).to(x.dtype)


@kernel("halved_sum", contract="rounded_sum")
def rounded_throughout(x: Tensor, y: Tensor) -> Tensor:
    return (x + y) * 0.5


@kernel("halved_sum", contract="rounded_sum", stages=("sum",))
def with_its_sum(x: Tensor, y: Tensor, *, stages: tuple[str, ...] = ()) -> Tensor | dict[str, Tensor]:
    total = x + y
    output = total * 0.5
    return {"output": output, "sum": total} if stages else output


@kernel("halved_sum", contract="fp32_sum")
def truncated(x: Tensor, y: Tensor) -> Tensor:
    """Wrong wherever a row has a multiple of nine columns: the last one is what it was before."""
    output = by_product(x, y)
    if x.shape[-1] % 9 == 0:
        output[..., -1] = x[..., -1]
    return output


@kernel("halved_sum", contract="rounded_sum")
def a_little_more(x: Tensor, y: Tensor) -> Tensor:
    """Wrong wherever a row has more than 45 columns."""
    factor = 0.5 if x.shape[-1] <= 45 else 0.51
    return ((x + y).float() * factor).to(x.dtype)


@kernel("halved_sum", contract="fp32_sum")
def raises(x: Tensor, y: Tensor) -> Tensor:
    """Raise an error where a row has more than forty columns."""
    if x.shape[-1] > 40:
        raise RuntimeError(f"{x.shape[-1]} columns are more than 40")
    return by_product(x, y)
