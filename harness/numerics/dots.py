"""Dots: matrix products with fp32 accumulation in any order, tensor cores included.

Ends by the midpoint-radius rule: |computed - mid_a mid_b| <= rad_a |b| + |mid_a| rad_b + eps (|a| |b|), where eps
covers tensor cores, which cut off. On a lattice (see `accumulation`) the sum is exact and only the radii count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness.numerics.accumulation import midpoint_radius
from harness.numerics.enclosure import Enclosure, settled
from harness.numerics.formats import FP16, FP32, round_to
from harness.numerics.premises import current
from harness.numerics.sums import LATTICE_UNITS, UNDERFLOW, flushed, quantum_of

_FP64_U = 2.0**-53


@dataclass(frozen=True, eq=False)
class Factor:
    """One side of a dot and what its bound takes from it, which is computed once however many dots it is in.

    Attributes:
        enclosure: the matrix.
        dim: its dimension that is summed over, -1 of a left factor and -2 of a right one; figures along it are kept
            with size 1.
        middle: of every interval.
        radius: how far its ends are from there; None where every element is one number.
    """

    enclosure: Enclosure
    dim: int
    middle: Tensor
    radius: Tensor | None

    @classmethod
    def left(cls, x: Enclosure) -> Factor:
        """`x` [..., M, K], to be multiplied with a right factor [..., K, N]."""
        return cls(x, -1, *_middle_and_radius(x))

    @classmethod
    def right(cls, x: Enclosure) -> Factor:
        """`x` [..., K, N], to be multiplied with a left factor [..., M, K]."""
        return cls(x, -2, *_middle_and_radius(x))

    def columns(self, part: slice) -> Factor:
        """Part of the columns."""
        radius = None if self.radius is None else self.radius[..., part]
        return Factor(self.enclosure[..., part], self.dim, self.middle[..., part], radius)

    @property
    def terms(self) -> int:
        """How many products are added."""
        return self.enclosure.shape[self.dim]

    @cached_property
    def size(self) -> Tensor:
        """Largest magnitude of every element."""
        magnitude = self.middle.abs()
        return magnitude if self.radius is None else magnitude + self.radius

    @cached_property
    def finite(self) -> Tensor:
        """`size`, with zeros for infinities and NaN."""
        return torch.nan_to_num(self.size, nan=0.0, posinf=0.0)

    @cached_property
    def known(self) -> Tensor | None:
        """Whether all elements along `dim` are numbers; None where all are."""
        return None if self.radius is None else (self.radius == 0).all(self.dim, keepdim=True)

    @cached_property
    def nan(self) -> Tensor:
        """Whether an element along `dim` must be NaN."""
        return torch.isnan(self.enclosure.lo).any(self.dim, keepdim=True)

    @cached_property
    def quantum(self) -> Tensor:
        """Largest power of two that divides all middles along `dim`."""
        return quantum_of(self.middle, self.dim)

    @cached_property
    def largest(self) -> Tensor:
        """Largest finite magnitude along `dim`."""
        return self.finite.amax(self.dim, keepdim=True)

    @cached_property
    def fits_fp16(self) -> Tensor:
        """Whether fp16 may hold all elements."""
        return (self.quantum.min() >= FP16.quantum / 4) & (self.largest.max() <= FP16.max)


def dot(a: Enclosure, b: Enclosure) -> Enclosure:
    """Matrix product a[..., M, K] @ b[..., K, N] with fp32 accumulation in any order."""
    return dot_of(Factor.left(a), Factor.right(b))


def dot_of(left: Factor, right: Factor) -> Enclosure:
    """`dot` of factors that are there already; always of four parts."""
    magnitude = left.size @ right.size
    radius = _radius(magnitude, left, right)
    middle = left.middle @ right.middle
    ends = middle - radius, middle + radius
    known, value = _known_and_value(middle, left.enclosure, right.enclosure)
    if bool((magnitude <= current().arithmetic.max).all()):  # false for NaN, too
        parts = torch.stack([known, value, *ends])
        parts[1:] = round_to(parts[1:], current().arithmetic)
        return Enclosure(parts)
    return _beyond_range(magnitude, known, value, ends, left, right)


def _middle_and_radius(x: Enclosure) -> tuple[Tensor, Tensor | None]:
    middle, radius = midpoint_radius(x) if len(x.parts) == 4 else (x.value, None)
    return middle, None if radius is None or not bool(radius.any()) else radius


def _known_and_value(middle: Tensor, a: Enclosure, b: Enclosure) -> tuple[Tensor, Tensor]:
    """Exact part and value of a product, which are the product of the middles where these are the same numbers."""
    value = middle if max(len(a.parts), len(b.parts)) < 4 else a.value @ b.value
    return middle if len(a.parts) == len(b.parts) == 1 else a.exact @ b.exact, value


def _radius(magnitude: Tensor, left: Factor, right: Factor) -> Tensor:
    """How far a computed element may be from the product of the middles; of no meaning where `magnitude` is infinite.

    Where a radius is zero, it adds nothing.
    """
    terms, cut = left.terms, _cut_off(left, right)
    units = left.quantum * right.quantum
    exact = (magnitude < LATTICE_UNITS * units) & (units >= cut.clamp(min=FP32.quantum))
    for factor in (left, right):
        exact = exact if factor.known is None else exact & factor.known
    eps = current().dot_accumulation(terms) + terms * _FP64_U
    radius = (eps * magnitude + terms * (UNDERFLOW + 2 * cut)).masked_fill_(exact, 0.0)
    if flushed():
        radius = radius + terms * flushed()
    if left.radius is not None:
        radius = radius + left.radius @ right.size
    if right.radius is not None:
        radius = radius + left.middle.abs() @ right.radius
    return radius


def _beyond_range(
    magnitude: Tensor, known: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], left: Factor, right: Factor
) -> Enclosure:
    """The product where some sum may overflow, or has terms that are not finite."""
    points = [factor.known for factor in (left, right) if factor.known is not None]
    settles = left.nan | right.nan
    settles = settles | (points[0] & points[-1]) if points else torch.ones_like(settles)
    infinite = ~torch.isfinite(magnitude)
    certain = settles & infinite  # what comes out does not depend on the order
    low, high = (torch.where(certain, value, end) for end in ends)
    overflows = (left.finite @ right.finite > current().arithmetic.max) & ~torch.isnan(value)
    return settled(torch.stack([known, value, low, high])).unknown_where(overflows, infinite & ~certain)


def _cut_off(left: Factor, right: Factor) -> Tensor:
    """What tensor cores cut off of each product besides a share of the largest: [M, N].

    They take the exponent of a subnormal operand for that of the smallest normal number, so that its product counts for
    larger than it is. That matters where operands may be of fp16.
    """
    cores = current().tensor_cores
    if cores is None or not left.middle.numel() or not right.middle.numel():
        return left.middle.new_zeros(())
    fp16 = left.fits_fp16 & right.fits_fp16
    smallest = torch.where(fp16, 2.0**FP16.min_exponent, 2.0**FP32.min_exponent).double()  # fp32 holds no product of it
    return cores.cut * smallest * torch.maximum(torch.maximum(left.largest, right.largest), smallest)
