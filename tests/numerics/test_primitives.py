"""Division, roots and exponentials: the documented error is inside, a larger one outside."""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lastbit.numerics import (
    DOCUMENTED,
    Bound,
    Enclosure,
    Premises,
    divide,
    divide_rn,
    exp,
    hull,
    mean,
    rsqrt,
    sigmoid,
    sqrt,
    sqrt_rn,
    using,
)
from lastbit.numerics.premises import REAL, current

INF, NAN = math.inf, math.nan
U = 2.0**-24
SMALLEST_NORMAL = 2.0**-126

positive = st.floats(2.0**-120, 2.0**120, width=32)
errors = st.floats(-1, 1)

Primitive = Callable[[Enclosure], Enclosure]


def point(*values: float) -> Enclosure:
    return Enclosure.point(torch.tensor(values, dtype=torch.float32))


def interval(lo: float, hi: float) -> Enclosure:
    return Enclosure(torch.tensor([[lo], [lo], [lo], [hi]], dtype=torch.float64))


def f32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float64).to(torch.float32).item()


def ends(enclosure: Enclosure) -> tuple[float, float]:
    return enclosure.lo.item(), enclosure.hi.item()


def holds(enclosure: Enclosure, result: float) -> bool:
    lo, hi = ends(enclosure)
    if math.isnan(lo) or math.isnan(hi):
        return math.isnan(lo) and math.isnan(hi) and math.isnan(result)
    return (lo, hi) == (-INF, INF) or lo <= result <= hi


def high_precision(function: Callable[[Decimal], Decimal], x: float) -> float:
    """Compute a function of `x` by decimal arithmetic, independent of torch's."""
    with localcontext() as context:
        context.prec = 40
        return float(function(Decimal(x)))


# Within and beyond the documented bounds


@given(x=positive, error=errors)
def test_rsqrt_holds_results_off_by_two_to_the_minus_22(x: float, error: float) -> None:
    exact = high_precision(lambda d: 1 / d.sqrt(), x)
    assert holds(rsqrt(point(x)), f32(exact * (1 + error * 2.0**-22)))


@given(x=positive, error=errors)
def test_sqrt_holds_results_off_by_two_to_the_minus_22(x: float, error: float) -> None:
    exact = high_precision(lambda d: d.sqrt(), x)
    assert holds(sqrt(point(x)), f32(exact * (1 + error * 2.0**-22)))


@given(a=st.floats(-(2.0**60), 2.0**60, width=32), b=st.floats(2.0**-40, 2.0**40, width=32), error=errors)
def test_divide_holds_both_ways_of_dividing(a: float, b: float, error: float) -> None:
    quotient = divide(point(a), point(b))
    if abs(a / b) > SMALLEST_NORMAL:
        assert holds(quotient, f32(a / b * (1 + error * 2.0**-22)))
    assert holds(quotient, float(np.float32(a) * (np.float32(1) / np.float32(b))))
    assert quotient.value.item() == float(np.float32(a) / np.float32(b))


@given(x=positive, root=errors, inverse=errors)
@example(x=1.9999998807907104, root=-1.0, inverse=1.0)
@example(x=1.9999998807907104, root=1.0, inverse=-1.0)
def test_rsqrt_holds_a_root_and_a_division_within_their_own_bounds(x: float, root: float, inverse: float) -> None:
    denominator = f32(high_precision(lambda d: d.sqrt(), x) * (1 + root * (2.0**-22 - U)))
    assert holds(rsqrt(point(x)), f32(1 / denominator * (1 + inverse * 2.0**-22)))


def test_a_root_and_a_division_err_by_more_than_rsqrt_alone() -> None:
    worst = 0.0
    for x in np.linspace(1, 4, 2000, dtype=np.float32):
        exact = float(x) ** -0.5
        for root, inverse in ((-1, 1), (1, -1)):
            denominator = f32(float(x) ** 0.5 * (1 + root * (2.0**-22 - U)))
            worst = max(worst, abs(f32(1 / denominator * (1 + inverse * (2.0**-22 - U))) / exact - 1))
    assert 7 * U < worst < Premises().inverse_root


@given(a=st.floats(-(2.0**60), 2.0**60, width=32), b=st.floats(2.0**-40, 2.0**127, width=32), error=st.integers(-1, 1))
@example(a=1.9999998807907104, b=1.5, error=1)
@example(a=2.2779369917838787e18, b=3.2704580274227054e38, error=1)  # the reciprocal is subnormal
def test_divide_holds_a_rounded_product_with_an_approximate_reciprocal(a: float, b: float, error: int) -> None:
    reciprocal = f32(1 / b * (1 + error * (2.0**-22 - U)))  # and rounded, which may be to a subnormal number
    assert holds(divide(point(a), point(b)), f32(a * reciprocal))


def test_a_mean_holds_a_product_with_an_approximate_reciprocal() -> None:
    for error in (-1, 1):
        reciprocal = f32(1 / 3 * (1 + error * (2.0**-22 - U)))
        rows = torch.zeros(2000, 3)
        rows[:, 0] = torch.linspace(1, 2, 2000)
        product, found = (rows[:, :1] * reciprocal).double(), mean(Enclosure.point(rows))
        assert bool(((found.lo <= product) & (product <= found.hi)).all())


@given(x=st.floats(-87, 88, width=32), error=errors)
def test_exp_holds_an_error_that_grows_with_its_argument(x: float, error: float) -> None:
    exact = high_precision(Decimal.exp, x)
    assert holds(exp(point(x)), f32(exact * (1 + error * (2.0**-22 + 2 * U * abs(x)))))


@given(x=st.floats(-87, 88, width=32))
def test_exp_holds_exp2_of_a_rounded_product(x: float) -> None:
    """How a GPU computes it: the product with log2(e) is rounded to fp32, then exp2 errs by 2**-22."""
    argument = float(np.float32(x) * np.float32(1.4426950408889634))
    for error in (-(2.0**-22), 0.0, 2.0**-22):
        assert holds(exp(point(x)), f32(2.0**argument * (1 + error)))


@given(x=st.floats(-80, 80, width=32), error=errors)
def test_sigmoid_holds_what_its_steps_give(x: float, error: float) -> None:
    """An exponential off by its own bound, a rounded addition, and a division off by 2**-22, exact for 1 by 1."""
    power = f32(high_precision(Decimal.exp, -x) * (1 + error * (2.0**-22 + 2 * U * abs(x))))
    denominator = float(np.float32(1) + np.float32(power))
    for last in (-1, 0, 1) if denominator != 1 else (0,):
        assert holds(sigmoid(point(x)), f32(1 / denominator * (1 + last * 2.0**-22)))


def test_sigmoid_holds_both_neighbours_of_one_until_it_is_one() -> None:
    """exp(-17) is lost when it is added to 1, but the correctly rounded result is the number below 1."""
    assert float(torch.sigmoid(torch.tensor(17.0, dtype=torch.float64)).float()) == 1 - 2.0**-24
    for x in np.arange(16.5, 18.0, 0.01, dtype=np.float32):
        found = sigmoid(point(float(x)))
        assert found.lo <= found.value <= found.hi
        assert holds(found, 1.0) or x < 17


def test_sigmoid_is_one_from_17_33_on() -> None:
    assert sigmoid(point(17.5)).lo.item() == sigmoid(point(float("inf"))).lo.item() == 1.0
    assert sigmoid(point(17.3)).lo.item() < 1.0


@pytest.mark.parametrize(
    ("function", "exact"),
    [
        (rsqrt, lambda x: x**-0.5),
        (sqrt, lambda x: x**0.5),
        (lambda x: divide(x, 3.0), lambda x: x / 3),
        (exp, math.exp),
        (sigmoid, lambda x: 1 / (1 + math.exp(-x))),
    ],
    ids=["rsqrt", "sqrt", "divide", "exp", "sigmoid"],
)
def test_a_result_off_by_four_times_the_bound_is_outside(function: Primitive, exact: Callable[[float], float]) -> None:
    for x in (0.7, 1.3, 2.9, 5.1):
        x = f32(x)
        enclosure = function(point(x))
        assert enclosure.value.item() == f32(exact(x))
        assert enclosure.exact.item() == pytest.approx(exact(x), rel=1e-14)
        for sign in (-1, 1):
            assert not holds(enclosure, exact(x) * (1 + sign * 4 * (2.0**-22 + 2 * U * x)))


@given(x=positive, y=positive)
def test_the_primitives_of_an_interval_hold_those_of_its_members(x: float, y: float) -> None:
    lo, hi = sorted((x, y))
    both = hull(point(lo), point(hi))
    for function in (rsqrt, sqrt, sqrt_rn, lambda e: divide(1.0 * e, 3.0), lambda e: divide(point(5.0), e)):
        whole = function(both)
        for member in (lo, f32(lo + (hi - lo) / 3), hi):
            part = function(point(member))
            assert whole.lo.item() <= part.lo.item() <= part.hi.item() <= whole.hi.item()


@given(x=st.floats(-80, 80, width=32), y=st.floats(-80, 80, width=32))
@example(x=16.5, y=51.0)
def test_the_exponentials_of_an_interval_hold_those_of_its_members(x: float, y: float) -> None:
    lo, hi = sorted((x, y))
    for function in (exp, sigmoid):
        whole = function(interval(lo, hi))
        for member in (lo, f32(lo + (hi - lo) / 3), hi):
            part = function(point(member))
            assert whole.lo.item() <= part.lo.item() <= part.hi.item() <= whole.hi.item()


@pytest.mark.parametrize("y", [(1.0, 1.0), (3.0, 3.0), (1.0, 2.0), (3.0, 4.0)])
@pytest.mark.parametrize("x", [(0.0, 0.0), (2.0, 2.0), (1.0, 2.0), (1.0, 3.0)])
@pytest.mark.parametrize("premises", [Premises(), REAL], ids=["documented", "real"])
def test_a_quotient_of_opposites_is_opposite(
    x: tuple[float, float], y: tuple[float, float], premises: Premises
) -> None:
    with using(premises):
        lo, hi = ends(divide_rn(interval(*x), interval(*y)))
        assert ends(divide_rn(-interval(*x), interval(*y))) == (-hi, -lo)
        assert ends(divide_rn(interval(*x), -interval(*y))) == (-hi, -lo)
        assert ends(divide_rn(-interval(*x), -interval(*y))) == (lo, hi)


# Correctly rounded primitives


@given(a=st.floats(width=32, allow_nan=False), b=st.floats(width=32, allow_nan=False))
def test_correctly_rounded_primitives_are_points(a: float, b: float) -> None:
    with np.errstate(all="ignore"):
        quotient, root = float(np.float32(a) / np.float32(b)), float(np.sqrt(np.float32(a)))
    for enclosure, wanted in ((divide_rn(point(a), point(b)), quotient), (sqrt_rn(point(a)), root)):
        assert np.array_equal([*ends(enclosure), enclosure.value.item()], [wanted] * 3, equal_nan=True)


def test_approximate_primitives_are_no_points() -> None:
    for function in (rsqrt, sqrt, lambda e: divide(e, 3.0), exp, sigmoid):
        lo, hi = ends(function(point(1.5)))
        assert lo < hi


# Zero, subnormal and infinite arguments


@pytest.mark.parametrize(
    ("x", "lo", "hi"),
    [(0.0, INF, INF), (INF, 0.0, 0.0), (-1.0, NAN, NAN), (-INF, NAN, NAN), (NAN, NAN, NAN)],
)
def test_rsqrt_of_special_values(x: float, lo: float, hi: float) -> None:
    assert np.array_equal(ends(rsqrt(point(x))), [lo, hi], equal_nan=True)


@pytest.mark.parametrize("x", [2.0**-149, 2.0**-127, 2.0**-126 - 2.0**-149])
def test_rsqrt_of_a_subnormal_number_may_be_infinite(x: float) -> None:
    enclosure = rsqrt(point(x))
    assert holds(enclosure, INF)
    assert holds(enclosure, enclosure.value.item())
    assert math.isfinite(enclosure.lo.item())
    assert math.isfinite(enclosure.value.item())


def test_rsqrt_of_the_smallest_normal_number_is_finite() -> None:
    lo, hi = ends(rsqrt(point(SMALLEST_NORMAL)))
    assert lo < 2.0**63 < hi < 2.0**63 * (1 + 2.0**-20)


@pytest.mark.parametrize(
    ("x", "lo", "hi"),
    [(interval(-1.0, 4.0), -INF, INF), (interval(0.0, INF), 0.0, INF), (interval(1.0, INF), 0.0, 1.0)],
)
def test_rsqrt_of_intervals(x: Enclosure, lo: float, hi: float) -> None:
    actual = ends(rsqrt(x))
    assert actual[0] == lo
    assert actual[1] == pytest.approx(hi, rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "lo", "hi"),
    [
        (point(1.0), point(0.0), INF, INF),
        (point(-1.0), point(0.0), -INF, -INF),
        (point(0.0), point(0.0), NAN, NAN),
        (point(INF), point(INF), NAN, NAN),
        (point(1.0), point(INF), 0.0, 0.0),
        (point(1.0), interval(-1.0, 1.0), -INF, INF),
        (point(1.0), interval(0.0, 1.0), -INF, INF),
        (interval(-1.0, 1.0), point(0.0), -INF, INF),
        (point(INF), interval(1.0, INF), -INF, INF),
        (interval(1.0, INF), point(INF), -INF, INF),
    ],
)
@pytest.mark.parametrize("function", [divide, divide_rn])
def test_division_of_special_values(
    function: Callable[[Enclosure, Enclosure], Enclosure], a: Enclosure, b: Enclosure, lo: float, hi: float
) -> None:
    assert np.array_equal(ends(function(a, b)), [lo, hi], equal_nan=True)


@pytest.mark.parametrize(("a", "b"), [(2.0**-120, 2.0**-130), (2.0**100, 3.3e38)])
@np.errstate(over="ignore")
def test_division_by_a_reciprocal_that_overflows_or_is_subnormal(a: float, b: float) -> None:
    assert holds(divide(point(a), point(b)), float(np.float32(a) * (np.float32(1) / np.float32(b))))


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (exp, INF, INF),
        (exp, -INF, 0.0),
        (exp, NAN, NAN),
        (sigmoid, INF, 1.0),
        (sigmoid, -INF, 0.0),
        (sigmoid, NAN, NAN),
    ],
)
def test_exponentials_of_special_values(function: Primitive, x: float, expected: float) -> None:
    enclosure = function(point(x))
    assert holds(enclosure, expected)
    assert math.isnan(expected) or not holds(enclosure, 0.5)
    assert np.array_equal(enclosure.value.item(), expected, equal_nan=True)


def test_exp_that_overflows_or_vanishes() -> None:
    assert ends(exp(point(89.0))) == (INF, INF)
    lo, hi = ends(exp(point(88.72283)))
    assert (math.isfinite(lo), hi) == (True, INF)
    assert holds(exp(point(-104.0)), 0.0)
    assert holds(exp(point(-100.0)), 0.0)  # it is subnormal: exp2 and what nvcc makes of a fast exp flush it
    assert not holds(exp(point(-87.0)), 0.0)


def test_an_end_at_minus_infinity_does_not_narrow_the_other() -> None:
    """The error at one end has nothing to do with the size of the other."""
    for function in (exp, sigmoid):
        assert function(interval(-INF, 5.0)).hi.item() >= function(point(5.0)).hi.item()


@pytest.mark.parametrize("function", [rsqrt, sqrt, sqrt_rn, exp, sigmoid, lambda e: divide(e, 3.0)])
def test_nothing_is_known_about_a_function_of_the_unknown(function: Primitive) -> None:
    """Even the exponential: what is unknown may be NaN."""
    assert holds(function(interval(-INF, INF)), NAN)


# Premises


def test_bounds_come_from_the_premises_in_force() -> None:
    exact = Premises(bounds={"rsqrt": Bound(0.0, "measured")})
    documented = rsqrt(point(2.0))
    with using(exact):
        assert current() is exact
        lo, hi = ends(rsqrt(point(2.0)))
        assert hi - lo <= 2.0**-24
        assert ends(sqrt(point(2.0))) != (f32(2**0.5),) * 2, "a primitive that is missing keeps its documented bound"
    assert ends(rsqrt(point(2.0))) == ends(documented)


def test_premises_are_restored_after_an_error() -> None:
    before = current()
    with pytest.raises(ZeroDivisionError), using(Premises(device="other")):
        raise ZeroDivisionError
    assert current() is before


def test_every_documented_bound_says_where_it_is_from() -> None:
    assert {"rsqrt", "sqrt", "divide", "exp", "sigmoid"} <= set(DOCUMENTED)
    assert all(bound.source and 0 < bound.relative < 1 for bound in DOCUMENTED.values())
