"""Dots: matrix products with fp32 accumulation in any order, tensor cores included.

Ends by the midpoint-radius rule: |computed - mid_a mid_b| <= rad_a |b| + |mid_a| rad_b + eps (|a| |b|), where eps
covers tensor cores, which cut off. On a lattice (see `sums.py`) the sum is exact and only the radii count.

Dots that a kernel walks in a declared order lose by the partial sums that they go through, not by Σ|terms|. After every
`order` terms one fp32 number, the accumulator, holds the sum of all before; the terms between are added to it in any
order. The exact sum is known, in fp64, at every such place, and in between no partial sum leaves it by more than the
terms of one block allow. docs/numerics.md derives the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import torch
from torch import Tensor
from torch.nn.functional import pad

from lastbit.errors import OpError
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.formats import FP16, FP32, FP64_U, Format, round_to
from lastbit.numerics.fused import one_kernel_on_cuda
from lastbit.numerics.parts import rounded, unknown_where
from lastbit.numerics.premises import U, current
from lastbit.numerics.sums import LATTICE_UNITS, UNDERFLOW, flushed, units_of

QUANTUM, KIND, LARGEST = 0, 1, 2
"""Limits of a row or column: the largest power of two that divides all of it, its kind, and its largest magnitude,
negative: of each the least counts, for one limit of several."""

KNOWN, APART, NAN = 1.0, 0.0, -1.0
"""Kinds: every element is one number, the ends of some are apart, some must be NaN."""


@dataclass(frozen=True, eq=False)
class Factor:
    """One side of a dot, with the figures that its error bound needs, computed once for all dots it is in.

    Attributes:
        enclosure: the matrix.
        dim: its dimension that is summed over, -1 of a left factor and -2 of a right one; figures along it are kept
            with size 1.
        spans: see `spans`; of one part, the numbers, where every element is one.
    """

    enclosure: Enclosure
    dim: int
    spans: Tensor

    @classmethod
    def left(cls, x: Enclosure) -> Factor:
        """Make a left factor of `x` [..., M, K], to be multiplied with a right one [..., K, N]."""
        return cls(x, -1, _spans_of(x))

    @classmethod
    def right(cls, x: Enclosure) -> Factor:
        """Make a right factor of `x` [..., K, N], to be multiplied with a left one [..., M, K]."""
        return cls(x, -2, _spans_of(x))

    def columns(self, part: slice) -> Factor:
        """Keep only a part of the columns."""
        return Factor(self.enclosure[..., part], self.dim, self.spans[..., part])

    @property
    def terms(self) -> int:
        """Number of products that are added for an element of the dot."""
        return self.enclosure.shape[self.dim]

    @property
    def middle(self) -> Tensor:
        """The middle of every interval."""
        return self.spans[0]

    @cached_property
    def radius(self) -> Tensor | None:
        """Distance of every interval's ends from its middle; None if all are points, as far as the host can tell."""
        return None if len(self.spans) == 1 or _all_zero(self.spans[1]) else self.spans[1]

    @cached_property
    def size(self) -> Tensor:
        """Largest magnitude of every element."""
        return self.spans[2] if len(self.spans) == 4 else self.middle.abs()

    @cached_property
    def finite(self) -> Tensor:
        """`size`, with zeros for infinities and NaN."""
        return self.spans[3] if len(self.spans) == 4 else _finite(self.size)

    @cached_property
    def limits(self) -> Tensor:
        """QUANTUM, KIND and LARGEST of all elements along `dim`, the last one twice."""
        if not self.terms:
            empty = self.middle.sum(self.dim, keepdim=True)
            return torch.stack([empty + torch.inf, empty + KNOWN, empty, empty])
        radius = self.spans[1:2] if self.radius is not None else self.middle.new_zeros(1)
        return limiting(self.spans[:1], radius).amin(self.dim, keepdim=True)

    @cached_property
    def least_limits(self) -> Tensor:
        """`limits` of everything, one number each."""
        limits = self.limits.flatten(1)
        return limits.amin(1) if limits.shape[1] else limits.new_zeros(4)


def _spans_of(x: Enclosure) -> Tensor:
    """Return `spans`, laid out in memory like the elements; only the numbers where there are fewer than four parts."""
    if len(x.parts) < 4:
        return x.value[None]
    return spans(x.parts.mT).mT if x.parts.stride(-1) > x.parts.stride(-2) else spans(x.parts)


def _all_zero(radius: Tensor) -> bool:
    """Check for zeros, on the CPU only: an accelerator would have to finish everything before it could answer."""
    return radius.device.type == "cpu" and not bool(radius.any())


def _finite(size: Tensor) -> Tensor:
    return torch.nan_to_num(size, nan=0.0, posinf=0.0)


# The operations, as in `lastbit.numerics.parts`


@one_kernel_on_cuda
def spans(x: Tensor) -> Tensor:
    """Return four figures of intervals: middle, radius, largest magnitude, and that with 0 in place of inf and NaN."""
    lo, hi = x[2], x[3]
    middle = (lo + hi) / 2
    known = (lo == hi) | torch.isnan(lo)
    radius = torch.where(known, 0.0, torch.maximum(hi - middle, middle - lo))
    size = middle.abs() + radius
    return torch.stack([middle, radius, size, _finite(size)])


@one_kernel_on_cuda
def limiting(middle: Tensor, radius: Tensor) -> Tensor:
    """Return the limits of single elements."""
    known = torch.where(torch.isnan(middle[0]), NAN, KNOWN)
    kind = torch.where(radius[0] == 0, known, APART)
    largest = -_finite(middle[0].abs() + radius[0])
    return torch.stack([units_of(middle[0]), kind, largest, largest])


SHORTEST = 256
"""Products of the shortest dots that are walked: shorter ones gain little (docs/measurements/ordered_dots.md)."""

_LEAST_BLOCK = 16  # smaller ones cost more than they gain; what holds after each block holds after every second one
_TOGETHER, _TOGETHER_ON_CPU = 1 << 22, 1 << 18  # elements of the sums of several blocks that are looked at together
_EVALUATION = 1 + 2.0**-30  # more than the sums over blocks err in fp64
_EXPONENT = 0x7FF << 52


def block_of(terms: int) -> int:
    """Return the number of terms in a block of a dot; 0 where the dot is short, or no order is declared."""
    premises = current()
    if premises.order is None or premises.exact_sums or terms < SHORTEST:
        return 0
    return premises.order * -(-_LEAST_BLOCK // premises.order)


def losing(left: Factor, right: Factor, block: int, pieces: int, magnitude: Tensor, known: Tensor) -> Tensor:
    """Bound the rounding error of a dot whose pieces are walked in blocks, underflow excepted.

    `magnitude` is the sum of the magnitudes of all terms, and `known` a bound on how far the computed sum of any of
    them may be from that of the middles.
    """
    terms, premises = left.terms, current()
    block = min(block, terms // pieces)
    slack = known + 4 * terms * FP64_U * magnitude  # by which all sizes may be larger
    # Sums are halved: the middle of a block counts.
    operands = left.middle / 2, right.middle.mT, left.size / 2, right.size.mT
    x, y, x_size, y_size = (_in_blocks(operand, block, pieces) for operand in operands)
    # Powers of two that bound the numbers in a block, each summed over all blocks but `most`: sums of some of its terms
    # `alone`; how much larger those may be to which the accumulator was added, `beyond`, and the largest such
    # difference, `most`; and the accumulator before and after the block, and each of its terms, `ends`.
    accumulator, alone, beyond, most, ends = (torch.zeros_like(slack) for _ in range(5))
    together = max(1, (_TOGETHER_ON_CPU if slack.device.type == "cpu" else _TOGETHER) // max(1, slack.numel()))
    for part in (slice(start, start + together) for start in range(0, len(x), together)):
        change = x[part] @ y[part].mT
        spread = (x_size[part] @ y_size[part].mT).add_(slack)
        after = accumulator + 2 * change.cumsum(0)
        accumulator, center = after[-1].clone(), after.sub_(change).abs_()
        change.abs_()
        ends.add_(_binade(torch.maximum(center + slack, spread).add_(change)).sum(0))
        of_terms, joined = _binade(change.add_(spread)), _binade(center.add_(spread))
        larger = joined.sub_(of_terms).clamp_(min=0.0)
        alone.add_(of_terms.sum(0))
        beyond.add_(larger.sum(0))
        torch.maximum(most, larger.amax(0), out=most)
    lost = magnitude + block * alone + torch.minimum(block * beyond, premises.height(terms) * most)
    if (cores := premises.tensor_cores) is not None:
        steps, of_step = -(-block // cores.products), cores.lost(cores.products)
        added = max(0.0, 1 - cores.cut / U)  # a block that is summed alone: its first step cuts off no sum so far
        lost = torch.maximum(lost, (steps - 1) * of_step * (alone + beyond) + (of_step + added) * ends)
    return U * _EVALUATION * lost + terms * FP64_U * magnitude


def _in_blocks(x: Tensor, block: int, pieces: int) -> Tensor:
    """Cut […, K] into [blocks, …, block], with zeros behind the last terms of each piece."""
    of_pieces: Tensor = x.unflatten(-1, (pieces, -1))
    blocks: Tensor = pad(of_pieces, (0, -of_pieces.shape[-1] % block)).unflatten(-1, (-1, block))
    return blocks.flatten(-3, -2).movedim(-2, 0)


def _binade(x: Tensor) -> Tensor:
    """Replace each positive number, in place, by the power of two at or below it; NaN may become inf."""
    bits = x.view(torch.int64)
    bits &= _EXPONENT
    return x


FITS_FP16 = FP16.quantum / 4, FP16.max
"""Limits of what fp16 may hold: the smallest quantum, the largest magnitude."""


def dot(a: Enclosure, b: Enclosure) -> Enclosure:
    """Multiply matrices a[..., M, K] @ b[..., K, N] with fp32 accumulation in any order; errors as in `dot_of`."""
    return dot_of(Factor.left(a), Factor.right(b))


@algebraic(lambda a, b, pieces=1: a.enclosure.residues @ b.enclosure.residues, of_enclosures=True)
def dot_of(left: Factor, right: Factor, pieces: int = 1) -> Enclosure:
    """Multiply two factors, whose figures may serve several products; see `dot`. The result has four parts.

    A kernel that declares an order walks each of the `pieces` equal pieces of the sum from its own first term, the
    second on top of the sum of the first.

    Raises:
        OpError: an operand of fp8 where tensor cores may compute the dot.
    """
    a, b, fmt = left.enclosure, right.enclosure, current().arithmetic
    # Tensor cores keep fewer bits of products of fp8 than any model here says.
    if (fp8 := a.fp8 or b.fp8) is not None and current().tensor_cores is not None:
        raise OpError(
            f"a dot takes an operand of {fp8.name}, but how tensor cores add products of fp8 is not known here, so "
            "that nothing bounds it; judge it on a CPU, or round the operand to bf16 in the reference if kernels do"
        )
    magnitude = _times(left.size, right.size)
    radius = _radius(magnitude, left, right, pieces)
    middle = _times(left.middle, right.middle)
    # Exact part and value are the product of the middles where the factors are points.
    value = middle if max(len(a.parts), len(b.parts)) < 4 else _times(a.value, b.value)
    known = middle if len(a.parts) == len(b.parts) == 1 else _times(a.exact, b.exact)
    if _all_within(magnitude, fmt):
        parts = torch.stack([known, value, middle - radius, middle + radius])
        parts[1:] = round_to(parts[1:], fmt)
        return Enclosure(parts)
    sizes = torch.stack([magnitude, _times(left.finite, right.finite)])
    return Enclosure(enclosing(torch.stack([known, value, middle, radius]), sizes, left.limits, right.limits, fmt))


def _all_within(magnitude: Tensor, fmt: Format) -> bool:
    """Check whether no sum can overflow; on the CPU only, because an accelerator would have to finish first."""
    return magnitude.device.type == "cpu" and bool((magnitude <= fmt.max).all())  # false for NaN, too


def _times(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; for two stacks of matrices call bmm, to which `@` comes after several other operations."""
    return torch.bmm(a, b) if a.ndim == b.ndim == 3 and len(a) == len(b) else a @ b


def _radius(magnitude: Tensor, left: Factor, right: Factor, pieces: int) -> Tensor:
    """Bound the distance of a computed element from the product of the middles; meaningless where `magnitude` is inf.

    A factor without a radius adds nothing.
    """
    terms, cores = left.terms, current().tensor_cores
    eps = current().dot_accumulation(terms) + terms * FP64_U
    least, cut = torch.minimum(left.least_limits, right.least_limits), 0.0 if cores is None else cores.cut
    numbers = cut, eps, terms * flushed(), float(terms)
    strayed = straying(magnitude[None], left.limits, right.limits, least, *numbers)[0]
    spreads = [] if left.radius is None else [_times(left.radius, right.size)]
    spreads += [] if right.radius is None else [_times(left.middle.abs(), right.radius)]
    radius = reduce(add, spreads, strayed)
    if block := block_of(terms):
        lost = losing(left, right, block, pieces, magnitude, radius)
        lost += terms * (UNDERFLOW + flushed()) + 2 * terms * cut_off(left.limits, right.limits, least, cut)
        radius = reduce(add, spreads, torch.fmin(strayed, lost))
    return radius


# The operations, as in `lastbit.numerics.parts`


@one_kernel_on_cuda
def straying(
    magnitude: Tensor, left: Tensor, right: Tensor, least: Tensor, cut: float, eps: float, flushed: float, terms: float
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
