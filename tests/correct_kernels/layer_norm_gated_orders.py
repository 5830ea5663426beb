"""Gated LayerNorm and its gradients in PyTorch, with sums and products in many orders: all keep the contract."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import mul

import torch
from summation import SUMS, Depth, Sum
from torch import Tensor

from lastbit.kernel import kernel

Product = Callable[..., Tensor]
MultiplyAdd = Callable[[Tensor, Tensor, Tensor], Tensor]
STAGES = ("gated_input", "mean", "variance", "rstd")


def forwards(*factors: Tensor) -> Tensor:
    return reduce(mul, factors)


def backwards(*factors: Tensor) -> Tensor:
    return reduce(mul, factors[::-1])


def inside_out(*factors: Tensor) -> Tensor:
    """Multiply by the first factor last: x · (r · w)."""
    return factors[0] if len(factors) == 1 else reduce(mul, factors[1:]) * factors[0]


def sigmoid_of_torch(z: Tensor) -> Tensor:
    return torch.sigmoid(z)


def sigmoid_by_exp(z: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-z))


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute a · b + c rounded once, but for the rare double rounding of the sum in fp64."""
    return (a.double() * b.double() + c.double()).float()


def unfused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return a * b + c


VARIANTS: dict[str, tuple[Product, Callable[[Tensor], Tensor], MultiplyAdd]] = {
    "library": (forwards, sigmoid_of_torch, unfused),
    "running": (backwards, sigmoid_by_exp, fused),
    "reversed": (inside_out, sigmoid_of_torch, unfused),
    "halves": (forwards, sigmoid_by_exp, unfused),
    "neighbours": (inside_out, sigmoid_by_exp, fused),
    "lanes32": (backwards, sigmoid_of_torch, fused),
    "chunks37": (forwards, sigmoid_of_torch, fused),
    "descending": (backwards, sigmoid_by_exp, unfused),
}
"""Order of the sums → order of the products, sigmoid, and whether a product is fused into an addition."""


def _activation(z: Tensor, activation: str, sigmoid: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Factors of the activation and of its derivative."""
    s = sigmoid(z.float())
    if activation == "sigmoid":
        return [s], [s, 1 - s]
    return [z.float(), s], [s, 1 + z.float() * (1 - s)]


def _centered(x: Tensor, value: Tensor, before: list[Tensor], mean: Tensor, multiply_add: MultiplyAdd) -> Tensor:
    """value - mean; where value is x · act(z), its last product may be fused into the difference."""
    if not before or multiply_add is unfused:
        return value - mean
    *first, last = (t.expand_as(x).float().unflatten(-1, (mean.shape[-2], -1)) for t in (x, *before))
    return multiply_add(reduce(mul, first), last, -mean)


def _declare_forward(order: str, total: Sum, depth: Depth | None) -> None:
    product, sigmoid, multiply_add = VARIANTS[order]

    @kernel("layer_norm_gated", name=f"order[gated, {order}]", depth=depth, stages=STAGES)
    def forward(
        x, weight, bias=None, z=None, *,
        eps, group_size=None, norm_before_gate=True, is_rms_norm=False, activation="silu", stages=(),
    ):  # fmt: skip
        width = x.shape[-1] if group_size is None else group_size
        gating = [] if z is None else _activation(z, activation, sigmoid)[0]
        before = gating if not norm_before_gate else []
        stored = {"gated_input": product(x.float(), *before)} if before else {}
        value = product(x.float(), *before).unflatten(-1, (-1, width))
        if not is_rms_norm:
            mean = total(value) / width
            stored["mean"] = mean[..., 0]
            value = _centered(x, value, before, mean, multiply_add)
        variance = total(value.square()) / width
        rstd = torch.rsqrt(variance + eps)
        stored |= {"variance": variance[..., 0], "rstd": rstd[..., 0]}
        gain = weight.float().unflatten(-1, (-1, width))
        if bias is None:
            y = product(value, rstd, gain)
        else:
            y = multiply_add(value * rstd, gain, bias.float().unflatten(-1, (-1, width)))
        output = product(y.flatten(-2), *(gating if norm_before_gate else [])).to(x.dtype)
        return {"output": output, **stored} if stages else output


def _declare_backward(order: str, total: Sum, depth: Depth | None) -> None:
    product, sigmoid, multiply_add = VARIANTS[order]

    def over_rows(terms: Tensor) -> Tensor:
        return total(terms.flatten(0, -2).t().contiguous())[..., 0].clone()  # one row is its own sum

    @kernel("layer_norm_gated_backward", name=f"order[gated_backward, {order}]", depth=depth)
    def backward(
        x, dy, weight, rstd, mean=None, bias=None, z=None, *,
        norm_before_gate=True, activation="silu", recompute_output=False,
    ):  # fmt: skip
        groups = rstd.shape[-1]
        gating, slope = ([], []) if z is None else _activation(z, activation, sigmoid)
        after, before = (gating, []) if norm_before_gate else ([], gating)
        results = {}
        value = product(x.float(), *before).unflatten(-1, (groups, -1))
        value = value if mean is None else _centered(x, value, before, mean[..., None], multiply_add)
        normalized = (value * rstd[..., None]).flatten(-2)
        gain = weight.float()
        affine = normalized * gain if bias is None else multiply_add(normalized, gain, bias.float())
        if recompute_output:
            results["output"] = product(affine, *after).to(x.dtype)
        if after:
            results["dz"] = product(dy.float(), affine, *slope).to(z.dtype)
        daffine = product(dy.float(), *after)
        results["dw"] = over_rows(daffine * normalized).to(weight.dtype)
        if bias is not None:
            results["db"] = over_rows(daffine).to(bias.dtype)
        d, normalized = ((t).unflatten(-1, (groups, -1)) for t in (daffine * gain, normalized))
        c1 = total(normalized * d) / d.shape[-1]
        if mean is None:
            difference = multiply_add(-normalized, c1, d)
        else:
            difference = d - multiply_add(normalized, c1, total(d) / d.shape[-1])
        dx = (difference * rstd[..., None]).flatten(-2)
        if before:
            results["dz"] = product(dx, x.float(), *slope).to(z.dtype)
        return results | {"dx": product(dx, *before).to(x.dtype)}


for _order in VARIANTS:
    _declare_forward(_order, *SUMS[_order])
    _declare_backward(_order, *SUMS[_order])
