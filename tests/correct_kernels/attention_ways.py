"""Attention in many ways that keep a contract: tiles, their direction, bases, orders of sums, places of sinks.

A bound on rounding errors that any of these exceeds is a false alarm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
_TILES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Way:
    """How attention is computed, in fp32 but where its contract rounds.

    Attributes:
        tile: keys at a time.
        backwards: the last tile first; tiles begin at multiples of their size.
        base_2: scores are multiplied by log2 e, with `fused` without rounding the product before the subtraction.
        late_sink: the sink is added at the end, and not the first score.
        rounded_sum: the rounded weights are added.
        scale: as the axis of the contract calls it.
        reciprocal: the output is multiplied by 1 / sum.
        order: of columns in all sums; "" for that of torch.
    """

    tile: int
    backwards: bool
    base_2: bool
    fused: bool
    late_sink: bool
    rounded_sum: bool
    scale: str
    reciprocal: bool
    order: str

    @classmethod
    def drawn(cls, random: Random) -> Way:
        """Any of them."""
        flags = [random.random() < 0.5 for _ in range(6)]
        scale = random.choice(("scaled_scores", "scaled_query", "scaled_query_log2", "split_scale"))
        orders = ("", "ascending", "descending", "shuffled")
        return cls(random.choice(_TILES), *flags[:5], scale, flags[5], random.choice(orders))

    @property
    def contract(self) -> str:
        """Return what it keeps."""
        options = ["flash", "" if self.scale == "scaled_scores" else self.scale, f"tiles_{self.tile}"]
        truths = {name: getattr(self, name) for name in ("backwards", "late_sink", "rounded_sum")}
        return "+".join([*filter(None, options), *(name for name, is_so in truths.items() if is_so)])


def attention(
    way: Way, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, causal: bool = False,
    cap: float | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Output [B, T, H, E] and lse [B, H, T]."""
    shared = q.shape[2] // k.shape[2]
    queries = q.transpose(1, 2).float()
    keys, values = (x.transpose(1, 2).float().repeat_interleave(shared, 1) for x in (k, v))
    scores = _scores(way, queries, keys, scale, cap, q.dtype)
    count, length = scores.shape[-2:]
    visible = torch.ones(count, length, dtype=torch.bool)
    if causal:
        visible = visible.tril(length - count)
    scores = scores.masked_fill(~visible, -math.inf)
    by_two = way.base_2 or (way.scale == "scaled_query_log2" and cap is None)
    unit = LOG2E if way.base_2 and not (way.scale == "scaled_query_log2" and cap is None) else 1.0
    power = torch.exp2 if by_two else torch.exp

    def less(x: Tensor, largest: Tensor) -> Tensor:
        """x · unit - largest, where largest is in units already."""
        if unit == 1.0:
            return x - largest
        factor = torch.tensor(unit, dtype=torch.float32).double()
        return (x.double() * factor - largest.double()).float() if way.fused else x * unit - largest

    largest = torch.full((*scores.shape[:-1], 1), -math.inf)
    total = torch.zeros_like(largest)
    column = None if sinks is None else sinks.float()[:, None, None]
    sink_unit = LOG2E if by_two else 1.0
    if column is not None and not way.late_sink:
        largest, total = (column * sink_unit).expand_as(largest), torch.ones_like(total)
    sums = torch.zeros(*scores.shape[:-1], values.shape[-1])
    starts = range(0, length, way.tile)
    for start in reversed(starts) if way.backwards else starts:
        part = slice(start, start + way.tile)
        larger = torch.maximum(largest, scores[..., part].amax(-1, keepdim=True) * unit)
        shift = larger.masked_fill(larger == -math.inf, 0.0)
        weights, factor = power(less(scores[..., part], shift)), power(largest - shift)
        rounded = weights.to(v.dtype).float()
        total = total * factor + _added(way, rounded if way.rounded_sum else weights)
        sums = sums * factor + _dot(way, rounded, values[..., part, :])
        largest = larger
    shift = largest.masked_fill(largest == -math.inf, 0.0)
    if column is not None and way.late_sink:
        total = total + power(column * sink_unit - shift)
    divisor = total.masked_fill(total == 0, 1.0)
    output = sums * (1.0 / divisor) if way.reciprocal else sums / divisor
    return {"output": output.transpose(1, 2).to(q.dtype).contiguous()}


def _scores(way: Way, queries: Tensor, keys: Tensor, scale: float, cap: float | None, dtype: torch.dtype) -> Tensor:
    after: float | None = scale
    if way.scale == "scaled_query":
        queries, after = (queries * scale).to(dtype).float(), None
    elif way.scale == "scaled_query_log2" and cap is None:
        return _dot(way, (queries * (scale * LOG2E)).to(dtype).float(), keys.mT)
    elif way.scale == "split_scale":
        queries, keys, after = queries * math.sqrt(scale), keys * math.sqrt(scale), None
    products = _dot(way, queries, keys.mT)
    if cap is None:
        return products if after is None else products * after
    ratio = products / cap if after is None else products * (after / cap) if way.fused else products * after / cap
    return torch.tanh(ratio) * cap


def _order(way: Way, count: int) -> list[int]:
    columns = [*range(count)]
    if way.order == "shuffled":
        Random(count).shuffle(columns)
    return columns[::-1] if way.order == "descending" else columns


def _dot(way: Way, a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b, one term after the other, each product rounded, where an order is given."""
    if not way.order:
        return a @ b
    total = torch.zeros(*a.shape[:-1], b.shape[-1])
    for column in _order(way, a.shape[-1]):
        total = total + a[..., column, None] * b[..., column, None, :]
    return total


def _added(way: Way, x: Tensor) -> Tensor:
    if not way.order:
        return x.sum(-1, keepdim=True)
    total = torch.zeros_like(x[..., :1])
    for column in _order(way, x.shape[-1]):
        total = total + x[..., column, None]
    return total


def ways(seed: int) -> Iterator[Way]:
    """One after the other, without an end."""
    random = Random(seed)
    while True:
        yield Way.drawn(random)
