"""Sums and means, whose only freedom is the order of accumulation.

Three rules, strongest first. On a *lattice* (all terms multiples of one power of two, and the sum of their magnitudes
below 2**24 of it) every partial sum is exact in fp32, whatever the order, with or without FMA: the enclosure is a
point. Whether a row is one is read off its terms. Else, where the height of the summation tree is known, that height
bounds the error; else the number of terms does. Probabilistic bounds are never used.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure, settled, unrounded_product
from lastbit.numerics.parts import unknown_if
from lastbit.numerics.premises import current
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import Residues
from lastbit.numerics.sums import UNKNOWN, Sum, averaged, facts_of_squares, flushed

_FP64_U = 2.0**-53


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
    doubt = 2 * count * _FP64_U * middle.abs().amax(-1, keepdim=True)  # of the average in fp64
    error = error * (1 + 4 * count * _FP64_U) + 2 * doubt * (doubt + farthest.sqrt())
    eps = current().accumulation(count) + 4 * current().unit + current().quotient + 4 * count * _FP64_U
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
