"""Sums of any number of terms in any order: whole rows and columns, prefixes, and few terms with sharp ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.errors import OpError
from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.formats import FP32, FP64_U, Format
from lastbit.numerics.fused import one_kernel_on_cuda
from lastbit.numerics.parts import added, all_finite, full, hull, magnitudes, rounded, unknown_where, widened
from lastbit.numerics.premises import EXACT, current
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import Residues

_MANTISSA_BITS = 52
_HIDDEN_BIT = 1 << _MANTISSA_BITS
_FRACTION = _HIDDEN_BIT - 1
_EXPONENT = 0x7FF << _MANTISSA_BITS
LATTICE_UNITS = 2.0**24
UNDERFLOW = 2.0**-150  # largest error of a product that is rounded to a subnormal fp32 number
SUMS, QUANTUM, KNOWN, NEGATIVE, POSITIVE, UNKNOWN = slice(0, 6), 6, 7, 8, 9, 10


@dataclass(frozen=True, eq=False)
class Sum:
    """The facts about the terms of a sum that bound it; `+` joins the terms of two parts of one sum.

    Attributes:
        count: number of terms.
        products: the terms are products that may underflow, or be rounded before they are added.
        facts: stacked, in fp64: the four parts of the sum; the sums of the largest |term|, all of them and finite ones
            only; the largest power of two that divides all terms; whether every term is one known number, and whether a
            term may be negative or positive, each 0 or 1.
        algebra: the residues of the sum, where they are followed.
    """

    count: int
    products: bool
    facts: Tensor
    algebra: Residues | None = None

    @classmethod
    def of(cls, terms: Tensor, *, dim: int = -1, products: bool = False) -> Sum:
        """Sum `terms` (stacked parts) over the last dimension, which is kept with size 1, or over the one before."""
        facts = facts_of_rows(terms) if dim == -1 else facts_of_columns(terms)
        return cls(terms.shape[dim], products, facts)

    def __add__(self, other: Sum) -> Sum:
        a, b = self.facts, other.facts
        sums, least = a[SUMS] + b[SUMS], torch.minimum(a[QUANTUM:NEGATIVE], b[QUANTUM:NEGATIVE])
        facts = torch.cat([sums, least, torch.maximum(a[NEGATIVE:], b[NEGATIVE:])])
        known = None if self.algebra is None or other.algebra is None else self.algebra + other.algebra
        return Sum(self.count + other.count, self.products, facts, known)

    @property
    def shape(self) -> torch.Size:
        return self.facts.shape[1:]

    @property
    def enclosure(self) -> Enclosure:
        """The enclosure of the fp32 sum."""
        return self.enclosed()

    def enclosed(self, *, nonnegative: bool = False) -> Enclosure:
        """Enclose the fp32 sum, which may be known not to be negative.

        The sums are of fp64, in an order that is not the same on every device: 2 · count · 2^-53 covers any.
        """
        relative = current().accumulation(self.count) + 2 * self.count * FP64_U
        absolute = self.count * UNDERFLOW if self.products else 0.0
        least = 0.0 if nonnegative else -torch.inf
        parts = bounded(self.facts, relative, absolute, self.count * flushed(), least, current().arithmetic)
        return Enclosure(parts, algebra=self.algebra)

    def then(self, function: Callable[..., Enclosure], *others: Sum) -> AfterSums:
        """Apply a function to the finished sum, and to finished `others`, such as a mean from a sum and a count.

        `function` takes an enclosure for each sum. It must not depend on the rows that were seen: a count of rows or
        labels is a sum, too.
        """
        return AfterSums((self, *others), function)


@dataclass(frozen=True, eq=False)
class AfterSums:
    """A function of sums over rows, applied when all rows have been seen; `+` joins the terms of two parts of the rows.

    Attributes:
        sums: the sums.
        function: enclosures of the finished sums → enclosure of the result.
    """

    sums: tuple[Sum, ...]
    function: Callable[..., Enclosure]

    def __add__(self, other: AfterSums) -> AfterSums:
        for name, number in _numbers(self.function).items():
            if (found := _numbers(other.function).get(name, number)) != number:
                raise OpError(
                    f"what follows from a sum over rows takes {name}={number} in some rows and {found} in others; what "
                    "depends on the rows must come from a sum over them, as a count does from sum_of_rows of ones"
                )
        return AfterSums(tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)), self.function)

    @property
    def shape(self) -> torch.Size:
        return self.enclosure.shape

    @property
    def enclosure(self) -> Enclosure:
        """The enclosure of the result for the rows seen so far."""
        return self.function(*(each.enclosure for each in self.sums))

    def then(self, function: Callable[[Enclosure], Enclosure]) -> AfterSums:
        """Apply another function to the result."""
        return AfterSums(self.sums, lambda *finished: function(self.function(*finished)))


def _numbers(function: Callable[..., object]) -> dict[str, float]:
    """Return the numbers in the closure of a function, by the names of its variables."""
    code = getattr(function, "__code__", None)
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True) if code else ()
    return {name: cell.cell_contents for name, cell in cells if isinstance(cell.cell_contents, int | float)}


def flushed() -> float:
    """Return the most that flushing one subnormal result to zero can change; 0 where the premises exclude it."""
    return FP32.quantum * 2.0**23 if current().flushes_subnormals else 0.0


def finite(x: Tensor) -> Tensor:
    """Return magnitudes, with zeros for infinities and NaN."""
    return torch.where(torch.isfinite(x), x.abs(), 0.0)


def quantum_of(x: Tensor, dim: int, *, keepdim: bool = True) -> Tensor:
    """Return the largest power of two that divides all elements of `x` (fp64) along `dim`; inf where all are zero."""
    if x.shape[dim] == 0:
        return torch.full_like(x.sum(dim, keepdim=keepdim), torch.inf)
    return units_of(x).amin(dim, keepdim=keepdim)


def units_of(x: Tensor) -> Tensor:
    """Return the largest power of two that divides each element of `x` (fp64); inf of zero, infinities and NaN."""
    bits = x.view(torch.int64)
    significand = (bits & _FRACTION).bitwise_or_(_HIDDEN_BIT)
    lowest = significand.bitwise_and_(-significand).to(torch.float64)
    last_place = (bits & _EXPONENT).view(torch.float64).mul_(2.0**-_MANTISSA_BITS)  # inf where x is not finite
    return lowest.mul_(last_place).masked_fill_(x == 0, torch.inf)


# The operations on stacked parts, as in `lastbit.numerics.parts`


@one_kernel_on_cuda
def facts_of_rows(terms: Tensor) -> Tensor:
    """Return the facts of `Sum` over the last dimension, which is kept."""
    return _facts(terms, -1, keepdim=True)


@one_kernel_on_cuda
def facts_of_columns(terms: Tensor) -> Tensor:
    """Return the facts of `Sum` for terms [parts, M, N] over the M rows: [10, N]."""
    return _facts(terms, -2, keepdim=False)


@one_kernel_on_cuda
def facts_of_squares(x: Tensor) -> Tensor:
    """Return the facts of x² over the last dimension, which is kept, and 1 where an element of x is unknown, else 0."""
    facts = _facts(magnitudes(x).square(), -1, keepdim=True)
    lost = torch.isneginf(x[-2]) & torch.isposinf(x[-1]) if len(x) == 4 else torch.zeros_like(x[0], dtype=torch.bool)
    return torch.cat([facts, lost.any(-1, keepdim=True).to(facts.dtype)[None]])


def _facts(terms: Tensor, dim: int, *, keepdim: bool) -> Tensor:
    lo, hi = (terms[2], terms[3]) if len(terms) == 4 else (terms[-1], terms[-1])
    magnitude = (torch.maximum(lo.abs(), hi.abs()) if len(terms) == 4 else lo.abs()).sum(dim, keepdim=keepdim)
    of_finite = magnitude
    if not all_finite(magnitude):
        of_finite = torch.maximum(finite(lo), finite(hi)).sum(dim, keepdim=keepdim)
    known, negative = (lo == hi).all(dim, keepdim=keepdim), (lo < 0).any(dim, keepdim=keepdim)
    truths = [truth.to(terms.dtype) for truth in (known, negative, (hi > 0).any(dim, keepdim=keepdim))]
    rest = torch.stack([magnitude, of_finite, quantum_of(lo, dim, keepdim=keepdim), *truths])
    return torch.cat([full(terms.sum(dim, keepdim=keepdim)), rest])


@one_kernel_on_cuda
def bounded(facts: Tensor, relative: float, absolute: float, flushed: float, least: float, fmt: Format) -> Tensor:
    """Enclose a sum by its facts, with an error relative to the magnitudes and absolute ones, not below `least`.

    On a lattice it is exact but for flushing. Nothing is known where some order of the sum overflows.
    """
    return bounded_each(facts, relative, absolute, flushed, least, fmt)


def bounded_each(
    facts: Tensor,
    relative: float | Tensor,
    absolute: float | Tensor,
    flushed: float | Tensor,
    least: float,
    fmt: Format,
) -> Tensor:
    """Enclose sums as `bounded`, with errors that may differ from sum to sum."""
    exact, value, lo, hi, magnitude, of_finite, quantum, known, negative, positive = facts.unbind()
    lattice = (known > 0) & (magnitude < LATTICE_UNITS * quantum) & (quantum >= FP32.quantum)
    slack = torch.where(lattice, 0.0, relative * magnitude + absolute) + flushed
    low, high = lo - slack, hi + slack
    low = torch.where(low < least, least, low)
    low, high = torch.where(torch.isfinite(lo), low, lo), torch.where(torch.isfinite(hi), high, hi)
    overflows = (negative > 0) & (positive > 0) & (of_finite > fmt.max) & ~torch.isnan(value)
    return rounded(unknown_where(torch.stack([exact, value, low, high]), overflows), fmt)


@one_kernel_on_cuda
def averaged(x: Tensor, count: float, relative: float, fmt: Format) -> Tensor:
    """Return x / count, with a relative error if it is not zero."""
    means = full(x) / count
    return rounded(widened(means, relative) if relative else means, fmt)


@algebraic(rules.cumulative)
@remembered
def cumsum(x: Enclosure) -> Enclosure:
    """Sum the prefixes of the last dimension, each by fp32 additions of its terms in any order.

    That covers scans from first to last, in trees, and in blocks to which the sum of what is before them is added. Not
    covered is a prefix from which something is taken away again, as in the total minus the rest.
    """
    count = torch.arange(1, x.shape[-1] + 1, dtype=torch.float64, device=x.parts.device)
    relative = torch.tensor([current().accumulation(n) for n in range(1, x.shape[-1] + 1)], dtype=torch.float64)
    relative = relative.to(count.device) + 2 * count * FP64_U
    terms = x.parts
    lo, hi = (terms[2], terms[3]) if len(terms) == 4 else (terms[-1], terms[-1])
    magnitude = torch.maximum(lo.abs(), hi.abs()).cumsum(-1)
    of_finite = torch.maximum(finite(lo), finite(hi)).cumsum(-1)
    quantum = units_of(lo.contiguous()).cummin(-1).values
    known = (lo == hi).to(lo.dtype).cummin(-1).values
    signs = [sign.to(lo.dtype).cummax(-1).values for sign in (lo < 0, hi > 0)]
    facts = torch.cat([full(terms.cumsum(-1)), torch.stack([magnitude, of_finite, quantum, known, *signs])])
    return Enclosure(bounded_each(facts, relative, 0.0, count * flushed(), -torch.inf, current().arithmetic))


@algebraic(rules.added, of_enclosures=True)
@remembered
def sum_in_any_order(terms: Sequence[Enclosure], fmt: Format | None = None) -> Enclosure:
    """Add terms of one shape two at a time in whichever order, each sum rounded to fp32 and then to `fmt`.

    25 additions for four terms, 3,025 for eight, and so on by the power of three. For two numbers of bf16 or fp16, to
    round their sum to fp32 first changes nothing (24 >= 2 * 11 + 2, Figueroa 1995). The value is that of one order.
    """
    arithmetic, exact = current().arithmetic, current() == EXACT

    def add(x: Tensor, y: Tensor) -> Tensor:
        total = added(x, y, arithmetic)
        return total if fmt is None or exact else rounded(total, fmt)

    everything = (1 << len(terms)) - 1
    sums = {1 << position: term.parts for position, term in enumerate(terms)}
    for part in range(1, everything + 1):
        if part not in sums:  # what is added last: one side of the split without the last term, and the other with it
            last = 1 << (part.bit_length() - 1)
            one = rest = part ^ last
            sums[part] = add(sums[rest], sums[last])
            while one := (one - 1) & rest:
                sums[part] = hull(sums[part], add(sums[one], sums[part ^ one]))
    return Enclosure(sums[everything])
