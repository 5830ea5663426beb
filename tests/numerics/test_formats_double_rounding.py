"""Rounding an fp64 result to fp32 gives what rounding the exact result gives; by exact rational arithmetic."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from lastbit.numerics import Enclosure, clamp, divide_rn, fusible_product, mean, multiply_add, sqrt_rn, variance_about

Triple = tuple[float, float, float]


def point(x: float) -> Enclosure:
    return Enclosure.point(torch.tensor([x], dtype=torch.float64))


def rounded(exact: Fraction) -> float:
    """To fp32, ties to even."""
    if exact == 0:
        return 0.0
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent += abs(exact) >= Fraction(2) ** (exponent + 1)
    exponent -= abs(exact) < Fraction(2) ** exponent
    quantum = max(exponent - 23, -149)
    return math.ldexp(round(exact / Fraction(2) ** quantum), quantum)


def near_ties(count: int) -> list[Triple]:
    """Find a, b, c of fp32 such that a · b + c lies so close to the middle of two of fp32 that in fp64 it is there."""
    draw = random.Random(0)
    found: list[Triple] = []
    while len(found) < count:
        a = draw.randrange(2**23 + 1, 2**24, 2)
        b = round(2**47 / a)
        rest = a * b - 2**47  # of the product, which is 2**47 · (1 + rest · 2**-47)
        if rest == 0 or abs(rest) > 2**17:
            continue
        scale = draw.randrange(-60, 40)
        product = Fraction(a * b) * Fraction(2) ** scale
        c = draw.choice([-1, 1]) * math.ldexp(2**24 - draw.randrange(1, 2**10), scale + 48)
        sign = draw.choice([-1, 1])
        triple = math.ldexp(sign * a, scale), float(b), c
        exact = sign * product + Fraction(c)
        if rounded(exact) != rounded(Fraction(float(exact))):
            found.append(triple)
    return found


TRIPLES = near_ties(40)

ADDITIONS: dict[str, Callable[[float, float, float], Enclosure]] = {
    "product + c": lambda a, b, c: fusible_product(point(a), point(b)) + point(c),
    "c + product": lambda a, b, c: point(c) + fusible_product(point(a), point(b)),
    "product - -c": lambda a, b, c: fusible_product(point(a), point(b)) - point(-c),
    "c - -product": lambda a, b, c: point(c) - fusible_product(point(-a), point(b)),
    "product + number": lambda a, b, c: fusible_product(point(a), point(b)) + c,
    "number + product": lambda a, b, c: c + fusible_product(point(a), point(b)),
    "multiply_add": lambda a, b, c: multiply_add(point(a), point(b), point(c)),
    "groups": lambda a, b, c: (fusible_product(point(a), point(b)).in_groups(1) - point(-c)).joined(),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_of_a_product_that_is_not_rounded_has_the_fused_and_the_separate_result_as_ends(name: str) -> None:
    for a, b, c in TRIPLES:
        product = Fraction(a) * Fraction(b)
        fused = rounded(product + Fraction(c))
        separate = rounded(Fraction(rounded(product)) + Fraction(c))
        found = ADDITIONS[name](a, b, c)
        assert (found.lo.item(), found.hi.item()) == (min(fused, separate), max(fused, separate)), (a, b, c)


def test_the_constructed_false_alarm_of_a_gated_norm() -> None:
    x, z, mean = 1.153347373008728, 27.74532699584961, -536870912.0
    assert (fusible_product(point(x), point(z)) - point(mean)).hi.item() == 536870976.0


def test_a_mean_and_a_variance_of_products_that_are_not_rounded_hold_what_an_fma_gives() -> None:
    for a, b, c in TRIPLES:
        product = fusible_product(point(a), point(b))
        exact = Fraction(a) * Fraction(b)
        average = mean(product)
        assert average.lo.item() <= rounded(exact) <= average.hi.item()
        if abs(c) < 2.0**62:  # the square is no infinity
            square = rounded(Fraction(rounded(exact + Fraction(c))) ** 2)
            variance = variance_about(product, point(-c))
            assert variance.lo.item() <= square <= variance.hi.item(), (a, b, c)


@pytest.mark.parametrize("scale", [0, -24, -40], ids=["normal", "at the edge", "subnormal"])
def test_quotients_and_roots_are_rounded_once_also_where_they_are_subnormal(scale: int) -> None:
    draw = random.Random(1)
    for _ in range(2000):
        divisor = draw.randrange(2**23 + 1, 2**24, 2)
        middle = 2 * draw.randrange(1, 2**20) + 1  # quotients next to the middle of two numbers of fewer bits
        dividend = round(middle * divisor / 2 ** (draw.randrange(21)))
        dividend >>= max(0, dividend.bit_length() - 24)
        a, b = math.ldexp(dividend, scale - 90), math.ldexp(divisor, -20)
        assert divide_rn(point(a), point(b)).value.item() == rounded(Fraction(a) / Fraction(b)), (a, b)
        root = sqrt_rn(point(a)).value.item()
        below, above = (Fraction(root) + side * Fraction(math.ulp(root)) * 2**28 for side in (-1, 1))  # half an ulp
        assert below**2 <= Fraction(a) <= above**2


def test_limits_of_a_clamp_reach_a_kernel_as_fp32() -> None:
    limit = rounded(Fraction(0.1))
    clamped = clamp(point(1.0), -0.1, 0.1)
    assert clamped.lo.item() == clamped.hi.item() == limit != 0.1
