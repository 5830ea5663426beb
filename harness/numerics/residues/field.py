"""Arithmetic modulo two primes, P = 2 Q + 1, elementwise on int64 tensors of numbers from 0 to the modulus.

Both primes are below 2^31, so that a product of two numbers fits in 63 bits, and 3 modulo 4, so that x ↦ x^((m+1)/4)
is a root of x or of -x. The squares of Z/P are a group of order Q: g ↦ g^a for a modulo Q is a homomorphism from
addition modulo Q to multiplication modulo P, which is what stands for exp. All primes up to 37 are squares modulo both,
so that √(n² x) = n √x for n of such factors, as sizes of rows and heads are.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Q = 888679679
P = 2 * Q + 1

LN2 = {P: 0x2B7E1516, Q: 0x28AED2A6}
"""What stands for ln 2: any numbers, by which no short formula falls together with another."""

BASE = pow(2, pow(LN2[Q], -1, Q), P)
"""What stands for e, of order Q: BASE to the power of ln 2 is 2, so that exp(a) and 2^(a · log2 e) are one number."""

_HALF = 16
_LOW = (1 << _HALF) - 1
_LONG = 8  # bits of an exponent, from which on some powers are found beforehand
_FEW = 32  # numbers of which Python finds the inverses as fast as torch halves them
_EXPONENTS = range(-2300, 2300)  # of products and quotients of fp64 numbers


def power(x: Tensor, exponent: int, modulus: int) -> Tensor:
    """Return x to the power of a nonnegative exponent."""
    if exponent == 0:
        return torch.ones_like(x)
    odd, width, bits = [x], 1, f"{exponent:b}"
    if len(bits) > _LONG:  # x, x³, x⁵ and x⁷, so that three bits are one product
        square, width = x * x % modulus, 3
        for _ in range(3):
            odd.append(odd[-1] * square % modulus)
    window = bits[:width].rstrip("0")
    result = odd[int(window, 2) >> 1].clone()
    while bits := bits[len(window) :]:
        window = bits[:width].rstrip("0") or "0"
        for _ in window:
            result.mul_(result).remainder_(modulus)
        if window != "0":
            result.mul_(odd[int(window, 2) >> 1]).remainder_(modulus)
    return result


def inverse(x: Tensor, modulus: int) -> Tensor:
    """Return 1 / x, and 0 for 0.

    All numbers by the inverses of a few: products of pairs, of pairs of pairs and so on, and back.
    """
    zero = x == 0
    level = torch.where(zero, 1, x).reshape(-1)
    levels = []
    while len(level) > _FEW:
        if len(level) & 1:
            level = torch.cat([level, level.new_ones(1)])
        levels.append(level)
        level = level[::2] * level[1::2] % modulus
    result = torch.tensor([pow(number, -1, modulus) for number in level.tolist()], dtype=torch.int64)
    for below in reversed(levels):
        pairs = below.view(-1, 2).flip(-1)
        result = (pairs * result[: len(pairs), None] % modulus).view(-1)
    return torch.where(zero, 0, result[: x.numel()].view(x.shape))


def quotient(a: Tensor, b: Tensor, modulus: int) -> Tensor:
    """Return a / b, and 0 where b is 0."""
    return a * inverse(b, modulus) % modulus


def root(x: Tensor, modulus: int) -> Tensor:
    """Return a root of x or of -x: a homomorphism of multiplication."""
    return power(x, (modulus + 1) // 4, modulus)


def is_root(root: Tensor, x: Tensor, modulus: int) -> Tensor:
    """Return whether `root` of x is one of x itself, and not of -x: x is a square."""
    return root * root % modulus == x


def is_square(x: Tensor, modulus: int) -> Tensor:
    """Return whether x is a square, so that `root` is a root of x itself."""
    return power(x, (modulus - 1) // 2, modulus) != modulus - 1


def dot(a: Tensor, b: Tensor, modulus: int) -> Tensor:
    """Return the matrix product a @ b, exactly: halves of 16 bits are multiplied in fp64, up to 2^21 terms."""
    low, high = (a & _LOW).double(), (a >> _HALF).double()
    of_low, of_high = (b & _LOW).double(), (b >> _HALF).double()
    least = (low @ of_low).long() % modulus
    middle = ((low @ of_high).long() + (high @ of_low).long()) % modulus
    most = (high @ of_high).long() % modulus
    most = ((most << _HALF) % modulus + middle) % modulus
    return ((most << _HALF) + least) % modulus


def product_along(x: Tensor, dim: int, modulus: int) -> Tensor:
    """Return the product of all elements along a dimension, which is kept with size 1."""
    x = x.movedim(dim, -1)
    while x.shape[-1] > 1:
        if x.shape[-1] & 1:
            x = torch.cat([x, torch.ones_like(x[..., :1])], -1)
        x = x[..., ::2] * x[..., 1::2] % modulus
    if x.shape[-1] == 0:
        x = x.new_ones((*x.shape[:-1], 1))
    return x.movedim(-1, dim)


@lru_cache
def _powers_of_base() -> tuple[Tensor, Tensor]:
    """Return BASE to the powers 0, 1, 2, … and 0, 2^16, 2 · 2^16, …, by doubling."""

    def table(base: int, bits: int) -> Tensor:
        numbers = torch.ones(1, dtype=torch.int64)
        for bit in range(bits):
            numbers = torch.cat([numbers, numbers * pow(base, 1 << bit, P) % P])
        return numbers

    return table(BASE, _HALF), table(pow(BASE, 1 << _HALF, P), 15)


def exponential(a: Tensor) -> Tensor:
    """Return BASE^a modulo P, for a modulo Q."""
    small, large = _powers_of_base()
    return small[a & _LOW] * large[a >> _HALF] % P


def raised(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x^exponent elementwise, for squares x modulo P and exponents modulo Q."""
    x, exponent = torch.broadcast_tensors(x, exponent)
    result = torch.ones_like(x)
    for bit in range(Q.bit_length()):
        result = torch.where((exponent >> bit) & 1 == 1, result * x % P, result)
        x = x * x % P
    return result


@lru_cache
def _powers_of_two(modulus: int) -> Tensor:
    return torch.tensor([pow(2, e, modulus) for e in _EXPONENTS])


def power_of_two(exponent: Tensor, modulus: int) -> Tensor:
    """Return 2 to the power of integers, which may be as small as exponents of products of fp64 numbers."""
    return _powers_of_two(modulus)[exponent - _EXPONENTS.start]


def residues(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return m · 2^e modulo P and modulo Q for the finite numbers x = m · 2^e of fp64; 0 for others."""
    significand, exponent = torch.frexp(torch.nan_to_num(x, 0.0, 0.0, 0.0))
    integer, exponent = (significand * 2.0**53).long(), exponent.long() - 53
    of_p, of_q = (integer % modulus * power_of_two(exponent, modulus) % modulus for modulus in (P, Q))
    return of_p, of_q


def mixed(x: Tensor, tag: int, modulus: int) -> Tensor:
    """Return a hash of numbers modulo P, from 0 to the modulus, with h(-x) = -h(x).

    The steps are the finalizer of splitmix64 (Steele, Lea and Flood 2014), another stream for each tag.
    """
    negative = x > Q  # Q is half of P
    u = torch.where(negative, P - x, x).mul_(-0x61C8864680B583EB).add_(tag * 0x1234567)
    u = (u >> 30).bitwise_and_(0x3FFFFFFFF).bitwise_xor_(u).mul_(-0x40A7B892E31B1A47)
    u = (u >> 27).bitwise_and_(0x1FFFFFFFFF).bitwise_xor_(u).mul_(-0x6B2FB644ECCEEE15)
    # The highest 31 bits are enough: the last step of the finalizer mixes the others.
    u = (u >> 33).bitwise_and_(0x7FFFFFFF).mul_(modulus - 1).bitwise_right_shift_(31).add_(1)
    u = torch.where(negative, modulus - u, u)
    return u.masked_fill_(x == 0, 0)
