"""Sums, means and dots, whose only freedom is the order of accumulation.

Three rules, strongest first. On a *lattice* (all terms multiples of one power of two, and the sum of their magnitudes
below 2**24 of it) every partial sum is exact in fp32, whatever the order, with or without FMA: the enclosure is a
point. Whether a row is one is read off its terms. Else, where the height of the summation tree is known, that height
bounds the error; else the number of terms does. Probabilistic bounds are never used.
"""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics.enclosure import Enclosure, magnitudes, settled, widened
from harness.numerics.formats import FP32
from harness.numerics.premises import current

_MANTISSA_BITS = 52
_LATTICE_UNITS = 2.0**24
_FP64_U = 2.0**-53
_UNDERFLOW = 2.0**-150  # largest error of a product that is rounded to a subnormal fp32 number


def total(x: Enclosure) -> Enclosure:
    """Sum over the last dimension, which is kept with size 1."""
    return settled(_accumulated(x.parts, products=False))


def mean(x: Enclosure) -> Enclosure:
    """Mean over the last dimension, which is kept with size 1."""
    return _averaged(_accumulated(x.parts, products=False), x.shape[-1])


def mean_of_squares(x: Enclosure) -> Enclosure:
    """Mean of x² over the last dimension, which is kept with size 1; each square rounded or fused into the sum."""
    squares = magnitudes(x).square()
    unknown = None if x.unknown is None else x.unknown.any(-1, keepdim=True)
    return _averaged(_accumulated(squares, products=True), x.shape[-1]).unknown_where(unknown)


def dot(a: Enclosure, b: Enclosure) -> Enclosure:
    """Matrix product a[..., M, K] @ b[..., K, N] with fp32 accumulation in any order.

    Ends by the midpoint-radius rule: |computed - mid_a mid_b| <= rad_a |b| + |mid_a| rad_b + eps (|a| |b|).
    """
    terms = a.shape[-1]
    (mid_a, rad_a), (mid_b, rad_b) = _midpoint_radius(a), _midpoint_radius(b)
    size_a, size_b = mid_a.abs() + rad_a, mid_b.abs() + rad_b
    magnitude = size_a @ size_b
    units = _quantum(mid_a, -1) * _quantum(mid_b, -2)
    points = (rad_a == 0).all(-1, keepdim=True) & (rad_b == 0).all(-2, keepdim=True)
    exact = points & (magnitude < _LATTICE_UNITS * units) & (units >= FP32.quantum)
    slack = torch.where(exact, 0.0, (current().accumulation(terms) + terms * _FP64_U) * magnitude + terms * _UNDERFLOW)
    radius = rad_a @ size_b + mid_a.abs() @ rad_b + slack + terms * _flush()
    middle, value = mid_a @ mid_b, a.value @ b.value
    special = points & ~torch.isfinite(magnitude)  # inf or NaN in, and what comes out does not depend on the order
    low, high = torch.where(special, value, middle - radius), torch.where(special, value, middle + radius)
    finite = _finite(size_a) @ _finite(size_b)
    overflows = (finite > FP32.max) & ~torch.isnan(value)
    return settled(torch.stack([a.exact @ b.exact, value, low, high])).unknown_where(overflows)


def _accumulated(terms: Tensor, *, products: bool) -> Tensor:
    """Parts of the sum of `terms` (stacked parts) over the last dimension, not rounded yet."""
    count = terms.shape[-1]
    sums = terms.sum(-1, keepdim=True)
    sums = Enclosure(sums).full
    lo, hi = Enclosure(terms).lo, Enclosure(terms).hi
    magnitude = torch.maximum(lo.abs(), hi.abs()).sum(-1, keepdim=True)
    eps = current().accumulation(count) + 2 * count * _FP64_U
    rounding = eps * magnitude + (count * _UNDERFLOW if products else 0.0)
    slack = torch.where(_is_lattice(lo, hi, magnitude), 0.0, rounding) + count * _flush()
    low, high = sums[2] - slack, sums[3] + slack
    if products:
        low = torch.where(low < 0, 0.0, low)
    low, high = (torch.where(torch.isfinite(s), end, s) for s, end in ((sums[2], low), (sums[3], high)))
    mixed = (lo < 0).any(-1, keepdim=True) & (hi > 0).any(-1, keepdim=True)
    finite = torch.maximum(_finite(lo), _finite(hi)).sum(-1, keepdim=True)
    overflows = mixed & (finite > FP32.max) & ~torch.isnan(sums[1])  # of partial sums, in some order
    return Enclosure(torch.stack([sums[0], sums[1], low, high])).unknown_where(overflows).parts


def _flush() -> float:
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
    return settled(widened(means, current().relative("divide")))


def _is_lattice(lo: Tensor, hi: Tensor, magnitude: Tensor) -> Tensor:
    """Rows whose terms are known numbers on a lattice that fp32 holds and sums exactly in any order."""
    known = (lo == hi).all(-1, keepdim=True)
    quantum = _quantum(lo, -1)
    return known & (magnitude < _LATTICE_UNITS * quantum) & (quantum >= FP32.quantum)


def _quantum(x: Tensor, dim: int) -> Tensor:
    """Largest power of two that divides all elements of `x` (fp64) along `dim`; inf where all are zero."""
    bits = x.abs().view(torch.int64)
    significand = (bits & ((1 << _MANTISSA_BITS) - 1)) | (1 << _MANTISSA_BITS)
    lowest = (significand & -significand).to(torch.float64)
    unit = ((bits >> _MANTISSA_BITS) << _MANTISSA_BITS).view(torch.float64) * 2.0**-_MANTISSA_BITS
    if x.shape[dim] == 0:
        return x.new_full((), torch.inf)
    quantum = torch.where((x == 0) | ~torch.isfinite(x), torch.inf, lowest * unit)
    return quantum.amin(dim, keepdim=True)


def _midpoint_radius(x: Enclosure) -> tuple[Tensor, Tensor]:
    middle = (x.lo + x.hi) / 2
    return middle, torch.where(x.lo == x.hi, 0.0, torch.maximum(x.hi - middle, middle - x.lo))
