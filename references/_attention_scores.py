"""Scores of attention: scaled, and capped."""

from __future__ import annotations

import math

from lastbit import Contract, StageRecorder
from lastbit.numerics import Enclosure, concatenate, divide, dot, hull, of_base_two, tanh

LOG2E = math.log2(math.e)
ROUNDED = ("products", "scaled", "cap_ratio", "cap_tanh", "capped")
"""Stages that are rounded where each step of the scores is a tensor of its own."""


def scores_of(
    queries: Enclosure, keys: Enclosure, scale: float, cap: float | None, contract: Contract, stage: StageRecorder
) -> Enclosure:
    """Compute the scores of queries [B, H, T, D] and keys [B, H, S, D]: [B, H, T, S].

    Where the root of the scale is a power of two, query and key may be scaled by it exactly.
    """
    in_query = contract.has("scaled_query")
    if in_query:
        queries = stage("query", queries * scale)
    elif cap is None and contract.has("scaled_query_log2"):
        products = stage("products", dot(stage("query", queries * _product(scale, LOG2E, queries)), keys.transposed))
        return of_base_two(products)
    elif not _is_power_of_two(math.sqrt(scale)) and contract.has("split_scale"):
        in_query, queries, keys = True, queries * math.sqrt(scale), keys * math.sqrt(scale)
    products = stage("products", dot(queries, keys.transposed))
    scaled = products if in_query else stage("scaled", products * scale)
    if cap is None:
        return scaled
    ratio = divide(scaled, cap)
    if not in_query and not contract.has("rounded_scores"):
        ratio = hull(ratio, products * _product(scale, 1 / cap, products))
    return stage("capped", stage("cap_tanh", tanh(stage("cap_ratio", ratio))) * cap)


def with_sinks(sinks: Enclosure, scores: Enclosure) -> Enclosure:
    """Prepend to rows [B, H, T, N] a column with the sink of their head [H]."""
    batch, heads, rows, _ = scores.shape
    return concatenate(sinks[None, :, None, None].expand(batch, heads, rows, 1), scores)


def _is_power_of_two(number: float) -> bool:
    return math.frexp(number)[0] == 0.5


def _product(first: float, second: float, like: Enclosure) -> Enclosure:
    """Enclose the product of two factors as a kernel has it: rounded to fp32 once, or made of two fp32 numbers."""

    def fp32(number: float) -> Enclosure:
        return Enclosure.point(like.value.new_tensor(number).float())  # a constant of the formula

    return hull(fp32(first * second), fp32(first) * fp32(second))
