"""Tensors of residues: formulas that are equal over the real numbers have equal residues, others do not.

docs/residues.md derives each rule, and says what is preserved and what is not.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import or_

import numpy as np
import torch
from torch import Tensor

from lastbit.numerics.formats import Format, round_ends
from lastbit.numerics.parts import all_finite
from lastbit.numerics.residues import field
from lastbit.numerics.residues.field import P, Q

OPEN, NO_EXPONENT, MINUS_INFINITY, SIGN, CONSTANT, ROOT, EXTREME = 1, 2, 4, 8, 16, 32, 64
_HANDED_ON = OPEN | NO_EXPONENT | MINUS_INFINITY | SIGN | ROOT | EXTREME
_LOGARITHM = 128  # no flag, but a kind of residues
_OF_NUMBERS = OPEN | SIGN | ROOT | EXTREME  # of what has residues of its own modulo both primes
_LEAST_POWER = -200  # below the numbers of every format of 16 bits
NONE = -1
_ZERO, _NONE = torch.tensor(0), torch.tensor(NONE)
# Eight times the rounding of bf16: what has the residues of a number by chance lies farther off, mostly.
_ABOUT = 2.0**-5
_VANISHING = -(2.0**8)  # exp and exp2 are 0 below, in fp32
# A quarter of fp32's unit roundoff: such a term changes no sum, rounded to nearest, of two numbers of fp32.
_NEGLIGIBLE = 2.0**-26


@dataclass(frozen=True, eq=False)
class Residues:
    """Residues of a tensor of numbers, stacked: modulo P, modulo Q, of the exponential modulo P, and flags.

    The residue modulo Q is what exp makes a power of; that of the exponential is there for numbers behind a logarithm
    only, else NONE, and then the first two are hashes of it. Flags of an element are a sum of:

    * OPEN: another right formula may give another residue, so that a difference says nothing (equality does);
    * NO_EXPONENT: nothing is known modulo Q, as behind exp;
    * MINUS_INFINITY: the number is -inf, of which exp is 0, and did not come of an overflow. It is OPEN, too;
    * CONSTANT: the number was written down, so that it may stand for whatever is beyond it;
    * SIGN: a root of -x was taken for one of x: another right formula may give the negative number. A product of
      two such numbers is OPEN;
    * ROOT: a root was taken, and another right formula may give the negative number: the root of a² x is one of
      a times that of x only where a is a square;
    * EXTREME: a number of a size that formulas have none of was written down: -1e30 for -inf, 1e-20 beside a divisor.
      Where values do not say which, exp of what was made with one is OPEN.

    >>> x, y = Residues.of(torch.tensor([0.1, 3.0])), Residues.of(torch.tensor([0.7, 5.0]))
    >>> ((x + y) * (x - y)).equal(x * x - y * y)
    tensor([True, True])
    >>> ((x + y) * (x - y)).equal(x * x + y * y)
    tensor([False, False])
    """

    numbers: Tensor

    @classmethod
    def of(cls, values: Tensor) -> Residues:
        """Return the exact residues of numbers of any dtype; infinities and NaN are OPEN."""
        if not values.is_floating_point():
            whole = values.long()
            return cls._made(whole % P, whole % Q)
        if values.itemsize == 2:
            return cls(_of_all(values.dtype)[:, values.detach().cpu().view(torch.int16).long() & 0xFFFF])
        x = values.detach().double().cpu()
        made = cls._made(*field.residues(x))
        return made._flagged(torch.isneginf(x), MINUS_INFINITY).seen(x)

    @classmethod
    def _made(cls, p: Tensor, q: Tensor | None, *flagged: Residues, exponential: Tensor | None = None) -> Residues:
        """Make residues with the flags of the operands `flagged`."""
        kinds = reduce(or_, [other._kinds for other in flagged], 0) & _HANDED_ON
        flags = reduce(or_, [other.flags for other in flagged]) & _HANDED_ON if kinds else _ZERO
        if q is None:
            q, flags, kinds = _ZERO, flags | NO_EXPONENT, kinds | NO_EXPONENT
        e = _NONE if exponential is None else exponential
        made = cls(torch.stack(torch.broadcast_tensors(p, q, e, flags)))
        return made._of_kinds(kinds) if exponential is None else made._canonical()

    @cached_property
    def _kinds(self) -> int:
        """The sum of the flags that elements have, and of `_LOGARITHM` if one is behind a logarithm; or of more."""
        if not self.numbers.numel():
            return 0
        *_, exponentials, flags = self.numbers.numpy()
        return int(np.bitwise_or.reduce(flags, axis=None)) | (_LOGARITHM if exponentials.max() != NONE else 0)

    def _of_kinds(self, kinds: int) -> Residues:
        """Return these residues, of which it is known that they have no other kinds."""
        vars(self)["_kinds"] = kinds
        return self

    def _canonical(self) -> Residues:
        """Replace the first two residues by hashes of the exponential, where there is one."""
        p, q, e, flags = self.numbers
        behind = e != NONE
        p = torch.where(behind, field.mixed(e, _tag("log"), P), p)
        q = torch.where(behind, field.mixed(e, _tag("log mod Q"), Q), q)
        return Residues(torch.stack([p, q, e, torch.where(behind, flags & ~NO_EXPONENT, flags)]))

    @property
    def p(self) -> Tensor:
        return self.numbers[0]

    @property
    def q(self) -> Tensor:
        return self.numbers[1]

    @property
    def flags(self) -> Tensor:
        return self.numbers[3]

    @property
    def open(self) -> Tensor:
        """Mask of the elements whose difference from others says nothing."""
        return self.flags & OPEN != 0

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape[1:]

    @property
    def is_sound(self) -> bool:
        """Return whether all numbers and flags are in range; those that come from another process need not be."""
        if self.numbers.dtype != torch.int64 or self.numbers.ndim < 1 or len(self.numbers) != 4:
            return False
        ends = (0, P), (0, Q), (NONE, P), (0, 2 * EXTREME)
        return all(bool(((x >= low) & (x < high)).all()) for x, (low, high) in zip(self.numbers, ends, strict=True))

    # Elements as they are, elsewhere

    def moved(self, function: Callable[[Tensor], Tensor]) -> Residues:
        """Apply `function`, which only moves elements, to the stacked numbers, [4, …]."""
        made = Residues(function(self.numbers))
        return made._of_kinds(self._kinds) if "_kinds" in vars(self) else made

    def __getitem__(self, index: object) -> Residues:
        return self.moved(lambda n: n[(slice(None), *(index if isinstance(index, tuple) else (index,)))])

    @staticmethod
    def where(mask: Tensor, a: Residues, b: Residues) -> Residues:
        """Choose elements of `a` where the mask is true, else of `b`."""
        dims = max(a.numbers.ndim, b.numbers.ndim, mask.ndim + 1)
        first, second = (x.numbers.reshape(4, *[1] * (dims - x.numbers.ndim), *x.shape) for x in (a, b))
        return Residues(torch.where(mask, first, second))._of_kinds(a._kinds | b._kinds)

    @staticmethod
    def chosen(mask: Tensor, a: Residues, b: Residues, alike: Tensor) -> Residues:
        """Choose as `where`; OPEN where values are `alike` but residues differ: either could have been chosen."""
        return Residues.where(mask, a, b).open_where(alike & ~a.equal(b))

    @property
    def unlimited(self) -> Residues:
        """These results of a choice, OPEN where a written constant was chosen.

        A limit that changes no result, as of the argument of an exponential, is no other formula.
        """
        return self.open_where(self.flags & CONSTANT != 0) if self._kinds & CONSTANT else self

    def written_as(self, constant: Residues) -> Residues:
        """Mark the numbers as written down, with the flags of a constant."""
        return self._flagged(torch.ones((), dtype=torch.bool), int(constant.flags) & (CONSTANT | EXTREME))

    def masked(self, values: Tensor) -> Residues:
        """Mark large negative numbers that stand for -inf as -inf, where exp of the values vanishes."""
        if not self._kinds & EXTREME or not bool((extreme := self.flags & EXTREME != 0).any()):
            return self
        plain = Residues(torch.stack([*self.numbers[:3], self.flags & ~EXTREME]))
        return plain._flagged(extreme & (values < _VANISHING), MINUS_INFINITY)

    def beside(self, values: Tensor, others: Tensor) -> Residues:
        """Replace by 0 the constants of extreme size that change no sum with the `others`."""
        if not self._kinds & EXTREME:
            return self
        written = self.flags & (CONSTANT | EXTREME) == CONSTANT | EXTREME
        if not bool(written.any()):
            return self
        nothing = written & (values.abs() <= _NEGLIGIBLE * others.abs())
        either = written & ~nothing & (values.abs() <= 4 * _NEGLIGIBLE * others.abs())
        return Residues.where(nothing, zeros_like(self), self).open_where(either)

    def open_where(self, mask: Tensor | None) -> Residues:
        """Mark the elements where the mask is true as OPEN."""
        return self if mask is None else self._flagged(mask, OPEN)

    @property
    def opened(self) -> Residues:
        """These residues with all elements OPEN."""
        return self.open_where(torch.ones((), dtype=torch.bool))

    def _flagged(self, mask: Tensor, flag: int) -> Residues:
        if not bool(mask.any()):
            return self
        p, q, e, flags = torch.broadcast_tensors(*self.numbers, mask)[:4]
        made = Residues(torch.stack([p, q, e, torch.where(mask, flags | flag, flags)]))
        return made._of_kinds(self._kinds | flag)

    def seen(self, values: Tensor) -> Residues:
        """Adapt the residues to the values that were computed: OPEN where these are not finite."""
        if all_finite(values) and not self._kinds & MINUS_INFINITY:
            return self
        finite, flagged = torch.isfinite(values), self.flags & MINUS_INFINITY != 0
        p, q, e, flags = torch.broadcast_tensors(*self.numbers, finite)[:4]
        below = torch.isneginf(values) & flagged
        flags = torch.where(below, flags, flags & ~MINUS_INFINITY) | torch.where(finite, 0, OPEN)
        p, q, e = (torch.where(below, nothing, x) for x, nothing in ((p, 0), (q, 0), (e, NONE)))
        return Residues(torch.stack([p, q, e, flags]))

    # Arithmetic

    def __add__(self, other: Residues) -> Residues:
        plain = Residues._made((self.p + other.p) % P, (self.q + other.q) % Q, self, other)
        return self._of_logarithms(other, plain, lambda a, b: a * b % P)

    def __sub__(self, other: Residues) -> Residues:
        return self + -other

    def __neg__(self) -> Residues:
        plain = Residues._made((P - self.p) % P, (Q - self.q) % Q, self)
        if self._kinds & MINUS_INFINITY:
            plain = Residues(torch.stack([*plain.numbers[:3], plain.flags & ~MINUS_INFINITY]))
        if not self._has_logarithms:
            return plain
        e = self.numbers[2]
        inverse = torch.where(e == NONE, NONE, field.inverse(e.clamp(min=0), P))
        return Residues(torch.stack([plain.p, plain.q, inverse, plain.flags]))._canonical()

    def __mul__(self, other: Residues) -> Residues:
        plain = Residues._made(self.p * other.p % P, self.q * other.q % Q, self, other)
        plain = plain._decided_where_zero(self, other)
        if self._kinds & other._kinds & SIGN:
            plain = plain.open_where((self.flags & other.flags & SIGN) != 0)
        if not self._has_logarithms and not other._has_logarithms:
            return plain
        (a, b), (e, f) = (self, other), torch.broadcast_tensors(self.numbers[2], other.numbers[2])
        logarithm, factor = torch.where(e != NONE, e, f), torch.where(e != NONE, b.q, a.q)
        lost = torch.where(e != NONE, b.flags, a.flags) & NO_EXPONENT != 0
        behind = (e != NONE) | (f != NONE)
        known = ((e == NONE) != (f == NONE)) & ~lost
        squares = field.is_square(logarithm.clamp(min=0), P)
        logarithm = torch.where(squares, logarithm.clamp(min=0), (P - logarithm) % P)  # others are no powers of e
        raised = torch.where(known, field.raised(logarithm, factor), NONE)
        made = Residues(torch.stack([plain.p, plain.q, raised, plain.flags]))._canonical()
        return made._flagged(known & ~squares, SIGN).open_where(behind & ~known)

    def _decided_where_zero(self, a: Residues, b: Residues) -> Residues:
        """Clear OPEN in this product where one factor is 0 for sure, whatever the other may be."""
        if not self._kinds & OPEN or not bool(self.open.any()):
            return self
        open_ = (a.open & (b.p != 0)) | (b.open & (a.p != 0)) | (a.open & b.open)
        made = Residues(torch.stack([*self.numbers[:3], torch.where(open_, self.flags, self.flags & ~OPEN)]))
        return made._of_kinds(self._kinds)

    def reciprocal(self) -> Residues:
        """Return 1 / x."""
        q = self.q if self._is_lost else field.inverse(self.q, Q)
        made = Residues._made(field.inverse(self.p, P), q, self)
        return made.open_where(self.numbers[2] != NONE) if self._has_logarithms else made

    def __truediv__(self, other: Residues) -> Residues:
        return self * other.reciprocal()

    def __abs__(self) -> Residues:
        raise TypeError("the sign of a residue is not known: choose between x and -x by the values")

    def total(self, dim: int = -1, *, keepdim: bool = True) -> Residues:
        """Return the sum along a dimension."""
        kinds = self._kinds if self.shape[dim] else 0
        flags = [(self.flags & f).amax(dim, keepdim=True) if kinds & f else 0 for f in (OPEN, SIGN, ROOT)]
        lost = (self.flags & NO_EXPONENT).amax(dim, keepdim=True) if kinds & NO_EXPONENT else 0
        p, q = self.p.sum(dim, keepdim=True) % P, self.q.sum(dim, keepdim=True) % Q
        e = torch.full_like(p, NONE)
        made = Residues(torch.stack([p, q, e, torch.zeros_like(p) | flags[0] | flags[1] | flags[2] | lost]))
        if self._has_logarithms:
            known = field.product_along(self._exponential(), dim, P)
            behind = (self.numbers[2] != NONE).any(dim, keepdim=True)
            made = Residues(torch.stack([p, q, torch.where(behind & (lost == 0), known, NONE), made.flags]))
            made = made._canonical().open_where(behind & (lost != 0))
        return made if keepdim else Residues(made.numbers.squeeze(dim if dim < 0 else dim + 1))

    def __matmul__(self, other: Residues) -> Residues:
        made = Residues._made(field.dot(self.p, other.p, P), field.dot(self.q, other.q, Q))
        flags = torch.zeros_like(made.p)
        for flag in (OPEN, NO_EXPONENT, SIGN, ROOT):
            if (self._kinds | other._kinds) & flag:
                a, b = ((x.flags & flag != 0).float() for x in (self, other))
                reached = a @ (other.p != 0).float() + (self.p != 0).float() @ b + a @ b
                flags = flags | torch.where(reached > 0, flag, 0)
                if flag == SIGN:
                    flags = flags | torch.where(a @ b > 0, OPEN, 0)
        made = Residues(torch.stack([*made.numbers[:3], flags]))
        if self._has_logarithms or other._has_logarithms:
            behind_a = (self.numbers[2] != NONE).any(-1, keepdim=True)
            made = made.open_where(behind_a | (other.numbers[2] != NONE).any(-2, keepdim=True))
        return made

    def sqrt(self) -> Residues:
        """Return the square root of x, or one of -x where x is no square in the field: its square is not x there."""
        p, q = field.root(self.p, P), self.q if self._is_lost else field.root(self.q, Q)
        made, squares = Residues._made(p, q, self), field.is_root(p, self.p, P)
        if not self._is_lost:  # an element of which nothing is known modulo Q has its sign from P alone
            squares &= (self.flags & NO_EXPONENT != 0) | field.is_root(q, self.q, Q)
        made = made._flagged(torch.ones((), dtype=torch.bool), ROOT)._flagged(~squares, SIGN)
        made = made.open_where(self.flags & SIGN != 0) if self._kinds & SIGN else made
        return made.open_where(self.numbers[2] != NONE) if self._has_logarithms else made

    # Exponentials and logarithms

    @cached_property
    def _is_lost(self) -> bool:
        """Return whether nothing is known of any element modulo Q."""
        return bool(self._kinds & NO_EXPONENT) and bool((self.flags & NO_EXPONENT != 0).all())

    @property
    def _has_logarithms(self) -> bool:
        return bool(self._kinds & _LOGARITHM)

    def _exponential(self) -> Tensor:
        """Return exp of each number; meaningless where NO_EXPONENT."""
        plain = field.exponential(self.q)
        e = self.numbers[2]
        return torch.where(e == NONE, plain, e) if self._has_logarithms else plain

    def _of_logarithms(self, other: Residues, plain: Residues, f: Callable[[Tensor, Tensor], Tensor]) -> Residues:
        """Return `plain`, recomputed from exponentials where one of the two numbers is behind a logarithm."""
        if not self._has_logarithms and not other._has_logarithms:
            return plain
        behind = (self.numbers[2] != NONE) | (other.numbers[2] != NONE)
        known = behind & (plain.flags & NO_EXPONENT == 0)
        e = torch.where(known, f(self._exponential(), other._exponential()), NONE)
        made = Residues(torch.stack(torch.broadcast_tensors(plain.p, plain.q, e, plain.flags)))._canonical()
        return made.open_where(behind & ~known)

    def exp(self) -> Residues:
        """Return exp; 0 for -inf, and OPEN for a number that is itself behind an exponential."""
        p, lost = self._exponential(), self.flags & (NO_EXPONENT | SIGN | EXTREME) != 0
        if self._kinds & NO_EXPONENT:
            p = torch.where(self.flags & NO_EXPONENT != 0, field.mixed(self.p, _tag("exp"), P), p)
        made = Residues._made(p, None, self).open_where(lost)
        nothing = self.flags & MINUS_INFINITY != 0
        return Residues.where(nothing, zeros_like(made), made) if self._kinds & MINUS_INFINITY else made

    def log(self) -> Residues:
        """Return the logarithm, which carries its exponential: the number itself."""
        made = Residues._made(torch.zeros_like(self.p), torch.zeros_like(self.p), self, exponential=self.p)
        return made.open_where(self.numbers[2] != NONE)

    def function(self, name: str, *, odd: bool = False, even: bool = False) -> Residues:
        """Return a hash of the number as the residue of a function without algebra, such as erf or sin."""
        p = field.mixed(self.p, _tag(name), P)
        if even:
            p = p * p % P
        elif not odd:
            p = (p + field.mixed(p * p % P, _tag(name), P)) % P
        made = Residues._made(p, field.mixed(p, _tag(name), Q), Residues.opening(self))
        return made if odd or even else made.open_where(self.flags & SIGN != 0)

    @staticmethod
    def opening(x: Residues) -> Residues:
        """Drop all flags of x but OPEN, SIGN, ROOT and EXTREME."""
        return Residues(torch.stack([*x.numbers[:3], x.flags & _OF_NUMBERS]))

    def with_function_of(self, name: str) -> Residues:
        """Set the residues modulo Q to hashes of the numbers, so that exp and powers of these are known again.

        For the result of a function that kernels do not write in another way, such as tanh.
        """
        return Residues._made(self.p, field.mixed(self.p, _tag(name), Q), Residues.opening(self))

    # Rounding

    def rounded(self, fmt: Format, values: Tensor, ends: tuple[Tensor, Tensor] | None = None) -> Residues:
        """Round to a narrow format in its direction: hash each number, except those that the format holds.

        `values` are the numbers as they were computed, of which the exponents are taken: rounding 2x is rounding x,
        doubled. Where the `ends` of their enclosures have other exponents, the result is OPEN; without ends, the values
        may be rounded already. A number that was rounded to the format in any direction is recognised and stays. A
        number rounded to zero is zero: a kernel may leave it out. Rounding to either neighbour is OPEN, since a hash of
        the one tells nothing of the other. So is any direction but to nearest where rounding to nearest may give the
        same number: a kernel may round to nearest and go back by one where that went too far.
        """
        if fmt.precision >= 24:
            return self
        fmt, direction = fmt.nearest, fmt.direction
        tag, seal = _tag(fmt.name + direction), _tag(fmt.name)
        below, tie = math.nextafter(fmt.quantum, 0), fmt.quantum / 2
        vanishing = {"nearest": tie, "ties_away": math.nextafter(tie, 0), "zero": below, "either": 0.0}[direction]
        numbers = torch.stack([values, *(ends or ())]).double()
        exponents, zeros = _exponents(numbers, fmt), numbers.abs() <= vanishing
        exponent, zero, lost = exponents[0], zeros[0], self.flags & NO_EXPONENT != 0
        p = self.p * field.power_of_two(fmt.precision - exponent, P) % P
        own_p, own_q, own_e, own_flags = self.numbers
        hashed = field.mixed(p, tag, P)
        held, digits = _held(p, exponent, numbers[0], fmt)
        held |= own_p == 0
        if self._kinds & NO_EXPONENT:  # what the format holds is known modulo Q, too
            restored = digits * field.power_of_two(exponent - fmt.precision, Q) % Q
            own_q = torch.where(lost & held, restored, own_q)
            own_flags = torch.where(lost & held, own_flags & _OF_NUMBERS, own_flags)
        if self._is_lost:
            sealed = field.mixed(hashed, seal, Q)
        else:
            mark = self.q * field.power_of_two(-exponent, Q) % Q
            sealed, own, doubled = field.mixed(torch.stack([hashed, p, 2 * p % P]), seal, Q)
            held |= ((mark == own) | (2 * mark % Q == doubled)) & ~lost
        fresh_p = hashed * field.power_of_two(exponent - fmt.precision, P) % P
        fresh_q = sealed * field.power_of_two(exponent, Q) % Q
        doubt = self.open
        if direction == "either":
            doubt = torch.ones_like(zero)
        elif ends is None:  # a power of two may be what a number of the binade below was rounded to
            doubt = doubt | (torch.frexp(numbers[0]).mantissa.abs() == 0.5)
        else:
            doubt = doubt | (zeros != zero).any(0)
            crossing = (exponents[1] != exponents[2]) | (numbers[1].sign() * numbers[2].sign() < 0)
            if direction != "nearest":
                (least, most), (own_least, own_most) = (round_ends(*ends, f) for f in (fmt, fmt.toward(direction)))
                crossing |= (least <= own_most) & (own_least <= most)
            doubt = doubt | (crossing & ~zero)
        flags = own_flags & _OF_NUMBERS
        flags = torch.where(zero, 0, flags) | torch.where(doubt, OPEN, 0)
        return Residues(
            torch.stack(
                [
                    torch.where(held, own_p, fresh_p.masked_fill_(zero, 0)),
                    torch.where(held, own_q, fresh_q.masked_fill_(zero, 0)),
                    torch.where(held, own_e, NONE),
                    torch.where(held, own_flags, flags),
                ]
            )
        )

    # Comparison

    def equal(self, other: Residues) -> Tensor:
        """Return the mask of equal numbers."""
        if self._has_logarithms or other._has_logarithms:
            e, f = torch.broadcast_tensors(self.numbers[2], other.numbers[2])
            behind = (e != NONE) | (f != NONE)
            return torch.where(behind, self._exponential() == other._exponential(), self.p == other.p)
        return self.p == other.p

    def differs(self, other: Residues) -> Tensor:
        """Return the mask of elements that differ for sure: none is OPEN or equal up to an unknown sign."""
        return ~self.equal(other) & ~self.open & ~other.open & ~self._opposite(other)

    def _opposite(self, other: Residues) -> Tensor:
        """Return the mask of numbers of which one is the negative of the other, where its sign is not known."""
        signed = (self.flags | other.flags) & (SIGN | ROOT) != 0
        return signed & ((self.p + other.p) % P == 0) if bool(signed.any()) else signed

    def or_another(self, other: Residues) -> Residues:
        """Return these numbers, OPEN where another right formula gives others, and of unknown sign where only that."""
        opposite = self._opposite(other)
        return self._flagged(opposite, SIGN).open_where(~self.equal(other) & ~opposite)


@lru_cache
def _of_all(dtype: torch.dtype) -> Tensor:
    """Return the stacked residues of all numbers of a dtype of 16 bits, by their bits."""
    return Residues.of(torch.arange(1 << 16).to(torch.int16).view(dtype).double()).numbers


def zeros_like(x: Residues) -> Residues:
    """Return zeros of this shape."""
    return Residues._made(torch.zeros_like(x.p), torch.zeros_like(x.q))


def concatenated(parts: Sequence[Residues], dim: int) -> Residues:
    """Return residues joined along a dimension, counted from the last one, -1."""
    return Residues(torch.cat([part.numbers for part in parts], dim=dim))


def _exponents(x: Tensor, fmt: Format) -> Tensor:
    """Return floor(log2 |x|) of fp64 numbers, but at least the exponent of the format's smallest normal number."""
    exponents = (x.view(torch.int64) >> 52).bitwise_and_(0x7FF).sub_(1023)
    return exponents.masked_fill_(exponents == 1024, fmt.min_exponent).clamp_(min=fmt.min_exponent)  # infinity or NaN


def _held(p: Tensor, exponent: Tensor, values: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the mask of numbers that a format holds, and each as an integer times 2^(exponent - precision).

    `p` are the residues of these integers. A number of the format that lies near the values of this exponent has few
    digits; what has the residue of one by chance is no such number, or lies farther off, mostly.
    """
    digits = torch.where(p > Q, p - P, p)
    numbers = digits * _powers_of_two()[exponent - (fmt.precision + _LEAST_POWER)]
    near = ((values - numbers).abs() <= _ABOUT * numbers.abs()) & (numbers.abs() <= fmt.max)
    return near & (numbers.to(fmt.dtype).double() == numbers), digits


@lru_cache
def _powers_of_two() -> Tensor:
    """Return 2 to the powers from `_LEAST_POWER` on as numbers of fp64."""
    return torch.tensor([2.0**e for e in range(_LEAST_POWER, 1024)], dtype=torch.float64)


@lru_cache
def _tag(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF
