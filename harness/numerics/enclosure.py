"""The enclosure of a tensor: exact value, contract's value, and the interval of what a conforming kernel may give.

Every operation below stands for one fp32 operation of a kernel: the exact part is never rounded; the contract's value
and both ends of the interval are, and because rounding is monotone, correctly rounded ends enclose every correctly
rounded result. Where a kernel has freedom (approximate primitives, order of a product) the ends move apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics.formats import Format, are_fp32, round_to, sum_to_odd
from harness.numerics.premises import current

Operand = "Enclosure | float"


@dataclass(frozen=True, eq=False)
class Enclosure:
    """fp64 tensors of one shape, stacked: exact, value, lo, hi.

    Two parts stand for exact and value = lo = hi (nothing but correctly rounded operations so far), one part for a
    number that is known exactly. Invariant: an element's `lo` and `hi` are both NaN (the result must be NaN) or neither
    is; an element about which nothing is known has lo = -inf and hi = +inf.
    """

    parts: Tensor

    @classmethod
    def point(cls, values: Tensor | float) -> Enclosure:
        """The enclosure of numbers that are known exactly, such as the elements of an input."""
        return cls(torch.as_tensor(values).to(torch.float64).unsqueeze(0))

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
        return self.parts if len(self.parts) == 4 else self.parts[[0, *[len(self.parts) - 1] * 3]]

    @property
    def shape(self) -> torch.Size:
        return self.parts.shape[1:]

    def __getitem__(self, index: tuple[object, ...]) -> Enclosure:
        return Enclosure(self.parts[(slice(None), *index)])  # type: ignore[index]

    def in_groups(self, size: int) -> Enclosure:
        """The last dimension cut into groups: [..., N] → [..., N / size, size]."""
        return Enclosure(self.parts.unflatten(-1, (-1, size)))

    def joined(self) -> Enclosure:
        """The groups put together again: [..., G, size] → [..., G · size]."""
        return Enclosure(self.parts.flatten(-2))

    @property
    def transposed(self) -> Enclosure:
        """The last two dimensions exchanged."""
        return Enclosure(self.parts.transpose(-1, -2))

    def reshape(self, *shape: int) -> Enclosure:
        """The same elements in another shape."""
        return Enclosure(self.parts.reshape(len(self.parts), *shape))

    def zero_where(self, mask: Tensor) -> Enclosure:
        """The same with zeros where the mask is true, whatever was there."""
        return Enclosure(self.parts.masked_fill(mask, 0.0))

    @property
    def unknown(self) -> Tensor | None:
        """Elements about which nothing is known, NaN included; None where there can be none."""
        return torch.isneginf(self.lo) & torch.isposinf(self.hi) if len(self.parts) == 4 else None

    def unknown_where(self, *masks: Tensor | None) -> Enclosure:
        """The same with nothing known about the masked elements, nor about those of which one end is NaN."""
        if len(self.parts) < 4:
            return self
        unknown = torch.isnan(self.lo) ^ torch.isnan(self.hi)
        for mask in masks:
            unknown = unknown if mask is None else unknown | mask
        ends = torch.where(unknown, -torch.inf, self.lo), torch.where(unknown, torch.inf, self.hi)
        return Enclosure(torch.stack([self.exact, self.value, *ends]))

    def rounded(self, fmt: Format) -> Enclosure:
        """Value and ends correctly rounded to `fmt`; the exact part stays."""
        contract = self.parts[1:] if len(self.parts) > 1 else self.parts
        rounded = Enclosure(torch.cat([self.parts[:1], round_to(contract, fmt)]))
        if fmt.overflow == "nan" and len(self.parts) == 4:  # both ends overflow, on either side of what is finite
            return rounded.unknown_where(self.unknown, torch.isnan(rounded.lo) & (self.lo < 0) & (self.hi > 0))
        return rounded.unknown_where(self.unknown)

    def __add__(self, other: Enclosure | float) -> Enclosure:
        return settled(unrounded_sum(self, other))

    def __sub__(self, other: Enclosure | float) -> Enclosure:
        return self + (-_enclosure(other, self))

    def __mul__(self, other: Enclosure | float) -> Enclosure:
        return settled(unrounded_product(self, other))

    def __neg__(self) -> Enclosure:
        negated = -self.parts
        return Enclosure(negated[[0, 1, 3, 2]] if len(negated) == 4 else negated)

    __radd__ = __add__
    __rmul__ = __mul__


def settled(parts: Tensor) -> Enclosure:
    """An enclosure from stacked parts whose contract side is still to be rounded to fp32, of wide range if need be."""
    return Enclosure(parts).rounded(current().arithmetic)


def aligned(a: Enclosure | float, b: Enclosure | float) -> tuple[Tensor, Tensor]:
    """The parts of both operands, as many dimensions in each and as many parts unless one is a point."""
    a, b = _enclosure(a, b), _enclosure(b, a)
    x, y = a.parts, b.parts
    if {len(x), len(y)} == {2, 4}:
        x, y = a.full, b.full
    rank = max(x.ndim, y.ndim)
    return tuple(p.reshape(len(p), *[1] * (rank - p.ndim), *p.shape[1:]) for p in (x, y))  # type: ignore[return-value]


def _enclosure(operand: Enclosure | float, like: Enclosure | float) -> Enclosure:
    """A Python number reaches a kernel as fp32, on the device of the other operand."""
    if isinstance(operand, Enclosure):
        return operand
    device = like.parts.device if isinstance(like, Enclosure) else None
    return Enclosure.point(torch.tensor(operand, dtype=torch.float32, device=device))


def unrounded_sum(a: Enclosure | float, b: Enclosure | float) -> Tensor:
    """Parts of a + b, such that rounding them to fp32 is one correct rounding.

    For numbers of fp32 the fp64 sum is (53 >= 2 * 24 + 2, Figueroa 1995); for a product that was not rounded it is not.
    """
    x, y = aligned(a, b)
    plain = all(are_fp32(parts[1:] if len(parts) > 1 else parts) for parts in (x, y))  # the exact part need not be
    return x + y if plain else sum_to_odd(x, y)


def unrounded_product(a: Enclosure | float, b: Enclosure | float) -> Tensor:
    """Parts of a · b, not rounded; exact in fp64 for numbers of fp32."""
    return _product(*aligned(a, b))


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Parts of the unrounded product."""
    straight = x * y
    if len(straight) < 4:
        return straight
    ends = [straight[2], straight[3]]
    if len(x) == len(y) == 4:
        ends += [x[2] * y[3], x[3] * y[2]]
    product = Enclosure(torch.stack([straight[0], straight[1], *extremes(ends)]))
    return product.unknown_where(Enclosure(x).unknown, Enclosure(y).unknown).parts


def extremes(ends: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Smallest and largest of several tensors, elementwise; where only some are NaN, nothing is known."""
    lo = hi = ends[0]
    for end in ends[1:]:
        lo, hi = torch.minimum(lo, end), torch.maximum(hi, end)
    unknown = torch.isnan(lo) & ~torch.stack([torch.isnan(end) for end in ends]).all(0)
    return torch.where(unknown, -torch.inf, lo), torch.where(unknown, torch.inf, hi)


def widened(parts: Tensor, relative: float | Tensor, absolute: float | Tensor = 0.0) -> Tensor:
    """Four parts from `parts`, the ends moved outward by an absolute and a relative error, which may be one per end.

    The fp64 evaluation of the ends is itself rounded, by at most a few 2^-53; 2^-50 is added for it.
    """
    four = Enclosure(parts).full
    margin = four[2:].abs() * (relative + 2.0**-50) + absolute
    outward = torch.stack([four[2] - margin[0], four[3] + margin[1]])
    return torch.cat([four[:2], torch.where(torch.isfinite(four[2:]), outward, four[2:])])


def hull(first: Enclosure, *others: Enclosure) -> Enclosure:
    """The enclosure of results that may be any of the given ones; exact part and value are those of the first."""
    ends = [end for enclosure in (first, *others) for end in (enclosure.lo, enclosure.hi)]
    return Enclosure(torch.stack([first.exact, first.value, *extremes(ends)]))


def stack(*enclosures: Enclosure) -> Enclosure:
    """Enclosures of one shape put side by side in a new last dimension."""
    return Enclosure(torch.stack(_alike(enclosures), dim=-1))


def concatenate(*enclosures: Enclosure, dim: int = -1) -> Enclosure:
    """Enclosures joined along a dimension, counted from the last one, -1."""
    return Enclosure(torch.cat(_alike(enclosures), dim=dim))


def _alike(enclosures: Sequence[Enclosure]) -> list[Tensor]:
    """The parts of all, as many in each."""
    alike = len({len(e.parts) for e in enclosures}) == 1
    return [e.parts if alike else e.full for e in enclosures]


def product_in_any_order(*factors: Enclosure) -> Enclosure:
    """The product of all factors by fp32 multiplications in whichever order; the value is that from left to right.

    A part of the factors is multiplied in one of the ways to split it in two, so the product of each part is computed
    once: 6 multiplications for three factors, 25 for four.
    """
    everything = (1 << len(factors)) - 1
    products: dict[int, Enclosure] = {1 << position: factor for position, factor in enumerate(factors)}
    for part in range(1, everything + 1):
        if part not in products:
            products[part] = hull(*(products[one] * products[part ^ one] for one in _halves(part)))
    return products[everything]


def _halves(part: int) -> Iterator[int]:
    """One side of each split of the bits of `part` in two, the one without the last bit first."""
    last = 1 << (part.bit_length() - 1)
    rest = part ^ last
    one = rest
    while one:
        yield one
        one = (one - 1) & rest


def fusible_product(a: Enclosure, b: Enclosure | float) -> Enclosure:
    """a · b, rounded or not, because a compiler may fuse it into the addition that follows."""
    rounded, exact = a * b, Enclosure(unrounded_product(a, b))
    return hull(rounded, Enclosure(torch.cat([rounded.full[:2], exact.full[2:]])))


def multiply_add(a: Enclosure, b: Enclosure | float, c: Enclosure | float) -> Enclosure:
    """a · b + c with the product rounded or not: a compiler may contract the two into one FMA."""
    return hull(a * b + c, settled(unrounded_sum(Enclosure(unrounded_product(a, b)), c)))


def monotone(x: Enclosure, function: Callable[[Tensor], Tensor]) -> Enclosure:
    """An exactly computed non-decreasing function of every part, such as a clamp."""
    return Enclosure(function(x.parts)).unknown_where(x.unknown)


def clamp(x: Enclosure, low: float, high: float) -> Enclosure:
    """Values limited to [low, high], which are taken to fp32; NaN stays NaN."""
    return monotone(x, lambda parts: parts.clamp(_as_fp32(low), _as_fp32(high)))


def at_least(x: Enclosure, low: float) -> Enclosure:
    """The larger of `x` and `low`, taken to fp32; NaN stays NaN."""
    return monotone(x, lambda parts: parts.clamp(min=_as_fp32(low)))


def _as_fp32(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def magnitudes(x: Enclosure) -> Tensor:
    """Parts of |x|, exact: an interval that holds zero has it as its lower end."""
    parts = x.parts.abs()
    if len(parts) < 4:
        return parts
    near = torch.where((x.lo <= 0) & (x.hi >= 0), 0.0, torch.minimum(parts[2], parts[3]))
    return torch.stack([parts[0], parts[1], near, torch.maximum(parts[2], parts[3])])


def largest_magnitude(x: Enclosure) -> Enclosure:
    """Largest |element| of the last dimension (kept, of size 1); NaN elements are ignored, 0 where all are NaN."""
    parts = magnitudes(x)
    if parts.shape[-1] == 0:
        return Enclosure(parts.new_zeros((*parts.shape[:-1], 1)))
    return Enclosure(torch.where(torch.isnan(parts), 0.0, parts).amax(dim=-1, keepdim=True))
