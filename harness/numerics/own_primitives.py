"""Primitives: a function of one argument, how it rises and falls, and a bound on the error of a kernel's result.

Where a function is monotone, its values at the ends of an interval enclose those between. A bound then moves these ends
outward. `primitive` makes one of a project's own, and by it are made logarithms, powers of two, tanh, erf, sine and
cosine, with bounds from the premises in force. The documented bounds are in `lastbit.numerics.premises`;
docs/numerics.md derives them and says which ways to compute a function they cover.
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
from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.parts import extremes, full, rounded, unknown, unknown_where, widened
from lastbit.numerics.premises import DOCUMENTED, Bound, current
from lastbit.numerics.primitives import LOST, SUBNORMAL
from lastbit.numerics.remembered import remembered

SMALLEST_NORMAL = 2.0**-126
"""Of fp32. A result below it may be flushed to zero, and so may an argument."""

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
