"""Words for the difference between a wrong number and the contract's: a rounding left out, a cut, another format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lastbit.numerics.formats import FORMATS, FP32, FP64, Format, around, from_ordinals, ordinals, round_to
from lastbit.reports.why import GIVES
from lastbit.result import NEAR

Legal = tuple[float, float, float, float]


def rounded(value: float, fmt: Format) -> float:
    """Round a number to a format, in its direction."""
    return float(round_to(torch.tensor(value, dtype=torch.float64), fmt))


def neighbours(value: float, fmt: Format) -> tuple[float, float]:
    """Return the numbers of a format next below and above a value; the value twice if the format holds it."""
    below, above = map(float, around(torch.tensor(value, dtype=torch.float64), fmt))
    return (below, above) if math.isfinite(value) else (value, value)


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


def ways_of_all(actual: Tensor, legal: Tensor, fmt: Format, *, rounds: bool, dtype: str) -> tuple[str, ...]:
    """Return the other roundings that give every wrong element and nearly every right one, such as `cuts off`.

    Args:
        actual: what the kernel has for the elements of a stage, [n], fp64.
        legal: their exact values, the contract's, and the ends of what it allows, [4, n].
        fmt: the format of the stage.
        rounds: the contract rounds to it, and does not only hold the stage in it.
        dtype: in which the kernel holds them.
    """
    finite = torch.isfinite(actual) & torch.isfinite(legal[0])
    if not bool((finite & ((actual < legal[2]) | (actual > legal[3]))).any()):
        return ()
    every = torch.unique(torch.cat([actual.unsqueeze(0), legal])[:, finite], dim=1)
    actual, legal = every[0], every[1:]
    wrong = (actual < legal[2]) | (actual > legal[3])
    count, right = int(wrong.sum()), NEARLY * float((~wrong).sum())

    def fits(bits: float, given: Tensor) -> bool:
        return bits * count >= SURE and bool(given[wrong].all()) and bool(given[~wrong].sum() >= right)

    own = _of_format(actual, legal[0], wrong, fmt) if rounds else ()
    if found := tuple(name for name, bits, given in own if fits(bits, given)):
        return found
    others = sorted((f for f in FORMATS.values() if f != fmt.nearest), key=lambda f: (f.name != dtype, f.precision))
    digits = FORMATS[dtype].precision if dtype in FORMATS else fmt.precision
    for verb in ("rounds", "cuts off"):
        for f in others:
            made = round_to(legal, f if verb == "rounds" else f.toward("zero"))
            bits = math.inf if f.name == dtype else float(digits - f.precision)
            if f.precision < FP32.precision and fits(bits, (made == actual).any(0)):
                return (f"{verb} to {f.name}",)
    return ()


def _of_format(actual: Tensor, exact: Tensor, wrong: Tensor, fmt: Format) -> Iterator[tuple[str, float, Tensor]]:
    """Yield other roundings to the format of a stage, what an element says for each in bits, and those it gives."""
    cut, own, nearest = (round_to(exact, f) for f in (fmt.toward("zero"), fmt, fmt.nearest))
    after = torch.copysign(from_ordinals(ordinals(cut.abs(), fmt) + 1, fmt), exact)
    tie = exact == (cut + after) / 2
    yield "leaves out a rounding before this one, and rounds", 1.0, own == actual
    yield "rounds the tie the other way", RARE, tie & (cut + after - own == actual) | ~tie & ~wrong
    yield "saturates", SURE, nearest.isinf() & (actual == cut) | ~wrong
    yield "cuts off", 1.0, cut == actual
    if fmt.direction != "nearest":
        yield "rounds (to nearest)", 1.0, nearest == actual
    for f in FORMATS.values():
        if fmt.precision < f.precision < FP64.precision:
            yield f"rounds twice (by way of {f.name})", RARE, round_to(round_to(exact, f), fmt) == actual


def deed(actual: float, legal: Legal, fmt: Format, *, rounds: bool, dtype: str, ways: Sequence[str] = ()) -> str:
    """Describe how a kernel came to a number that the contract excludes, as a verb: `does not round, and holds …`.

    `legal` are the exact value, the contract's, and the ends of what it allows; `ways` the other roundings that all
    wrong elements of the stage have, of which all are named.
    """
    exact, expected = legal[:2]
    if not all(map(math.isfinite, (actual, exact))):
        return f"{GIVES} {actual:.9g}"
    if ways:
        return f"{' or '.join(ways)}, and {GIVES} {actual:.9g}"
    if rounds and rounded(actual, fmt) != actual and in_ulp(actual, exact, fmt) < 1:
        narrow = dtype in FORMATS and FORMATS[dtype].precision < FP32.precision
        return f"{'holds' if narrow else 'does not round, and holds'} {actual:.9g} in {dtype or 'more digits'}"
    ulp = in_ulp(actual, expected, fmt)
    return f"{GIVES} {actual:.9g}{f', {ulp:,.4g} ulp away' if ulp <= NEAR else ''}"
