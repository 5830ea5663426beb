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
from lastbit.numerics.formats import BF16, E4M3, FP16, Format, round_to
from lastbit.numerics.residues import Residues, constant, field, products_of
from lastbit.numerics.residues.field import P, Q

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


@pytest.mark.parametrize("modulus", [P, Q])
@pytest.mark.parametrize("tag", [0, 1, 77])
def test_hashes_are_those_of_splitmix64(modulus: int, tag: int) -> None:
    """Computed with Python's integers; of a number and its negative they are negatives of each other."""

    def finalized(x: int) -> int:
        u = x * 0x9E3779B97F4A7C15 + tag * 0x1234567 & 2**64 - 1
        u = (u ^ u >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        u = (u ^ u >> 27) * 0x94D049BB133111EB & 2**64 - 1
        return ((u ^ u >> 31) >> 2) % modulus

    x = torch.randint(0, P, (500,), generator=torch.Generator().manual_seed(tag))
    found = field.mixed(x, tag, modulus)
    assert found.tolist() == [(finalized(n) - finalized((P - n) % P)) % modulus for n in x.tolist()]
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
