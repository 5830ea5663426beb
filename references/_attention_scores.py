"""Scores of attention: scaled, capped, and to which base they are exponentiated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from harness.numerics import Enclosure, Tensor, concatenate, divide, dot, fusible_product, hull, tanh, where
from harness.op import Contract, StageRecorder

LOG2E = math.log2(math.e)
ROUNDED = ("products", "scaled", "cap_ratio", "cap_tanh", "capped")
"""Stages that are rounded where each step of the scores is a tensor of its own."""


@dataclass(frozen=True)
class Scores:
    """Scores of rows [..., N], in the units in which they are exponentiated.

    Attributes:
        plain: rounded; the largest one is taken of these.
        exponents: from which the largest is subtracted: not rounded where that subtraction may be fused with a product.
    """

    plain: Enclosure
    exponents: Enclosure

    def visible(self, shown: Tensor) -> Scores:
        """-inf where they are not shown [..., N]."""
        return Scores(*(where(shown, x, -math.inf) for x in (self.plain, self.exponents)))

    def after(self, first: Scores) -> Scores:
        """Rows [B, H, T, N] with one more column, the first one, which is that of a head [H] in all rows."""
        column = first.as_column(self)
        return Scores(concatenate(column.plain, self.plain), concatenate(column.exponents, self.exponents))

    def as_column(self, of: Scores) -> Scores:
        """These [H] as one column of such rows, [B, H, T, 1]."""
        batch, heads, rows, _ = of.plain.shape
        both = (x.parts[:, None, :, None, None].expand(-1, batch, heads, rows, 1) for x in (self.plain, self.exponents))
        return Scores(*map(Enclosure, both))


def scores_of(
    queries: Enclosure, keys: Enclosure, scale: float, cap: float | None, contract: Contract, stage: StageRecorder
) -> Scores:
    """Those of queries [B, H, T, D] and keys [B, H, S, D]."""
    by_two = contract.has("exp2")
    last = LOG2E if by_two and cap is None else None  # to base 2, the factor after the dot is scale · log2 e
    if contract.has("scaled_query"):
        queries = stage("query", queries * _constant(scale, last, queries))
        factor = None
    elif contract.has("split_scale"):
        queries, keys = queries * math.sqrt(scale), keys * math.sqrt(scale)
        factor = None if last is None else _constant(1.0, last, queries)
    else:
        factor = _constant(scale, last, queries)
    products = stage("products", dot(queries, keys.transposed))
    if cap is None:
        return _to_base(products, factor, stage, fused=by_two)
    ratio = divide(products, cap) if factor is None else _ratio(products, factor, scale, cap, contract, stage)
    bounded = stage("cap_tanh", tanh(stage("cap_ratio", ratio)))
    if by_two:
        return _folded(bounded, _constant(cap, LOG2E, bounded))
    capped = stage("capped", bounded * cap)
    return Scores(capped, capped)


def sink_scores(sinks: Enclosure, contract: Contract) -> Scores:
    """Those of sinks [H]."""
    return _folded(sinks, _constant(1.0, LOG2E, sinks)) if contract.has("exp2") else Scores(sinks, sinks)


def _to_base(products: Enclosure, factor: Enclosure | None, stage: StageRecorder, *, fused: bool) -> Scores:
    if factor is None:
        return Scores(products, products)
    if fused:
        return _folded(products, factor)
    scaled = stage("scaled", products * factor)
    return Scores(scaled, scaled)


def _ratio(
    products: Enclosure, factor: Enclosure, scale: float, cap: float, contract: Contract, stage: StageRecorder
) -> Enclosure:
    """score / cap, by two operations or, where neither is rounded, by one product with scale / cap."""
    scaled = divide(stage("scaled", products * factor), cap)
    return scaled if contract.has("rounded_scores") else hull(scaled, products * _constant(scale, 1 / cap, products))


def _folded(x: Enclosure, factor: Enclosure) -> Scores:
    return Scores(x * factor, fusible_product(x, factor))


def _constant(first: float, second: float | None, like: Enclosure) -> Enclosure:
    """A factor as it reaches a kernel: the product of two is rounded to fp32 as such, or made of two such numbers."""

    def fp32(number: float) -> Enclosure:
        return Enclosure.point(torch.tensor(number, dtype=torch.float32, device=like.parts.device))

    return fp32(first) if second is None else hull(fp32(first * second), fp32(first) * fp32(second))
