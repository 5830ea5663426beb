"""Constants of formulas: the number that a constant written in a kernel stands for, such as 1 / n, 1 / √D or log2 e.

A constant reaches a kernel rounded, so that its own residue would be that of another number. A function of the fp32
number says what it stands for, the same one for references and kernels; products with parameters of a case, which
kernels compute beforehand, are registered while the case is followed.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from functools import lru_cache

import torch

from lastbit.numerics.residues.field import LN2, P, Q
from lastbit.numerics.residues.numbers import CONSTANT, EXTREME, NONE, SIGN, Residues

_NEAR = 2.0**-22  # relative: two roundings to fp32
# Of the fp32 numbers from 2⁻²⁰ to 1, one in 160 is one by chance.
_MOST_RECIPROCALS = 1 << 20
# Of the fp32 numbers from 1 to 128, about one in 500 is as near to such a root by chance.
_MOST_ROOTS = 1 << 14
_MOST_PARTS = 1 << 9  # of a fraction: as rare
# Of the fp64 numbers from 1 to 2, one in 2²⁷ is one by chance, of those up to 2¹³ one in 2¹⁴.
_MOST_WRITTEN = 1 << 13  # of the denominator of a fraction that Python computed
# There, neighbours lie 2⁻²² apart, which is `_NEAR`.
_MOST_BESIDE_1 = 1 << 11  # of n where (n - 1) / n and n / (n - 1) are known
# Arbitrary: below every usual eps but those that guard a division by zero, 1e-12 and less.
_LEAST = 2.0**-26
_LARGEST, _LOWEST = 9999.0, -500.0
"""Sizes of the constants of formulas; others stand for -inf, or for 0 if no product of parameters is one."""
_DIGITS = 5  # of a decimal: one fp32 number in two hundred is a rounding of one

Pair = tuple[int, int]
"""Residues of a constant modulo P and modulo Q."""

_products: ContextVar[Mapping[float, Pair] | None] = ContextVar("products", default=None)
_parameters: ContextVar[tuple[tuple[float, ...], ...]] = ContextVar("parameters", default=())
_signless: ContextVar[frozenset[float]] = ContextVar("signless", default=frozenset())
"""Roots of parameters that stand for a root of the negative one: a product of two of them is not the parameter."""


def constant(number: float) -> Residues:
    """Return the residues, of shape [], of the number that a constant in a kernel or reference stands for."""
    return _constant(number, recognised_parameters())


@lru_cache(maxsize=1 << 12)
def _constant(number: float, parameters: tuple[tuple[float, ...], ...]) -> Residues:
    """Return the residues of a constant where products of these parameters are recognised."""
    if not math.isfinite(number):
        return Residues.of(torch.tensor(number))
    pair, own = _pair(number), _fp32(abs(number))
    signless = own in _signless.get() or _is_signless(own, pair)
    tiny = 0 < own < _LEAST and own not in (_products.get() or {})
    extreme = tiny or own > _LARGEST or number < _LOWEST
    flags = CONSTANT | (SIGN if signless else 0) | (EXTREME if extreme else 0)
    # c · x - (c · x - x) rounds x where c = 2^s + 1, by which Veltkamp splits numbers into parts.
    splits = number > 1 << 12 and math.frexp(number - 1)[0] == 0.5
    return Residues(torch.tensor([*pair, NONE, flags])).open_where(torch.tensor(splits))


def is_recognised(number: float) -> bool:
    """Return whether a number may have been written as a constant: it has few bits, or stands for another number."""
    own = _fp32(abs(number))
    return not math.isfinite(own) or _is_short(own) or own in (_products.get() or {}) or _recognised(own) is not None


@contextmanager
def products_of(parameters: Iterable[float]) -> Iterator[None]:
    """Recognise products and quotients of these numbers, of log2 e and of one minus a number, while the context lasts.

    Their roots are recognised as well.
    """
    parameters = tuple(parameters)
    found, signless = _products_of(parameters, tuple((_products.get() or {}).items()))
    tokens = _products.set(found), _signless.set(signless), _parameters.set((*_parameters.get(), parameters))
    try:
        yield
    finally:
        _products.reset(tokens[0])
        _signless.reset(tokens[1])
        _parameters.reset(tokens[2])


def recognised_parameters() -> tuple[tuple[float, ...], ...]:
    """Return the numbers of each `products_of` around: what a constant stands for depends on nothing else."""
    return _parameters.get()


@lru_cache
def _products_of(
    parameters: tuple[float, ...], known: tuple[tuple[float, Pair], ...]
) -> tuple[Mapping[float, Pair], frozenset[float]]:
    """Return what `products_of` recognises, and which of it are signless; `known` is what is recognised already."""
    numbers = {abs(number): _pair(abs(number)) for number in parameters if number and math.isfinite(number)}
    numbers |= {1 - a: ((1 - p) % P, (1 - q) % Q) for a, (p, q) in numbers.items() if 0 < _fp32(1 - a) < 1}
    numbers |= {a * a: _times(pair, pair) for a, pair in numbers.items() if a > 1}
    numbers |= {math.log2(math.e): _LOG2E, 1.0: (1, 1)}
    found: dict[float, Pair] = {}
    roots: dict[float, Pair] = {}
    for a, pair in numbers.items():
        inverse = pow(pair[0], -1, P), pow(pair[1], -1, Q)
        for b, other in numbers.items():
            for value, residues in ((a * b, _times(pair, other)), (b / a, _times(inverse, other))):
                found.setdefault(_fp32(value), residues)
                roots.setdefault(_fp32(math.sqrt(value)), residues)
    signless = frozenset(key for key, residues in roots.items() if key not in found and not _is_square(residues))
    return {key: _root_of(residues) for key, residues in roots.items() if key not in found} | found, signless


def _pair(number: float) -> Pair:
    own = _fp32(abs(number))
    found = _of_fraction(Fraction(own)) if _is_short(own) else (_products.get() or {}).get(own) or _recognised(own)
    found = found or _of_fraction(_written(abs(number)))
    return found if number >= 0 else ((P - found[0]) % P, (Q - found[1]) % Q)


@lru_cache
def _written(x: float) -> Fraction:
    """Return the fraction of which an fp64 number that fp32 does not hold is a rounding, 52 / 17 say; else its fp32.

    Updates of a mean and of squares by pieces have n · m / (n + m), of whatever size.
    """
    fraction = Fraction(x).limit_denominator(_MOST_WRITTEN)
    return fraction if float(fraction) == x != _fp32(x) and x < _MOST_WRITTEN else Fraction(_fp32(x))


@lru_cache
def _recognised(x: float) -> Pair | None:
    """Return the residues of the number of which x is a rounding; None if it is not recognised.

    Recognised are decimals, fractions, √n and 1 / √n, also times log2 e or ln 2.
    """
    if _MOST_ROOTS * x > 1 and _fp32(1 / round(1 / x) if x < 1 else 0.0) == x:
        return _of_fraction(Fraction(1, round(1 / x)))
    decimal = Fraction(f"{x:.{_DIGITS}g}")
    if _fp32(float(decimal)) == x:
        return _of_fraction(decimal)
    for fraction in _fractions(x):
        if _fp32(float(fraction)) == x:
            return _of_fraction(fraction)
    for factor, pair in ((1.0, (1, 1)), (math.log2(math.e), _LOG2E), (math.log(2), _LN2)):
        for n, of_root, inverted in _candidates(x / factor):
            value = math.sqrt(n) if of_root else float(n)
            if factor == 1 and value.is_integer() and (value == 1 or not inverted):
                continue  # nothing rounds a whole number: 1 + 2^-22 is none
            if abs(x - factor * (1 / value if inverted else value)) <= _NEAR * x:
                residues = _root_of((n % P, n % Q)) if of_root else (n % P, n % Q)
                if inverted:
                    residues = pow(residues[0], -1, P), pow(residues[1], -1, Q)
                return _times(residues, pair)
    return None


@lru_cache
def _is_signless(x: float, pair: Pair) -> bool:
    """Return whether x stands for √n or 1 / √n and its square in the field is not n or 1 / n."""
    for n in (round(x * x), round(1 / (x * x)) if x else 0):
        if 1 < n < _MOST_ROOTS and abs(x - math.sqrt(n if x > 1 else 1 / n)) <= _NEAR * x:
            square = (n % P, n % Q) if x > 1 else (pow(n, -1, P), pow(n, -1, Q))
            return not _is_square((n % P, n % Q)) and _times(pair, pair) != square
    return False


def _fractions(x: float) -> Iterator[Fraction]:
    """Yield fractions near x < 2: of a small denominator, and (n ± 1) / n, as running means and variances have them."""
    if 1 / _MOST_PARTS < x < 2:
        yield Fraction(x).limit_denominator(_MOST_PARTS)
        n = round(1 / abs(1 - x))
        if n <= _MOST_BESIDE_1:
            yield 1 + Fraction(1 if x > 1 else -1, n)


def _candidates(x: float) -> Iterator[tuple[int, bool, bool]]:
    """Yield integers n with x near n, 1 / n, √n, 1 / √n: n, whether of a root, whether inverted."""
    if 0.5 < x < 64:
        yield round(x), False, False
    if 1 / _MOST_RECIPROCALS < x < 1:
        yield round(1 / x), False, True
    if 1 < x * x < _MOST_ROOTS:
        yield round(x * x), True, False
    if 1 / _MOST_ROOTS < x * x < 1:
        yield round(1 / (x * x)), True, True


def _is_short(x: float) -> bool:
    """Return whether a number has few bits, so that nothing has rounded it."""
    return math.ldexp(math.frexp(x)[0], 12).is_integer()


def _of_fraction(x: Fraction) -> Pair:
    p, q = (x.numerator * pow(x.denominator, -1, modulus) % modulus for modulus in (P, Q))
    return p, q


def _is_square(x: Pair) -> bool:
    return all(pow(residue, (modulus - 1) // 2, modulus) == 1 for residue, modulus in zip(x, (P, Q), strict=True))


def _root_of(x: Pair) -> Pair:
    p, q = (pow(residue, (modulus + 1) // 4, modulus) for residue, modulus in zip(x, (P, Q), strict=True))
    return p, q


def _times(a: Pair, b: Pair) -> Pair:
    return a[0] * b[0] % P, a[1] * b[1] % Q


def _fp32(number: float) -> float:
    return ctypes.c_float(number).value


_LN2: Pair = LN2[P], LN2[Q]
_LOG2E: Pair = pow(LN2[P], -1, P), pow(LN2[Q], -1, Q)
