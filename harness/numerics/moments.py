"""Averages of rows and their variances, whose only freedom is the order of accumulation.

Three rules for averages, strongest first. On a *lattice* (all terms multiples of one power of two, and the sum of their
magnitudes below 2**24 of it) every partial sum is exact in fp32, whatever the order, with or without FMA: the enclosure
is a point. Whether a row is one is read off its terms. Else, where the height of the summation tree is known, that
height bounds the error; else the number of terms does. Probabilistic bounds are never used.

Mean and variance in one pass, by updates of both (Welford 1962; Chan, Golub & LeVeque 1983): two parts a and b of a row
are merged into one, with d = mean_b - mean_a and n = n_a + n_b,

    mean = mean_a + d * n_b / n        or n_a / n * mean_a + n_b / n * mean_b
    M2   = M2_a + M2_b + d**2 * n_a * n_b / n

Welford's update is the merge with one element x, where d * (x - mean) is in use for the last term. The order of the
merges is free. docs/numerics.md derives the bounds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure, aligned, settled, unrounded_product, widened
from lastbit.numerics.formats import FP64_U
from lastbit.numerics.parts import unknown_if
from lastbit.numerics.premises import current
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import Residues
from lastbit.numerics.sums import UNKNOWN, Sum, averaged, facts_of_squares, flushed


@algebraic(Residues.total)
@remembered
def total(x: Enclosure) -> Enclosure:
    """Sum over the last dimension, which is kept with size 1."""
    return Sum.of(x.parts).enclosure


@algebraic(rules.mean)
def mean(x: Enclosure) -> Enclosure:
    """Average over the last dimension, which is kept with size 1."""
    return _averaged(Sum.of(x.parts).enclosure, x.shape[-1])


@algebraic(lambda x: rules.mean(x * x))
def mean_of_squares(x: Enclosure) -> Enclosure:
    """Average x² over the last dimension, which is kept with size 1; each square rounded or fused into the sum."""
    facts = facts_of_squares(x.parts)
    squares = Sum(x.shape[-1], products=True, facts=facts[:UNKNOWN])
    mean = _averaged(squares.enclosed(nonnegative=True), x.shape[-1])
    return Enclosure(unknown_if(mean.parts, facts[UNKNOWN:]))


@algebraic(lambda a, b: rules.mean(a * b))
def mean_of_products(a: Enclosure, b: Enclosure) -> Enclosure:
    """Average a · b over the last dimension, which is kept with size 1; each product rounded or fused into the sum."""
    return _averaged(Sum.of(unrounded_product(a, b), products=True).enclosure, a.shape[-1])


@algebraic(lambda x, center: rules.mean((x - center) * (x - center)))
def variance_about(x: Enclosure, center: Enclosure) -> Enclosure:
    """Average (x - center)² over the last dimension, kept with size 1: the second pass of a two-pass variance.

    `center` [..., 1] is the computed mean. It is one number for the whole row, so its error does not count once per
    element as in naive interval arithmetic: mean((x - c)²) = var(x) + (mean(x) - c)² holds for every c. An error of rad
    in x changes the result by at most mean(2 |x - c| rad + rad²). Each difference is rounded, which counts as 2u + u²
    of its square. The naive interval is the better one where `center` is known, and on a lattice; both are valid, so
    the result is their intersection.
    """
    naive = mean_of_squares(x - center)
    middle, radius = midpoint_radius(x)
    low, high = center.lo, center.hi
    average = middle.mean(-1, keepdim=True)
    spread = (middle - average).square().mean(-1, keepdim=True)
    nearest = (average - average.clamp(low, high)).square()
    farthest = torch.maximum((average - low).abs(), (average - high).abs()).square()
    reach = torch.maximum((middle - low).abs(), (middle - high).abs())
    error = ((2 * reach + radius) * radius).mean(-1, keepdim=True)
    count = x.shape[-1]
    doubt = 2 * count * FP64_U * middle.abs().amax(-1, keepdim=True)  # of the average in fp64
    error = error * (1 + 4 * count * FP64_U) + 2 * doubt * (doubt + farthest.sqrt())
    eps = current().accumulation(count) + 4 * current().unit + current().quotient + 4 * count * FP64_U
    absolute = 2.0**-147 + flushed() * 2  # of squares, their sum and the quotient
    below = ((spread + nearest - error) * (1 - eps) - absolute).clamp(min=0.0)
    above = (spread + farthest + error) * (1 + eps) + absolute
    usable = torch.isfinite(below) & torch.isfinite(above) & (above * count < current().arithmetic.max)
    lo = torch.where(usable, torch.maximum(naive.lo, below), naive.lo)
    hi = torch.where(usable, torch.minimum(naive.hi, above), naive.hi)
    return settled(torch.stack([naive.exact, naive.value, lo, hi])).unknown_where(naive.unknown)


def sum_of_rows(x: Enclosure) -> Sum:
    """Sum over all leading dimensions of x [..., N], in any order: [N], to be finished when all rows have been seen."""
    return replace(Sum.of(_as_rows(x.parts), dim=-2, products=True), algebra=rules.sum_of_rows(x))


def sum_of_row_products(a: Enclosure, b: Enclosure) -> Sum:
    """Sum a · b over all leading dimensions [..., N], in any order: [N]; see `sum_of_rows`."""
    return replace(Sum.of(_as_rows(unrounded_product(a, b)), dim=-2, products=True), algebra=rules.sum_of_rows(a, b))


def _as_rows(parts: Tensor) -> Tensor:
    """Merge the leading dimensions of stacked parts into one: [parts, ..., N] → [parts, M, N]."""
    return parts.reshape(len(parts), math.prod(parts.shape[1:-1]), parts.shape[-1])


@algebraic(lambda a, b: (a * b).total())
@remembered
def total_of_products(a: Enclosure, b: Enclosure) -> Enclosure:
    """Sum a · b over the last dimension, kept with size 1; each product rounded or fused into the sum."""
    return Sum.of(unrounded_product(a, b), products=True).enclosure


def _averaged(total: Enclosure, count: int) -> Enclosure:
    """Make a mean of a sum, which overflows as fp32 does: divide by the count, or multiply by its reciprocal."""
    relative = current().quotient if count & (count - 1) else 0.0
    return Enclosure(averaged(total.parts, float(count), relative, current().arithmetic))


def midpoint_radius(x: Enclosure) -> tuple[Tensor, Tensor]:
    """Return the middle of every interval, and the distance of its ends from there."""
    if len(x.parts) < 4:
        return x.value, torch.zeros_like(x.value)
    middle = (x.lo + x.hi) / 2
    known = (x.lo == x.hi) | torch.isnan(x.lo)
    return middle, torch.where(known, 0.0, torch.maximum(x.hi - middle, middle - x.lo))


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
