"""Sums, means and dots, whose only freedom is the order of accumulation.

Three rules, strongest first. On a *lattice* (all terms multiples of one power of two, and the sum of their magnitudes
below 2**24 of it) every partial sum is exact in fp32, whatever the order, with or without FMA: the enclosure is a
point. Whether a row is one is read off its terms. Else, where the height of the summation tree is known, that height
bounds the error; else the number of terms does. Probabilistic bounds are never used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from harness.numerics.enclosure import Enclosure, settled, unrounded_product, widened
from harness.numerics.formats import FP16, FP32
from harness.numerics.premises import U, current
from harness.numerics.sums import LATTICE_UNITS, UNDERFLOW, UNKNOWN, Sum, facts_of_squares, finite, flushed, quantum_of

_FP64_U = 2.0**-53


def total(x: Enclosure) -> Enclosure:
    """Sum over the last dimension, which is kept with size 1."""
    return settled(Sum.of(x.parts).parts())


def mean(x: Enclosure) -> Enclosure:
    """Mean over the last dimension, which is kept with size 1."""
    return _averaged(Sum.of(x.parts).parts(), x.shape[-1])


def mean_of_squares(x: Enclosure) -> Enclosure:
    """Mean of x² over the last dimension, which is kept with size 1; each square rounded or fused into the sum."""
    facts = facts_of_squares(x.parts)
    squares = Sum(x.shape[-1], products=True, facts=facts[:UNKNOWN])
    return _averaged(squares.parts(nonnegative=True), x.shape[-1]).unknown_where(facts[UNKNOWN] > 0)


def mean_of_products(a: Enclosure, b: Enclosure) -> Enclosure:
    """Mean of a · b over the last dimension, which is kept with size 1; each product rounded or fused into the sum."""
    return _averaged(Sum.of(unrounded_product(a, b), products=True).parts(), a.shape[-1])


def variance_about(x: Enclosure, center: Enclosure) -> Enclosure:
    """Mean of (x - center)² over the last dimension, kept with size 1: the second pass of a two-pass variance.

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
    eps = current().accumulation(count) + 4 * U + current().quotient + 4 * count * _FP64_U
    absolute = 2.0**-147 + flushed() * 2  # of squares, their sum and the quotient
    below = ((spread + nearest - error) * (1 - eps) - absolute).clamp(min=0.0)
    above = (spread + farthest + error) * (1 + eps) + absolute
    usable = torch.isfinite(below) & torch.isfinite(above) & (above * count < current().arithmetic.max)
    lo = torch.where(usable, torch.maximum(naive.lo, below), naive.lo)
    hi = torch.where(usable, torch.minimum(naive.hi, above), naive.hi)
    return settled(torch.stack([naive.exact, naive.value, lo, hi])).unknown_where(naive.unknown)


def sum_of_rows(x: Enclosure) -> Sum:
    """Sum over all leading dimensions of x [..., N], in any order: [N], to be finished when all rows have been seen."""
    return Sum.of(_as_rows(x.parts), dim=-2, products=True)


def sum_of_row_products(a: Enclosure, b: Enclosure) -> Sum:
    """Sum of a · b over all leading dimensions [..., N], in any order: [N]; see `sum_of_rows`."""
    return Sum.of(_as_rows(unrounded_product(a, b)), dim=-2, products=True)


def _as_rows(parts: Tensor) -> Tensor:
    """Parts of a matrix, whatever the number of leading dimensions."""
    return parts.reshape(len(parts), math.prod(parts.shape[1:-1]), parts.shape[-1])


def total_of_products(a: Enclosure, b: Enclosure) -> Enclosure:
    """Sum of a · b over the last dimension, kept with size 1; each product rounded or fused into the sum."""
    return Sum.of(unrounded_product(a, b), products=True).enclosure


def dot(a: Enclosure, b: Enclosure) -> Enclosure:
    """Matrix product a[..., M, K] @ b[..., K, N] with fp32 accumulation in any order.

    Ends by the midpoint-radius rule: |computed - mid_a mid_b| <= rad_a |b| + |mid_a| rad_b + eps (|a| |b|), where eps
    covers tensor cores, which cut off.
    """
    terms = a.shape[-1]
    (mid_a, rad_a), (mid_b, rad_b) = midpoint_radius(a), midpoint_radius(b)
    size_a, size_b = mid_a.abs() + rad_a, mid_b.abs() + rad_b
    magnitude = size_a @ size_b
    quantum_a, quantum_b = quantum_of(mid_a, -1), quantum_of(mid_b, -2)
    units, cut = quantum_a * quantum_b, _cut_off(size_a, size_b, quantum_a, quantum_b)
    points = (rad_a == 0).all(-1, keepdim=True) & (rad_b == 0).all(-2, keepdim=True)
    exact = points & (magnitude < LATTICE_UNITS * units) & (units >= FP32.quantum) & (units >= cut)
    eps = current().dot_accumulation(terms) + terms * _FP64_U
    slack = torch.where(exact, 0.0, eps * magnitude + terms * (UNDERFLOW + 2 * cut))
    radius = slack + terms * flushed()
    if len(a.parts) == 4:
        radius = radius + rad_a @ size_b
    if len(b.parts) == 4:
        radius = radius + mid_a.abs() @ rad_b
    middle = mid_a @ mid_b
    plain = len(a.parts) == len(b.parts) == 1
    known, value = (middle, middle) if plain else (a.exact @ b.exact, a.value @ b.value)
    low, high = middle - radius, middle + radius
    if bool(torch.isfinite(magnitude).all()) and bool((magnitude <= current().arithmetic.max).all()):
        return settled(torch.stack([known, value, low, high]))
    nan = torch.isnan(a.lo).any(-1, keepdim=True) | torch.isnan(b.lo).any(-2, keepdim=True)
    certain = (points | nan) & ~torch.isfinite(magnitude)  # what comes out does not depend on the order
    low, high = torch.where(certain, value, low), torch.where(certain, value, high)
    overflows = (finite(size_a) @ finite(size_b) > current().arithmetic.max) & ~torch.isnan(value)
    lost = ~certain & ~torch.isfinite(magnitude)
    return settled(torch.stack([known, value, low, high])).unknown_where(overflows, lost)


def _cut_off(size_a: Tensor, size_b: Tensor, quantum_a: Tensor, quantum_b: Tensor) -> Tensor:
    """What tensor cores cut off of each product besides a share of the largest: [M, N].

    They take the exponent of a subnormal operand for that of the smallest normal number, so that its product counts for
    larger than it is. That matters where operands may be of fp16.
    """
    cores = current().tensor_cores
    if cores is None or not size_a.numel() or not size_b.numel():
        return size_a.new_zeros(())
    largest_a, largest_b = finite(size_a).amax(-1, keepdim=True), finite(size_b).amax(-2, keepdim=True)
    largest = torch.maximum(largest_a.max(), largest_b.max())
    fp16 = (torch.minimum(quantum_a.min(), quantum_b.min()) >= FP16.quantum / 4) & (largest <= FP16.max)
    smallest = torch.where(fp16, 2.0**FP16.min_exponent, 2.0**FP32.min_exponent)
    return cores.cut * smallest * torch.maximum(torch.maximum(largest_a, largest_b), smallest)


def _averaged(sums: Tensor, count: int) -> Enclosure:
    """Mean from the parts of a sum, which overflows as fp32 does: divided by the count or times its reciprocal."""
    means = settled(sums).parts / count
    if count & (count - 1) == 0:
        return settled(means)
    return settled(widened(means, current().quotient))


def midpoint_radius(x: Enclosure) -> tuple[Tensor, Tensor]:
    """The middle of every interval, and how far its ends are from there."""
    if len(x.parts) < 4:
        return x.value, torch.zeros_like(x.value)
    middle = (x.lo + x.hi) / 2
    known = (x.lo == x.hi) | torch.isnan(x.lo)
    return middle, torch.where(known, 0.0, torch.maximum(x.hi - middle, middle - x.lo))
