"""The rules for residues: on integers the residue of a result is that of the number; and where it is OPEN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.numerics import (
    Enclosure,
    Groups,
    Indices,
    amax,
    amin,
    clamp,
    cumsum,
    gather,
    grouped_dot,
    grouped_outer,
    largest_magnitude,
    maximum,
    mean,
    mean_and_variance,
    mean_of_products,
    mean_of_squares,
    minimum,
    sum_in_any_order,
    sum_of_row_products,
    total,
    total_of_products,
    trunc,
    where,
)
from lastbit.numerics import abs as magnitude
from lastbit.numerics import algebraic as rules
from lastbit.numerics.algebraic import following_residues, is_following, noting
from lastbit.numerics.dots import Factor
from lastbit.numerics.formats import BF16, INT8
from lastbit.numerics.residues import Residues, constant

X = torch.tensor([[3.0, -5.0, 2.0, 8.0], [-7.0, 4.0, -1.0, 6.0], [9.0, -2.0, 5.0, -4.0]])
Y = torch.tensor([[2.0, 3.0, -4.0, 1.0], [5.0, -6.0, 7.0, 8.0], [-3.0, 1.0, 2.0, 9.0]])
INDEX = torch.tensor([[1, 3], [0, 0], [2, 1]])


def fractions(numerator: Tensor, denominator: float) -> Residues:
    return Residues.of(numerator.double()) * Residues.of(torch.tensor(denominator).double()).reciprocal()


@pytest.mark.parametrize(
    ("computed", "right"),
    [
        (lambda x, y: x + y, X + Y),
        (lambda x, y: x - y, X - Y),
        (lambda x, y: x * y, X * Y),
        (lambda x, y: 3.0 - x, 3 - X),
        (lambda x, y: -x, -X),
        (lambda x, y: total(x), X.sum(-1, keepdim=True)),
        (lambda x, y: total_of_products(x, y), (X * Y).sum(-1, keepdim=True)),
        (lambda x, y: cumsum(x), X.cumsum(-1)),
        (lambda x, y: sum_in_any_order([x, y, x]), X + Y + X),
        (lambda x, y: sum_of_row_products(x, y).enclosure, (X * Y).sum(0)),
        (lambda x, y: maximum(x, y), torch.maximum(X, Y)),
        (lambda x, y: minimum(x, y), torch.minimum(X, Y)),
        (lambda x, y: maximum(x, 2.0), X.clamp(min=2)),
        (lambda x, y: clamp(x, -3.0, 5.0), X.clamp(-3, 5)),
        (lambda x, y: clamp(x, -math.inf, 5.0), X.clamp(max=5)),
        (lambda x, y: amax(x), X.amax(-1, keepdim=True)),
        (lambda x, y: amin(x), X.amin(-1, keepdim=True)),
        (lambda x, y: magnitude(x), X.abs()),
        (lambda x, y: largest_magnitude(x), X.abs().amax(-1, keepdim=True)),
        (lambda x, y: where(x > y, x, y * 2.0), torch.where(X > Y, X, Y * 2)),
        (lambda x, y: where(X > 0, x, y), torch.where(X > 0, X, Y)),
        (lambda x, y: trunc(x * 0.5), (X / 2).trunc()),
        (lambda x, y: gather(x, INDEX), X.gather(-1, INDEX)),
        (lambda x, y: gather(x, INDEX % 3, 0), X.gather(0, INDEX % 3)),
        (lambda x, y: x.rounded(INT8), X),
    ],
)
def test_residues_of_integers_are_those_of_the_result(computed: Callable[..., Enclosure], right: Tensor) -> None:
    with following_residues():
        x, y = Enclosure.point(X), Enclosure.point(Y)
        found = computed(x, y)
    assert found.residues.shape == right.shape == found.shape
    assert found.residues.equal(Residues.of(right.double())).all() and not found.residues.open.any()


@pytest.mark.parametrize(
    ("computed", "numerator", "denominator"),
    [
        (lambda x, y: mean(x), X.sum(-1, keepdim=True), 4),
        (lambda x, y: mean_of_squares(x), X.square().sum(-1, keepdim=True), 4),
        (lambda x, y: mean_of_products(x, y), (X * Y).sum(-1, keepdim=True), 4),
        (lambda x, y: mean_and_variance(x)[0], X.sum(-1, keepdim=True), 4),
        (lambda x, y: mean_and_variance(x)[1], (4 * X - X.sum(-1, keepdim=True)).square().sum(-1, keepdim=True), 64),
        (lambda x, y: x / y, X * (Y.prod() / Y), Y.prod()),
    ],
)
def test_residues_of_quotients(computed: Callable[..., Enclosure], numerator: Tensor, denominator: float) -> None:
    with following_residues():
        found = computed(Enclosure.point(X), Enclosure.point(Y))
    assert found.residues.equal(fractions(numerator, float(denominator))).all() and not found.residues.open.any()


def test_residues_of_dots_and_of_those_in_groups() -> None:
    numbers = torch.tensor([1, 0, 1, 5])
    a, b = X.mT, torch.cat([Y, X, Y + X]).reshape(3, 3, 4)
    groups = Groups(numbers, 3)
    with following_residues():
        x, matrices = Enclosure.point(a), Enclosure.point(b)
        outer = grouped_outer(x, Enclosure.point(Y.mT), groups)
        rows = grouped_dot(x, groups, lambda own: Factor.right(matrices[own,]), 4)
        whole = x.residues @ Enclosure.point(Y).residues
    right = torch.stack([a[r] @ b[g] if g < 3 else torch.zeros(4) for r, g in enumerate(numbers.tolist())])
    sums = [sum((torch.outer(a[r], Y.mT[r]) for r in range(4) if numbers[r] == g), torch.zeros(3, 3)) for g in range(3)]
    for found, numbers_ in ((rows.residues, right), (outer.residues, torch.stack(sums)), (whole, a @ Y)):
        assert found.equal(Residues.of(numbers_.double())).all() and not found.open.any()
        assert ((found.q == Residues.of(numbers_.double()).q) & (found.numbers[2] == -1) & (found.flags == 0)).all()


def test_a_tile_counts_by_all_factors_that_come_after_it() -> None:
    tiles, factors = (
        [Residues.of(torch.tensor([t])) for t in (2, 3, 5)],
        [Residues.of(torch.tensor([f])) for f in (7, 11)],
    )
    found = torch.cat([each.p for each in rules.rescaled(tiles, factors)])
    assert found.tolist() == [2 * 7 * 11, 3 * 11, 5]


def test_shares_and_sigmoids_of_residues() -> None:
    x = Residues.of(X)
    power = x.exp()
    assert rules.shares(x).equal(power / power.total()).all()
    assert (rules.sigmoid(x) * (constant(1.0) + (-x).exp())).equal(constant(1.0)).all()
    assert rules.FORMULAS["tanh"](x).equal(constant(1.0) - constant(2.0) / ((x + x).exp() + constant(1.0))).all()


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("divide", None),
        ("sqrt", lambda x: x.sqrt()),
        ("rsqrt", lambda x: constant(1.0) / x.sqrt()),
        ("exp2", lambda x: (x * constant(math.log(2))).exp()),
        ("log2", lambda x: x.log() / constant(math.log(2))),
        ("log1p", lambda x: (constant(1.0) + x).log()),
        ("expm1", lambda x: x.exp() - Residues.of(torch.ones(1))),
        ("erf", lambda x: -rules.FORMULAS["erf"](-x)),
        ("sin", lambda x: -rules.FORMULAS["sin"](-x)),
        ("cos", lambda x: rules.FORMULAS["cos"](-x)),
    ],
)
def test_formulas_of_primitives(name: str, same: Callable[[Residues], Residues] | None) -> None:
    x = Residues.of(torch.tensor([2.0, 3.0, 10.0]))
    if same is None:
        assert rules.FORMULAS[name](x, x).equal(constant(1.0)).all()
        return
    found = rules.FORMULAS[name](x)
    assert found.equal(same(x)).all() and not found.open.any()
    assert not found.equal(rules.FORMULAS[name](x + constant(1.0))).any()
    others = [formula(x) for other, formula in rules.FORMULAS.items() if other not in (name, "divide")]
    assert not any(bool(found.equal(other).any()) for other in others)


# What is OPEN


def between(lo: list[float], hi: list[float], value: list[float] | None = None) -> Enclosure:
    """Return an enclosure whose elements have residues of their own, 11, 12 and so on."""
    parts = torch.tensor([value or lo, value or lo, lo, hi], dtype=torch.float64)
    return Enclosure(parts, algebra=Residues.of(torch.arange(11, 11 + len(lo))))


def opened(found: Any) -> list[bool]:
    residues = found if isinstance(found, Residues) else found.residues
    return residues.open.tolist()  # type: ignore[no-any-return]


def test_a_limit_that_may_or_may_not_apply_is_open() -> None:
    """Of numbers below, touching, around, at, and above a limit of 2."""
    x = between([0.0, 1.0, 1.0, 2.0, 2.0, 3.0], [1.0, 2.0, 3.0, 2.0, 3.0, 4.0])
    assert opened(rules.clamped(x, 2.0, math.inf)) == [False, True, True, False, False, False]
    assert opened(rules.clamped(x, -math.inf, 2.0)) == [False, False, True, False, True, False]
    assert rules.clamped(x, 2.0, math.inf).p.tolist() == [2, 2, 2, 14, 15, 16]
    assert rules.clamped(x, -math.inf, 2.0).p.tolist() == [11, 12, 13, 14, 15, 2]
    both = between([1.0], [5.0])
    both = Enclosure(both.parts, algebra=constant(2.0).moved(lambda n: n.reshape(4, 1)))
    assert opened(rules.clamped(both, 2.0, math.inf)) == [False]  # the limit and the number are one


def test_a_choice_of_the_larger_is_open_where_the_numbers_may_be_either_way() -> None:
    x, y = between([0.0, 1.0, 0.0, 2.0], [1.0, 2.0, 3.0, 2.0]), between([2.0, 2.0, 1.0, 1.0], [3.0, 3.0, 2.0, 1.5])
    y = Enclosure(y.parts, algebra=Residues.of(torch.arange(21, 25)))
    assert opened(rules.larger(x, y)) == opened(rules.larger(x, y, sign=-1)) == [False, True, True, False]
    assert rules.larger(x, y).p.tolist() == [21, 22, 23, 14]
    assert rules.larger(x, y, sign=-1).p.tolist() == [11, 12, 13, 24]
    assert opened(rules.larger(x, replace(y, algebra=x.residues))) == [False] * 4


def test_the_largest_of_a_row_is_open_where_another_may_be_it() -> None:
    apart = between([0.0, 2.0, 1.0], [1.0, 3.0, 1.5])
    touching = between([0.0, 2.0, 1.0], [1.0, 3.0, 2.0])
    assert [opened(rules.largest(x)) for x in (apart, touching)] == [[False], [True]]
    assert rules.largest(apart).p.tolist() == [12]
    assert rules.largest(apart, sign=-1).p.tolist() == [11] and opened(rules.largest(apart, sign=-1)) == [True]
    below = between([0.0, 2.0, 1.0], [0.5, 3.0, 2.0])
    assert opened(rules.largest(below, sign=-1)) == [False]
    missing = between([0.0, math.nan], [1.0, math.nan])
    assert rules.largest(missing).p.tolist() == [11]
    assert rules.largest(Enclosure.point(torch.zeros(2, 0))).shape == (2, 1)


def test_a_magnitude_is_open_where_the_sign_is() -> None:
    x = between([-2.0, -1.0, -1.0, 0.0, 1.0], [-1.0, 0.0, 1.0, 1.0, 2.0])
    found = rules.magnitude(x)
    assert opened(found) == [False, False, True, False, False]
    assert found.equal(Residues.of(torch.tensor([-11, -12, -13, 14, 15]))).all()


def test_a_choice_by_a_condition_is_open_where_that_is() -> None:
    x = between([0.0, 1.0, 2.0], [0.5, 3.0, 4.0])
    found = rules.chosen(x > 1.5, x, 5.0)
    assert (opened(found), found.p.tolist()) == ([False, True, False], [5, 5, 13])
    assert opened(rules.chosen(x > 1.5, x, x)) == [False] * 3


def test_gathered_elements_are_open_where_another_may_be_chosen() -> None:
    x = between([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])[None,]
    one = Indices(torch.tensor([[False, True, False]]), torch.tensor([[1]]))
    two = Indices(torch.tensor([[True, True, False]]), torch.tensor([[1]]))
    assert [rules.gathered(x, index).p.tolist() for index in (one, two)] == [[[12]], [[12]]]
    assert [opened(rules.gathered(x, index)) for index in (one, two)] == [[[False]], [[True]]]
    same = replace(x, algebra=x.residues[:, :1].moved(lambda n: n.expand(4, 1, 3)))
    assert opened(rules.gathered(same, two)) == [[False]]


def test_options_are_open_where_they_differ_and_of_the_shape_of_both() -> None:
    a, b = Residues.of(torch.tensor([[1.0, 2.0]])), Residues.of(torch.tensor([[1.0], [2.0]]))
    found = rules.hull(a, b)
    assert found.open.tolist() == [[False, True], [True, False]] and found.p.tolist() == [[1, 2], [1, 2]]
    assert opened(rules.hull(a, a, b)) == [[False, True], [True, False]]


def test_a_rounded_sum_of_three_is_open_and_one_of_two_is_rounded() -> None:
    with following_residues():
        x, y = Enclosure.point(torch.tensor([1.0, 256.0])), Enclosure.point(torch.tensor([2.0, 1.0]))
        two, three = sum_in_any_order([x, y], BF16), sum_in_any_order([x, y, y], BF16)
        apart = (x + y).rounded(BF16)
    assert two.residues.equal(apart.residues).all() and not two.residues.open.any()
    assert two.residues.p.tolist()[0] == 3 and two.residues.p.tolist()[1] != 257
    assert three.residues.open.all()
    assert not rules.added([x, y, y]).open.any() and rules.added([x, y, y]).p.tolist() == [5, 258]


def test_integers_are_open_where_they_may_be_others() -> None:
    x = between([1.2, 1.4, 126.7], [1.3, 1.6, 300.0])
    found = rules.rounded(x, INT8)
    assert (found.p.tolist(), opened(found)) == ([1, 1, 127], [False, True, True])


# Following


def test_residues_are_followed_within_the_context_alone() -> None:
    assert not is_following()
    with following_residues():
        assert is_following() and Enclosure.point(X).algebra is not None
        with following_residues(False):
            assert not is_following() and Enclosure.point(X).algebra is None
        assert is_following()
    assert not is_following() and (Enclosure.point(X) + 1.0).algebra is None
    assert rules.sum_of_rows(Enclosure.point(X)) is None


def test_what_is_computed_is_noted() -> None:
    with following_residues():
        Enclosure.point(X) + 1.0  # before
        with noting() as noted:
            x = Enclosure.point(X)
            y = x * 2.0
        y + 1.0  # after
    found = [each for each in noted if isinstance(each, Enclosure)]
    assert [each is known for each, known in zip(found, (x, x, y), strict=True)] == [True] * 3


def test_a_single_number_of_floating_point_is_a_constant_and_others_are_numbers() -> None:
    third = torch.tensor(1 / 3)
    assert rules.point(third).equal(Residues.of(torch.tensor(3)).reciprocal()) and rules.point(third).flags == 16
    assert not rules.point(third[None]).equal(Residues.of(torch.tensor([3])).reciprocal()).any()
    assert rules.point(torch.tensor(7)).flags == 0 and rules.residues_of(7).flags == 16
    assert rules.residues_of(True) is True and rules.residues_of("text") == "text"
    nested = rules.residues_of([2.0, (3, "x")])
    assert (nested[0].p, nested[1][0].p, nested[1][1]) == (2, 3, "x")


def test_infinite_results_are_open() -> None:
    with following_residues():
        x = Enclosure.point(torch.tensor([3e38, 1.0]))
        assert opened(x + x) == [True, False]
        assert opened(x * x) == [True, False]
