"""Sums and means, whose only freedom is the order of accumulation.

Three rules, strongest first. On a *lattice* (all terms multiples of one power of two, and the sum of their magnitudes
below 2**24 of it) every partial sum is exact in fp32, whatever the order, with or without FMA: the enclosure is a
point. Whether a row is one is read off its terms. Else, where the height of the summation tree is known, that height
bounds the error; else the number of terms does. Probabilistic bounds are never used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics.enclosure import Enclosure, magnitudes, settled, unrounded_product, widened
from harness.numerics.formats import FP32
from harness.numerics.premises import U, current
from harness.numerics.remembered import remembered

_MANTISSA_BITS = 52
_HIDDEN_BIT = 1 << _MANTISSA_BITS
_FRACTION = _HIDDEN_BIT - 1
_EXPONENT = 0x7FF << _MANTISSA_BITS
LATTICE_UNITS = 2.0**24
_FP64_U = 2.0**-53
UNDERFLOW = 2.0**-150  # largest error of a product that is rounded to a subnormal fp32 number


@dataclass(frozen=True, eq=False)
class Sum:
    """What has to be known of the terms of a sum to bound it; `+` joins the terms of two parts of one sum.

    Attributes:
        count: number of terms.
        products: the terms are products that may underflow, or be rounded before they are added.
        sums: stacked parts of the sum in fp64.
        magnitude, finite: sums of the largest |term|, all of them and finite ones only.
        known: every term is one known number.
        quantum: largest power of two that divides all terms.
        negative, positive: whether a term may be.
    """

    count: int
    products: bool
    sums: Tensor
    magnitude: Tensor
    finite: Tensor
    known: Tensor
    quantum: Tensor
    negative: Tensor
    positive: Tensor

    @classmethod
    def of(cls, terms: Tensor, *, dim: int = -1, products: bool = False) -> Sum:
        """The sum of `terms` (stacked parts) over `dim`; the last dimension is kept with size 1."""
        keep = dim == -1
        lo, hi = Enclosure(terms).lo, Enclosure(terms).hi
        return cls(
            count=terms.shape[dim],
            products=products,
            sums=Enclosure(terms.sum(dim, keepdim=keep)).full,
            magnitude=torch.maximum(lo.abs(), hi.abs()).sum(dim, keepdim=keep),
            finite=torch.maximum(_finite(lo), _finite(hi)).sum(dim, keepdim=keep),
            known=(lo == hi).all(dim, keepdim=keep),
            quantum=quantum_of(lo, dim, keepdim=keep),
            negative=(lo < 0).any(dim, keepdim=keep),
            positive=(hi > 0).any(dim, keepdim=keep),
        )

    def __add__(self, other: Sum) -> Sum:
        return Sum(
            count=self.count + other.count,
            products=self.products,
            sums=self.sums + other.sums,
            magnitude=self.magnitude + other.magnitude,
            finite=self.finite + other.finite,
            known=self.known & other.known,
            quantum=torch.minimum(self.quantum, other.quantum),
            negative=self.negative | other.negative,
            positive=self.positive | other.positive,
        )

    @property
    def shape(self) -> torch.Size:
        return self.sums.shape[1:]

    @property
    def enclosure(self) -> Enclosure:
        """The fp32 sum."""
        return settled(self.parts())

    def parts(self, *, nonnegative: bool = False) -> Tensor:
        """Stacked parts of the sum, not rounded yet."""
        eps = current().accumulation(self.count) + 2 * self.count * _FP64_U
        rounding = eps * self.magnitude + (self.count * UNDERFLOW if self.products else 0.0)
        exact = self.known & (self.magnitude < LATTICE_UNITS * self.quantum) & (self.quantum >= FP32.quantum)
        slack = torch.where(exact, 0.0, rounding) + self.count * flushed()
        low, high = self.sums[2] - slack, self.sums[3] + slack
        if nonnegative:
            low = torch.where(low < 0, 0.0, low)
        low, high = (torch.where(torch.isfinite(s), e, s) for s, e in ((self.sums[2], low), (self.sums[3], high)))
        overflows = (
            self.negative & self.positive & (self.finite > current().arithmetic.max) & ~torch.isnan(self.sums[1])
        )
        sums = Enclosure(torch.stack([self.sums[0], self.sums[1], low, high]))
        return sums.unknown_where(overflows).parts  # some order of the sum overflows


@remembered
def total(x: Enclosure) -> Enclosure:
    """Sum over the last dimension, which is kept with size 1."""
    return settled(Sum.of(x.parts).parts())


def mean(x: Enclosure) -> Enclosure:
    """Mean over the last dimension, which is kept with size 1."""
    return _averaged(Sum.of(x.parts).parts(), x.shape[-1])


def mean_of_squares(x: Enclosure) -> Enclosure:
    """Mean of x² over the last dimension, which is kept with size 1; each square rounded or fused into the sum."""
    squares = magnitudes(x).square()
    unknown = None if x.unknown is None else x.unknown.any(-1, keepdim=True)
    return _averaged(Sum.of(squares, products=True).parts(nonnegative=True), x.shape[-1]).unknown_where(unknown)


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


@remembered
def total_of_products(a: Enclosure, b: Enclosure) -> Enclosure:
    """Sum of a · b over the last dimension, kept with size 1; each product rounded or fused into the sum."""
    return Sum.of(unrounded_product(a, b), products=True).enclosure


def flushed() -> float:
    """What flushing one subnormal result to zero can change."""
    return FP32.quantum * 2.0**23 if current().flushes_subnormals else 0.0


def _finite(x: Tensor) -> Tensor:
    """Magnitudes, with zeros for infinities and NaN."""
    return torch.where(torch.isfinite(x), x.abs(), 0.0)


def _averaged(sums: Tensor, count: int) -> Enclosure:
    """Mean from the parts of a sum, which overflows as fp32 does: divided by the count or times its reciprocal."""
    means = settled(sums).parts / count
    if count & (count - 1) == 0:
        return settled(means)
    return settled(widened(means, current().quotient))


def quantum_of(x: Tensor, dim: int, *, keepdim: bool = True) -> Tensor:
    """Largest power of two that divides all elements of `x` (fp64) along `dim`; inf where all are zero."""
    if x.shape[dim] == 0:
        return x.new_full((), torch.inf)
    bits = x.view(torch.int64)
    significand = (bits & _FRACTION).bitwise_or_(_HIDDEN_BIT)
    lowest = significand.bitwise_and_(-significand).to(torch.float64)
    last_place = (bits & _EXPONENT).view(torch.float64).mul_(2.0**-_MANTISSA_BITS)  # inf where x is not finite
    return lowest.mul_(last_place).masked_fill_(x == 0, torch.inf).amin(dim, keepdim=keepdim)


def midpoint_radius(x: Enclosure) -> tuple[Tensor, Tensor]:
    """The middle of every interval, and how far its ends are from there."""
    if len(x.parts) < 4:
        return x.value, torch.zeros_like(x.value)
    middle = (x.lo + x.hi) / 2
    known = (x.lo == x.hi) | torch.isnan(x.lo)
    return middle, torch.where(known, 0.0, torch.maximum(x.hi - middle, middle - x.lo))
