"""Scaled dot-product attention, forward: softmax(q · kᵀ · scale) · v (Vaswani et al. 2017, arXiv 1706.03762).

With grouped queries (Ainslie et al. 2023, arXiv 2305.13245), a causal mask, capped scores (Gemma 2, arXiv 2408.00118)
and sinks (gpt-oss, arXiv 2508.10925). docs/contracts/attention.md says who rounds where.
"""

from __future__ import annotations

import math

import torch

from harness.numerics import (
    Enclosure,
    Tensor,
    amax,
    divide,
    dot,
    exp,
    exp2,
    fusible_product,
    hull,
    log,
    log2,
    minimum,
    total,
    where,
)
from harness.numerics.rescaled import rescaled_dot
from harness.op import Contract, StageRecorder, op
from references._attention_calls import RELATIONS, SEQUENCES, attention_flops, check_attention, is_visible
from references._attention_scores import ROUNDED, Scores, scores_of, sink_scores
from references._softmax_tiles import Tiles, tiles_of

LN2 = math.log(2)
_TILES = {"tiles_16": 16, "tiles_32": 32, "tiles_64": 64, "tiles_128": 128}
_NORMALIZED = ("rounded_probabilities", "fp32_probabilities")


@op(
    rows=(),
    flops=attention_flops,
    axes={
        "scale": {"scaled_scores": {}, "scaled_query": {"query": "q"}, "split_scale": {}},
        "scores": {"fp32_scores": {}, "rounded_scores": dict.fromkeys(ROUNDED, "q")},
        "base": {"": {}, "exp2": {}},
        "weights": {
            "rounded_weights": {"weights": "v"},
            "fp32_weights": {},
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
        "flash": ("scaled_scores", "fp32_scores", "", "rounded_weights", "", "", "", ""),
        "eager": ("scaled_scores", "rounded_scores", "", "rounded_probabilities", "", "", "", ""),
        "math": ("split_scale", "fp32_scores", "", "fp32_probabilities", "", "", "", ""),
    },
    optional_results=("lse",),
    torch_ops=(
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
    ),
    relations=(SEQUENCES, *RELATIONS),
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

    q: [B, T, H, D]; k: [B, S, G, D]; v: [B, S, G, E]; sinks: [H]; output: [B, T, H, E]. G divides H, and h' = h · G // H.
    With `causal`, query i sees the keys up to i + S - T. With `cap`, scores are cap · tanh(score / cap). A sink is one
    more score of each row of its head, which no value belongs to. A query that sees no key has the output 0. `lse`
    [B, H, T], the logarithm of the sum of all exponentials, sink included, need not be returned. What is not finite in
    a key that is masked, or in its value, may reach a row or not: nothing is known of it then.

    Raises:
        ValueError: shapes that do not fit, or a scale or cap that is not positive and finite.
    """
    check_attention(q, k, v, sinks, scale, cap)
    visible = shown = is_visible(q.shape[1], k.shape[1], q.parts.device, causal=causal)
    shared = q.shape[2] // k.shape[2]
    queries, *others = (Enclosure(x.parts.transpose(2, 3)) for x in (q, k, v))
    keys, values = (Enclosure(x.parts.repeat_interleave(shared, 2)) for x in others)
    scores = scores_of(queries, keys, scale, cap, contract, stage)
    lost = ~(torch.isfinite(scores.plain.lo) & torch.isfinite(scores.plain.hi)) & ~visible
    late = None
    if sinks is not None:
        sink = sink_scores(sinks, contract)
        late = sink.as_column(scores) if contract.has("late_sink") else None
        if late is None:
            scores, shown = scores.after(sink), torch.nn.functional.pad(visible, (1, 0), value=True)
    attended, lse = _attended(scores.visible(shown), shown, values, late, contract, stage)
    stage("lse", lse.unknown_where(lost.any(-1)), result=True)
    attended = attended.unknown_where(lost.any(-1, keepdim=True) | _reached(visible, values))
    stage("output", Enclosure(attended.parts.transpose(2, 3)), result=True)


def _reached(visible: Tensor, values: Enclosure) -> Tensor:
    """Which outputs [B, H, T, E] have a term 0 · v with a masked v that is not finite, if such terms are added."""
    bad = ~(torch.isfinite(values.lo) & torch.isfinite(values.hi))
    return (~visible).double() @ bad.double() > 0


def _attended(
    scores: Scores, shown: Tensor, values: Enclosure, late: Scores | None, contract: Contract, stage: StageRecorder
) -> tuple[Enclosure, Enclosure]:
    """Output [B, H, T, E] and lse [B, H, T] from scores whose first column may be that of a sink."""
    columns, keys = scores.plain.shape[-1], values.shape[-2]
    first = columns - keys
    offset: Enclosure | float = 0.0
    if contract.has("rounded_shift"):
        offset = where(shown.any(-1, keepdim=True), amax(scores.plain), 0.0)
        shifted = stage("shifted", scores.plain - offset)
        scores = Scores(shifted, shifted)
    exponential = exp2 if contract.has("exp2") else _falling
    tiles = Tiles.of(scores.plain, shown, _parts(first, columns, contract))
    plain = tiles.weights(scores.exponents, exponential)
    terms = tiles.counted(plain, exponential)
    normalized = any(contract.has(option) for option in _NORMALIZED)
    if not normalized:
        rounded = tiles.counted(stage("weights", plain), exponential)
        terms = rounded if contract.has("rounded_sum") else terms
    summed = total(terms)
    if late is not None:
        summed = summed + exponential(late.exponents - tiles.largest)
    seen = tiles.seen[-1]
    divisor = where(seen, summed, 1.0)
    lse = where(seen, _lse(tiles.largest + offset, summed, contract), -math.inf)[..., 0]
    if normalized:
        return dot(stage("probabilities", divide(plain, divisor))[..., first:], values), lse
    product = rescaled_dot(rounded[..., first:], values, len(tiles.parts), stage.format_of("v"))
    return divide(product, divisor), lse


def _falling(x: Enclosure) -> Enclosure:
    """e**x of a number less a larger one."""
    return exp(minimum(x, 0.0))


def _parts(first: int, columns: int, contract: Contract) -> list[slice]:
    """The columns in tiles: all of them where no tile was named, or one tile has all of them."""
    size = next((size for name, size in _TILES.items() if contract.has(name)), columns)
    if size >= columns - first:
        return [slice(0, columns)]
    return tiles_of(first, columns, size, backwards=contract.has("backwards"))


def _lse(largest: Enclosure, summed: Enclosure, contract: Contract) -> Enclosure:
    if not contract.has("exp2"):
        return largest + log(summed)
    return hull((largest + log2(summed)) * LN2, fusible_product(largest, LN2) + log(summed))
