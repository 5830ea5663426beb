"""Words for the difference between a wrong number and the contract's: a rounding left out, a cut, another format."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from lastbit.numerics.formats import FORMATS, FP32, FP64, Format, from_ordinals, ordinals, round_to
from lastbit.reports.why import GIVES
from lastbit.result import NEAR

Legal = tuple[float, float, float, float]


def rounded(value: float, fmt: Format, *, to_zero: bool = False) -> float:
    """Round a number to a format: in the direction of the format, or toward zero."""
    return float(round_to(_tensor(value), fmt.toward("zero") if to_zero else fmt))


def neighbours(value: float, fmt: Format) -> tuple[float, float]:
    """Return the numbers of a format next below and above a value; the value twice if the format holds it."""
    if not math.isfinite(value):
        return value, value
    inner = rounded(value, fmt, to_zero=True)
    if inner == value:
        return value, value
    outer = _after(abs(inner), fmt) * math.copysign(1.0, value)
    return min(inner, outer), max(inner, outer)


def in_ulp(actual: float, expected: float, fmt: Format) -> float:
    """Return |actual - expected| in units in the last place of `expected`; infinite if one of them is not finite."""
    if actual == expected or (math.isnan(actual) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return math.inf
    exponent = max(math.frexp(expected)[1] - 1, fmt.min_exponent) if expected else fmt.min_exponent
    return abs(actual - expected) / math.ldexp(1.0, exponent - fmt.precision + 1)


SURE = 8.0
"""Bits of evidence for another rounding: it is said of one element only if it fits all that are wrong, and so many."""
NEARLY = 0.98
"""Share of the right elements that it must give, too: exact values are known but for the last digit of fp32."""
RARE = 4.0
"""Bits that an element says for what seldom shows: a tie, or a number that is rounded twice and not where once is."""


def ways_of_all(actual: Tensor, legal: Tensor, fmt: Format, *, dtype: str) -> frozenset[str]:
    """Return the other roundings that give every wrong element and nearly every right one, such as `cuts off`.

    Args:
        actual: what the kernel has for the elements of a stage, [n], fp64.
        legal: their exact values, the contract's, and the ends of what it allows, [4, n].
        fmt: the format of the stage.
        dtype: in which the kernel holds them.
    """
    finite = torch.isfinite(actual) & torch.isfinite(legal[0])
    every = torch.unique(torch.cat([actual.unsqueeze(0), legal])[:, finite], dim=1)
    actual, legal = every[0], every[1:]
    wrong = (actual < legal[2]) | (actual > legal[3])
    exact, count = legal[0], int(wrong.sum())
    if not count:
        return frozenset()
    cut, own_way, nearest = (round_to(exact, f) for f in (fmt.toward("zero"), fmt, fmt.nearest))
    after = torch.copysign(from_ordinals(ordinals(cut.abs(), fmt) + 1, fmt), exact)
    tie = exact == (cut + after) / 2
    own = FORMATS[dtype].precision if dtype in FORMATS else fmt.precision
    made = [
        ("leaves out a rounding before this one, and rounds", 1.0, own_way == actual),
        ("rounds the tie the other way", RARE, tie & (cut + after - own_way == actual) | ~tie & ~wrong),
        ("saturates", SURE, nearest.isinf() & (actual == cut) | ~wrong),
        ("cuts off", 1.0, cut == actual),
    ]
    if fmt.direction != "nearest":
        made.append(("rounds (to nearest)", 1.0, nearest == actual))
    for f in FORMATS.values():
        if fmt.precision < f.precision < FP64.precision:
            made.append((f"rounds twice (by way of {f.name})", RARE, round_to(round_to(exact, f), fmt) == actual))
        if f != fmt.nearest:
            bits = math.inf if f.name == dtype else float(own - f.precision)
            made.append((f"rounds to {f.name}", bits, (round_to(legal, f) == actual).any(0)))
            made.append((f"cuts off to {f.name}", bits, (round_to(legal, f.toward("zero")) == actual).any(0)))
    right = NEARLY * float((~wrong).sum())
    fitting = (
        name
        for name, bits, fits in made
        if bits * count >= SURE and bool(fits[wrong].all()) and fits[~wrong].sum() >= right
    )
    return frozenset(fitting)


def deed(
    actual: float, legal: Legal, fmt: Format, *, rounds: bool, dtype: str, ways: Collection[str] | None = None
) -> str:
    """Describe how a kernel came to a number that the contract excludes, as a verb: `does not round, and …`.

    `legal` are the exact value, the contract's, and the ends of what it allows. If more than one rounding gives the
    number, all of them are named: those among the `ways` that all wrong elements have, if these are known.
    """
    exact, expected = legal[:2]
    if not all(map(math.isfinite, (actual, exact))):
        return f"{GIVES} {actual:.9g}"
    if rounds and rounded(actual, fmt) != actual and in_ulp(actual, exact, fmt) < 1:
        narrow = dtype in FORMATS and FORMATS[dtype].precision < FP32.precision
        how = "holds" if narrow else "does not round, and holds"
        return _other_format(actual, legal, fmt, dtype, ways) or f"{how} {actual:.9g} in {dtype or 'more digits'}"
    own = _other_ways(actual, exact, fmt) if rounds and actual in neighbours(exact, fmt) else ()
    if said := " or ".join(way for way in own if ways is None or way in ways):
        return f"{said} to {actual:.9g}"
    return _other_format(actual, legal, fmt, dtype, ways) or f"{GIVES} {actual:.9g}{_apart(actual, expected, fmt)}"


def _apart(actual: float, expected: float, fmt: Format) -> str:
    """Return the distance from the contract's value in ulp, as words, if it is small; else an empty string."""
    ulp = in_ulp(actual, expected, fmt)
    return f", {ulp:,.4g} ulp away" if ulp <= NEAR else ""


def _other_format(actual: float, legal: Legal, fmt: Format, dtype: str, ways: Collection[str] | None) -> str:
    """Describe a rounding or cut to another format narrower than fp32 that gives the number; empty if none does.

    The format in which the kernel holds the number is tried first, then the others from the coarsest on.
    """
    narrow = [f for f in FORMATS.values() if f not in (fmt.nearest, FP32, FP64)]
    narrow.sort(key=lambda f: (f.name != dtype, f.precision))
    for to_zero in (False, True):
        for f in narrow if actual else ():
            verb = f"{'cuts off' if to_zero else 'rounds'} to {f.name}"
            if (ways is None or verb in ways) and any(rounded(v, f, to_zero=to_zero) == actual for v in legal):
                return f"{verb}, {actual:.9g}"
    return ""


def _other_ways(actual: float, exact: float, fmt: Format) -> Iterator[str]:
    """Yield roundings other than the contract's that give `actual`, a neighbour of `exact` in the format."""
    below, above = neighbours(exact, fmt)
    if actual == rounded(exact, fmt):
        yield "leaves out a rounding before this one, and rounds"
        return
    if math.isinf(above - below):
        yield "saturates"
        return
    if fmt.direction != "nearest" and actual == rounded(exact, fmt.nearest):
        yield "rounds (to nearest)"
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
    """Return the number of a format that follows a nonnegative one; infinity after the largest."""
    after = float(from_ordinals(ordinals(_tensor(magnitude), fmt) + 1, fmt))
    return math.inf if after > fmt.max else after


def _tensor(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)
