"""Logarithms, powers of two, tanh, erf, sine and cosine: approximate, with bounds from the premises in force.

The documented bounds are in `lastbit.numerics.premises`; docs/numerics.md derives them and says which ways to compute a
function they cover.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lastbit.numerics.enclosure import Enclosure
from lastbit.numerics.own import Exact, Extent, primitive
from lastbit.numerics.premises import DOCUMENTED

_FAR = 2.0**30
"""Arguments from which on an interval that is no point is taken to hold every phase."""
_SLACK = 2.0**-20
"""Of a turn: more than fp64 errs in telling which turning points are within an interval nearer than `_FAR`."""

_exp2 = primitive("exp2", torch.exp2, shape="rising", bound=DOCUMENTED["exp2"])
_log = primitive("log", torch.log, shape="rising", bound=DOCUMENTED["log"])
_log2 = primitive("log2", torch.log2, shape="rising", bound=DOCUMENTED["log2"])
_log1p = primitive("log1p", torch.log1p, shape="rising", bound=DOCUMENTED["log1p"])
_expm1 = primitive("expm1", torch.expm1, shape="rising", bound=DOCUMENTED["expm1"])
_tanh = primitive("tanh", torch.tanh, shape="rising", bound=DOCUMENTED["tanh"])
_erf = primitive("erf", torch.erf, shape="rising", bound=DOCUMENTED["erf"])


def exp2(x: Enclosure) -> Enclosure:
    """Return 2**x."""
    return _exp2(x)


def log(x: Enclosure) -> Enclosure:
    """Return the natural logarithm; NaN for negative numbers. That of a subnormal number may be -inf."""
    return _log(x)


def log2(x: Enclosure) -> Enclosure:
    """Return the logarithm to base 2; NaN for negative numbers. That of a subnormal number may be -inf."""
    return _log2(x)


def log1p(x: Enclosure) -> Enclosure:
    """Return log(1 + x) as accurate near zero as a function of its own is; NaN below -1."""
    return _log1p(x)


def expm1(x: Enclosure) -> Enclosure:
    """Return e**x - 1 as accurate near zero as a function of its own is."""
    return _expm1(x)


def tanh(x: Enclosure) -> Enclosure:
    """Return tanh by a function of that name; formulas of exponentials and tanh.approx are less accurate."""
    return _tanh(x)


def erf(x: Enclosure) -> Enclosure:
    """Return the error function."""
    return _erf(x)


def sin(x: Enclosure) -> Enclosure:
    """Return the sine of x in radians, with an argument reduction that is exact enough for every fp32 number."""
    return _sin(x)


def cos(x: Enclosure) -> Enclosure:
    """Return the cosine of x in radians, with an argument reduction that is exact enough for every fp32 number."""
    return _cos(x)


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


_sin = primitive("sin", torch.sin, shape=_extremes(torch.sin, 0.25), bound=DOCUMENTED["sin"])
_cos = primitive("cos", torch.cos, shape=_extremes(torch.cos, 0.0), bound=DOCUMENTED["cos"])
