"""What a contract does with a number, and what a kernel did in its place."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from harness.numerics.formats import FORMATS, FP32, FP64, Format, from_ordinals, ordinals, round_to
from harness.outcomes.explanation import GIVES
from harness.result import NEAR

Legal = tuple[float, float, float, float]


def rounded(value: float, fmt: Format, *, to_zero: bool = False) -> float:
    """A number rounded to a format, to nearest or toward zero."""
    return float(round_to(_tensor(value), fmt, mode="zero" if to_zero else "nearest"))


def neighbours(value: float, fmt: Format) -> tuple[float, float]:
    """The numbers of a format below and above a finite one; that itself, twice, if it is one of them."""
    if not math.isfinite(value):
        return value, value
    inner = rounded(value, fmt, to_zero=True)
    if inner == value:
        return value, value
    outer = _after(abs(inner), fmt) * math.copysign(1.0, value)
    return min(inner, outer), max(inner, outer)


def in_ulp(actual: float, expected: float, fmt: Format) -> float:
    """|actual - expected| in units in the last place that `expected` has; infinite if one of them is not finite."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return math.inf
    exponent = max(math.frexp(expected)[1] - 1, fmt.min_exponent) if expected else fmt.min_exponent
    return abs(actual - expected) / math.ldexp(1.0, exponent - fmt.precision + 1)


def deed(actual: float, legal: Legal, fmt: Format, *, rounds: bool, dtype: str) -> str:
    """What a kernel did that gave a number which the contract excludes, as a verb: `does not round, and …`.

    `legal` are the exact value, the contract's, and the ends of what it allows. If more than one rounding gives the
    number, all of them are named.
    """
    exact, expected = legal[:2]
    if not all(map(math.isfinite, (actual, exact))):
        return f"{GIVES} {actual:.9g}"
    if rounds and rounded(actual, fmt) != actual and in_ulp(actual, exact, fmt) < 1:
        return (
            _other_format(actual, legal, fmt, dtype)
            or f"does not round, and holds {actual:.9g} in {dtype or 'more digits'}"
        )
    ways = _other_ways(actual, exact, fmt) if rounds and actual in neighbours(exact, fmt) else ()
    if said := " or ".join(ways):
        return f"{said} to {actual:.9g}"
    return _other_format(actual, legal, fmt, dtype) or f"{GIVES} {actual:.9g}{_apart(actual, expected, fmt)}"


def _apart(actual: float, expected: float, fmt: Format) -> str:
    """How far that is from the contract's value, if that is little."""
    ulp = in_ulp(actual, expected, fmt)
    return f", {ulp:,.4g} ulp away" if ulp <= NEAR else ""


def _other_format(actual: float, legal: Legal, fmt: Format, dtype: str) -> str:
    """That it rounds to another format narrower than fp32, or cuts off to it: that in which it holds the number, or
    else the coarsest that gives it.
    """
    narrow = [f for f in FORMATS.values() if f not in (fmt, FP32, FP64)]
    narrow.sort(key=lambda f: (f.name != dtype, f.precision))
    for to_zero in (False, True):
        for f in narrow if actual else ():
            if any(rounded(value, f, to_zero=to_zero) == actual for value in legal):
                return f"{'cuts off' if to_zero else 'rounds'} to {f.name}, {actual:.9g}"
    return ""


def _other_ways(actual: float, exact: float, fmt: Format) -> Iterator[str]:
    """How one of its neighbours comes from a number, where the contract has the other one."""
    below, above = neighbours(exact, fmt)
    if actual == rounded(exact, fmt):
        yield "leaves out a rounding before this one, and rounds"
        return
    if math.isinf(above - below):
        yield "saturates"
        return
    if exact - below == above - exact:
        yield "rounds the tie the other way"
        return
    if abs(actual) < abs(exact):
        yield "cuts off"
    for f in FORMATS.values():
        if fmt.precision < f.precision < FP64.precision and rounded(rounded(exact, f), fmt) == actual:
            yield f"rounds twice (by way of {f.name})"


def _after(magnitude: float, fmt: Format) -> float:
    """The next number of a format after one that is not negative; infinity after the largest."""
    after = float(from_ordinals(ordinals(_tensor(magnitude), fmt) + 1, fmt))
    return math.inf if after > fmt.max else after


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
