"""Comparisons, choices and extremes: exact operations, of which a kernel has only the freedom that its operands have.

A comparison of enclosures gives a `Truth`: what must hold whatever the kernel's numbers are, and what may hold. Where
the two differ, the comparison is *open*, and what is chosen by it may be either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure, aligned, both
from lastbit.numerics.parts import full, hull, magnitudes, negated, unknown, unknown_where
from lastbit.numerics.remembered import remembered

NaN = Literal["propagate", "ignore"]


@algebraic(rules.magnitude, of_enclosures=True)
def abs(x: Enclosure) -> Enclosure:
    """Return |x|, exact."""
    return Enclosure(magnitudes(x.parts))


@dataclass(frozen=True, eq=False)
class Truth:
    """The truth of a condition, as stacked bool tensors of one shape: for the exact parts, for the contract's values,
    and whether it must, and may, hold for a kernel's numbers. Where it must hold it may.
    """

    parts: Tensor

    @property
    def exact(self) -> Tensor:
        """Return whether it is true in real arithmetic."""
        return self.parts[0]

    @property
    def value(self) -> Tensor:
        """Return whether it is true of the contract's values."""
        return self.parts[1]

    @property
    def must(self) -> Tensor:
        """Return whether it is true of all numbers that a conforming kernel may have."""
        return self.parts[2]

    @property
    def may(self) -> Tensor:
        """Return whether it is true of some of them."""
        return self.parts[3]

    @property
    def open(self) -> Tensor:
        """Mask of the elements for which a conforming kernel may see it either way."""
        return self.may & ~self.must

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    def __and__(self, other: Truth | Tensor) -> Truth:
        return Truth(torch.logical_and(*_of_one_rank(self.parts, _truth(other))))

    def __or__(self, other: Truth | Tensor) -> Truth:
        return Truth(torch.logical_or(*_of_one_rank(self.parts, _truth(other))))

    def __invert__(self) -> Truth:
        exact, value, must, may = ~self.parts
        return Truth(torch.stack([exact, value, may, must]))

    __rand__ = __and__
    __ror__ = __or__


def _truth(condition: Truth | Tensor) -> Tensor:
    """Return the parts of a condition; one for a bool tensor, which is known."""
    if isinstance(condition, Truth):
        return condition.parts
    if condition.dtype != torch.bool:
        raise ValueError(f"a condition is of {condition.dtype}; it must be of bool, or a comparison of enclosures")
    return condition[None]


def _of_one_rank(*operands: Tensor) -> tuple[Tensor, ...]:
    """Reshape stacked parts to equally many dimensions."""
    rank = max(p.ndim for p in operands)
    return tuple(p.reshape(len(p), *[1] * (rank - p.ndim), *p.shape[1:]) for p in operands)


@remembered
def less(a: Enclosure | float, b: Enclosure | float, *, or_equal: bool = False) -> Truth:
    """Compare a < b, or a ≤ b; false of NaN."""
    x, y = (full(parts) for parts in aligned(a, b))
    compare = torch.le if or_equal else torch.lt
    exact, value = compare(x[:2], y[:2])
    must, may = compare(x[3], y[2]), compare(x[2], y[3])
    for four in (x, y):
        must = must & ~(torch.isneginf(four[2]) & torch.isposinf(four[3]))  # nothing is known about this operand
    return Truth(torch.stack([exact, value, must, may]))


@algebraic(rules.chosen, of_enclosures=True)
@remembered
def where(condition: Truth | Tensor, a: Enclosure | float, b: Enclosure | float) -> Enclosure:
    """Choose `a` where the condition is true and `b` elsewhere; either of both where it is open.

    condition: a bool tensor, which is exact, or a `Truth`; all three are broadcast.
    """
    x, y = aligned(a, b)
    if isinstance(condition, Truth) or len(x) != len(y):
        x, y = full(x), full(y)
    truth, x, y = _of_one_rank(_truth(condition), x, y)
    chosen = torch.where(truth, x, y)
    if isinstance(condition, Tensor):
        return Enclosure(chosen)
    either = hull(x.expand_as(chosen), y.expand_as(chosen))
    return Enclosure(torch.cat([chosen[:2], torch.where(truth[3:] & ~truth[2:3], either[2:], chosen[2:])]))


@algebraic(rules.larger, of_enclosures=True)
@remembered
def maximum(a: Enclosure | float, b: Enclosure | float, nan: NaN = "propagate") -> Enclosure:
    """Return the larger of both, exact; NaN if one is, or the other one with `nan="ignore"`, as `fmax` does."""
    return Enclosure(_larger(*both(a, b), nan))


@algebraic(partial(rules.larger, sign=-1), of_enclosures=True)
@remembered
def minimum(a: Enclosure | float, b: Enclosure | float, nan: NaN = "propagate") -> Enclosure:
    """Return the smaller of both, exact; NaN if one is, or the other one with `nan="ignore"`, as `fmin` does."""
    x, y = both(a, b)
    return Enclosure(negated(_larger(negated(x), negated(y), nan)))


def _larger(x: Tensor, y: Tensor, nan: NaN) -> Tensor:
    x, y = aligned(Enclosure(x), Enclosure(y))
    x, y = (x, y) if len(x) == len(y) else (full(x), full(y))
    if _ignored(nan):
        return torch.fmax(x, y)  # what may be NaN, about which nothing is known, has no largest end
    return unknown_where(torch.maximum(x, y), unknown(x), unknown(y))


def _ignored(nan: str) -> bool:
    if nan not in ("propagate", "ignore"):
        raise ValueError(f"nan={nan!r} is neither propagate nor ignore")
    return nan == "ignore"


@algebraic(rules.largest, of_enclosures=True)
@remembered
def amax(x: Enclosure, nan: NaN = "propagate") -> Enclosure:
    """Return the largest element of the last dimension (kept, size 1), exact; NaN if one is, or all with `ignore`."""
    return Enclosure(_largest(x.parts, nan))


@algebraic(partial(rules.largest, sign=-1), of_enclosures=True)
@remembered
def amin(x: Enclosure, nan: NaN = "propagate") -> Enclosure:
    """Return the smallest element of the last dimension (kept, size 1), exact; NaN if one is, or all with `ignore`."""
    return Enclosure(negated(_largest(negated(x.parts), nan)))


def _largest(parts: Tensor, nan: NaN) -> Tensor:
    if parts.shape[-1] == 0:
        raise ValueError(f"a row of shape {tuple(parts.shape[1:])} has no elements, so that none is the largest")
    if _ignored(nan):
        missing = torch.isnan(parts)
        most = parts.masked_fill(missing, -torch.inf).amax(-1, keepdim=True)
        return most.masked_fill(missing.all(-1, keepdim=True), torch.nan)
    lost = unknown(parts)
    return unknown_where(parts.amax(-1, keepdim=True), None if lost is None else lost.any(-1, keepdim=True))


@algebraic(rules.gathered, of_enclosures=True)
@remembered
def gather(x: Enclosure, index: Tensor | Indices, dim: int = -1) -> Enclosure:
    """Gather the elements of `x` at `index` along a dimension, as `torch.gather`; the hull of all an argmax may choose.

    index: an integer tensor with as many dimensions as x, which is exact, or the result of `argmax` for the last one.
    """
    if isinstance(index, Indices):
        return index.elements(x, dim)
    if index.is_floating_point() or index.dtype == torch.bool or index.ndim != len(x.shape):
        raise ValueError(
            f"gather takes an index of integers with {len(x.shape)} dimensions, as x has; this is "
            f"{index.dtype} of shape {tuple(index.shape)}"
        )
    size = x.shape[dim]
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        least, most = int(index.min()), int(index.max())
        raise ValueError(f"the index of gather reaches from {least} to {most}, but there are {size} elements")
    wide = index.to(torch.int64)[None].expand(len(x.parts), *index.shape)
    return Enclosure(x.parts.gather(dim if dim < 0 else dim + 1, wide))


@dataclass(frozen=True, eq=False)
class Indices:
    """A choice of one index per row, of several that are allowed.

    Attributes:
        allowed: [..., N], bool: mask of the allowed elements of the row; every row has at least one.
        value: [..., 1], int64: the contract's own choice.
        dtype: of the kernel's indices.
    """

    allowed: Tensor
    value: Tensor
    dtype: torch.dtype = torch.int64

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def range(self) -> Enclosure:
        """The contract's choice, between the first and last index that is allowed."""
        columns = torch.arange(self.allowed.shape[-1], dtype=torch.float64, device=self.allowed.device)
        first = torch.where(self.allowed, columns, torch.inf).amin(-1, keepdim=True)
        last = torch.where(self.allowed, columns, -torch.inf).amax(-1, keepdim=True)
        value = self.value.to(torch.float64)
        return Enclosure(torch.stack([value, value, first, last]))

    def outside(self, given: Tensor) -> Tensor:
        """Return a mask of the given indices, [..., 1], that are not allowed."""
        size = self.allowed.shape[-1]
        within = (given >= 0) & (given < size)
        return ~(within & self.allowed.gather(-1, given.to(torch.int64).clamp(0, max(size - 1, 0))))

    def only(self, given: Tensor) -> Indices:
        """Allow the given indices and no other; those beyond the row stand for any element of it."""
        size = self.allowed.shape[-1]
        columns = torch.arange(size, device=given.device)
        chosen = (columns == given) | (given < 0) | (given >= size)
        return Indices(chosen, given.to(torch.int64).clamp(0, size - 1), self.dtype)

    def elements(self, x: Enclosure, dim: int = -1) -> Enclosure:
        """Return the elements of rows of x [..., N] at the index: the hull of those at all allowed indices."""
        if dim not in (-1, len(x.shape) - 1) or x.shape[-1] != self.allowed.shape[-1]:
            raise ValueError(f"what argmax chose of {self.allowed.shape[-1]} elements is not that of {x.shape[-1]}")
        four = full(x.parts)
        chosen = four[:2].gather(-1, self.value[None].expand(2, *self.shape))
        lost = ((torch.isneginf(four[2]) & torch.isposinf(four[3])) & self.allowed).any(-1, keepdim=True)
        nan = torch.isnan(four[2])
        mixed = (nan & self.allowed).any(-1, keepdim=True) & (~nan & self.allowed).any(-1, keepdim=True)
        lo = torch.where(self.allowed, four[2], torch.inf).amin(-1, keepdim=True)
        hi = torch.where(self.allowed, four[3], -torch.inf).amax(-1, keepdim=True)
        lo, hi = lo.masked_fill(lost | mixed, -torch.inf), hi.masked_fill(lost | mixed, torch.inf)
        return Enclosure(torch.cat([chosen, lo[None], hi[None]]))


@remembered
def argmax(x: Enclosure, dtype: torch.dtype = torch.int64) -> Indices:
    """Return the index of the largest element of the last dimension: any that may be the largest, ties among them.

    x: [..., N] with N ≥ 1. A NaN counts as the largest, as for torch; where an element may be one, it may be chosen.

    >>> argmax(Enclosure.point(torch.tensor([[2.0, 5.0, 5.0]]))).allowed
    tensor([[False,  True,  True]])
    """
    four = full(x.parts)
    if four.shape[-1] == 0:
        raise ValueError(f"a row of shape {tuple(x.shape)} has no elements, so that none is the largest")
    lo, hi = four[2], four[3]
    nan, lost = torch.isnan(lo), torch.isneginf(lo) & torch.isposinf(hi)
    least = torch.where(nan, torch.inf, lo).amax(-1, keepdim=True)
    allowed = (hi >= least) | lost
    allowed = torch.where(nan.any(-1, keepdim=True), nan | lost, allowed)
    return Indices(allowed, four[1].argmax(-1, keepdim=True), dtype)
