"""Sums of rows in fp32 whose trees are known, and the trees as nested columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Nested = Any
SumOf = Callable[[Tensor], Tensor]
PRODUCTS, KEPT = 16, 25


def chain(parts: Sequence[Nested]) -> Nested:
    total, *rest = parts
    for part in rest:
        total = (total, part)
    return total


def neighbours(parts: Sequence[Nested]) -> Nested:
    parts = list(parts)
    while len(parts) > 1:
        parts = [tuple(parts[i : i + 2]) if i + 1 < len(parts) else parts[i] for i in range(0, len(parts), 2)]
    return parts[0]


def halves(parts: Sequence[Nested]) -> Nested:
    parts = list(parts)
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [(parts[i], parts[i + half]) for i in range(half)]
    return parts[0]


def lanes(terms: int, width: int) -> Nested:
    """Lanes that add every `width`-th term in turn, joined by halves."""
    return halves([chain(range(lane, terms, width)) for lane in range(width)])


def blocks(terms: int, size: int) -> Nested:
    """Blocks one after the other, each of lanes."""
    parts = [halves([chain(range(b + lane, b + size, 8)) for lane in range(8)]) for b in range(0, terms, size)]
    return chain(parts)


def steps(terms: int, width: int = PRODUCTS) -> Nested:
    """So many terms at a time, with the sum of those before."""
    total = tuple(range(width))
    for start in range(width, terms, width):
        total = (total, *range(start, min(start + width, terms)))
    return total


def sum_by(nested: Nested) -> SumOf:
    """Add by a tree that rounds to fp32 in each node."""

    def added(terms: Tensor) -> Tensor:
        return _added(terms.float(), nested)

    return added


def _added(terms: Tensor, nested: Nested) -> Tensor:
    """By a stack of one's own, as a chain is deeper than Python recurses."""
    values: dict[int, Tensor] = {}
    left = [nested]
    while left:
        node = left[-1]
        waiting = [] if isinstance(node, int) else [part for part in node if id(part) not in values]
        waiting = [part for part in waiting if not isinstance(part, int)]
        if waiting:
            left += waiting
            continue
        left.pop()
        if not isinstance(node, int):
            summands = [terms[:, part] if isinstance(part, int) else values[id(part)] for part in node]
            values[id(node)] = summands[0] + summands[1] if len(summands) == 2 else at_once(summands)
    return values[id(nested)]


def at_once(summands: Sequence[Tensor]) -> Tensor:
    """Cut off below the 25th bit of the largest, added, cut to fp32: as the tensor cores of an H100 do."""
    numbers = torch.stack(list(summands), -1).double()
    shift = KEPT - torch.frexp(numbers.abs().amax(-1, keepdim=True)).exponent.double()
    kept = torch.trunc(numbers * torch.exp2(shift)).sum(-1, keepdim=True)
    total = (kept * torch.exp2(-shift))[:, 0]
    nearest = total.float()
    too_large = nearest.double().abs() > total.abs()
    return torch.where(too_large, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)


def fma_chain(terms: Tensor) -> Tensor:
    """Squares, fused into the additions: x · x is exact in fp64."""
    total = torch.zeros(len(terms))
    for term in terms.double().unbind(-1):
        total = (term * term + total.double()).float()
    return total


def kahan(terms: Tensor) -> Tensor:
    total, lost = torch.zeros(len(terms)), torch.zeros(len(terms))
    for term in terms.float().unbind(-1):
        step = term - lost
        after = total + step
        lost, total = (after - total) - step, after
    return total


def welford(terms: Tensor) -> Tensor:
    mean = torch.zeros(len(terms))
    for count, term in enumerate(terms.float().unbind(-1), 1):
        mean = mean + (term - mean) / count
    return mean


def welford_lanes(terms: Tensor) -> Tensor:
    """Lanes of 8 neighbours, each a running mean, whose means are averaged in pairs."""
    means = welford(terms.reshape(-1, 8)).reshape(len(terms), -1)
    while means.shape[1] > 1:
        means = 0.5 * means[:, ::2] + 0.5 * means[:, 1::2]
    return means


def normalized(sum_of_squares: SumOf) -> Callable[[Tensor, float], Tensor]:
    """x / sqrt(mean of squares + eps) in x's dtype, where a sum of squares is added so."""

    def norm(x: Tensor, eps: float) -> Tensor:
        mean = sum_of_squares(x) / x.shape[1]
        return (x.float() * torch.rsqrt(mean + eps)[:, None]).to(x.dtype)

    return norm


def squares_by(sum_of: SumOf) -> SumOf:
    return lambda x: sum_of(x.float().square())
