"""Scaled dot-product attention, forward: softmax(q · kᵀ · scale) · v (Vaswani et al. 2017, arXiv 1706.03762).

With grouped queries (Ainslie et al. 2023, arXiv 2305.13245), a causal mask, capped scores (Gemma 2, arXiv 2408.00118)
and sinks (gpt-oss, arXiv 2508.10925). docs/contracts/attention.md says who rounds where.
"""

from __future__ import annotations

import math

from lastbit import Contract, StageRecorder, op
from lastbit.numerics import (
    FORMATS,
    Enclosure,
    Tensor,
    amax,
    concatenate,
    divide,
    dot,
    hull,
    log_sum_exp,
    rescaled_dot,
    shifted_exponential,
    softmax,
    total,
    where,
)
from lastbit.references._attention_calls import RELATIONS, attention_flops, check_attention, is_visible, with_one
from lastbit.references._attention_scores import ROUNDED, scores_of, with_sinks
from lastbit.references._softmax_tiles import Tiles, tiles_of

_QUERY = {"query": "q"}
_TILES = {"tiles_16": 16, "tiles_32": 32, "tiles_64": 64, "tiles_128": 128}


@op(
    rows=(),
    flops=attention_flops,
    axes={
        "scale": {"scaled_scores": {}, "scaled_query": _QUERY, "scaled_query_log2": _QUERY, "split_scale": {}},
        "scores": {"fp32_scores": {}, "rounded_scores": dict.fromkeys(ROUNDED, "q")},
        "weights": {
            "rounded_weights": {"weights": "v"},
            "rounded_probabilities": {"probabilities": "v"},
            "fp32_probabilities": {},
        },
        "tiles": {"": {}, **{name: {} for name in _TILES}},
        "direction": {"": {}, "backwards": {}},
        "sum": {"": {}, "rounded_sum": {}},
        "sink": {"": {}, "late_sink": {}, "rounded_shift": {"shifted": "q"}},
    },
    rounds={"output": "q"},
    presets={
        "flash": "default",
        "eager": "rounded_scores+rounded_probabilities",
        "math": "split_scale+fp32_probabilities",
    },
    optional_results=("lse",),
    returns=("output", "lse"),
    torch_ops=(
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    ),
    relations=RELATIONS,
)
def attention(
    q: Enclosure,
    k: Enclosure,
    v: Enclosure,
    sinks: Enclosure | None = None,
    *,
    scale: float,
    causal: bool = False,
    cap: float | None = None,
    contract: Contract,
    stage: StageRecorder,
) -> None:
    """output[b, i, h] = Σ_j p[j] · v[b, j, h'] with p = softmax(scale · q[b, i, h] · k[b, j, h']) over the keys j.

    q: [B, T, H, D]; k: [B, S, G, D]; v: [B, S, G, E]; sinks: [H]; output: [B, T, H, E]. G divides H, h' = h · G // H.
    With `causal`, query i sees the keys up to i + S - T. With `cap`, scores are cap · tanh(score / cap). A sink is one
    more score of each row of its head, which no value belongs to. A query that sees no key has the output 0. `lse`
    [B, H, T], the logarithm of the sum of all exponentials, sink included, need not be returned. What is not finite in
    a key that is masked, or in its value, may reach a row or not: nothing is known of it then.

    Raises:
        ValueError: shapes that do not fit, or a scale or cap that is not positive and finite.
    """
    check_attention(q, k, v, sinks, scale, cap)
    visible = is_visible(q.value, k.value, causal=causal)
    shared = q.shape[2] // k.shape[2]
    queries, keys, values = (x.permute(-4, -2, -3, -1) for x in (q, k, v))
    keys, values = _repeated(keys, shared), _repeated(values, shared)
    scores = scores_of(queries, keys, scale, cap, contract, stage)
    lost = ~(scores.lo.isfinite() & scores.hi.isfinite()) & ~visible
    scores = where(visible, scores, -math.inf)
    rows = scores if sinks is None else with_sinks(sinks, scores)
    seen = visible.any(-1) if sinks is None else visible.any(-1) | True
    lse = where(seen, log_sum_exp(rows, folded=True)[..., 0], -math.inf)
    stage("lse", lse.unknown_where(lost.any(-1)), result=True)
    if contract.has("rounded_weights"):
        attended = _flash(scores, visible, values, sinks, contract, stage)
    else:
        attended = _normalized(rows, seen[:, None], values, contract, stage)
    attended = attended.unknown_where(lost.any(-1, keepdim=True) | _reached(visible, values))
    stage("output", attended.permute(-4, -2, -3, -1), result=True)


def _repeated(x: Enclosure, times: int) -> Enclosure:
    """Repeat the keys or values [B, G, S, D] for the heads that share them: [B, G · times, S, D]."""
    batch, groups, keys, width = x.shape
    each = x.reshape(batch, groups, 1, keys, width).expand(batch, groups, times, keys, width)
    return each.reshape(batch, groups * times, keys, width)


def _reached(visible: Tensor, values: Enclosure) -> Tensor:
    """Mark outputs [B, H, T, E] with a term 0 · v of a masked v that is not finite, if such terms are added."""
    bad = ~(values.lo.isfinite() & values.hi.isfinite())
    return (~visible).double() @ bad.double() > 0


def _normalized(
    rows: Enclosure, seen: Tensor, values: Enclosure, contract: Contract, stage: StageRecorder
) -> Enclosure:
    """Compute the output from probabilities; unrounded ones may be divided by their sum before or after the product."""
    first = rows.shape[-1] - values.shape[-2]
    if first and contract.has("rounded_scores") and contract.has("rounded_shift"):
        rows = stage("shifted", rows - amax(rows))
    probabilities = stage("probabilities", softmax(rows, folded=True, empty="zero"))
    largest = where(seen, amax(rows), 0.0)
    product = dot(probabilities[..., first:], values).unknown_where(largest.lo.isneginf())
    if contract.has("rounded_probabilities"):
        return product
    weights = shifted_exponential(rows, largest)
    return hull(product, divide(dot(weights[..., first:], values), where(seen, total(weights), 1.0)))


def _flash(
    scores: Enclosure,
    visible: Tensor,
    values: Enclosure,
    sinks: Enclosure | None,
    contract: Contract,
    stage: StageRecorder,
) -> Enclosure:
    """Compute the output from weights that are rounded relative to the largest score so far, and divided at the end."""
    late = sinks if sinks is not None and contract.has("late_sink") else None
    first = int(sinks is not None and late is None)
    if first and sinks is not None:
        scores, visible = with_sinks(sinks, scores), with_one(visible)
    fmt = stage.format_of("v")
    tiles = Tiles.of(scores, visible, _parts(first, scores.shape[-1], contract))
    weights = tiles.weights(scores)
    rounded = tiles.counted(stage("weights", weights))
    terms = tiles.counted(weights)
    if fmt is not FORMATS["fp32"] and contract.has("rounded_sum"):
        terms = concatenate(terms[..., :first], rounded[..., first:])  # no value belongs to a sink: it is not rounded
    summed = total(terms)
    if late is not None:
        summed = summed + shifted_exponential(with_sinks(late, scores)[..., :1], tiles.largest, below=False)
    product = rescaled_dot(rounded[..., first:], values, len(tiles.parts), fmt)
    return divide(product, where(tiles.seen[-1], summed, 1.0)).unknown_where(tiles.hollow)


def _parts(first: int, columns: int, contract: Contract) -> list[slice]:
    """Cut the columns into tiles, or a single one if the contract names no smaller tile; the sink comes first."""
    smaller = [name for name, size in _TILES.items() if size < columns - first]
    size = next((_TILES[name] for name in smaller if contract.has(name)), columns)
    if size == columns:
        return [slice(0, columns)]
    return tiles_of(first, columns, size, backwards=contract.has("backwards"))
