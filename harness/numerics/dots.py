"""Dots: matrix products with fp32 accumulation in any order, tensor cores included.

Ends by the midpoint-radius rule: |computed - mid_a mid_b| <= rad_a |b| + |mid_a| rad_b + eps (|a| |b|), where eps
covers tensor cores, which cut off. On a lattice (see `sums.py`) the sum is exact and only the radii count.
"""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from torch import Tensor

from lastbit.errors import OpError
from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.factors import KIND, KNOWN, LARGEST, NAN, QUANTUM, Factor
from lastbit.numerics.formats import FP16, FP32, FP64_U, Format, round_to
from lastbit.numerics.fused import one_kernel_on_cuda
from lastbit.numerics.ordered import block_of, losing
from lastbit.numerics.parts import rounded, unknown_where
from lastbit.numerics.premises import current
from lastbit.numerics.sums import LATTICE_UNITS, UNDERFLOW, flushed

FITS_FP16 = FP16.quantum / 4, FP16.max
"""Limits of what fp16 may hold: the smallest quantum, the largest magnitude."""


def dot(a: Enclosure, b: Enclosure) -> Enclosure:
    """Multiply matrices a[..., M, K] @ b[..., K, N] with fp32 accumulation in any order; errors as in `dot_of`."""
    return dot_of(Factor.left(a), Factor.right(b))


@algebraic(rules.dot_of, of_enclosures=True)
def dot_of(left: Factor, right: Factor, pieces: int = 1) -> Enclosure:
    """Multiply two factors, whose figures may serve several products; see `dot`. The result has four parts.

    A kernel that declares an order walks each of the `pieces` equal pieces of the sum from its own first term, the
    second on top of the sum of the first.

    Raises:
        OpError: an operand of fp8 where tensor cores may compute the dot.
    """
    _refuse_fp8(left.enclosure.fp8 or right.enclosure.fp8)
    fmt = current().arithmetic
    magnitude = _times(left.size, right.size)
    radius = _radius(magnitude, left, right, pieces)
    middle = _times(left.middle, right.middle)
    known, value = _known_and_value(middle, left.enclosure, right.enclosure)
    if _all_within(magnitude, fmt):
        parts = torch.stack([known, value, middle - radius, middle + radius])
        parts[1:] = round_to(parts[1:], fmt)
        return Enclosure(parts)
    sizes = torch.stack([magnitude, _times(left.finite, right.finite)])
    return Enclosure(enclosing(torch.stack([known, value, middle, radius]), sizes, left.limits, right.limits, fmt))


def _refuse_fp8(fmt: Format | None) -> None:
    """Raise OpError for an operand of fp8, of whose products tensor cores keep fewer bits than any model here says."""
    cores = current().tensor_cores
    if fmt is not None and cores is not None:
        raise OpError(
            f"a dot takes an operand of {fmt.name}, but how tensor cores add products of fp8 is not known here, so "
            "that nothing bounds it; judge it on a CPU, or round the operand to bf16 in the reference if kernels do"
        )


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; for two stacks of matrices call bmm, to which `@` comes after several other operations."""
    return torch.bmm(a, b) if a.ndim == b.ndim == 3 and len(a) == len(b) else a @ b


def _all_within(magnitude: Tensor, fmt: Format) -> bool:
    """Check whether no sum can overflow; on the CPU only, because an accelerator would have to finish first."""
    return magnitude.device.type == "cpu" and bool((magnitude <= fmt.max).all())  # false for NaN, too


def _known_and_value(middle: Tensor, a: Enclosure, b: Enclosure) -> tuple[Tensor, Tensor]:
    """Return exact part and value of a product; they are the product of the middles where the factors are points."""
    value = middle if max(len(a.parts), len(b.parts)) < 4 else _times(a.value, b.value)
    return middle if len(a.parts) == len(b.parts) == 1 else _times(a.exact, b.exact), value


def _radius(magnitude: Tensor, left: Factor, right: Factor, pieces: int) -> Tensor:
    """Bound the distance of a computed element from the product of the middles; meaningless where `magnitude` is inf.

    A factor without a radius adds nothing.
    """
    terms, cores = left.terms, current().tensor_cores
    eps = current().dot_accumulation(terms) + terms * FP64_U
    least, cut = torch.minimum(left.least_limits, right.least_limits), 0.0 if cores is None else cores.cut
    numbers = cut, eps, terms * flushed(), float(terms)
    strayed = straying(magnitude[None], left.limits, right.limits, least, *numbers)[0]
    spreads = _spreads(left, right)
    radius = reduce(add, spreads, strayed)
    if block := block_of(terms):
        lost = losing(left, right, block, pieces, magnitude, radius)
        lost += terms * (UNDERFLOW + flushed()) + 2 * terms * cut_off(left.limits, right.limits, least, cut)
        radius = reduce(add, spreads, torch.fmin(strayed, lost))
    return radius


def _spreads(left: Factor, right: Factor) -> list[Tensor]:
    """Return the terms that the radii of the factors add to that of their product."""
    of_left = [] if left.radius is None else [_times(left.radius, right.size)]
    return of_left if right.radius is None else [*of_left, _times(left.middle.abs(), right.radius)]


# The operations, as in `lastbit.numerics.parts`


@one_kernel_on_cuda
def straying(
    magnitude: Tensor,
    left: Tensor,
    right: Tensor,
    least: Tensor,
    cut: float,
    eps: float,
    flushed: float,
    terms: float,
) -> Tensor:
    """Bound the errors of sums of `terms` products of numbers, given the limits of rows, columns and everything."""
    units = left[QUANTUM] * right[QUANTUM]
    lost = cut_off(left, right, least, cut)
    exact = (magnitude < LATTICE_UNITS * units) & (units >= lost.clamp(min=FP32.quantum))
    exact = exact & (left[KIND] == KNOWN) & (right[KIND] == KNOWN)
    return (eps * magnitude + terms * (UNDERFLOW + 2 * lost)).masked_fill_(exact, 0.0) + flushed


def cut_off(left: Tensor, right: Tensor, least: Tensor, cut: float) -> Tensor:
    """Bound the part of each product that tensor cores cut off besides a share of the largest: [M, N].

    They take the exponent of a subnormal operand for that of the smallest normal number, so that its product counts for
    larger than it is. That matters where operands may be of fp16.
    """
    fp16 = (least[QUANTUM] >= FITS_FP16[0]) & (-least[LARGEST] <= FITS_FP16[1])
    smallest = torch.where(fp16, 2.0**FP16.min_exponent, 2.0**FP32.min_exponent).double()  # fp32 holds no product of it
    return cut * smallest * torch.maximum(torch.maximum(-left[LARGEST], -right[LARGEST]), smallest)


@one_kernel_on_cuda
def enclosing(x: Tensor, sizes: Tensor, left: Tensor, right: Tensor, fmt: Format) -> Tensor:
    """Enclose a product by its exact part, value, middle and radius, where sums may overflow or have infinite terms.

    `sizes` are the sums of the magnitudes of all terms, and of finite ones.
    """
    exact, value, middle, radius = x
    settles = (left[KIND] == NAN) | (right[KIND] == NAN) | ((left[KIND] == KNOWN) & (right[KIND] == KNOWN))
    infinite = ~torch.isfinite(sizes[0])
    certain = settles & infinite  # what comes out does not depend on the order
    low, high = (torch.where(certain, value, end) for end in (middle - radius, middle + radius))
    overflows = (sizes[1] > fmt.max) & ~torch.isnan(value)
    return unknown_where(rounded(torch.stack([exact, value, low, high]), fmt), overflows, infinite & ~certain)
