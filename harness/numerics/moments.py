"""Mean and variance in one pass, by updates of both (Welford 1962; Chan, Golub & LeVeque 1983).

Two parts a and b of a row are merged into one: with d = mean_b - mean_a and n = n_a + n_b,

    mean = mean_a + d * n_b / n        or n_a / n * mean_a + n_b / n * mean_b
    M2   = M2_a + M2_b + d**2 * n_a * n_b / n

Welford's update is the merge with one element x, where d * (x - mean) is in use for the last term. The order of the
merges is free. docs/numerics.md derives the bounds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.accumulation import midpoint_radius
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure, aligned, settled, unrounded_product, widened
from lastbit.numerics.premises import current
from lastbit.numerics.sums import flushed

_UNDERFLOW = 2.0**-149
_THREADS = 10  # log2 of the most threads of a block, whose parts may be merged in any way


@algebraic(rules.moments)
def mean_and_variance(x: Enclosure) -> tuple[Enclosure, Enclosure]:
    """Return mean and biased variance over the last dimension, kept with size 1, by merges in any order.

    On the way from an element to the result the smaller part is merged into the larger, but for log2 n + 10 merges,
    which may be any. Nothing is known where something may overflow, the square of an element too: an empty part, whose
    mean is 0, may be merged with it, and a square that is infinite times n_a = 0 is NaN.
    """
    middle, radius = midpoint_radius(x)
    count = x.shape[-1]
    average = middle.mean(-1, keepdim=True)
    of_mean, of_root = _errors(middle.abs() + radius, count)
    moved = radius.square().sum(-1, keepdim=True).sqrt() + of_root
    root = (middle - average).square().sum(-1, keepdim=True).sqrt()
    relative = 2 * current().accumulation(count) + 8 * current().unit + current().quotient
    low = (root - moved).clamp(min=0.0).square() * max(0.0, 1 - relative)
    high = (root + moved).square() * (1 + relative)
    far = radius.mean(-1, keepdim=True) + of_mean
    reach = (middle + radius).amax(-1, keepdim=True) - (middle - radius).amin(-1, keepdim=True) + 2 * of_mean
    farthest = torch.maximum(reach, (middle.abs() + radius).amax(-1, keepdim=True))  # an empty part has the mean 0
    fits = (
        (2 * farthest.square() * count < current().arithmetic.max)
        & (2 * high < current().arithmetic.max)
        & (2 * (average.abs() + reach) < current().arithmetic.max)
    )
    unknown = ~fits & ~torch.isnan(x.lo).any(-1, keepdim=True)
    known = [part.mean(-1, keepdim=True) for part in (x.exact, x.value)]
    mean = settled(torch.stack([*known, average - far, average + far]))
    squares = [(p - a).square().sum(-1, keepdim=True) for p, a in zip((x.exact, x.value), known, strict=True)]
    absolute = count * count * (_UNDERFLOW + flushed())
    parts = widened(torch.stack([*squares, low, high]) / count, current().quotient, absolute)
    parts[2] = torch.where(parts[2] < 0, 0.0, parts[2])
    return mean.unknown_where(unknown), settled(parts).unknown_where(unknown)


def _errors(magnitude: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Bound the error of the mean of any part, and that of the root of M2, for elements up to `magnitude`."""
    largest, average = magnitude.amax(-1, keepdim=True), magnitude.mean(-1, keepdim=True)
    order = current().accumulation(count)
    levels = math.log2(count)
    update = (current().quotient + 3 * current().unit) * (3 * levels + 2 * _THREADS)
    merged = update / (1 - order - update) if order + update < 1 else math.inf
    rest = merged * largest + count * (2.0**-51 * average + _UNDERFLOW + flushed())
    weights = math.sqrt(count * max(levels, 1.0) / 2)
    if current().depth is not None:
        return order * largest + rest, 2 * (order * largest + rest) * weights
    in_any_order = order * (average * largest * (count + 1)).sqrt()
    return order * average + rest, in_any_order + 2 * rest * weights


@algebraic(lambda a, b, factor: (a - b) * factor)
def difference_of_products(a: Enclosure, b: Enclosure, factor: Enclosure) -> Enclosure:
    """Return a * factor - b * factor for a `factor` that is not negative, each product rounded or fused.

    Both products err by u of themselves; their ends are linear in `factor`, so that they grow or fall with it.
    """
    x, y = map(Enclosure, aligned(a, b))
    size = torch.maximum(x.lo.abs(), x.hi.abs()) + torch.maximum(y.lo.abs(), y.hi.abs())
    lost = current().unit * size
    apart = torch.stack([x.exact - y.exact, x.value - y.value, x.lo - y.hi - lost, x.hi - y.lo + lost])
    product = unrounded_product(Enclosure(apart).unknown_where(), factor)
    overflows = ~(size * factor.hi < current().arithmetic.max) & ~(
        torch.isnan(x.lo) | torch.isnan(y.lo) | torch.isnan(factor.lo)
    )
    return settled(widened(product, 0.0, 4 * _UNDERFLOW)).unknown_where(overflows)
