"""Sums, means and dots hold every order of fp32 accumulation, and are points where all orders agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastbit.numerics import (
    Enclosure,
    Premises,
    dot,
    hull,
    mean,
    mean_of_squares,
    sum_in_any_order,
    total,
    total_of_products,
    using,
)
from lastbit.numerics.formats import BF16, Format
from lastbit.numerics.premises import EXACT
from lastbit.numerics.sums import flushed, quantum_of, units_of

FLOAT_MAX = float(np.finfo(np.float32).max)
Row = np.ndarray
Order = Callable[[Row], np.float32]


def f32(*values: float) -> Row:
    return np.array(values, dtype=np.float32)


def of(row: Row) -> Enclosure:
    return Enclosure.point(torch.from_numpy(np.asarray(row, dtype=np.float32)))


def bounds(enclosure: Enclosure) -> tuple[float, float]:
    return enclosure.lo.item(), enclosure.hi.item()


def holds(enclosure: Enclosure, result: float) -> bool:
    lo, hi = bounds(enclosure)
    if math.isnan(lo) or math.isnan(hi):
        return math.isnan(lo) and math.isnan(hi) and math.isnan(result)
    return (lo, hi) == (-math.inf, math.inf) or lo <= result <= hi


def is_point(enclosure: Enclosure) -> bool:
    lo, hi = bounds(enclosure)
    return lo == hi == enclosure.value.item()


# fp32 implementations of a sum


def sequential(terms: Row) -> np.float32:
    return np.add.accumulate(terms)[-1] if len(terms) else np.float32(0)  # one rounding per term, unlike np.sum


def backwards(terms: Row) -> np.float32:
    return sequential(terms[::-1])


def pairwise(terms: Row) -> np.float32:
    while len(terms) > 1:
        rest = terms[len(terms) // 2 * 2 :]
        terms = np.concatenate([terms[0 : len(terms) - 1 : 2] + terms[1::2], rest])
    return terms[0]


def blocked(terms: Row) -> np.float32:
    return sequential(f32(*(sequential(terms[i : i + 7]) for i in range(0, len(terms), 7))))


def strided(terms: Row) -> np.float32:
    """Four running sums, then a tree: how a program with four threads sums."""
    return pairwise(f32(*(sequential(terms[i::4]) for i in range(min(4, len(terms))))))


def ascending(terms: Row) -> np.float32:
    return sequential(np.sort(terms))


def random_tree(terms: Row) -> np.float32:
    draw = np.random.default_rng(len(terms))
    pool = list(terms)
    while len(pool) > 1:
        a, b = (pool.pop(int(draw.integers(len(pool)))) for _ in range(2))
        pool.append(a + b)
    return pool[0]


ORDERS: tuple[Order, ...] = (sequential, backwards, pairwise, blocked, strided, ascending, random_tree)
every_order = pytest.mark.parametrize("order", ORDERS, ids=lambda o: o.__name__)


def fused_squares(row: Row) -> np.float32:
    """Σ x² where each square is fused into the sum: fp64 holds product and sum nearly exactly, then one rounding."""
    result = np.float32(0)
    for x in row:
        result = np.float32(np.longdouble(x) * np.longdouble(x) + np.longdouble(result))
    return result


def means(total_: np.float32, count: int) -> tuple[float, float]:
    """Divided by the count, and multiplied by its rounded reciprocal."""
    return float(total_ / np.float32(count)), float(total_ * (np.float32(1) / np.float32(count)))


def rows(kind: str, count: int) -> Row:
    draw = np.random.default_rng(count)
    normal = draw.standard_normal(count)
    made = {
        "normal": normal,
        "positive": np.abs(normal),
        "constant": np.full(count, normal[0]),
        "large mean": normal + 1000,
        "wide range": normal * 2.0 ** draw.integers(-30, 30, count),
        "cancelling": np.concatenate([normal[: count // 2], -normal[: count - count // 2] * (1 + 2.0**-20)]),
    }
    return made[kind].astype(np.float32)


every_kind = pytest.mark.parametrize(
    "kind", ["normal", "positive", "constant", "large mean", "wide range", "cancelling"]
)


# Any order


@every_order
@every_kind
@pytest.mark.parametrize("count", [1, 2, 3, 17, 256, 1000])
@np.errstate(all="ignore")
def test_every_order_lies_within(kind: str, order: Order, count: int) -> None:
    x = rows(kind, count)
    assert holds(total(of(x)), float(order(x)))
    for result in means(order(x), count):
        assert holds(mean(of(x)), result)
    for squares in (order(x * x), fused_squares(x)):
        for result in means(squares, count):
            assert holds(mean_of_squares(of(x)), result)


@given(
    values=st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=40),
    order=st.sampled_from(ORDERS),
)
def test_any_terms_in_any_order(values: list[float], order: Order) -> None:
    x = f32(*values)
    assert holds(total(of(x)), float(order(x)))
    assert all(holds(mean_of_squares(of(x)), result) for result in means(order(x * x), len(x)))


@every_kind
def test_value_is_the_rounded_exact_result(kind: str) -> None:
    x = rows(kind, 256)
    exact = sum(map(Fraction, x.tolist()), Fraction(0))
    assert total(of(x)).value.item() == np.float32(float(exact))
    squares = sum((Fraction(v) ** 2 for v in x.tolist()), Fraction(0)) / 256
    assert mean_of_squares(of(x)).value.item() == np.float32(float(squares))
    assert math.isclose(mean_of_squares(of(x)).exact.item(), float(squares), rel_tol=1e-14)


def test_bounds_are_not_wider_than_the_theorem() -> None:
    """n·u relative for terms of one sign, and the rounding of each end."""
    x = rows("positive", 1000)
    lo, hi = bounds(total(of(x)))
    exact = float(np.sum(x, dtype=np.float64))
    assert 0 < (hi - lo) / exact < 2 * 1000 * 2.0**-24 * 1.001 + 2.0**-22


def test_a_sum_of_intervals_holds_the_sums_of_their_members() -> None:
    x = rows("normal", 64)
    low, high = of(x), of(x) + 0.25
    for combine in (total, mean, mean_of_squares):
        enclosure = combine(hull(low, high))
        for member in (low, high, low + 0.125):
            inner = combine(member)
            assert enclosure.lo.item() <= inner.lo.item()
            assert inner.hi.item() <= enclosure.hi.item()


def test_squares_of_an_interval_around_zero_reach_down_to_zero() -> None:
    x = hull(of(f32(-1.0)), of(f32(2.0)))
    lo, hi = bounds(mean_of_squares(x))
    assert lo == 0.0
    assert 4.0 <= hi < 4.0001


def test_rows_are_kept_apart() -> None:
    x = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    together = mean_of_squares(Enclosure.point(x))
    assert together.shape == (3, 2, 1)
    assert torch.equal(together[2, 1].full, mean_of_squares(Enclosure.point(x[2, 1])).full)


# Depth


def test_a_known_depth_tightens_the_bound_and_still_holds_trees_of_that_depth() -> None:
    x = rows("positive", 1024)
    with using(Premises(depth=lambda n: math.ceil(math.log2(n)))):
        by_depth = total(of(x))
    any_order = total(of(x))
    assert by_depth.hi.item() - by_depth.lo.item() < (any_order.hi.item() - any_order.lo.item()) / 50
    assert holds(by_depth, float(pairwise(x)))


def test_a_depth_excludes_an_order_that_is_deeper() -> None:
    """4095 times 1 after 2**24: each of them is lost in a sequential sum, none in a tree."""
    x = np.concatenate([f32(2.0**24), np.ones(4095, np.float32)])
    with using(Premises(depth=lambda n: 12)):
        assert not holds(total(of(x)), float(sequential(x)))
    assert holds(total(of(x)), float(sequential(x)))


def test_a_depth_beyond_the_number_of_terms_is_cut() -> None:
    assert Premises(depth=lambda n: 1000).accumulation(8) == Premises().accumulation(8)


def test_no_bound_holds_for_more_terms_than_fp32_can_count() -> None:
    assert Premises().accumulation(2**24) == math.inf


# Lattices


@given(
    integers=st.lists(st.integers(-1000, 1000), min_size=1, max_size=64),
    exponent=st.integers(-60, 60),
    order=st.sampled_from(ORDERS),
)
def test_on_a_lattice_the_sum_is_a_point_that_every_order_gives(
    integers: list[int], exponent: int, order: Order
) -> None:
    x = (np.array(integers, dtype=np.float64) * 2.0**exponent).astype(np.float32)
    enclosure = total(of(x))
    assert is_point(enclosure)
    assert enclosure.value.item() == float(order(x)) == sum(integers) * 2.0**exponent


@given(
    integers=st.lists(st.integers(-500, 500), min_size=1, max_size=64),
    exponent=st.integers(-40, 40),
    order=st.sampled_from(ORDERS),
)
def test_on_a_lattice_squares_sum_to_a_point(integers: list[int], exponent: int, order: Order) -> None:
    power = 1 << (len(integers) - 1).bit_length()
    x = np.zeros(power, np.float32)
    x[: len(integers)] = (np.array(integers, dtype=np.float64) * 2.0**exponent).astype(np.float32)
    enclosure = mean_of_squares(of(x))
    assert is_point(enclosure)
    assert enclosure.value.item() == float(order(x * x) / np.float32(power)) == float(fused_squares(x)) / power


@pytest.mark.parametrize("unit", [1.0, 2.0**-100, 2.0**80])
def test_a_lattice_ends_at_2_to_the_24_units(unit: float) -> None:
    below = f32(*[2.0**23, 2.0**23 - 2, 1.0]) * np.float32(unit)
    at = f32(*[2.0**23, 2.0**23 - 1, 1.0]) * np.float32(unit)
    assert is_point(total(of(below)))
    assert not is_point(total(of(at)))


def test_the_units_of_a_lattice_are_counted_by_magnitude() -> None:
    """The sum itself is small, but a partial sum need not be."""
    assert not is_point(total(of(f32(2.0**23 + 1, -(2.0**23) - 1, 1.0))))
    assert is_point(total(of(f32(2.0**22 + 1, -(2.0**22) - 1, 1.0))))


def test_intervals_are_no_lattice() -> None:
    assert not is_point(total(hull(of(f32(1.0, 2.0)), of(f32(1.0, 3.0)))))


def test_one_row_off_the_lattice_leaves_the_others_points() -> None:
    x = torch.tensor([[3.0, 5.0, 1.0], [1.0, 2.0**-30, 1.0], [0.0, 0.0, 0.0]])
    sums = total(Enclosure.point(x))
    assert (sums.lo == sums.hi).flatten().tolist() == [True, False, True]


# Subnormal numbers


@given(
    significands=st.lists(st.integers(1, 2**12), min_size=1, max_size=32),
    exponent=st.integers(-92, -68),
    order=st.sampled_from(ORDERS),
)
def test_squares_that_underflow(significands: list[int], exponent: int, order: Order) -> None:
    """Squares around the smallest subnormal number are rounded on their own, or fused; on a lattice as well."""
    x = (np.array(significands, dtype=np.float64) * 2.0**exponent).astype(np.float32)
    with np.errstate(all="ignore"):
        for squares in (order(x * x), fused_squares(x)):
            for result in means(squares, len(x)):
                assert holds(mean_of_squares(of(x)), result)


def test_flushing_subnormals_widens_a_sum_of_them() -> None:
    x = f32(2.0**-127, 3 * 2.0**-128)
    assert is_point(total(of(x)))
    with using(Premises(flushes_subnormals=True)):
        assert holds(total(of(x)), 0.0)


def test_flushed_squares() -> None:
    x = f32(2.0**-65, 2.0**-65)
    with using(Premises(flushes_subnormals=True)):
        assert holds(mean_of_squares(of(x)), 0.0)


# Zeros, infinities, NaN and overflow


def test_zero_rows_are_points() -> None:
    for combine in (total, mean, mean_of_squares):
        for count in (1, 3, 4):
            assert bounds(combine(of(np.zeros(count, np.float32)))) == (0.0, 0.0)


@pytest.mark.parametrize("combine", [total, mean, mean_of_squares])
@pytest.mark.parametrize(
    "row", [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, -1.0, 2.0), (math.inf, -math.inf), (math.inf, math.nan)]
)
def test_special_values_are_decided_by_class(combine: Callable[[Enclosure], Enclosure], row: tuple[float, ...]) -> None:
    squared = combine is mean_of_squares
    expected = sum(v * v for v in row) if squared else sum(row)
    lo, hi = bounds(combine(of(f32(*row))))
    assert np.array_equal([lo, hi], [expected, expected], equal_nan=True)


def test_a_sum_that_overflows_is_infinite_although_the_mean_would_not_be() -> None:
    x = f32(3e38, 3e38)
    assert bounds(mean(of(x))) == (math.inf, math.inf)
    assert bounds(mean(of(-x))) == (-math.inf, -math.inf)
    assert mean(of(x)).exact.item() == pytest.approx(3e38)
    assert bounds(mean_of_squares(of(f32(2e19, 1.0)))) == (math.inf, math.inf)
    assert bounds(mean_of_squares(of(f32(1.7e19, 1.7e19)))) == (math.inf, math.inf)


def test_a_sum_near_overflow_may_be_finite_or_infinite() -> None:
    x = np.full(64, FLOAT_MAX / 64, np.float32)
    lo, hi = bounds(total(of(x)))
    assert lo < FLOAT_MAX
    assert hi == math.inf


@np.errstate(all="ignore")
def test_a_partial_sum_that_overflows_leaves_the_sum_unknown() -> None:
    x = f32(3e38, 3e38, -3e38, -3e38, 1.0)
    results = [order(x) for order in ORDERS]
    assert len({str(r) for r in results}) > 1
    assert all(holds(total(of(x)), float(r)) for r in results)


@np.errstate(all="ignore")
def test_a_partial_sum_that_overflows_against_an_infinity_leaves_the_sum_unknown() -> None:
    x = f32(math.inf, -3e38, -3e38)
    assert (sequential(x), str(backwards(x))) == (np.inf, "nan")
    assert holds(total(of(x)), math.inf)
    assert holds(total(of(x)), math.nan)


# Dot


def fp32_dots(a: Row, b: Row) -> list[Row]:
    """Compute a @ b with terms in several orders, products rounded or not."""
    exact = a[..., :, :, None].astype(np.float64) * b[..., None, :, :].astype(np.float64)
    rounded = exact.astype(np.float32)
    results = [np.add.accumulate(rounded, axis=-2)[..., -1, :]]
    results.append(np.add.accumulate(rounded[..., ::-1, :], axis=-2)[..., -1, :])
    fused = np.zeros_like(results[0])
    for k in range(a.shape[-1]):
        fused = (exact[..., k, :] + fused).astype(np.float32)
    return [*results, fused]


def within(enclosure: Enclosure, result: Row) -> bool:
    actual = torch.from_numpy(result.astype(np.float64))
    known = torch.where(enclosure.lo.isnan(), actual.isnan(), (enclosure.lo <= actual) & (actual <= enclosure.hi))
    return bool((known | (enclosure.lo.isneginf() & enclosure.hi.isposinf())).all())


@every_kind
@pytest.mark.parametrize("terms", [1, 5, 64, 300])
def test_dots_in_several_orders_lie_within(kind: str, terms: int) -> None:
    numbers = rows(kind, 2 * 3 * terms + terms * 4)
    a, b = numbers[: 6 * terms].reshape(2, 3, terms), numbers[6 * terms :].reshape(terms, 4)
    enclosure = dot(of(a), of(b))
    assert enclosure.shape == (2, 3, 4)
    for result in fp32_dots(a, b):
        assert within(enclosure, result)
    assert np.allclose(enclosure.exact, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-12)


@pytest.mark.usefixtures("no_tensor_cores")
def test_a_dot_off_by_more_than_any_order_is_outside() -> None:
    a, b = rows("positive", 64).reshape(1, 64), rows("positive", 65)[:64].reshape(64, 1)
    wrong = fp32_dots(a, b)[0] * np.float32(1 + 2.0**-17)
    assert not within(dot(of(a), of(b)), wrong)


@given(
    left=st.lists(st.integers(-60, 60), min_size=32, max_size=32),
    right=st.lists(st.integers(-60, 60), min_size=32, max_size=32),
    exponents=st.tuples(st.integers(-30, 30), st.integers(-30, 30)),
)
def test_a_dot_on_a_lattice_is_a_point(left: list[int], right: list[int], exponents: tuple[int, int]) -> None:
    a = (np.array(left).reshape(2, 16) * 2.0 ** exponents[0]).astype(np.float32)
    b = (np.array(right).reshape(16, 2) * 2.0 ** exponents[1]).astype(np.float32)
    enclosure = dot(of(a), of(b))
    assert torch.equal(enclosure.lo, enclosure.hi)
    for result in fp32_dots(a, b):
        assert np.array_equal(enclosure.value, result)


def test_a_dot_of_intervals_holds_the_dots_of_their_members() -> None:
    a, b = of(rows("normal", 24).reshape(3, 8)), of(rows("normal", 32).reshape(8, 4))
    enclosure = dot(hull(a, a + 0.125), b)
    for member in (a, a + 0.125, a + 0.0625):
        inner = dot(member, b)
        assert (enclosure.lo <= inner.lo).all()
        assert (inner.hi <= enclosure.hi).all()


@pytest.mark.parametrize(
    ("row", "expected"), [((math.inf, 1.0), math.inf), ((math.nan, 1.0), math.nan), ((math.inf, -math.inf), math.nan)]
)
def test_special_values_in_a_dot(row: tuple[float, float], expected: float) -> None:
    enclosure = dot(of(f32(*row).reshape(1, 2)), of(np.ones((2, 1), np.float32)))
    assert holds(enclosure, expected)
    assert not holds(enclosure, 1.0)


@np.errstate(all="ignore")
def test_a_partial_dot_that_overflows_leaves_the_dot_unknown() -> None:
    a, b = f32(3e38, 3e38, -3e38, -3e38).reshape(1, 4), np.ones((4, 1), np.float32)
    results = [*fp32_dots(a, b), fp32_dots(a[:, [0, 2, 1, 3]], b)[0]]
    assert {float(r.item()) for r in results} >= {0.0, math.inf}
    for result in results:
        assert within(dot(of(a), of(b)), result)


def test_products_of_a_dot_that_underflow() -> None:
    """Two products of 0.375 · 2**-149: each rounds to zero, their sum to 2**-149."""
    a, b = f32(2.0**-75, 2.0**-75).reshape(1, 2), f32(0.75 * 2.0**-75, 0.75 * 2.0**-75).reshape(2, 1)
    results = fp32_dots(a, b)
    assert {float(r.item()) for r in results[:2]} == {0.0}
    for result in results:
        assert within(dot(of(a), of(b)), result)


# Few terms, in any order


def every_sum(terms: list[float], rounded: Callable[[float], float]) -> set[float]:
    """All results of adding terms two at a time in whichever order, by splitting them in every way."""
    if len(terms) == 1:
        return {terms[0]}
    found = set()
    for mask in range(1, 1 << (len(terms) - 1)):
        halves = [[t for n, t in enumerate(terms) if (mask >> n & 1) == side] for side in (0, 1)]
        found |= {rounded(a + b) for a in every_sum(halves[0], rounded) for b in every_sum(halves[1], rounded)}
    return found


@pytest.mark.parametrize("fmt", [None, BF16])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_few_terms_reach_the_ends_of_all_orders(count: int, fmt: Format | None) -> None:
    numbers = (torch.randn(count, 40, generator=torch.Generator().manual_seed(count)) * 8).bfloat16().float()
    found = sum_in_any_order([Enclosure.point(row) for row in numbers], fmt)

    def rounded(x: float) -> float:
        own = torch.tensor(x, dtype=torch.float64).float()
        return float(own if fmt is None else own.bfloat16())

    for column in range(numbers.shape[1]):
        own = every_sum(numbers[:, column].double().tolist(), rounded)
        assert (found.lo[column].item(), found.hi[column].item()) == (min(own), max(own))
    assert torch.allclose(found.exact, numbers.double().sum(0), rtol=1e-14, atol=0)


def test_exact_sums_of_few_terms_are_not_rounded() -> None:
    terms = [Enclosure.point(torch.tensor([x])) for x in (256.0, 1.0, 1.0)]
    with using(EXACT):
        found = sum_in_any_order(terms, BF16)
    assert found.exact.item() == 258.0 and found.lo.item() <= 258.0 <= found.hi.item() and found.hi.item() < 258.001
    assert sum_in_any_order(terms, BF16).lo.item() == 256.0


@pytest.mark.parametrize(
    ("x", "unit"),
    [
        (1.0, 1.0), (3.0, 1.0), (12.0, 4.0), (-0.375, 0.125), (0.0, math.inf), (math.inf, math.inf),
        (math.nan, math.inf), (2.0**-1000 * 5, 2.0**-1000), (1.0 + 2.0**-52, 2.0**-52),
    ],
)  # fmt: skip
def test_the_largest_power_of_two_that_divides_a_number(x: float, unit: float) -> None:
    own = torch.tensor([[x]], dtype=torch.float64)
    assert units_of(own).item() == unit == quantum_of(own, -1).item()
    several = torch.tensor([[4.0, 12.0, 0.0]], dtype=torch.float64)
    assert quantum_of(several, -1).tolist() == [[4.0]] and quantum_of(several, -1, keepdim=False).tolist() == [4.0]
    assert quantum_of(several[:, :0], -1).tolist() == [[math.inf]]


@pytest.mark.parametrize(("largest", "exact"), [(2.0**24 - 2, True), (2.0**24 - 1, False)])
def test_the_largest_sum_on_a_lattice(largest: float, exact: bool) -> None:
    """Below 2^24 units with the other number, 1, every partial sum is exact."""
    found = total(Enclosure.point(torch.tensor([[largest, 1.0]])))
    assert (found.lo == found.hi).item() == exact
    negative = total(Enclosure.point(torch.tensor([[-largest, 1.0]])))
    assert (negative.lo == negative.hi).item() == exact


@pytest.mark.parametrize(
    ("numbers", "unknown"),
    [([3e38, 3e38, -3e38], True), ([3e38, 3e38], False), ([2e38, 1e38, -1e37], False), ([3e38, 5e37, -5e37], True)],
)
def test_sums_of_both_signs_of_which_some_order_overflows(numbers: list[float], unknown: bool) -> None:
    found = total(Enclosure.point(torch.tensor([numbers])))
    assert (found.unknown is not None and found.unknown.item()) == unknown


def test_what_flushing_and_underflow_may_change() -> None:
    with using(Premises(flushes_subnormals=True)):
        assert flushed() == 2.0**-126
        found = total(Enclosure.point(torch.tensor([[1.0, 2.0]])))
    assert flushed() == 0.0
    assert found.lo.item() == found.hi.item() == 3.0
    small = total_of_products(*[Enclosure.point(torch.tensor([[2.0**-75, 3 * 2.0**-76]]))] * 2)
    assert small.hi.item() - small.exact.item() >= 2 * 2.0**-150 - 2.0**-150 and small.lo.item() <= small.exact.item()
