"""The enclosure of a tensor: exact value, contract's value, and the interval of what a conforming kernel may give.

Every operation below stands for one fp32 operation of a kernel: the exact part is never rounded; the contract's value
and both ends of the interval are, and because rounding is monotone, correctly rounded ends enclose every correctly
rounded result. Where a kernel has freedom (approximate primitives, order of a product) the ends move apart.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics import parts as arithmetic
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.formats import E4M3, E5M2, PRECISE, Format
from lastbit.numerics.premises import EXACT, current
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import Residues, concatenated, constant

if TYPE_CHECKING:
    from lastbit.numerics.selection import Truth


@dataclass(frozen=True, eq=False)
class Enclosure:
    """fp64 tensors of one shape, stacked: exact, value, lo, hi.

    Two parts stand for exact and value = lo = hi (nothing but correctly rounded operations so far), one part for a
    number that is known exactly. Invariant: an element's `lo` and `hi` are both NaN (the result must be NaN) or neither
    is; an element about which nothing is known has lo = -inf and hi = +inf.

    `fp8` is the format of fp8 in which a kernel may hold the elements, None after any arithmetic: see `dot`. `algebra`:
    the residues of the elements, where they are followed.

    >>> third = Enclosure.point(torch.tensor([1.0])) / 3.0
    >>> third.exact.item(), third.value.item()
    (0.3333333333333333, 0.3333333432674408)
    >>> third.lo.item() < third.value.item() < third.hi.item()  # a kernel may divide, or multiply by 1 / 3
    True
    """

    parts: Tensor
    fp8: Format | None = None
    algebra: Residues | None = None

    @classmethod
    @algebraic(lambda _, values: rules.point(values), of_enclosures=True)
    @remembered
    def point(cls, values: Tensor | float) -> Enclosure:
        """Enclose numbers that are known exactly, such as the elements of an input."""
        numbers = torch.as_tensor(values)
        fp8 = next((fmt for fmt in (E4M3, E5M2) if fmt.dtype == numbers.dtype), None)
        return cls(numbers.to(torch.float64).unsqueeze(0), fp8)

    @property
    def exact(self) -> Tensor:
        """The result in real arithmetic (fp64, no rounding)."""
        return self.parts[0]

    @property
    def value(self) -> Tensor:
        """The result of the contract with every primitive correctly rounded and every sum correctly rounded."""
        return self.parts[min(1, len(self.parts) - 1)]

    @property
    def lo(self) -> Tensor:
        """Smallest value that a conforming kernel may give."""
        return self.parts[-2] if len(self.parts) == 4 else self.value

    @property
    def hi(self) -> Tensor:
        """Largest value that a conforming kernel may give."""
        return self.parts[-1] if len(self.parts) == 4 else self.value

    @property
    def full(self) -> Tensor:
        """All four parts."""
        return arithmetic.full(self.parts)

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    def __getitem__(self, index: tuple[object, ...]) -> Enclosure:
        return self._moved(lambda x: x[(slice(None), *index)])  # type: ignore[index]

    def _moved(self, function: Callable[[Tensor], Tensor]) -> Enclosure:
        """Move elements by a function that is applied to their stacked parts, and to their residues."""
        residues = None if self.algebra is None else self.algebra.moved(function)
        return Enclosure(function(self.parts), self.fp8, residues)

    @property
    def residues(self) -> Residues:
        """The residues of the elements; if they were not followed, OPEN unless all are numbers known exactly."""
        if self.algebra is not None:
            return self.algebra
        return Residues.of(self.value).open_where(torch.full(self.shape, len(self.parts) > 1))

    def in_groups(self, size: int) -> Enclosure:
        """Cut the last dimension into groups: [..., N] → [..., N / size, size]."""
        return self._moved(lambda x: x.unflatten(-1, (-1, size)))

    def joined(self) -> Enclosure:
        """Put the groups together again: [..., G, size] → [..., G · size]."""
        return self._moved(lambda x: x.flatten(-2))

    @property
    def transposed(self) -> Enclosure:
        """This matrix, or these matrices, transposed: the last two dimensions exchanged."""
        return self._moved(lambda x: x.transpose(-1, -2))

    def reshape(self, *shape: int) -> Enclosure:
        """Return the elements in another shape, like `torch.reshape`."""
        return self._moved(lambda x: x.reshape(len(x), *shape))

    def permute(self, *dims: int) -> Enclosure:
        """Reorder the dimensions: all of them, each counted from the last one, -1."""
        return self._moved(lambda x: x.permute(0, *dims))

    def expand(self, *shape: int) -> Enclosure:
        """Repeat the elements along dimensions of size 1 and new leading ones; -1 leaves a size as it is."""
        new = [1] * (len(shape) - len(self.shape))
        return self._moved(lambda x: x.reshape(len(x), *new, *self.shape).expand(-1, *shape))

    @algebraic(lambda x, mask: Residues.where(mask, constant(0.0), x))
    @remembered
    def zero_where(self, mask: Tensor) -> Enclosure:
        """Put zeros where the mask is true, whatever was there."""
        return Enclosure(self.parts.masked_fill(mask, 0.0), self.fp8)

    @property
    def unknown(self) -> Tensor | None:
        """Mask of the elements about which nothing is known, NaN included; None where there can be none."""
        return arithmetic.unknown(self.parts)

    @algebraic(rules.unknown)
    def unknown_where(self, *masks: Tensor | None) -> Enclosure:
        """Mark the masked elements as unknown, and those of which one end alone is NaN."""
        return Enclosure(arithmetic.unknown_where(self.parts, *masks))

    @algebraic(rules.rounded, of_enclosures=True)
    @remembered
    def rounded(self, fmt: Format) -> Enclosure:
        """Round value and ends correctly to `fmt`, in its direction; the exact part stays.

        Nothing is known of what a number that may be NaN, or beyond the range of integers, is converted to. Where
        nothing is to be rounded, as for the exact value alone, ends that enclose it do so still.
        """
        if current() == EXACT:
            return self
        parts = (arithmetic.converted if fmt.is_integer else arithmetic.rounded)(self.parts, fmt)
        return Enclosure(parts, plain if (plain := fmt.nearest) in (E4M3, E5M2) else None)

    @algebraic(rules.added_to, of_enclosures=True)
    @remembered
    def __add__(self, other: Enclosure | float) -> Enclosure:
        return Enclosure(arithmetic.added(self.parts, _parts(other, self), current().arithmetic))

    @algebraic(partial(rules.added_to, sign=-1), of_enclosures=True)
    @remembered
    def __sub__(self, other: Enclosure | float) -> Enclosure:
        return Enclosure(arithmetic.subtracted(self.parts, _parts(other, self), current().arithmetic))

    @algebraic(Residues.__mul__)
    @remembered
    def __mul__(self, other: Enclosure | float) -> Enclosure:
        return Enclosure(arithmetic.multiplied(self.parts, _parts(other, self), current().arithmetic))

    @algebraic(Residues.__neg__)
    @remembered
    def __neg__(self) -> Enclosure:
        return Enclosure(arithmetic.negated(self.parts))

    @algebraic(lambda x, other: other - x)
    @remembered
    def __rsub__(self, other: float) -> Enclosure:
        return Enclosure(arithmetic.subtracted(_parts(other, self), self.parts, current().arithmetic))

    def __truediv__(self, other: Enclosure | float) -> Enclosure:
        return _divide(self, other)

    def __rtruediv__(self, other: float) -> Enclosure:
        return _divide(other, self)

    def __lt__(self, other: Enclosure | float) -> Truth:
        return _less(self, other)

    def __gt__(self, other: Enclosure | float) -> Truth:
        return _less(other, self)

    def __le__(self, other: Enclosure | float) -> Truth:
        return _less(self, other, or_equal=True)

    def __ge__(self, other: Enclosure | float) -> Truth:
        return _less(other, self, or_equal=True)

    @algebraic(rules.magnitude, of_enclosures=True)
    @remembered
    def __abs__(self) -> Enclosure:
        return Enclosure(arithmetic.magnitudes(self.parts))

    def __pow__(self, exponent: object) -> Enclosure:
        raise TypeError(f"x ** {exponent} does not say how it is multiplied; write product_in_any_order(x, x, …)")

    @classmethod
    def __torch_function__(cls, function: Callable[..., object], *_: object) -> Enclosure:
        what = f"torch.{function.__name__} takes no enclosure"
        raise TypeError(f"{what}; a reference uses the functions of lastbit.numerics (docs/primitives.md)")

    __radd__ = __add__
    __rmul__ = __mul__


def _divide(a: Enclosure | float, b: Enclosure | float) -> Enclosure:
    """Call `divide` of a module that imports this one."""
    from lastbit.numerics.primitives import divide

    return divide(a, b)


def _less(a: Enclosure | float, b: Enclosure | float, *, or_equal: bool = False) -> Truth:
    """Call `less` of a module that imports this one."""
    from lastbit.numerics.selection import less

    return less(a, b, or_equal=or_equal)


def settled(parts: Tensor) -> Enclosure:
    """Make an enclosure of stacked parts: round the contract's side to fp32, or to the arithmetic of the premises."""
    return Enclosure(arithmetic.rounded(parts, current().arithmetic))


def aligned(a: Enclosure | float, b: Enclosure | float) -> tuple[Tensor, Tensor]:
    """Return the parts of both operands with equally many dimensions, and equally many parts unless one is a point."""
    return arithmetic.aligned(*both(a, b))


def both(a: Enclosure | float, b: Enclosure | float) -> tuple[Tensor, Tensor]:
    """Return the parts of both operands as they are."""
    return _parts(a, b), _parts(b, a)


def _parts(operand: Enclosure | float, like: Enclosure | float) -> Tensor:
    """Return the parts of an operand; a Python number becomes fp32, as in a kernel, or what the premises say."""
    if isinstance(operand, Enclosure):
        return operand.parts
    try:
        bits = struct.pack("d", operand)
    except struct.error:
        raise TypeError(f"{operand!r} is neither an enclosure nor a number") from None
    return _number(bits, like.parts.device if isinstance(like, Enclosure) else None, current().numbers.dtype)


@lru_cache(maxsize=256)
def _number(bits: bytes, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """Return a number as one part; it is copied once per device, where a copy takes longer than an operation."""
    return torch.tensor([struct.unpack("d", bits)[0]], dtype=dtype, device=device).to(torch.float64)


def unrounded_product(a: Enclosure | float, b: Enclosure | float) -> Tensor:
    """Return the parts of a · b, not rounded; exact in fp64 for numbers of fp32."""
    return arithmetic.unrounded_product(*both(a, b))


def widened(parts: Tensor, relative: float, absolute: float = 0.0) -> Tensor:
    """Return four parts, with the ends of `parts` moved outward by a relative and an absolute error."""
    return arithmetic.spread(parts, float(relative), float(absolute))


@algebraic(rules.hull)
@remembered
def hull(first: Enclosure, *others: Enclosure) -> Enclosure:
    """Enclose results that may be any of the given ones; exact part and value are those of the first."""
    if not current().options:
        return first
    return Enclosure(arithmetic.hull(first.parts, *(other.parts for other in others)))


@algebraic(lambda *each: Residues(torch.stack([x.numbers for x in each], dim=-1)))
@remembered
def stack(*enclosures: Enclosure) -> Enclosure:
    """Put enclosures of one shape side by side in a new last dimension."""
    return Enclosure(torch.stack(_alike(enclosures), dim=-1))


@algebraic(lambda *each, dim=-1: concatenated(each, dim))
@remembered
def concatenate(*enclosures: Enclosure, dim: int = -1) -> Enclosure:
    """Join enclosures along a dimension, counted from the last one, -1."""
    return Enclosure(torch.cat(_alike(enclosures), dim=dim))


def _alike(enclosures: Sequence[Enclosure]) -> list[Tensor]:
    """Return the parts of all enclosures, equally many of each."""
    alike = len({len(e.parts) for e in enclosures}) == 1
    return [e.parts if alike else e.full for e in enclosures]


@algebraic(rules.product)
@remembered
def product_in_any_order(*factors: Enclosure | float) -> Enclosure:
    """Multiply all factors by fp32 multiplications in whichever order; the value is that from left to right.

    One of the factors at least is an enclosure.

    A part of the factors is multiplied in one of the ways to split it in two, so the product of each part is computed
    once: 6 multiplications for three factors, 25 for four.
    """
    like = next(factor for factor in factors if isinstance(factor, Enclosure))
    return Enclosure(arithmetic.product_in_any_order(*(_parts(f, like) for f in factors), fmt=current().arithmetic))


@algebraic(Residues.__mul__)
@remembered
def fusible_product(a: Enclosure, b: Enclosure | float) -> Enclosure:
    """Return a · b, rounded or not, because a compiler may fuse it into the addition that follows."""
    return Enclosure(arithmetic.fusible_product(*both(a, b), current().arithmetic))


@algebraic(lambda a, b, c: a * b + c)
@remembered
def multiply_add(a: Enclosure, b: Enclosure | float, c: Enclosure | float) -> Enclosure:
    """Return a · b + c with the product rounded or not: a compiler may contract the two into one FMA."""
    return Enclosure(arithmetic.multiply_add(*both(a, b), _parts(c, a), current().arithmetic))


@algebraic(rules.clamped, of_enclosures=True)
@remembered
def clamp(x: Enclosure, low: float, high: float) -> Enclosure:
    """Limit values to [low, high], which are taken to fp32; NaN stays NaN."""
    return Enclosure(arithmetic.clamped(x.parts, _as_fp32(low), _as_fp32(high)))


def at_least(x: Enclosure, low: float) -> Enclosure:
    """Return the larger of `x` and `low`, which is taken to fp32; NaN stays NaN."""
    return clamp(x, low, float("inf"))


def _as_fp32(number: float) -> float:
    return ctypes.c_float(number).value


def in_reals(computed: Enclosure, formula: Callable[[], Enclosure]) -> Enclosure:
    """Return `computed`, in which digits cancel; where nothing is rounded to fp32, a formula in which they do not."""
    return formula() if current().arithmetic is PRECISE else computed


@algebraic(rules.largest_magnitude, of_enclosures=True)
def largest_magnitude(x: Enclosure) -> Enclosure:
    """Return the largest |element| of the last dimension (kept, of size 1); NaN are ignored, 0 where all are NaN."""
    parts = arithmetic.magnitudes(x.parts)
    if parts.shape[-1] == 0:
        return Enclosure(parts.new_zeros((*parts.shape[:-1], 1)))
    return Enclosure(torch.where(torch.isnan(parts), 0.0, parts).amax(dim=-1, keepdim=True))
