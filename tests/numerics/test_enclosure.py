"""Enclosures hold what conforming fp32 implementations compute, and nothing more where these have no freedom."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from lastbit.numerics import (
    Enclosure,
    at_least,
    clamp,
    concatenate,
    divide_rn,
    exp,
    fusible_product,
    hull,
    largest_magnitude,
    multiply_add,
    product_in_any_order,
    sqrt_rn,
    stack,
    total,
    using,
    where,
)
from lastbit.numerics.algebraic import following_residues
from lastbit.numerics.formats import BF16, E4M3, FP32, round_to
from lastbit.numerics.premises import EXACT
from lastbit.numerics.residues import Residues

INF, NAN = math.inf, math.nan

fp32_numbers = st.floats(width=32, allow_subnormal=True)
moderate = st.floats(-(2.0**40), 2.0**40, width=32).filter(lambda x: x == 0 or abs(x) > 2.0**-40)
ends = st.sampled_from([-INF, -(2.0**127), -2.0, -(2.0**-140), -0.0, 0.0, 2.0**-140, 1.0, 5.0, 2.0**127, INF])


def point(*values: float) -> Enclosure:
    return Enclosure.point(torch.tensor(values, dtype=torch.float32))


def interval(lo: float, hi: float, value: float | None = None) -> Enclosure:
    """One element of which only bounds are known."""
    middle = lo if value is None else value
    return Enclosure(torch.tensor([[middle], [middle], [lo], [hi]], dtype=torch.float64))


UNKNOWN = interval(-INF, INF, 0.0)


def holds(enclosure: Enclosure, *results: float) -> bool:
    """Return whether a kernel may give every one of the results."""
    lo, hi = enclosure.lo.reshape(-1), enclosure.hi.reshape(-1)
    for result in results:
        x = torch.tensor(float(result), dtype=torch.float64)
        anything = lo.isneginf() & hi.isposinf()
        inside = torch.where(lo.isnan(), x.isnan(), (lo <= x) & (x <= hi))
        if not bool((inside | anything).all()):
            return False
    return True


def is_valid(enclosure: Enclosure) -> bool:
    """lo and hi both NaN or neither, and in order."""
    lo, hi = enclosure.lo, enclosure.hi
    return bool(((lo.isnan() == hi.isnan()) & ((lo <= hi) | lo.isnan())).all())


def is_point(enclosure: Enclosure) -> bool:
    return torch.equal(enclosure.lo, enclosure.hi) and torch.equal(enclosure.lo, enclosure.value)


def f32(x: float) -> np.float32:
    with np.errstate(all="ignore"):
        return np.float32(x)


def fma(a: float, b: float, c: float) -> float:
    """Compute a · b + c with one rounding to fp32, by exact rational arithmetic."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return 0.0
    exponent = max(math.frexp(float(exact))[1] - 24, -149)
    scaled = exact / Fraction(2) ** exponent
    return math.ldexp(round(scaled), exponent)  # Python rounds a Fraction's ties to even


# Parts


def test_a_number_has_one_part_and_a_computed_one_two() -> None:
    x = point(1.0, 3.0)
    assert len(x.parts) == 1
    assert len((x * x).parts) == 2
    assert [len(e.full) for e in (x, x * x, hull(x * x, x + x))] == [4, 4, 4]


def test_the_exact_part_is_never_rounded() -> None:
    x = point(1.0 + 2.0**-23)
    square = x * x
    assert square.exact.item() == (1.0 + 2.0**-23) ** 2
    assert square.value.item() == square.lo.item() == square.hi.item() == f32(1.0 + 2.0**-22)
    assert square.rounded(BF16).exact.item() == square.exact.item()
    assert square.rounded(BF16).value.item() == 1.0


def test_a_python_number_reaches_a_kernel_as_fp32() -> None:
    third = point(0.0) + 1 / 3
    assert third.value.item() == third.exact.item() == float(f32(1 / 3))
    assert (1 / 3 + point(0.0)).value.item() == (0.1 * point(1.0)).value.item() - float(f32(0.1)) + float(f32(1 / 3))


def test_zeros_of_either_sign_are_different_numbers() -> None:
    zero = point(0.0)
    assert [bool((zero * number).value.signbit()) for number in (0.0, -0.0, 0, 0.0)] == [False, True, False, False]


def test_negation_exchanges_the_ends() -> None:
    negated = -interval(1.0, 2.0, 1.5)
    assert negated.parts.flatten().tolist() == [-1.5, -1.5, -2.0, -1.0]
    assert (-point(0.0)).value.signbit().all()


def test_indexing_keeps_the_parts() -> None:
    x = hull(point(1.0, 2.0, 3.0), point(4.0, 5.0, 6.0))
    assert x[1:,].parts.tolist() == [[2.0, 3.0], [2.0, 3.0], [2.0, 3.0], [5.0, 6.0]]
    assert x[..., :1].shape == (1,)


@pytest.mark.parametrize("operate", [Enclosure.__add__, Enclosure.__sub__, Enclosure.__mul__, divide_rn])
@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("second", [1, 2, 4])
def test_parts_and_ranks_broadcast(operate: Callable[..., Enclosure], first: int, second: int) -> None:
    """Each element is what the operation gives for the two elements alone."""

    def made(parts: int, shape: tuple[int, ...], seed: int) -> Enclosure:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x = Enclosure.point(values)
        return {1: x, 2: x * 1.0, 4: hull(x, x + 0.5)}[parts]

    a, b = made(first, (2, 3, 4), 1), made(second, (4,), 2)
    for x, y in ((a, b), (b, a)):
        together = operate(x, y)
        assert together.shape == (2, 3, 4)
        assert len(together.parts) == max(first, second, 2)
        for index in ((0, 0, 0), (1, 2, 3), (1, 0, 2)):
            p, q = (e[index] if e is a else e[index[-1:]] for e in (x, y))
            assert torch.equal(together[index].full, operate(p, q).full)


# Shapes


def of_parts(parts: int, *shape: int) -> Enclosure:
    """Different numbers in each part."""
    x = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    return Enclosure(torch.stack([x, x + 0.25, x - 1, x + 1][:parts]))


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("second", [1, 2, 4])
def test_stacked_and_concatenated_elements_keep_their_parts(first: int, second: int) -> None:
    a, b = of_parts(first, 2, 3), -of_parts(second, 2, 3)
    side_by_side, behind, below = stack(a, b), concatenate(a, b), concatenate(a, b, dim=-2)
    assert [e.shape for e in (side_by_side, behind, below)] == [(2, 3, 2), (2, 6), (4, 3)]
    for x, found in ((a, side_by_side[..., 0]), (a, behind[..., :3]), (a, below[:2, :])):
        assert torch.equal(found.full, x.full)
    for x, found in ((b, side_by_side[..., 1]), (b, behind[..., 3:]), (b, below[2:, :])):
        assert torch.equal(found.full, x.full)
    alike = first if first == second else 4
    assert {len(e.parts) for e in (side_by_side, behind, below)} == {alike}


def test_concatenated_along_a_dimension_that_differs() -> None:
    joined = concatenate(of_parts(1, 2, 3), of_parts(4, 2, 1), of_parts(2, 2, 2))
    assert joined.shape == (2, 6)
    assert joined.lo[0].tolist() == [0, 1, 2, -1, 0.25, 1.25]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_transposed_exchanges_the_last_two_dimensions(parts: int) -> None:
    x = of_parts(parts, 5, 2, 3)
    assert x.transposed.shape == (5, 3, 2)
    assert torch.equal(x.transposed.full, x.full.mT)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_reshaped_elements_keep_their_parts(parts: int) -> None:
    x = of_parts(parts, 4, 6)
    assert torch.equal(x.reshape(2, -1, 3).full, x.full.reshape(4, 2, 4, 3))


@pytest.mark.parametrize("whatever", [NAN, INF, 3.0])
def test_zero_where_a_mask_is_true_whatever_was_there(whatever: float) -> None:
    mask = torch.tensor([[False], [True]])
    for x in (point(whatever, 2.0), point(whatever, 2.0) * 1.0, hull(point(whatever, 2.0), point(whatever, 5.0))):
        rows = Enclosure(torch.stack([x.parts, x.parts], 1))
        cleared = rows.zero_where(mask)
        assert torch.equal(cleared.full[:, 1], torch.zeros(4, 2, dtype=torch.float64))
        assert torch.equal(cleared.full[:, 0].nan_to_num(7.0), x.full.nan_to_num(7.0))
    assert holds(UNKNOWN.zero_where(torch.tensor([True])), 0.0)
    assert not holds(UNKNOWN.zero_where(torch.tensor([True])), 1.0, NAN)


# Containment


@given(a=fp32_numbers, b=fp32_numbers)
@example(1.0, 2.0**-24)
@example(3e38, 3e38)
@example(1e-38, 1e-7)
def test_correctly_rounded_operations_on_points_are_the_bits_of_the_hardware(a: float, b: float) -> None:
    with np.errstate(all="ignore"):
        expected = {
            "add": (point(a) + point(b), np.float32(a) + np.float32(b)),
            "subtract": (point(a) - point(b), np.float32(a) - np.float32(b)),
            "multiply": (point(a) * point(b), np.float32(a) * np.float32(b)),
            "divide": (divide_rn(point(a), point(b)), np.float32(a) / np.float32(b)),
            "root": (sqrt_rn(point(a)), np.sqrt(np.float32(a))),
        }
    for name, (enclosure, wanted) in expected.items():
        lo, value, hi = (e.item() for e in (enclosure.lo, enclosure.value, enclosure.hi))
        if np.isnan(wanted):
            assert all(map(math.isnan, (lo, value, hi))), name
        else:
            assert lo == value == hi == float(wanted), name
            assert math.copysign(1, value) == math.copysign(1, float(wanted)), name


Tree = tuple  # ("leaf", number) or (operation, Tree, ...)
leaves = st.tuples(st.just("leaf"), moderate)
trees = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.tuples(st.sampled_from(["add", "subtract", "multiply"]), children, children),
        st.tuples(st.sampled_from(["multiply_add", "any_order"]), children, children, children),
        st.tuples(st.sampled_from(["root_of_magnitude", "bf16"]), children),
    ),
    max_leaves=12,
)


def enclosed(tree: Tree) -> Enclosure:
    kind, *operands = tree
    if kind == "leaf":
        return point(operands[0])
    x, *others = (enclosed(o) for o in operands)
    match kind:
        case "add":
            return x + others[0]
        case "subtract":
            return x - others[0]
        case "multiply":
            return x * others[0]
        case "multiply_add":
            return multiply_add(x, *others)
        case "any_order":
            return product_in_any_order(x, *others)
        case "bf16":
            return x.rounded(BF16)
        case _:
            return sqrt_rn(largest_magnitude(x))


def computed(tree: Tree, fused: bool, order: int) -> float:
    """Compute as one fp32 implementation: with or without FMA, products in one of three orders."""
    kind, *operands = tree
    if kind == "leaf":
        return operands[0]
    x, *others = (computed(o, fused, order) for o in operands)
    with np.errstate(all="ignore"):
        a, rest = np.float32(x), [np.float32(o) for o in others]
        match kind:
            case "add":
                return float(a + rest[0])
            case "subtract":
                return float(a - rest[0])
            case "multiply":
                return float(a * rest[0])
            case "multiply_add":
                finite = all(map(math.isfinite, (a, *rest)))
                return fma(a, *rest) if fused and finite else float(a * rest[0] + rest[1])
            case "any_order":
                return float(((a * rest[0]) * rest[1], a * (rest[0] * rest[1]), (a * rest[1]) * rest[0])[order])
            case "bf16":
                return round_to(torch.tensor(float(a), dtype=torch.float64), BF16).item()
            case _:
                return float(np.sqrt(np.abs(a)))


@given(tree=trees, fused=st.booleans(), order=st.integers(0, 2))
def test_trees_of_operations_hold_every_conforming_result(tree: Tree, fused: bool, order: int) -> None:
    enclosure = enclosed(tree)
    assert is_valid(enclosure)
    assert holds(enclosure, enclosure.value.item())
    assert holds(enclosure, computed(tree, fused, order))


def test_products_in_another_order_differ_and_are_allowed() -> None:
    """A fixed triple for which two of the orders round differently: the freedom is real, and no wider than needed."""
    a, b, c = (float(f32(x)) for x in (1.3, 1.5, 1.4))
    orders = {float(f32(f32(a * b) * c)), float(f32(a * f32(b * c))), float(f32(f32(a * c) * b))}
    assert len(orders) > 1
    allowed = product_in_any_order(point(a), point(b), point(c))
    assert (allowed.lo.item(), allowed.hi.item()) == (min(orders), max(orders))
    assert allowed.value.item() == float(f32(f32(a * b) * c))
    assert not holds(point(a) * point(b) * point(c), *orders)


def test_multiply_add_allows_the_fused_and_the_separate_result() -> None:
    a = float(f32(1 + 2.0**-12))
    separate = float(f32(f32(a * a) + f32(-1.0)))
    assert separate != fma(a, a, -1.0)
    allowed = multiply_add(point(a), point(a), -1.0)
    assert (allowed.lo.item(), allowed.hi.item()) == (min(separate, fma(a, a, -1.0)), max(separate, fma(a, a, -1.0)))
    assert allowed.value.item() == separate


def test_a_fusible_product_is_rounded_or_not() -> None:
    a = float(f32(1 + 2.0**-12))
    product = fusible_product(point(a), point(a))
    assert (product.lo.item(), product.hi.item()) == (float(f32(a * a)), a * a)
    assert product.value.item() == float(f32(a * a))
    exact = fusible_product(point(3.0), point(5.0))
    assert exact.lo.item() == exact.hi.item() == 15.0
    beyond = fusible_product(point(1e30), point(-1e30))
    assert (beyond.lo.item(), beyond.hi.item()) == (-INF, float(f32(1e30)) ** 2 * -1)


@given(a=fp32_numbers, b=fp32_numbers, c=fp32_numbers)
def test_a_sum_of_fusible_products_holds_what_an_fma_gives(a: float, b: float, c: float) -> None:
    assume(all(map(math.isfinite, (a, b, c))) and abs(a * b) < 2.0**126 and abs(c) < 2.0**126)
    result = total(stack(fusible_product(point(a), point(b)), point(c)))
    assert is_valid(result)
    assert holds(result[..., 0], fma(a, b, c), float(f32(f32(a * b) + f32(c))))


def test_a_fused_result_is_rounded_once() -> None:
    """a · b is just above 2**-24, so that 1 + a · b rounds up; through fp64 it would be a tie, which rounds down."""
    a, b = 8390641.0, 16773151.0 * 2.0**-71
    assert 2.0**-24 < a * b < 2.0**-24 + 2.0**-53
    assert (a * b + 1.0, fma(a, b, 1.0)) == (1.0 + 2.0**-24, 1.0 + 2.0**-23)
    assert holds(multiply_add(point(a), point(b), 1.0), 1.0 + 2.0**-23, 1.0)


# Infinities and NaN


@given(ends=st.tuples(ends, ends, ends, ends))
@pytest.mark.parametrize("operate", [Enclosure.__add__, Enclosure.__sub__, Enclosure.__mul__, divide_rn])
def test_intervals_hold_what_their_members_give(
    operate: Callable[..., Enclosure], ends: tuple[float, float, float, float]
) -> None:
    """Over ends that are zero, infinite and near overflow, members being the ends and what lies between."""
    (a, b), (c, d) = sorted(ends[:2]), sorted(ends[2:])
    x, y = interval(a, b), interval(c, d)
    result = operate(x, y)
    assert is_valid(result)
    between = [-1.0, 0.0, 1.5]
    for p in {a, b, *(v for v in between if a <= v <= b)}:
        for q in {c, d, *(v for v in between if c <= v <= d)}:
            single = operate(point(p), point(q))
            assert holds(result, single.value.item()), (p, q)


@given(numbers=st.tuples(ends, ends, ends, ends))
def test_members_of_a_product_by_a_point(numbers: tuple[float, float, float, float]) -> None:
    a, b = sorted(numbers[:2])
    for number in numbers[2:]:
        result = interval(a, b) * point(number)
        assert is_valid(result)
        assert holds(result, (point(a) * point(number)).value.item(), (point(b) * point(number)).value.item())


@pytest.mark.parametrize(
    ("result", "lo", "hi"),
    [
        (point(0.0) * point(INF), NAN, NAN),
        (point(INF) - point(INF), NAN, NAN),
        (point(NAN) + interval(0.0, 1.0), NAN, NAN),
        (point(3e38) * 2.0, INF, INF),
        (interval(1e38, 3e38) * 2.0, float(f32(2e38)), INF),
        (interval(1.0, INF) - point(INF), -INF, INF),
        (interval(0.0, 1.0) * point(INF), -INF, INF),
        (interval(-1.0, 1.0) * interval(2.0, INF), -INF, INF),
        (UNKNOWN + 1.0, -INF, INF),
        (UNKNOWN * 0.0, -INF, INF),
        (sqrt_rn(interval(-1.0, 4.0)), -INF, INF),
        (sqrt_rn(interval(-4.0, -1.0)), NAN, NAN),
    ],
)
def test_what_must_be_nan_and_what_is_unknown(result: Enclosure, lo: float, hi: float) -> None:
    expected = torch.tensor([lo, hi], dtype=torch.float64)
    ends_of = torch.cat([result.lo, result.hi])
    assert torch.equal(ends_of.isnan(), expected.isnan())
    assert torch.equal(ends_of.nan_to_num(0.0), expected.nan_to_num(0.0))


def test_orders_of_which_only_one_is_nan_leave_the_product_unknown() -> None:
    """1e30 · 1e30 overflows and then meets 0; the other order meets 0 first."""
    result = product_in_any_order(point(1e30), point(1e30), point(0.0))
    assert is_valid(result)
    assert holds(result, NAN, 0.0)


def test_fused_result_that_avoids_an_overflow_leaves_the_sum_unknown() -> None:
    """Separately, 1e30 · 1e30 is inf, and inf - inf is NaN; fused, the result is -inf."""
    assert holds(multiply_add(point(1e30), point(1e30), -INF), NAN, -INF)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: clamp(x, -448.0, 448.0),
        lambda x: at_least(x, 1e-6),
        lambda x: sqrt_rn(x),
        lambda x: exp(x),
        lambda x: x.rounded(BF16),
        lambda x: x * x,
    ],
    ids=["clamp", "at_least", "sqrt", "exp", "rounded", "square"],
)
def test_what_may_be_nan_may_still_be_nan_after_a_function_that_keeps_it(
    function: Callable[[Enclosure], Enclosure],
) -> None:
    assert holds(function(UNKNOWN), NAN)


# Rounding to a format, clamps, magnitudes


def test_rounding_an_interval_rounds_its_ends() -> None:
    x = interval(1.0 + 2.0**-9, 1.0 + 2.0**-8 + 2.0**-20).rounded(BF16)
    assert (x.lo.item(), x.hi.item()) == (1.0, 1.0 + 2.0**-7)
    closed = interval(1.0 + 2.0**-10, 1.0 + 2.0**-9).rounded(BF16)
    assert closed.lo.item() == closed.hi.item() == 1.0


@pytest.mark.parametrize(("lo", "hi"), [(400.0, 500.0), (-500.0, 500.0), (-500.0, -400.0)])
def test_rounding_to_a_format_without_infinity_keeps_the_invariant(lo: float, hi: float) -> None:
    x = interval(lo, hi).rounded(E4M3)
    assert is_valid(x)
    members = [lo, hi, (lo + hi) / 2]
    assert holds(x, *round_to(torch.tensor(members, dtype=torch.float64), E4M3).tolist())


def test_rounding_beyond_a_format_without_infinity_must_give_nan() -> None:
    x = interval(500.0, 600.0).rounded(E4M3)
    assert holds(x, NAN)
    assert not holds(x, 448.0)


def test_clamp_and_floor() -> None:
    x = clamp(hull(point(-9.0, 0.5, NAN), point(-1.0, 9.0, NAN)), -2.0, 2.0)
    assert x.lo[:2].tolist() == [-2.0, 0.5]
    assert x.hi[:2].tolist() == [-1.0, 2.0]
    assert x.lo[2].isnan()
    assert x.hi[2].isnan()
    assert at_least(point(0.0, 7.0), 0.1).value.tolist() == [float(f32(0.1)), 7.0]


def test_largest_magnitude_of_points_ignores_nan() -> None:
    x = torch.tensor([[1.0, -3.0, NAN], [NAN, NAN, NAN], [-INF, 2.0, NAN]])
    largest = largest_magnitude(Enclosure.point(x))
    assert largest.shape == (3, 1)
    assert largest.value.flatten().tolist() == [3.0, 0.0, INF]


@given(
    bounds=st.lists(st.tuples(moderate, moderate), min_size=1, max_size=5),
    share=st.floats(0, 1),
)
def test_largest_magnitude_of_intervals(bounds: list[tuple[float, float]], share: float) -> None:
    pairs = [tuple(sorted(b)) for b in bounds]
    lo, hi = (torch.tensor(t, dtype=torch.float64) for t in zip(*pairs, strict=True))
    members = lo + share * (hi - lo)
    largest = largest_magnitude(Enclosure(torch.stack([lo, lo, lo, hi])))
    assert holds(largest, float(members.clamp(lo, hi).abs().max()))
    assert largest.hi.item() == max(abs(v) for pair in pairs for v in pair)
    assert largest.lo.item() == max(0.0 if a <= 0 <= b else min(abs(a), abs(b)) for a, b in pairs)


def test_hull_keeps_the_first_value() -> None:
    both = hull(point(2.0), point(1.0), point(5.0))
    assert both.parts.flatten().tolist() == [2.0, 2.0, 1.0, 5.0]


@given(x=fp32_numbers, y=fp32_numbers, z=fp32_numbers)
def test_products_in_any_order_hold_each_order(x: float, y: float, z: float) -> None:
    assume(not math.isnan(x * y * z))
    a, b, c = point(x), point(y), point(z)
    allowed = product_in_any_order(a, b, c)
    assert is_valid(allowed)
    assert is_point(a * b)
    assert holds(allowed, *[(p * q * r).value.item() for p, q, r in ((a, b, c), (b, c, a), (a, c, b))])


@given(factors=st.lists(st.floats(-100, 100, width=32), min_size=4, max_size=4), data=st.data())
def test_products_of_four_factors_hold_each_order(factors: list[float], data: st.DataObject) -> None:
    points = [point(f) for f in factors]
    allowed = product_in_any_order(*points)
    left, right = points[0] * points[1], points[2] * points[3]
    assert allowed.value.item() == (left * points[2] * points[3]).value.item()
    while len(points) > 1:  # some tree
        a, b = (points.pop(data.draw(st.integers(0, len(points) - 1))) for _ in range(2))
        points.append(a * b)
    assert holds(allowed, (left * right).value.item(), points[0].value.item())
    width = allowed.hi.item() - allowed.lo.item()
    assert width <= 8 * 2.0**-24 * abs(allowed.exact.item()) + 2.0**-100


def test_a_product_of_one_factor_is_the_factor() -> None:
    x = point(3.0)
    assert product_in_any_order(x).parts is x.parts


def test_rounding_is_to_fp32_after_every_operation() -> None:
    x = Enclosure.point(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
    for result in (x + x * x, x * x * x, divide_rn(x, x + 3.0)):
        assert torch.equal(round_to(result.value, FP32), result.value)
        assert not torch.equal(result.exact, result.value)


# What only moves elements


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_elements_are_moved_with_all_their_parts(parts: int) -> None:
    x = of_parts(parts, 2, 3, 4)
    moves: list[tuple[Enclosure, torch.Tensor]] = [
        (x.in_groups(2), x.parts.reshape(parts, 2, 3, 2, 2)),
        (x.in_groups(4), x.parts.reshape(parts, 2, 3, 1, 4)),
        (x.joined(), x.parts.reshape(parts, 2, 12)),
        (x.permute(-1, -3, -2), x.parts.permute(0, 3, 1, 2)),
        (x.reshape(4, -1), x.parts.reshape(parts, 4, 6)),
        (x.expand(5, 2, 3, 4), x.parts[:, None].expand(parts, 5, 2, 3, 4)),
        (x.expand(5, -1, -1, -1), x.parts[:, None].expand(parts, 5, 2, 3, 4)),
        (x[:1, :].expand(7, 3, 4), x.parts[:, :1].expand(parts, 7, 3, 4)),
        (x.expand(2, 3, 4), x.parts),
    ]
    for moved, wanted in moves:
        assert moved.shape == wanted.shape[1:]
        assert torch.equal(moved.parts, wanted)


def test_residues_move_with_the_elements() -> None:
    with following_residues():
        x = Enclosure.point(torch.arange(6.0).reshape(2, 3))
        assert torch.equal(x.transposed.residues.p, Residues.of(torch.arange(6.0).reshape(2, 3).T).p)
    assert not Enclosure.point(torch.ones(2)).residues.open.any()
    assert interval(1.0, 2.0).residues.open.all()


def test_operations_with_numbers_on_either_side() -> None:
    x = point(4.0, -0.5)
    found = {
        "+": (x + 1.0, 1.0 + x, [5.0, 0.5]),
        "*": (x * 2.0, 2.0 * x, [8.0, -1.0]),
        "-": (x - 1.0, -(1.0 - x), [3.0, -1.5]),
        "/": (x / 2.0, 1.0 / (2.0 / x), [2.0, -0.25]),
    }
    for one, other, values in found.values():
        assert one.value.tolist() == other.value.tolist() == values
    assert abs(x).value.tolist() == [4.0, 0.5]
    assert abs(interval(-3.0, 2.0)).parts[2:].flatten().tolist() == [0.0, 3.0]


@pytest.mark.parametrize(("left", "right"), [(1.0, 2.0), (2.0, 1.0), (1.0, 1.0)])
def test_comparisons_are_those_of_numbers(left: float, right: float) -> None:
    x, y, zero, one = point(left), point(right), point(0.0), point(1.0)
    for truth, wanted in (
        (x < y, left < right),
        (x <= y, left <= right),
        (x > y, left > right),
        (x >= y, left >= right),
        (x < right, left < right),
        (x >= right, left >= right),
    ):
        assert where(truth, one, zero).value.item() == float(wanted)


def test_what_says_too_little_is_refused() -> None:
    with pytest.raises(TypeError, match=r"x \*\* 2 does not say how it is multiplied; write product_in_any_order"):
        point(1.0) ** 2
    with pytest.raises(TypeError, match=r"torch.exp takes no enclosure; a reference uses the functions of lastbit"):
        torch.exp(point(1.0))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'one' is neither an enclosure nor a number"):
        point(1.0) + "one"  # type: ignore[operator]


def test_the_exact_value_alone_is_not_rounded() -> None:
    x = point(1.0 + 2.0**-20)
    assert x.rounded(BF16).value.item() == 1.0
    with using(EXACT):
        assert x.rounded(BF16) is x


def test_nothing_is_the_largest_of_nothing() -> None:
    found = largest_magnitude(of_parts(4, 2, 0))
    assert found.parts.tolist() == [[[0.0], [0.0]]] * 4
