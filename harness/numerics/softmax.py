"""Exponentials that are divided by their sum: the shift that is taken from all arguments cancels.

A kernel computes exp(x - s) for some shift s, adds these in any order, and divides or multiplies by the reciprocal. s
is the largest element, or the largest one so far, in which case earlier results are rescaled. Two kernels may have
another s; their exponentials differ by a common factor, of which no quotient knows. So everything below holds up to
that factor. docs/primitives.md derives the bounds.

In sums that are rescaled while they grow, as flash attention does it, each tile of terms is relative to the largest
argument so far; when that grows, the sum so far is multiplied by a factor. There the shift of a term does not cancel:
it decides to which number of 16 bits it is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic, is_following
from lastbit.numerics.dots import dot
from lastbit.numerics.enclosure import Enclosure, unrounded_product
from lastbit.numerics.formats import FP16, FP32, FP64_U, PRECISE, Format, round_to
from lastbit.numerics.parts import full, rounded, spread, unknown, unknown_where, widened
from lastbit.numerics.premises import current
from lastbit.numerics.primitives import FLUSHED, LOST, SUBNORMAL, exp
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import constant
from lastbit.numerics.sums import flushed

Empty = Literal["nan", "zero", "any"]

_ARGUMENT = 5  # error of x - s in units of u |x - s|; docs/primitives.md says of what it is made
_LOG2_E = math.log2(math.e)
_SLACK = 2.0**-48  # more than fp64 errs


@dataclass(frozen=True, eq=False)
class Exponentials:
    """exp(x - s) of the rows [..., N] of an enclosure, up to a factor that is common to a row.

    Attributes:
        terms: that factor such that the largest possible element has exp(0) = 1; not rounded to fp32, for the factor is
            no number of fp32. An element that is the largest of known ones is exactly 1, unless `folded`.
        twice: for each element its error alone: the lowest number at the upper end of x, and the highest one at the
            lower end. What is divided by a sum in which it is a term itself has one x in both.
        distance: bounds of s - x, at the upper and the lower end of x.
        shift: [..., 1]: the largest element, as exact, value, lo and hi.
        folded: see `exponentials`.
    """

    terms: Enclosure
    twice: tuple[Tensor, Tensor]
    distance: tuple[Tensor, Tensor]
    shift: Tensor
    folded: bool

    @cached_property
    def total(self) -> Enclosure:
        """The sum of a row [..., 1], up to the factor of `terms`, added in any order and rescaled on the way."""
        exact, value, lo, hi = self.terms.full
        total = torch.stack([part.sum(-1, keepdim=True) for part in (exact, value, lo, hi)])
        error = self.accumulated
        ends = total[2] * (1 - error), total[3] * (1 + error)
        parts = torch.stack([total[0], round_to(total[1], current().arithmetic), *ends])
        return Enclosure(parts, algebra=self.terms.algebra and self.terms.algebra.total())

    @property
    def accumulated(self) -> Tensor:
        """Relative error of the sum of each row; none where all terms are known to be 0 or 1."""
        lo, hi = self.terms.lo, self.terms.hi
        exact = ((lo == hi) & ((lo == 0) | (lo == 1))).all(-1, keepdim=True)
        return torch.full_like(lo[..., :1], rescaled_accumulation(lo.shape[-1])).masked_fill(exact, 0.0)

    @property
    def others(self) -> tuple[Tensor, Tensor]:
        """Least and largest sum of a row, as each element at its own upper and its own lower end sees it."""
        _, _, lo, hi = self.terms.full
        error, least, most = self.accumulated, lo.sum(-1, keepdim=True), hi.sum(-1, keepdim=True)
        fp64 = 4 * lo.shape[-1] * FP64_U
        below = (least - lo + self.twice[0]) * (1 - fp64)
        above = most - hi + self.twice[1] + fp64 * most
        return torch.maximum(below, least) * (1 - error), torch.minimum(above, most) * (1 + error)

    @property
    def shown(self) -> tuple[Enclosure, Enclosure]:
        """Terms and sum as the fp32 numbers that a kernel has: the common factor may be any that its shift gives."""
        low, high = self.shift[2:]
        factor = 2 * current().unit * torch.maximum(low.abs(), high.abs()) * self.folded
        moved = torch.stack(
            [torch.ones_like(low), torch.ones_like(low), torch.exp(-factor), torch.exp(high - low + factor)]
        )
        terms, total = (Enclosure(each.full * moved, algebra=each.algebra) for each in (self.terms, self.total))
        return terms, self.settled(total, None)

    def settled(self, x: Enclosure, empty: float | None) -> Enclosure:
        """Round to fp32, with NaN in rows of NaN, `empty` in empty ones, and nothing known in `lost` ones."""
        settled = _settled(x.full, self, empty)
        return settled if x.algebra is None else replace(settled, algebra=x.algebra.seen(settled.value))

    @property
    def lost(self) -> tuple[Tensor, Tensor, Tensor]:
        """Masks [..., 1] of rows that give NaN, that are empty (all -inf), and about which nothing is known."""
        _, _, lo, hi = self.shift
        nan = torch.isnan(lo) | torch.isposinf(lo)
        empty = torch.isneginf(hi)
        unknown = ~nan & ~empty & (torch.isposinf(hi) | torch.isneginf(lo))
        if self.folded:
            unknown |= ~nan & ~empty & (torch.maximum(lo.abs(), hi.abs()) * _LOG2_E > current().arithmetic.max)
        return nan, empty, unknown


def rescaled_accumulation(terms: int) -> float:
    """Bound the relative error of a sum of `terms` numbers of one sign, in any order, with parts rescaled on the way.

    To join two parts, or a part and an element, rounds an addition, an exponential and a product.
    """
    premises, step = current(), current().relative("exp") + 2 * current().unit
    if premises.exact_sums:
        return premises.unit
    error = terms * premises.unit + math.ceil(math.log2(max(terms, 1))) * step
    if premises.depth is not None:
        error = min(error, (premises.depth(terms) + 1) * step)
    return error / (1 - error) + 2 * terms * FP64_U if error < 1 else math.inf


def _least() -> float:
    """Return a limit up to which numbers may be lost, in part or whole: subnormal in fp32; in fp64, zero."""
    return SUBNORMAL**2 if current().arithmetic is PRECISE else FLUSHED


def exponentials(x: Enclosure, folded: bool = False) -> Exponentials:
    """Return exp(x - s) over the last dimension, for the largest element s or one of the largest so far.

    x: [..., N] with N ≥ 1. `folded`: x may be multiplied by log2(e) and rounded before s is taken from it, so that an
    error of u·|x| stays. An element of -inf gives exactly 0. Of rows in `lost`, parts have no meaning.
    """
    shares = _exponentials(x, folded)
    if not is_following():
        return shares
    return replace(shares, terms=replace(shares.terms, algebra=(x.residues - rules.largest(x)).exp()))


@remembered
def _exponentials(x: Enclosure, folded: bool) -> Exponentials:
    four = full(x.parts)
    if four.shape[-1] == 0:
        raise ValueError(f"a row of shape {tuple(x.shape)} has no elements, so that none is the largest")
    shift = four.amax(-1, keepdim=True)
    top = torch.where(torch.isfinite(shift), shift, 0.0)
    known = (four[2] == four[3]) & (four[2] == shift[3]) & (shift[2] == shift[3])
    unit = current().unit
    near, far = (top[3] - four[3]).clamp(min=0.0), (top[3] - four[2]).clamp(min=0.0)
    fold = unit * torch.maximum(top[2].abs(), top[3].abs()) * folded
    relative = max(current().relative("exp"), current().relative("exp2"), unit)

    edge, precise = torch.exp(fold), current().arithmetic is PRECISE

    def at(end: Tensor, distance: Tensor, sign: int) -> Tensor:
        slack = torch.where(torch.isfinite(distance), _ARGUMENT * unit * distance, 0.0) + fold
        power = torch.exp(end - top[3] + sign * slack) * (1 + sign * (relative + _SLACK))
        power = power if folded else torch.where(known, 1.0, power)
        tiny = power <= _least() * edge
        if sign < 0:
            return torch.where(tiny, 0.0, power)
        some = torch.isfinite(end) if precise else power > LOST / edge
        return torch.where(some, torch.where(tiny, power + SUBNORMAL, power), 0.0)

    ends = at(four[2], far, -1), at(four[3], near, +1)
    twice = (at(four[3], near, -1), at(four[2], far, +1)) if len(x.parts) == 4 else ends
    exact = torch.exp(four[0] - top[3])
    value = round_to(torch.exp(round_to(four[1] - top[1], current().arithmetic)), current().arithmetic)
    terms = Enclosure(torch.stack([exact, value * torch.exp(top[1] - top[3]), *ends]))
    return Exponentials(terms, twice, (near, far), shift, folded)


def softmax(x: Enclosure, folded: bool = False, empty: Empty = "nan") -> Enclosure:
    """Return exp(x) / sum(exp(x)) over the last dimension, whatever the shift and the order of the sum.

    x: [..., N] with N ≥ 1; see `exponentials` for `folded`. NaN or +inf makes a row NaN; -inf gives exactly 0. `empty`:
    what a row of nothing but -inf gives: NaN as for torch, zeros, or anything.

    Raises:
        ValueError: an `empty` that is none of these.
    """
    if empty not in ("nan", "zero", "any"):
        raise ValueError(f"empty={empty!r} is none of nan, zero and any")
    return _softmax(x, folded, empty)


@algebraic(lambda x, *_: rules.shares(x))
@remembered
def _softmax(x: Enclosure, folded: bool, empty: str) -> Enclosure:
    shares = exponentials(x, folded)
    exact, value, lo, hi = shares.terms.full
    least, most = shares.others
    quotient = current().quotient
    upper = torch.where(least > 0, hi / least, 1.0) * (1 + quotient + _SLACK)
    lower = torch.where(lo > 0, lo / most, 0.0) * (1 - quotient - _SLACK)
    lower = torch.where(lower <= _least(), 0.0, lower)
    upper = torch.where((hi > 0) & (upper <= _least()), upper + SUBNORMAL, upper)
    parts = [exact / exact.sum(-1, keepdim=True), value / shares.total.value, lower, upper.clamp(min=0.0)]
    parts[3] = torch.where(torch.isneginf(full(x.parts)[3]), 0.0, parts[3])
    return _settled(torch.stack(parts), shares, {"nan": math.nan, "zero": 0.0, "any": None}[empty])


@algebraic(lambda x, folded=False: x.exp().total().log())
@remembered
def log_sum_exp(x: Enclosure, folded: bool = False) -> Enclosure:
    """Return log(sum(exp(x))) over the last dimension, kept with size 1: the shift plus the logarithm of the sum.

    x: [..., N] with N ≥ 1; see `exponentials` for `folded`. NaN or +inf gives NaN, for inf - inf is; of a row of
    nothing but -inf nothing is known: it is -inf for torch, and NaN by the formula.
    """
    shares = exponentials(x, folded)
    _, value, low, high = shares.shift
    total = shares.total
    least, most = torch.log(total.lo) + high, torch.log(total.hi) + high
    error = _log_error(shares, total.lo, total.hi)
    if folded:
        largest = torch.maximum(least.abs(), most.abs())
        error = error + current().unit * (2 * torch.maximum(low.abs(), high.abs()) + 3 * largest)
    of_value = torch.log(total.value * torch.exp(high - value))
    parts = [torch.log(total.exact) + high, round_to(of_value, current().arithmetic) + value]
    ends = torch.maximum(least, low - 1.0) - error, most + error  # a lower end of the sum may be lost to fp32
    return _settled(torch.stack([*parts, *ends]), shares, None)


@algebraic(lambda x, folded=False: x - x.exp().total().log())
@remembered
def log_softmax(x: Enclosure, folded: bool = False) -> Enclosure:
    """Return (x - s) - log(sum(exp(x - s))) over the last dimension: only differences of x are ever large.

    x: [..., N] with N ≥ 1; see `exponentials` for `folded`. A kernel that takes the rounded logarithm of the whole sum
    from x is written as `x - log_sum_exp(x)`. NaN, +inf and rows of nothing but -inf as in `log_sum_exp`; -inf gives
    -inf.
    """
    shares, four = exponentials(x, folded), full(x.parts)
    high = shares.shift[3]
    least, most = shares.others
    near, far = (torch.where(torch.isfinite(d), d, 0.0) for d in shares.distance)
    error = _log_error(shares, least, most)
    unit = current().unit
    fold = 2 * unit * high.abs() if folded else 0.0
    upper, lower = four[3] - high - torch.log(least), four[2] - high - torch.log(most)
    upper = upper + (error + _ARGUMENT * unit * near + (fold + 3 * unit * upper.abs() if folded else 0.0))
    lower = lower - (error + _ARGUMENT * unit * far + (fold + 3 * unit * lower.abs() if folded else 0.0))
    value = round_to(four[1] - shares.shift[1], current().arithmetic)
    of_value = torch.log(shares.total.value * torch.exp(high - shares.shift[1]))
    exact = four[0] - high - torch.log(shares.total.exact)
    value = value - round_to(of_value, current().arithmetic)
    parts = torch.stack([exact, value, lower, torch.where(torch.isneginf(four[3]), four[3], upper)])
    if current().arithmetic is PRECISE:
        parts = torch.where(torch.isfinite(shares.shift).all(0), _without_cancellation(four), parts)
    return _settled(parts, shares, None)


def _without_cancellation(x: Tensor) -> Tensor:
    """Return four parts of (x - t) - log1p(sum of exp(x - t) of all others), where t is one element, the largest."""
    at = x[0].argmax(-1, keepdim=True).expand(4, *x.shape[1:-1], 1)
    t = x.gather(-1, at)
    distance = widened((x - t[[0, 1, 3, 2]]).scatter(-1, at, 0.0), 0.0)
    terms = torch.exp(distance)
    terms[3] = torch.where((terms[3] == 0) & torch.isfinite(distance[3]), SUBNORMAL**2, terms[3])  # too small for fp64
    others = terms.scatter(-1, at, 0.0).sum(-1, keepdim=True)
    logarithm = torch.log1p(widened(others, 4 * x.shape[-1] * FP64_U + _SLACK))
    return distance - widened(logarithm, _SLACK)[[0, 1, 3, 2]]


def _log_error(shares: Exponentials, least: Tensor, most: Tensor) -> Tensor:
    """Bound the error of the logarithm of a sum between `least` and `most`, whose shift may be any within its ends.

    It is one of the natural logarithm, or one of the binary one times a rounded ln 2.
    """
    _, _, low, high = shares.shift
    relative = max(current().relative("log"), current().relative("log2") + 2 * current().unit) + _SLACK
    largest = torch.maximum(torch.log(least).abs(), torch.log(most).abs() + (high - low))
    terms = math.log(shares.terms.shape[-1]) + 2.0**-10  # of which none is above 1
    return relative * largest.clamp(max=terms)


def _settled(parts: Tensor, shares: Exponentials, empty: float | None) -> Enclosure:
    """Settle stacked parts; see `Exponentials.settled`."""
    nan, hollow, unknown = shares.lost
    parts = torch.where(nan | hollow | unknown, 0.0, parts)
    arithmetic = current().arithmetic
    parts = widened(parts, 0.0) if arithmetic is PRECISE else rounded(parts, arithmetic)
    parts = torch.where(nan, math.nan, parts)
    if empty is not None:
        parts = torch.where(hollow, empty, parts)
    else:
        parts[:2] = torch.where(hollow, math.nan, parts[:2])
        unknown = unknown | hollow
    parts[2] = torch.where(unknown, -math.inf, parts[2])
    parts[3] = torch.where(unknown, math.inf, parts[3])
    return Enclosure(parts)


@algebraic(lambda x: x * constant(math.log(2)))
@remembered
def of_base_two(x: Enclosure) -> Enclosure:
    """Return x · ln 2, not rounded: its exp stands for a kernel's 2 to the power of x.

    Bounds of exponentials, such as those below and of `folded` arguments, hold for a multiplication by log2 e.
    """
    return Enclosure(x.parts * math.log(2))


@algebraic(lambda x, shift, below=True: (x - shift).exp())
@remembered
def shifted_exponential(x: Enclosure, shift: Enclosure, *, below: bool = True) -> Enclosure:
    """Return exp(x - shift), by base e or base 2; `below`: x is never larger than the shift.

    The difference is rounded, u of it. With base 2, x and the shift are multiplied by log2 e: that constant, rounded
    once or twice, adds 2u of the difference, and each product may be rounded, or the one of x fused with the
    subtraction. So x and the shift err by up to 2u each, beside what their own ends were rounded by; |x| is at most
    |shift| and the difference. Together 5u of the difference and 4u of the shift. The bound of `exp` adds its own.
    """
    four, subtracted = full(x.parts), full(shift.parts)
    lo, hi = four[2] - subtracted[3], four[3] - subtracted[2]
    if below:
        hi = torch.where(hi > 0, 0.0, hi)
    largest = torch.maximum(subtracted[2].abs(), subtracted[3].abs())
    largest = torch.where(torch.isfinite(largest), largest, 0.0)
    errors = [torch.where(torch.isfinite(end), current().unit * (5 * end.abs() + 4 * largest), 0.0) for end in (lo, hi)]
    value = round_to(four[1] - subtracted[1], current().arithmetic)
    difference = torch.stack(torch.broadcast_tensors(four[0] - subtracted[0], value, lo - errors[0], hi + errors[1]))
    return exp(Enclosure(unknown_where(difference, unknown(four), unknown(subtracted))))


@algebraic(rules.rescaled)
def rescaled(tiles: Sequence[Enclosure], factors: Sequence[Enclosure]) -> list[Enclosure]:
    """Return the terms of each tile as they count in the last sum: times all factors that come after the tile.

    tiles: [..., n] each; factors: [..., 1] each, between a tile and the next, one fewer than tiles. Each product with a
    factor is rounded, which is an error of at most u of every term of the sum so far, and rounded terms of it are what
    is enclosed: `total` and `rescaled_dot` add the errors of additions.
    """
    counted = [tiles[-1]]
    later: Tensor | None = None
    for number, (tile, factor) in enumerate(zip(reversed(tiles[:-1]), reversed(factors), strict=True), 1):
        later = factor.parts if later is None else unrounded_product(Enclosure(later), factor)
        terms = unrounded_product(tile, Enclosure(later))
        lost = number * current().unit
        counted.append(Enclosure(spread(terms, lost / (1 - lost), number * (FP32.quantum + flushed()))))
    return counted[::-1]


@algebraic(lambda terms, values, *_: terms @ values)
def rescaled_dot(terms: Enclosure, values: Enclosure, tiles: int, operand: Format) -> Enclosure:
    """Multiply terms [..., M, K] @ values [..., K, N], where `rescaled` gave the terms for so many tiles.

    A product with a factor may underflow, which is an error of its own beside those of the terms. Tensor cores saw the
    terms in the format `operand`, before they were rescaled by at most 1: of fp16 they cut more off, see `cut_off`.
    """
    product = dot(terms, values)
    cores, count = current().tensor_cores, terms.shape[-1]
    lost = tiles * (FP32.quantum + flushed())
    if tiles == 1:
        return product
    if cores is not None and operand is FP16:
        largest = torch.nan_to_num(values.full.abs(), nan=0.0, posinf=0.0).amax().clamp(min=1.0)
        lost = lost + 2 * count * cores.cut * 2.0**FP16.min_exponent * float(largest)
    return Enclosure(rounded(spread(product.parts, current().unit, lost), current().arithmetic))
