"""Residues: the field, the functions that are homomorphisms in it, rounding, constants, and what is open."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lastbit.numerics import Enclosure, exp, where
from lastbit.numerics.algebraic import following_residues
from lastbit.numerics.formats import BF16, E4M3, FP16, FP32, Format, round_to
from lastbit.numerics.residues import Residues, constant, field, products_of
from lastbit.numerics.residues.constants import is_recognised
from lastbit.numerics.residues.field import P, Q
from lastbit.numerics.residues.numbers import (
    CONSTANT,
    EXTREME,
    MINUS_INFINITY,
    NO_EXPONENT,
    NONE,
    OPEN,
    ROOT,
    SIGN,
)

NARROW = pytest.mark.parametrize("fmt", [BF16, FP16, E4M3], ids=lambda fmt: fmt.name)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@pytest.mark.parametrize("modulus", [P, Q])
def test_field_is_one_of_integers(modulus: int) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(0, modulus, shape, generator=generator) for shape in ((5, 700), (700, 6)))
    product = a.numpy().astype(object) @ b.numpy().astype(object) % modulus
    assert field.dot(a, b, modulus).tolist() == product.tolist()
    assert field.inverse(a, modulus)[0].tolist() == [pow(int(x), -1, modulus) for x in a[0]]
    assert (field.root(a, modulus) ** 2 % modulus == torch.where(field.is_square(a, modulus), a, modulus - a)).all()


@given(st.integers(0, 2**31), st.integers(0, 2000), st.sampled_from([P, Q]))
def test_powers_roots_and_quotients_are_those_of_python(x: int, exponent: int, modulus: int) -> None:
    x %= modulus
    one = torch.tensor([x, 1, modulus - 1])
    assert field.power(one, exponent, modulus).tolist() == [pow(int(n), exponent, modulus) for n in one]
    assert field.quotient(one, one, modulus).tolist() == [int(x != 0), 1, 1]
    square = one * one % modulus
    assert field.is_square(square, modulus).all() and (field.root(square, modulus) ** 2 % modulus == square).all()
    signed = torch.tensor([exponent, -exponent])
    assert field.power_of_two(signed, modulus).tolist() == [pow(2, exponent, modulus), pow(2, -exponent, modulus)]
    assert field.exponential(one % Q).tolist() == [pow(field.BASE, int(n) % Q, P) for n in one]
    assert field.raised(square % P, torch.tensor(exponent)).tolist() == [pow(int(n) % P, exponent, P) for n in square]


def test_a_minus_one_is_no_square() -> None:
    assert field.is_square(torch.tensor([0, 1, P - 1]), P).tolist() == [True, True, False]
    assert field.inverse(torch.zeros(0, dtype=torch.int64), P).shape == (0,)
    assert field.inverse(torch.tensor([[0, 2], [3, 0]]), Q).tolist() == [[0, pow(2, -1, Q)], [pow(3, -1, Q), 0]]


@pytest.mark.parametrize("count", [0, 1, 2, 5, 8])
def test_products_along_a_dimension(count: int) -> None:
    x = torch.randint(0, P, (3, count, 2), generator=torch.Generator().manual_seed(count))
    found = field.product_along(x, 1, P)
    assert found.shape == (3, 1, 2)
    for i, j in ((0, 0), (2, 1)):
        assert int(found[i, 0, j]) == math.prod(x[i, :, j].tolist()) % P


@pytest.mark.parametrize("modulus", [P, Q])
@pytest.mark.parametrize("tag", [0, 1, 77])
def test_hashes_are_those_of_splitmix64(modulus: int, tag: int) -> None:
    """Computed with Python's integers; of a number and its negative they are negatives of each other."""

    def hashed(x: int) -> int:
        if x == 0 or x > P - x:
            return -hashed(P - x) if x else 0
        u = x * 0x9E3779B97F4A7C15 + tag * 0x1234567 & 2**64 - 1
        u = (u ^ u >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        u = (u ^ u >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return ((u >> 33) * (modulus - 1) >> 31) + 1

    x = torch.randint(0, P, (500,), generator=torch.Generator().manual_seed(tag))
    x[:6] = torch.tensor([0, 1, P - 1, Q - 1, Q, Q + 1])
    found = field.mixed(x, tag, modulus)
    assert found.tolist() == [hashed(n) % modulus for n in x.tolist()]
    assert found.unique().numel() == x.unique().numel()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_residue_of_a_float_is_that_of_its_fraction(x: float) -> None:
    numerator, denominator = x.as_integer_ratio()
    own = Residues.of(torch.tensor([x], dtype=torch.float64))
    assert int(own.p) == numerator * pow(denominator, -1, P) % P
    assert int(own.q) == numerator * pow(denominator, -1, Q) % Q


def test_powers_of_two_are_powers_of_e() -> None:
    whole = Residues.of(torch.arange(-20, 20))
    powers = (whole * constant(math.log(2))).exp()
    assert powers.equal(Residues.of(2.0 ** torch.arange(-20.0, 20.0))).all()
    x = Residues.of(drawn(100))
    assert (x * constant(math.log2(math.e)) * constant(math.log(2))).exp().equal(x.exp()).all()


def shifted(x: Residues, shift: Residues) -> Residues:
    terms = (x - shift).exp()
    return terms / terms.total()


def test_shift_of_a_softmax_cancels() -> None:
    x = Residues.of(drawn(8, 512))
    assert shifted(x, x[:, 3:4]).equal(shifted(x, x[:, 9:10])).all()
    assert not shifted(x, x[:, 3:4])[:, :-1].equal(shifted(x[:, :-1], x[:, 3:4])).any()


def test_sums_merge_by_their_logarithms() -> None:
    x = Residues.of(drawn(8, 512))
    whole = x.exp().total().log()
    parts = [part.exp().total().log() for part in (x[:, :100], x[:, 100:])]
    merged = (parts[1] - parts[0]).exp()
    merged = (merged + constant(1.0)).log() + parts[0]
    assert (whole.equal(merged) | whole.open | merged.open).all()
    assert whole.equal(merged).any()
    loss, again = whole - x[:, :1], -(shifted(x, x[:, 5:6])[:, :1].log())
    assert not loss.differs(again).any()
    assert loss.differs(whole - x[:, 1:2]).any()


@NARROW
def test_rounding_is_a_function_that_knows_its_format(fmt: Format) -> None:
    values = drawn(4096).double()
    x = Residues.of(values)
    once = x.rounded(fmt, values)
    assert once.rounded(fmt, round_to(values, fmt)).equal(once).all()  # recognised
    held = round_to(values, fmt)
    assert Residues.of(held).rounded(fmt, held).equal(Residues.of(held)).all()
    normal = values.abs() >= 2.0**fmt.min_exponent
    assert (x + x).rounded(fmt, 2 * values).equal(once + once)[normal].all()
    assert (-x).rounded(fmt, -values).equal(-once).all()
    assert once.equal(x).float().mean() < 0.01
    near = values * (1 + 2.0**-20)
    other = Residues.of(near).rounded(fmt, near)
    assert once.equal(other).float().mean() < 0.05


def test_rounding_of_what_was_rounded_up_to_a_power_of_two_is_open() -> None:
    values = torch.tensor([0.12499, 0.1246], dtype=torch.float64)
    x = Residues.of(values).exp().log()
    rounded = x.rounded(BF16, round_to(values, BF16))
    assert not rounded.differs(x.rounded(BF16, values, (values, values))).any()
    assert rounded.open.tolist() == [True, False]


def test_rounding_is_open_where_the_exponent_is() -> None:
    values = torch.tensor([1.5, 2.0000001], dtype=torch.float64)
    ends = values - 1e-4, values + 1e-4
    assert Residues.of(values).exp().rounded(BF16, values, ends).open.tolist() == [False, True]


@pytest.mark.parametrize("n", [3, 7, 41, 4096, 12288])
def test_constants_stand_for_what_they_round(n: int) -> None:
    whole = constant(float(n))
    assert constant(1 / n).equal(whole.reciprocal())
    assert constant(float(torch.tensor(1 / n, dtype=torch.float32))).equal(whole.reciprocal())
    if math.isqrt(n) ** 2 != n:
        assert constant(1 / math.sqrt(n)).equal(whole.sqrt().reciprocal())
        assert constant(math.log2(math.e) / math.sqrt(n)).equal(constant(math.log2(math.e)) * whole.sqrt().reciprocal())
    for root, square in ((constant(math.sqrt(n)), whole), (constant(1 / math.sqrt(n)), whole.reciprocal())):
        product = root * root
        assert (product.equal(square), product.open) == (n != 41, n == 41)  # 41 is no square: the root is one of -41
    assert not constant(1 / n).equal(constant(1 / (n - 1)))


@pytest.mark.parametrize("n", [3, 96, 510, 2000])
def test_constants_of_running_means_are_fractions(n: int) -> None:
    whole, less = constant(float(n)), constant(n - 1.0)
    assert constant((n - 1) / n).equal(less / whole)
    assert constant(n / (n - 1)).equal(whole / less)


def test_numbers_of_extreme_size_stand_for_nothing_and_for_minus_infinity() -> None:
    with following_residues():
        x = Enclosure.point(drawn(8))
        total = abs(x) + 1.0
        assert (total + 1e-20).residues.equal(total.residues).all() and not (total + 1e-20).residues.open.any()
        assert (total + 1e-5).residues.differs(total.residues).all()
        masked = where(torch.arange(8) < 6, x, -1e9)
        assert exp(masked).residues.open.tolist() == [False] * 6 + [True] * 2
    with products_of([1e-20]):
        assert not constant(1e-20).beside(torch.tensor(1e-20), torch.ones(1)).equal(constant(0.0)).any()


@pytest.mark.parametrize(("number", "fraction"), [(52 / 17, (52, 17)), (4097 * 31 / 4128, (127007, 4128))])
def test_constants_that_python_computed_are_fractions(number: float, fraction: tuple[int, int]) -> None:
    """Chan's update of squares has n · m / (n + m) as an fp64 number; the next one stands for its own rounding."""
    pair = tuple(fraction[0] * pow(fraction[1], -1, modulus) % modulus for modulus in (P, Q))
    assert tuple(constant(number).numbers[:2].tolist()) == pair
    assert tuple(constant(-number).numbers[:2].tolist()) == (P - pair[0], Q - pair[1])
    beside = math.nextafter(number, math.inf)
    assert constant(beside).numbers.tolist() == constant(float(torch.tensor(beside))).numbers.tolist()


@pytest.mark.parametrize("whole", [1, 3, 17])
def test_a_number_beside_a_whole_one_is_not_that(whole: int) -> None:
    """Fifty factors of 1 + 2^-22 are an error of 1e-5."""
    for beside in (whole * (1 + 2.0**-22), whole * (1 - 2.0**-23)):
        assert not constant(beside).equal(constant(float(whole)))


def test_a_choice_of_two_constants_has_the_shape_of_its_mask() -> None:
    mask = torch.eye(4, dtype=torch.bool)[:, None].expand(4, 4, 4)
    found = Residues.where(mask, constant(0.0), constant(-2.0))
    assert found.shape == mask.shape and found.equal(Residues.of(torch.where(mask, 0.0, -2.0))).all()


def test_products_of_parameters_stand_for_what_they_are() -> None:
    folded = 0.3 * math.log2(math.e), 0.3 / 50, 1 / 0.3
    apart = constant(0.3) * constant(math.log2(math.e)), constant(0.3) / constant(50.0), constant(0.3).reciprocal()
    assert not constant(folded[0]).equal(apart[0])
    with products_of([0.3, 50.0]):
        assert all(constant(a).equal(b) for a, b in zip(folded, apart, strict=True))


@pytest.mark.parametrize("width", [16, 32, 40, 64, 80, 128])
def test_a_scale_may_be_split_in_two_roots(width: int) -> None:
    scale = width**-0.5
    x, y = Residues.of(drawn(3, width)), Residues.of(drawn(width, 5))
    with products_of([scale, float(width)]):
        once = (x @ y) * constant(scale)
        split = (x * constant(math.sqrt(scale))) @ (y * constant(math.sqrt(scale)))
    assert not once.differs(split).any()
    assert not once.exp().differs(split.exp()).any()
    assert (once.exp().equal(split.exp()) | split.exp().open).all()


def test_infinities() -> None:
    x = Residues.of(torch.tensor([-math.inf, math.inf, math.nan, 1.0]))
    assert x.open.tolist() == [True, True, True, False]
    powers = x.exp()
    assert int(powers.p[0]) == 0
    assert powers.open.tolist() == [False, True, True, False]
    assert (-x).exp().open.tolist() == [True, True, True, False]  # of which the first is infinite, not 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda x, w: (x * (x * x).total().sqrt().reciprocal()) * w,
        lambda x, w: x * (((x * x).total() / constant(511.0)) + constant(1e-6)).sqrt().reciprocal() * w,
        lambda x, w: x * (((x * x).total() / constant(512.0)) + constant(1e-5)).sqrt().reciprocal() * w,
    ],
    ids=["no mean", "n - 1", "eps x 10"],
)
def test_norm_of_fp32_tells_formulas_apart(wrong: Callable[[Residues, Residues], Residues]) -> None:
    x, w = Residues.of(drawn(8, 512)), Residues.of(drawn(512, seed=1))
    order = torch.randperm(512, generator=torch.Generator().manual_seed(2))
    mean = (x[:, order] * x[:, order])[:, :100].total() + (x[:, order] * x[:, order])[:, 100:].total()
    right = (x / (mean * constant(1 / 512) + constant(1e-6)).sqrt()) * w
    also = x * ((x * x).total() / constant(512.0) + constant(1e-6)).sqrt().reciprocal() * w
    assert right.equal(also).all()
    other = wrong(x, w)
    assert not right.equal(other).any()
    assert right.differs(other).any(-1).all()


def test_root_of_minus_x_is_known_but_for_its_sign() -> None:
    x = Residues.of(torch.arange(2, 40))
    roots = x.sqrt()
    assert not (roots * roots).differs(x).any()
    assert not (x / roots).differs(roots).any()
    assert roots.differs(Residues.of(torch.arange(3, 41)).sqrt()).all()


# Flags


def flags(x: Residues) -> list[int]:
    return x.flags.tolist()  # type: ignore[no-any-return]


def flagged(*own: int) -> Residues:
    """Return the numbers 11, 12 and so on with flags."""
    numbers = torch.arange(11, 11 + len(own))
    return Residues(torch.stack([numbers, numbers, torch.full_like(numbers, NONE), torch.tensor(own)]))


ALL = OPEN, NO_EXPONENT, MINUS_INFINITY, SIGN, CONSTANT, ROOT, EXTREME


def test_flags_that_results_hand_on() -> None:
    plain = flagged(*[0] * len(ALL))
    x = flagged(*ALL)
    kept = [OPEN, NO_EXPONENT, MINUS_INFINITY, SIGN, 0, ROOT, EXTREME]
    assert flags(x + plain) == flags(plain + x) == flags(x * plain) == flags(x.reciprocal()) == kept
    assert flags(-x) == flags(plain - x) == [OPEN, NO_EXPONENT, 0, SIGN, 0, ROOT, EXTREME]
    assert flags(x * x) == [OPEN, NO_EXPONENT, MINUS_INFINITY, SIGN | OPEN, 0, ROOT, EXTREME]
    assert flags(Residues.opening(x)) == [OPEN, 0, 0, SIGN, 0, ROOT, EXTREME]
    odd = x.function("erf", odd=True)
    assert [f & ~NO_EXPONENT for f in flags(odd)] == [OPEN, 0, 0, SIGN, 0, ROOT, EXTREME]
    assert [f & OPEN for f in flags(x.function("gamma"))] == [OPEN, 0, 0, OPEN, 0, 0, 0]
    assert [f & OPEN for f in flags(x.exp())] == [OPEN, OPEN, 0, OPEN, 0, 0, OPEN]
    assert [int(p) == 0 for p in x.exp().p] == [False, False, True] + [False] * 4
    assert flags(x.unlimited) == [OPEN, NO_EXPONENT, MINUS_INFINITY, SIGN, CONSTANT | OPEN, ROOT, EXTREME]
    assert flags(plain.opened) == [OPEN] * len(ALL) and flags(plain.open_where(None)) == [0] * len(ALL)
    assert flags(flagged(0, SIGN).written_as(flagged(CONSTANT | SIGN)[0])) == [CONSTANT, CONSTANT | SIGN]


@pytest.mark.parametrize("dim", [-1, -2])
def test_a_sum_has_the_flags_of_its_terms(dim: int) -> None:
    x = Residues(torch.stack([torch.arange(6), torch.arange(6), torch.full((6,), NONE), torch.zeros(6)]).long())
    x = x.moved(lambda n: n.reshape(4, 2, 3))
    for flag in (OPEN, SIGN, ROOT, NO_EXPONENT, CONSTANT, EXTREME, MINUS_INFINITY):
        marked = x._flagged(torch.tensor([[False, True, False], [False, False, False]]), flag)
        expected = torch.zeros(2, 3, dtype=torch.int64)
        expected[0, 1] = flag if flag in (OPEN, SIGN, ROOT, NO_EXPONENT) else 0
        assert marked.total(dim).flags.tolist() == expected.amax(dim, keepdim=True).tolist()
    for own in (x.total(dim).p, x.total(dim).q):
        assert own.tolist() == torch.arange(6).reshape(2, 3).sum(dim, keepdim=True).tolist()
    assert x.total(dim, keepdim=False).shape == torch.arange(6).reshape(2, 3).sum(dim).shape
    assert x[:0].total(-2).p.tolist() == [[0, 0, 0]] and x[:0].total(-2, keepdim=False).shape == (3,)


def test_a_dot_has_the_flags_of_what_reaches_it() -> None:
    """A factor that is 0 keeps those of the other one out."""
    a = Residues.of(torch.tensor([[1, 0], [2, 3]]))
    b = Residues.of(torch.tensor([[5, 0], [7, 11]]))
    for flag in (OPEN, NO_EXPONENT, SIGN, ROOT):
        right = b._flagged(torch.tensor([[False, False], [True, False]]), flag)
        assert (a @ right).flags.tolist() == [[0, 0], [flag, 0]]
        left = a._flagged(torch.tensor([[True, False], [False, False]]), flag)
        assert (left @ b).flags.tolist() == [[flag, 0], [0, 0]]
        both = (left @ right).flags.tolist()
        assert both == [[flag, 0], [flag, 0]]
    twice = a._flagged(torch.ones(1, dtype=torch.bool), SIGN) @ b._flagged(torch.ones(1, dtype=torch.bool), SIGN)
    assert twice.flags.tolist() == [[SIGN | OPEN] * 2] * 2
    assert (a @ b).p.tolist() == [[5, 0], [31, 33]]


def test_a_factor_that_is_zero_decides_a_product() -> None:
    zero, some = Residues.of(torch.tensor([0, 0, 4, 4])), Residues.of(torch.tensor([3, 0, 0, 3]))
    open_ = torch.ones((), dtype=torch.bool)
    assert (zero * some.open_where(open_)).open.tolist() == [False, False, True, True]
    assert (zero.open_where(open_) * some).open.tolist() == [True, False, False, True]
    assert (zero.open_where(open_) * some.open_where(open_)).open.tolist() == [True] * 4


def test_roots_carry_what_is_not_known_of_their_sign() -> None:
    x = Residues.of(torch.tensor([4, 41, 5]))
    assert flags(x.sqrt()) == [ROOT, ROOT | SIGN, ROOT | SIGN * (not bool(field.is_square(torch.tensor(5), P)))]
    assert (x.sqrt().sqrt().open == (x.sqrt().flags & SIGN != 0)).all()
    assert x.log().sqrt().open.all() and x.log().reciprocal().open.all() and x.log().log().open.all()
    other = Residues.of(torch.tensor([P - 4]))
    four = Residues.of(torch.tensor([4]))
    assert four.differs(other).all()
    for flag in (SIGN, ROOT):
        assert not four._flagged(torch.ones(1, dtype=torch.bool), flag).differs(other).any()
    assert not four.opened.differs(Residues.of(torch.tensor([5]))).any()


def test_the_root_of_a_number_does_not_depend_on_those_beside_it() -> None:
    """What is meaningless modulo Q says nothing of the sign, be there numbers with an exponential beside it or not."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(2))
    lost, known = Residues.of(a).exp() + Residues.of(b), Residues.of(b)
    assert (lost.flags & NO_EXPONENT != 0).all()
    beside = Residues(torch.cat([lost.numbers, known.numbers], -1))
    assert flags(beside.sqrt()) == [*flags(lost.sqrt()), *flags(known.sqrt())]


def test_logarithms_add_multiply_and_turn_round() -> None:
    """log a + log b = log ab, -log a = log 1/a, n log a = log a^n; and of a number without one nothing is known."""
    a, b = Residues.of(torch.tensor([4, 9])), Residues.of(torch.tensor([25, 49]))
    assert (a.log() + b.log()).equal((a * b).log()).all() and (-a.log()).equal(a.reciprocal().log()).all()
    assert (a.log() - b.log()).equal((a / b).log()).all()
    assert (a.log() * constant(2.0)).equal((a * a).log()).all() and (constant(2.0) * a.log()).equal((a * a).log()).all()
    for made in (a.log() + b.log(), a.log() * constant(2.0), -a.log(), a.log() + a):
        assert not made.open.any() and (made.numbers[2] != NONE).all() and (made.flags & NO_EXPONENT == 0).all()
    assert a.log().exp().equal(a).all() and (a.log() + b).exp().equal(a * b.exp()).all()
    assert (a.log() * b.log()).open.all() and (a.log() + b.exp()).open.all() and (a.log() * b.exp()).open.all()
    rows = Residues(torch.stack([a.log().numbers, b.log().numbers], 1))
    assert rows.total(-2, keepdim=False).equal((a * b).log()).all()
    assert Residues.where(torch.tensor([True, False]), a.log(), a.exp()).total().open.all()
    assert (a.log()[None] @ b.log()[:, None]).open.all() and (a[None] @ b.log()[:, None]).open.all()
    no_square = Residues.of(torch.tensor([P - 4]))
    assert (no_square.log() * constant(2.0)).flags.tolist() == [SIGN] and no_square.log().flags.tolist() == [0]


def test_what_is_sound() -> None:
    good = flagged(0, 127)
    assert good.is_sound and a_log().is_sound
    for place, bad in ((0, P), (1, Q), (2, P), (3, 128), (0, -1), (1, -1), (2, -2), (3, -1)):
        numbers = good.numbers.clone()
        numbers[place, 0] = bad
        assert not Residues(numbers).is_sound
        numbers[place, 0] = bad + 1 if bad < 0 else bad - 1
        assert Residues(numbers).is_sound
    assert not Residues(good.numbers[:3]).is_sound and not Residues(good.numbers.int()).is_sound
    assert not Residues(torch.tensor(4)).is_sound


def a_log() -> Residues:
    return Residues.of(torch.tensor([3])).log()


def test_constants_of_extreme_size_beside_other_numbers() -> None:
    """Nothing up to 2^-26 of the other number, which rounding hides; OPEN up to 2^-24 of it; else a number."""
    tiny = constant(1e-20)
    assert flags(tiny) == CONSTANT | EXTREME
    others = 1e-20 * 2.0 ** torch.tensor([27.0, 26.0, 25.0, 24.0, 23.0]).double()
    found = tiny.beside(torch.tensor(1e-20).double(), others)
    assert [bool(p == 0) for p in found.p] == [True, True, False, False, False]
    assert found.open.tolist() == [False, False, True, True, False]
    assert flagged(EXTREME).beside(torch.zeros(1), torch.ones(1)).p.tolist() == [11]
    masked = flagged(EXTREME, EXTREME, 0).masked(torch.tensor([-257.0, -256.0, -1000.0]))
    assert flags(masked) == [MINUS_INFINITY, 0, 0]


@pytest.mark.parametrize(
    ("number", "extreme"),
    [(2.0**-26, 0), (2.0**-27, 1), (9999.0, 0), (10000.0, 1), (-500.0, 0), (-501.0, 1), (0.0, 0), (-1e4, 1)],
)
def test_sizes_that_formulas_have(number: float, extreme: int) -> None:
    assert flags(constant(number)) == CONSTANT | EXTREME * extreme


def test_values_that_are_not_finite_are_open() -> None:
    x = Residues.of(torch.tensor([-math.inf, 2.0, 3.0]))
    assert flags(x) == [MINUS_INFINITY | OPEN, 0, 0]
    seen = x.seen(torch.tensor([-math.inf, 5.0, math.inf]))
    assert (flags(seen), seen.p.tolist()) == ([MINUS_INFINITY | OPEN, 0, OPEN], [0, 2, 3])
    assert flags(x.seen(torch.tensor([1.0, 1.0, 1.0]))) == [OPEN, 0, 0]
    whole = Residues.of(torch.tensor([-3, 5], dtype=torch.int8))
    assert (whole.p.tolist(), whole.q.tolist(), flags(whole)) == ([P - 3, 5], [Q - 3, 5], [0, 0])
    narrow = torch.tensor([1.5, -0.375, math.inf]).bfloat16()
    assert torch.equal(Residues.of(narrow).numbers, Residues.of(narrow.double()).numbers)


def test_rounding_to_other_directions_and_of_what_vanishes() -> None:
    values = torch.tensor([1.3, 1.0 + 2.0**-9, 2.0**-8, -1.7])
    x = Residues.of(values.double() * 3) * constant(1 / 3)
    for fmt in (BF16, BF16.toward("ties_away"), BF16.toward("zero")):
        assert x.rounded(fmt, values).p.tolist()[2] == x.p.tolist()[2]
    near, cut = x.rounded(BF16, values), x.rounded(BF16.toward("zero"), values)
    assert not near.equal(cut)[[0, 3]].any()
    assert x.rounded(BF16.toward("either"), values).open.tolist() == [True, True, False, True]
    assert x.rounded(FP32, values) is x
    for direction, least in (("nearest", 2.0**-25), ("zero", 2.0**-24), ("ties_away", 2.0**-25)):
        small = torch.tensor([least * 0.99, least, least * 1.01]).double()
        found = Residues.of(small).exp().log().rounded(FP16.toward(direction), small)  # type: ignore[arg-type]
        assert [p == 0 for p in found.p.tolist()] == [True, direction == "nearest", False], direction


# Constants


@pytest.mark.parametrize(
    ("number", "fraction"),
    [
        (1 / 16383, (1, 16383)),
        (1 / 1000003, (1, 1000003)),
        (0.1, (1, 10)),
        (0.044715, (44715, 1000000)),
        (1e-6, (1, 1000000)),
        (12345.0, (12345, 1)),
        (3.1416, (31416, 10000)),
        (5 / 7, (5, 7)),
        (509 / 511, (509, 511)),
        (2047 / 2048, (2047, 2048)),
        (2001 / 2000, (2001, 2000)),
        (-2 / 3, (-2, 3)),
        (0.75, (3, 4)),
    ],
)
def test_numbers_that_constants_stand_for(number: float, fraction: tuple[int, int]) -> None:
    for own in (number, float(torch.tensor(number, dtype=torch.float32))):
        found, (numerator, denominator) = constant(own), fraction
        assert int(found.p) == numerator * pow(denominator, -1, P) % P
        assert int(found.q) == numerator * pow(denominator, -1, Q) % Q
        assert is_recognised(own)


@pytest.mark.parametrize(
    ("number", "base", "inverted", "factor"),
    [
        (math.sqrt(2), 2, False, 1.0),
        (math.sqrt(16383), 16383, False, 1.0),
        (1 / math.sqrt(16381), 16381, True, 1.0),
        (math.log2(math.e) * math.sqrt(1 / 96), 96, True, math.log2(math.e)),
        (math.log(2) * math.sqrt(7), 7, False, math.log(2)),
    ],
)
def test_roots_that_constants_stand_for(number: float, base: int, inverted: bool, factor: float) -> None:
    root = constant(float(base)).sqrt()
    assert constant(number).equal((root.reciprocal() if inverted else root) * constant(factor))
    assert is_recognised(number)


@pytest.mark.parametrize("number", [0.12345123, 1.2345678, 77.12345, 1000.1234])
def test_numbers_that_stand_for_themselves(number: float) -> None:
    own = float(torch.tensor(number, dtype=torch.float32))
    assert constant(own).equal(Residues.of(torch.tensor(own).double())) and not is_recognised(own)
    with products_of([own / 2, 2.0]):
        assert is_recognised(own)
    assert is_recognised(math.inf) and constant(math.inf).open and constant(-math.inf).flags == MINUS_INFINITY | OPEN


def test_constants_are_remembered_for_the_contexts_that_they_stand_in() -> None:
    """In a context within another, products of parameters of both are none; of both in one context they are."""
    a, b = 0.3001234, 7.7654321
    with products_of([a, b]):
        together = constant(a * b)
    with products_of([a]), products_of([b]):
        assert int(constant(a * b).p) != int(together.p)


def test_products_quotients_and_roots_of_parameters() -> None:
    a, b = 0.3001, 7.0003
    with products_of([a, b]):
        of_a, of_b = constant(a), constant(b)
        log2e = constant(math.log2(math.e))
        for number, right in (
            (a * b, of_a * of_b),
            (b / a, of_b / of_a),
            (a * a, of_a * of_a),
            (b * b * a, of_b * of_b * of_a),
            (1 - a, constant(1.0) - of_a),
            ((1 - a) * b, (constant(1.0) - of_a) * of_b),
            (a * math.log2(math.e), of_a * log2e),
            (1 / b, of_b.reciprocal()),
        ):
            found = constant(number)
            assert found.equal(right) and int(found.q) == int(right.q), number
            root = constant(math.sqrt(number))
            assert (root * root).equal(right) or (root.flags & SIGN and (root * root).equal(-right)), number
        with products_of([of_products := a * b, 11.003]):
            assert constant(11.003 * of_products).equal(constant(11.003) * of_a * of_b)
    assert not constant(a * b).equal(of_a * of_b)
