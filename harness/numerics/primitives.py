"""Division, square root, exponentials and other functions of elements; errors are taken from the premises in force.

A primitive that ends in `_rn` is correctly rounded (`tl.div_rn`, `tl.sqrt_rn`, torch's own division and square root)
and adds no width. The others are approximate on a GPU: their ends move outward by the bound, and the contract's value
is the correctly rounded result.

Where a function is monotone, its values at the ends of an interval enclose those between. A bound then moves these ends
outward. `primitive` makes one of a project's own, and by it are made logarithms, powers of two, tanh, erf, sine and
cosine. The documented bounds are in `lastbit.numerics.premises`; docs/numerics.md derives them and says which ways to
compute a function they cover.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import algebraic
from lastbit.numerics.enclosure import Enclosure, both
from lastbit.numerics.formats import PRECISE, Format
from lastbit.numerics.fused import one_kernel_on_cuda
from lastbit.numerics.parts import (
    LEAST,
    aligned,
    all_finite,
    covered,
    extremes,
    full,
    holds_fp32,
    rounded,
    unknown,
    unknown_where,
    widened,
)
from lastbit.numerics.premises import DOCUMENTED, Bound, current
from lastbit.numerics.remembered import remembered
from lastbit.numerics.residues import Residues

SMALLEST_NORMAL = 2.0**-126
"""Of fp32. A result below it may be flushed to zero, and so may an argument."""
SUBNORMAL = 2.0**-147
"""Error of a subnormal result: four times the spacing of the numbers there."""
FLUSHED = SMALLEST_NORMAL * (1 + 2.0**-6)
"""A larger exponential is not subnormal: the smallest normal number, and room for an error."""
LOST = 2.0**-151
"""A number that is not larger becomes zero, flushed or not: half of the smallest number, and room for an error."""
_SATURATED = 17.33  # above 25 ln 2: e**-x < 2**-25, so that the correctly rounded sigmoid is 1, too


@algebraic(lambda x: x.sqrt().reciprocal())
def rsqrt(x: Enclosure) -> Enclosure:
    """Return 1 / sqrt(x), also from a root and a division. A subnormal x may give inf, as in `rsqrt.approx.ftz`."""
    return Enclosure(inverse_root(x.parts, full(x.parts).sqrt(), current().inverse_root, current().arithmetic))


@algebraic(Residues.sqrt)
def sqrt_rn(x: Enclosure) -> Enclosure:
    """Return the correctly rounded square root."""
    return Enclosure(correct_root(x.parts, x.parts.sqrt(), current().arithmetic))


@algebraic(Residues.sqrt)
def sqrt(x: Enclosure) -> Enclosure:
    """Return the square root, approximate."""
    return Enclosure(approximate_root(x.parts, x.parts.sqrt(), current().relative("sqrt"), current().arithmetic))


@algebraic(Residues.__truediv__)
def divide_rn(a: Enclosure | float, b: Enclosure | float) -> Enclosure:
    """Return the correctly rounded a / b."""
    return Enclosure(quotient(*both(a, b), current().arithmetic))


@algebraic(Residues.__truediv__)
def divide(a: Enclosure | float, b: Enclosure | float) -> Enclosure:
    """Return a / b, approximate: also covers a · (1 / b), a rounded product with an approximate reciprocal.

    A reciprocal that is subnormal errs by 2**-150 besides. Nothing is known for a subnormal divisor, whose reciprocal
    may overflow and which may be flushed to zero.
    """
    return Enclosure(approximate_quotient(*both(a, b), current().quotient, current().arithmetic))


@algebraic(Residues.exp)
def exp(x: Enclosure) -> Enclosure:
    """Return e**x. The error grows with |x|, because exp(x) is computed as exp2 of a rounded product."""
    return Enclosure(exponential(x.parts, x.parts.exp(), current().relative("exp"), current().arithmetic))


@algebraic(rules.sigmoid)
@remembered
def sigmoid(x: Enclosure) -> Enclosure:
    """Return 1 / (1 + e**-x): the exponential's error counts by e**-x / (1 + e**-x), then an addition and a division.

    From 17.33 on e**-x is below a quarter of an ulp of 1, so that the sum is 1 and the quotient of 1 and 1 exact. At an
    infinity the result is exact too, and it is never below zero.
    """
    gate, rest = torch.sigmoid(x.parts), torch.sigmoid(-_ends(x.parts))
    relative, division = current().relative("exp"), max(current().relative("sigmoid"), current().relative("divide"))
    return Enclosure(logistic(x.parts, gate, rest, relative, division, current().arithmetic))


# What these do to stacked parts, as in `lastbit.numerics.parts`. Roots, exponentials and sigmoids are torch's own. They
# are not correctly rounded everywhere, so an operation takes what they give on the device at hand.


@one_kernel_on_cuda
def inverse_root(x: Tensor, root: Tensor, relative: float, fmt: Format) -> Tensor:
    """Return 1 / sqrt(x) from the root, with a relative error, or inf of a subnormal number."""
    inverse = 1.0 / full(root)
    inverse = widened(torch.stack([inverse[0], inverse[1], inverse[3], inverse[2]]), relative)
    lo = _ends(x)[0]
    inverse[3] = torch.where((lo < SMALLEST_NORMAL) & (lo >= 0), torch.inf, inverse[3])
    return unknown_where(rounded(inverse, fmt), unknown(x))


@one_kernel_on_cuda
def correct_root(x: Tensor, root: Tensor, fmt: Format) -> Tensor:
    """Round sqrt(x), which is `root`, correctly."""
    if fmt is PRECISE:
        return unknown_where(covered(root, holds_fp32(full(root)) & (full(root).square() == full(x))), unknown(x))
    return unknown_where(rounded(root, fmt), unknown(x))


@one_kernel_on_cuda
def approximate_root(x: Tensor, root: Tensor, relative: float, fmt: Format) -> Tensor:
    """Return sqrt(x), which is `root`, with a relative error."""
    return unknown_where(rounded(widened(root, relative), fmt), unknown(x))


@one_kernel_on_cuda
def quotient(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Return x / y."""
    result = _quotient(x, y)
    if fmt is PRECISE:
        x, y = (full(parts) for parts in aligned(x, y))
        point = (x[2] == x[3]) & (y[2] == y[3])
        result = full(result)
        return covered(result, (x == 0) | point & holds_fp32(y) & holds_fp32(result) & (result * y == x))
    return rounded(result, fmt)


@one_kernel_on_cuda
def approximate_quotient(x: Tensor, y: Tensor, relative: float, fmt: Format) -> Tensor:
    """Return x / y with a relative error, and that of a subnormal reciprocal."""
    dividend, divisor = (parts.abs() for parts in aligned(x, y))
    finite = dividend if all_finite(dividend) else torch.where(torch.isfinite(dividend), dividend, 0.0)
    result = rounded(widened(_quotient(x, y), relative, absolute=finite.amax(0) * 2.0**-150), fmt)
    subnormal = ((divisor > 0) & (divisor < SMALLEST_NORMAL)).any(0)
    return unknown_where(result, subnormal)


def _quotient(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y, not rounded; nothing is known where the divisor's interval holds zero and other numbers."""
    x, y = aligned(x, y)
    quotients = x / y
    if len(quotients) < 4:
        return quotients
    x, y = (p.expand(4, *p.shape[1:]) for p in (x, y))
    quotients[2], quotients[3] = extremes([quotients[2], quotients[3], x[2] / y[3], x[3] / y[2]])
    through_zero = (y[2] <= 0) & (y[3] >= 0) & (y[2] != y[3])
    return unknown_where(quotients, through_zero, unknown(x), unknown(y))


@one_kernel_on_cuda
def exponential(x: Tensor, power: Tensor, relative: float, fmt: Format) -> Tensor:
    """Return e**x, which is `power`, with an error that grows with |x|. A subnormal result may be flushed to zero."""
    ends = _ends(power)
    if fmt is PRECISE:
        tiny = some = (ends < LEAST) & ~torch.isneginf(_ends(x))  # too small for fp64 to have all its digits
    else:
        tiny = (ends > 0) & (ends <= FLUSHED)
        some = tiny & (ends > LOST)
    absolute = some.to(ends.dtype) * SUBNORMAL
    parts = widened(power, relative + _growth(_ends(x)), absolute)
    parts[2] = torch.where(tiny[0], 0.0, parts[2])
    return unknown_where(rounded(parts, fmt), unknown(x))


@one_kernel_on_cuda
def logistic(x: Tensor, gate: Tensor, rest: Tensor, relative: float, division: float, fmt: Format) -> Tensor:
    """Return sigmoid(x), `gate`, with errors of an exponential and a division; `rest` is 1 - gate at the ends."""
    ends = _ends(x)
    error = (relative + _growth(ends)) * rest + current().unit + division
    finite = all_finite(ends)
    lost = LEAST if fmt is PRECISE else SMALLEST_NORMAL  # what is below may be zero
    absolute = lost if finite else torch.where(torch.isfinite(ends), lost, 0.0)
    parts = widened(gate, error, absolute)
    result = torch.where(parts[2:] < 0, 0.0, parts[2:])
    parts[2:] = result if fmt is PRECISE else torch.where(ends[0] >= _SATURATED, 1.0, result)
    settled = rounded(parts, fmt)
    return settled if finite else unknown_where(settled, unknown(x))


def _ends(x: Tensor) -> Tensor:
    """Return lo and hi, or one tensor that is both."""
    return x[2:] if len(x) == 4 else x[-1:]


def _growth(x: Tensor) -> Tensor:
    """Return the relative error of exp(x) from rounding x · log2(e); none at an infinity, where the result is exact."""
    growth = 2 * current().unit * x.abs()
    return growth if all_finite(x) else torch.where(torch.isfinite(x), growth, 0.0)


Exact = Callable[[Tensor], Tensor]
Extent = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Primitive:
    """A function of one argument that a kernel computes with an error; calling it gives the enclosure of its results.

    Attributes:
        name: by which premises know its bound.
        exact: fp64 tensor → the function's values, correct to a few ulp of fp64; NaN where it is not defined.
        shape: it rises, or falls, wherever it is defined; or fp64 tensors lo and hi → its least and largest value
            between them, where it does neither.
        bound: how far a kernel's result may be from it, where the premises in force say nothing else.
    """

    name: str
    exact: Exact
    shape: Literal["rising", "falling"] | Extent
    bound: Bound

    def __call__(self, x: Enclosure) -> Enclosure:
        return enclosed(self, x)

    @property
    def __name__(self) -> str:
        """Return what a formula calls it, as if it were a function."""
        return self.name


def primitive(name: str, exact: Exact, *, shape: Literal["rising", "falling"] | Extent, bound: Bound) -> Primitive:
    """Make a primitive of a project's own.

    >>> import torch
    >>> from lastbit.numerics import Bound, Enclosure, primitive
    >>> atan = primitive("atan", torch.atan, shape="rising", bound=Bound(2.0**-22, "CUDA math table: atanf, 2 ulp"))
    >>> bool(atan(Enclosure.point(1.0)).lo < torch.pi / 4)
    True

    Raises:
        ValueError: a shape that is none.
    """
    if shape not in ("rising", "falling") and not callable(shape):
        raise ValueError(f"shape={shape!r} of the primitive {name} is neither rising nor falling, nor a function")
    return Primitive(name, exact, shape, bound)


@algebraic(rules.function, of_enclosures=True)
@remembered
def enclosed(function: Primitive, x: Enclosure) -> Enclosure:
    """Enclose the results of a primitive for an argument within `x`."""
    bound = current().bound(function.name, function.bound)
    values = _flushed(function.exact, x.parts, _values(function, x.parts))
    size = values[2:].abs()
    subnormal = (size > LOST) & (size <= 2 * SMALLEST_NORMAL)
    spread = widened(values, bound.relative, subnormal.to(size.dtype) * SUBNORMAL + bound.absolute)
    nearest = values[2:] * (1 - bound.relative)  # what is subnormal may be flushed, and keeps its sign
    least, most = (nearest[0] - bound.absolute).clamp(max=0.0), (nearest[1] + bound.absolute).clamp(min=0.0)
    spread[2] = torch.where((values[2] > 0) & (spread[2] < SMALLEST_NORMAL), least, spread[2])
    spread[3] = torch.where((values[3] < 0) & (spread[3] > -SMALLEST_NORMAL), most, spread[3])
    return Enclosure(unknown_where(rounded(spread, current().arithmetic), unknown(full(x.parts))))


def _values(function: Primitive, x: Tensor) -> Tensor:
    """Evaluate the function at each part; of an interval, its least and its largest value."""
    if len(x) < 4:
        return full(function.exact(x))
    if callable(function.shape):
        return torch.stack([*function.exact(x[:2]), *function.shape(x[2], x[3])])
    values = function.exact(x)
    return values if function.shape == "rising" else torch.stack([values[0], values[1], values[3], values[2]])


def _flushed(exact: Exact, x: Tensor, values: Tensor) -> Tensor:
    """Extend the ends by the value at zero where the argument may be subnormal, which a kernel may take for zero."""
    lo, hi = x[-2 if len(x) == 4 else -1], x[-1]
    near = (lo < SMALLEST_NORMAL) & (hi > -SMALLEST_NORMAL) & ((lo != 0) | (hi != 0))
    if near.device.type == "cpu" and not bool(near.any()):  # another device would have to finish before it could say
        return values
    zero = exact(torch.zeros((), dtype=x.dtype, device=x.device))
    least, most = extremes([values[2], values[3], zero.expand_as(values[2])])
    ends = torch.where(near, least, values[2]), torch.where(near, most, values[3])
    return torch.stack([values[0], values[1], *ends])


_FAR = 2.0**30
"""Arguments from which on an interval that is no point is taken to hold every phase."""
_SLACK = 2.0**-20
"""Of a turn: more than fp64 errs in telling which turning points are within an interval nearer than `_FAR`."""


def _extremes(exact: Exact, crest: float) -> Extent:
    """Return the extent of a wave: its least and largest value between two phases; crests are at `crest` + n turns."""

    def extent(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        first, last = exact(lo), exact(hi)
        least, most = torch.minimum(first, last), torch.maximum(first, last)
        point, far = lo == hi, torch.maximum(lo.abs(), hi.abs()) > _FAR
        most = torch.where(~point & (far | _reaches(lo, hi, crest)), 1.0, most)
        least = torch.where(~point & (far | _reaches(lo, hi, crest + 0.5)), -1.0, least)
        lost = ~point & ~(torch.isfinite(lo) & torch.isfinite(hi)) & ~torch.isnan(lo)  # of an infinity it is NaN
        return least.masked_fill(lost, -torch.inf), most.masked_fill(lost, torch.inf)

    return extent


def _reaches(lo: Tensor, hi: Tensor, phase: float) -> Tensor:
    """Check whether a phase, in turns, may lie between lo and hi, in radians."""
    turn = 2 * math.pi
    return torch.ceil(lo / turn - phase - _SLACK) <= torch.floor(hi / turn - phase + _SLACK)


def _documented(name: str, exact: Exact, shape: Literal["rising", "falling"] | Extent = "rising") -> Primitive:
    return primitive(name, exact, shape=shape, bound=DOCUMENTED[name])


exp2 = _documented("exp2", torch.exp2)
"""2**x."""

log = _documented("log", torch.log)
"""The natural logarithm; NaN for negative numbers. That of a subnormal number may be -inf."""

log2 = _documented("log2", torch.log2)
"""The logarithm to base 2; NaN for negative numbers. That of a subnormal number may be -inf."""

log1p = _documented("log1p", torch.log1p)
"""log(1 + x) as accurate near zero as a function of its own is; NaN below -1."""

expm1 = _documented("expm1", torch.expm1)
"""e**x - 1 as accurate near zero as a function of its own is."""

tanh = _documented("tanh", torch.tanh)
"""tanh by a function of that name; formulas of exponentials and tanh.approx are less accurate."""

erf = _documented("erf", torch.erf)
"""The error function."""

sin = _documented("sin", torch.sin, _extremes(torch.sin, 0.25))
"""The sine of x in radians, with an argument reduction that is exact enough for every fp32 number."""

cos = _documented("cos", torch.cos, _extremes(torch.cos, 0.0))
"""The cosine of x in radians, with an argument reduction that is exact enough for every fp32 number."""
