"""Comparisons, choices and extremes: what holds of the numbers within intervals, special values among them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.numerics import (
    Enclosure,
    Indices,
    Truth,
    abs,
    amax,
    amin,
    argmax,
    at_least,
    clamp,
    gather,
    largest_magnitude,
    maximum,
    minimum,
    where,
)

INF, NAN = math.inf, math.nan
ENDS = (-INF, -2.0, -1.0, -0.0, 1.0, 2.0, INF)
INTERVALS = [(lo, hi) for lo, hi in itertools.product(ENDS, ENDS) if lo <= hi] + [(NAN, NAN)]
"""Every interval of a few numbers; the one from -inf to inf stands for everything, NaN included."""


def of(pairs: list[tuple[float, float]]) -> Enclosure:
    lo, hi = torch.tensor(pairs, dtype=torch.float64).unbind(-1)
    middle = torch.where(torch.isfinite(lo), lo, hi)
    return Enclosure(torch.stack([middle, middle, lo, hi]))


def members(lo: float, hi: float) -> list[float]:
    """Numbers of an interval."""
    if math.isnan(lo):
        return [NAN]
    inner = [x for x in (*ENDS, -1.5, 0.5, 1.5) if lo <= x <= hi]
    return [*inner, NAN] if (lo, hi) == (-INF, INF) else inner


PAIRS = list(itertools.product(INTERVALS, INTERVALS))
A, B = of([a for a, _ in PAIRS]), of([b for _, b in PAIRS])


def results(of_two: Callable[[float, float], float]) -> list[list[float]]:
    """For each pair of intervals, what may come of their members."""
    return [[of_two(x, y) for x in members(*a) for y in members(*b)] for a, b in PAIRS]


def assert_encloses(e: Enclosure, found: list[list[float]]) -> None:
    """All that may come out lies inside; ends are attained unless nothing is known."""
    for lo, hi, values in zip(e.lo.tolist(), e.hi.tolist(), found, strict=True):
        finite = [v for v in values if not math.isnan(v)]
        if len(finite) < len(values):
            assert (lo, hi) == (-INF, INF) if finite else (math.isnan(lo) and math.isnan(hi)) or (lo, hi) == (-INF, INF)
        else:
            assert lo <= min(values) and hi >= max(values)
            assert (lo, hi) in ((min(values), max(values)), (-INF, INF)), values


def propagating(choose: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda x, y: NAN if math.isnan(x) or math.isnan(y) else choose(x, y)


def ignoring(choose: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda x, y: y if math.isnan(x) else x if math.isnan(y) else choose(x, y)


@pytest.mark.parametrize(("operation", "choose"), [(maximum, max), (minimum, min)])
def test_extremes_of_two_enclose_those_of_all_members(
    operation: Callable[..., Enclosure], choose: Callable[[float, float], float]
) -> None:
    assert_encloses(operation(A, B), results(propagating(choose)))
    ignored = operation(A, B, "ignore")
    for lo, hi, values in zip(ignored.lo.tolist(), ignored.hi.tolist(), results(ignoring(choose)), strict=True):
        for value in values:
            unknown = (lo, hi) == (-INF, INF)
            assert unknown or lo <= value <= hi or (math.isnan(value) and math.isnan(lo)), (lo, hi, value)


def test_a_number_may_be_one_of_two() -> None:
    x = Enclosure.point(torch.tensor([-1.0, 3.0, NAN]))
    assert maximum(x, 0.0).value.nan_to_num(9).tolist() == [0.0, 3.0, 9.0]
    assert maximum(x, 0.0).value.nan_to_num(9).equal(at_least(x, 0.0).value.nan_to_num(9))
    assert minimum(2.0, x, "ignore").value.tolist() == [-1.0, 2.0, 2.0]
    assert len(maximum(x, 0.0).parts) == 1  # exact: known numbers stay known
    assert abs(x).value.nan_to_num(9).tolist() == [1.0, 3.0, 9.0]


def test_magnitudes_enclose_those_of_all_members() -> None:
    one = of(INTERVALS)
    found = [[NAN if math.isnan(x) else math.fabs(x) for x in members(*a)] for a in INTERVALS]
    e = abs(one)
    for lo, hi, values in zip(e.lo.tolist(), e.hi.tolist(), found, strict=True):
        assert all((lo <= v <= hi) or (math.isnan(v) and (math.isnan(lo) or hi == INF)) for v in values)


@pytest.mark.parametrize(("operation", "choose"), [(amax, max), (amin, min)])
def test_extremes_of_rows_are_those_of_all_members(
    operation: Callable[..., Enclosure], choose: Callable[[float, float], float]
) -> None:
    rows = Enclosure(torch.stack([A.parts, B.parts], -1))
    assert_encloses(operation(rows)[..., 0], results(propagating(choose)))
    two = maximum(A, B, "ignore") if choose is max else minimum(A, B, "ignore")
    assert torch.equal(operation(rows, "ignore")[..., 0].full[2:].nan_to_num(9), two.full[2:].nan_to_num(9))


def test_largest_magnitude_is_that_of_the_magnitudes() -> None:
    x = Enclosure.point(torch.randn(8, 32, generator=torch.Generator().manual_seed(0)))
    assert amax(abs(x)).value.equal(largest_magnitude(x).value)


def test_a_row_without_elements_has_no_extreme() -> None:
    with pytest.raises(ValueError, match="no elements"):
        amax(Enclosure.point(torch.zeros(3, 0)))
    with pytest.raises(ValueError, match="no elements"):
        argmax(Enclosure.point(torch.zeros(3, 0)))
    with pytest.raises(ValueError, match="neither propagate nor ignore"):
        maximum(A, B, "drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("truth", "holds"),
    [
        (A < B, lambda x, y: x < y),
        (A <= B, lambda x, y: x <= y),
        (A > B, lambda x, y: x > y),
        (A >= B, lambda x, y: x >= y),
        (~(A < B), lambda x, y: not x < y),
        ((A < B) | (A > B), lambda x, y: x < y or x > y),
        ((A <= B) & (A >= B), lambda x, y: x <= y and x >= y),
    ],
)
def test_a_comparison_must_hold_or_may_hold(truth: Truth, holds: Callable[[float, float], bool]) -> None:
    simple = holds(1.0, 2.0) != holds(2.0, 1.0)  # one comparison, or its opposite
    for must, may, (a, b) in zip(truth.must.tolist(), truth.may.tolist(), PAIRS, strict=True):
        seen = {bool(holds(x, y)) for x in members(*a) for y in members(*b)}
        assert (True in seen) <= may and must <= (False not in seen), (a, b)
        if simple and (-INF, INF) not in (a, b):
            assert (must, may) == (False not in seen, True in seen), (a, b)


def test_a_truth_and_a_known_condition_are_joined() -> None:
    x, known = of([(0.0, 2.0), (0.0, 2.0), (2.0, 3.0)]), torch.tensor([True, False, True])
    both = (x > 1.0) & known
    assert both.must.tolist() == [False, False, True] and both.may.tolist() == [True, False, True]
    either = known | (x > 1.0)
    assert either.must.tolist() == [True, False, True] and either.open.tolist() == [False, True, False]
    assert both.shape == (3,)


def test_conditions_of_more_dimensions_than_values_broadcast() -> None:
    x, y = of([(0.0, 2.0), (2.0, 3.0)]), of([(-1.0, 0.5), (0.0, 9.0), (5.0, 6.0)])
    column = y.reshape(3, 1)
    e = where(column > 1.0, x, 7.0)
    assert e.lo.tolist() == [[7.0, 7.0], [0.0, 2.0], [0.0, 2.0]] and e.hi.tolist() == [
        [7.0, 7.0],
        [7.0, 7.0],
        [2.0, 3.0],
    ]
    both = (column > 1.0) & (x > 1.0)
    assert both.shape == (3, 2) and both.may.tolist() == [[False, False], [True, True], [True, True]]
    assert (both & torch.tensor([True, False])).may[:, 1].tolist() == [False] * 3
    assert ((x > 1.0) | torch.tensor([[True], [False]])).must.tolist() == [[True, True], [False, True]]


def test_where_a_comparison_is_open_either_may_be_chosen() -> None:
    x = of([(0.0, 2.0), (2.0, 3.0), (-1.0, 0.5), (NAN, NAN)])
    e = where(x > 1.0, x, 7.0)
    assert e.lo.tolist() == [0.0, 2.0, 7.0, 7.0] and e.hi.tolist() == [7.0, 3.0, 7.0, 7.0]


@pytest.mark.parametrize(("a", "b"), [((1.0, 2.0), (4.0, 5.0)), ((NAN, NAN), (1.0, 1.0)), ((NAN, NAN), (NAN, NAN))])
def test_an_open_choice_of_nan_is_unknown(a: tuple[float, float], b: tuple[float, float]) -> None:
    undecided = of([(0.0, 2.0)]) > 1.0
    e = where(undecided, of([a]), of([b]))
    lost = math.isnan(a[0]) != math.isnan(b[0])
    expected = (-INF, INF) if lost else (a[0], b[1])
    assert (float(e.lo), float(e.hi)) == pytest.approx(expected, nan_ok=True)


def test_where_of_a_known_condition_is_exact_and_broadcasts() -> None:
    x, mask = torch.randn(3, 4), torch.tensor([True, False, True, False])
    e = where(mask, Enclosure.point(x), -INF)
    assert len(e.parts) == 1 and e.value.equal(torch.where(mask, x.double(), -INF))
    columns = where(mask[:3, None], 1.0, Enclosure.point(x))
    assert columns.value.equal(torch.where(mask[:3, None], 1.0, x.double()))
    rows = where(mask[:3, None] & mask, Enclosure.point(x[0]), 0.0)
    assert rows.value.equal(torch.where(mask[:3, None] & mask, x[0].double(), 0.0))
    with pytest.raises(ValueError, match="must be of bool"):
        where(mask.int(), Enclosure.point(x), 0.0)


@pytest.mark.parametrize("dim", [-1, -2, 0, 1])
def test_gather_takes_what_torch_takes(dim: int) -> None:
    x, index = torch.randn(5, 4), torch.randint(0, 4, (3, 4))
    e = Enclosure(torch.stack([x, x, x - 1, x + 1]).double())
    taken = gather(e, index, dim)
    for part, of_x in zip(taken.parts, e.parts, strict=True):
        assert part.equal(of_x.gather(dim, index))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (torch.tensor([[0.0]]), "an index of integers"),
        (torch.tensor([0]), "with 2 dimensions"),
        (torch.tensor([[4]]), "from 4 to 4, but there are 4"),
        (torch.tensor([[-100]]), "from -100"),
    ],
)
def test_an_index_that_gather_cannot_take_is_refused(index: Tensor, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        gather(Enclosure.point(torch.zeros(1, 4)), index)


def test_argmax_allows_whatever_may_be_largest() -> None:
    """Against all ways to take a number from each interval of a row."""
    generator = torch.Generator().manual_seed(3)
    finite = [pair for pair in INTERVALS if pair != (-INF, INF)]
    for _ in range(60):
        picked = torch.randint(len(finite), (3,), generator=generator).tolist()
        row = [finite[i] for i in picked]
        allowed = argmax(of(row)).allowed.tolist()
        seen = set()
        for values in itertools.product(*(members(*pair) for pair in row)):
            largest = [i for i, v in enumerate(values) if math.isnan(v)]
            largest = largest or [i for i, v in enumerate(values) if v == max(values)]
            seen.update(largest)
        assert seen == {i for i, may in enumerate(allowed) if may}, row


def test_what_may_be_nan_may_be_chosen() -> None:
    chosen = argmax(of([(3.0, 3.0), (-INF, INF), (1.0, 1.0)]))
    assert chosen.allowed.tolist() == [True, True, False]
    assert chosen.shape == (1,) and chosen.range.hi.tolist() == [1.0]


def test_gather_of_an_argmax_is_the_hull_of_what_may_be_chosen() -> None:
    index = argmax(of([(3.0, 3.0), (2.0, 4.0), (1.0, 1.0)]))
    values = of([(5.0, 6.0), (-2.0, -1.0), (100.0, 100.0)])
    e = gather(values, index)
    assert (float(e.lo), float(e.hi)) == (-2.0, 6.0)
    unknown = gather(of([(5.0, 6.0), (NAN, NAN), (0.0, 0.0)]), index)
    assert (float(unknown.lo), float(unknown.hi)) == (-INF, INF)
    with pytest.raises(ValueError, match="is not that of 2"):
        gather(of([(0.0, 1.0), (0.0, 1.0)]), index)


def test_elements_are_gathered_along_the_last_dimension_however_it_is_called() -> None:
    x = Enclosure.point(torch.tensor([[1.0, 3.0, 2.0], [6.0, 5.0, 4.0]]))
    index = argmax(x)
    for dim in (-1, 1):
        assert gather(x, index, dim).value.tolist() == [[3.0], [6.0]]
    for dim in (0, -2, 2):
        with pytest.raises(ValueError, match="what argmax chose"):
            gather(x, index, dim)


def test_of_given_indices_nothing_else_may_be_chosen() -> None:
    index = argmax(of([(3.0, 3.0), (2.0, 4.0), (1.0, 1.0)]))
    assert index.only(torch.tensor([2])).allowed.tolist() == [False, False, True]
    assert index.only(torch.tensor([7])).allowed.all()
    assert index.outside(torch.tensor([2])).tolist() == [True]
    assert index.outside(torch.tensor([1])).tolist() == [False]


def test_reflected_operations_are_those_of_their_operands() -> None:
    x = Enclosure.point(torch.tensor([0.25, 3.0, -7.0]))
    assert (1.0 - x).value.equal((-x + 1.0).value)
    third, own = 1.0 / x, x / 3.0
    assert ((third.lo <= 1.0 / x.value) & (third.hi >= 1.0 / x.value)).all() and (third.hi > third.lo)[1]
    assert ((own.lo <= x.value / 3.0) & (own.hi >= x.value / 3.0)).all()
    assert clamp(1.0 - x, 0.0, 1.0).value.tolist() == [0.75, 0.0, 1.0]


@pytest.mark.parametrize(
    ("given", "outside", "value", "allowed"),
    [
        (0, False, 0, [True, False, False]),
        (1, True, 1, [False, True, False]),
        (2, False, 2, [False, False, True]),
        (3, True, 2, [True, True, True]),
        (-1, True, 0, [True, True, True]),
    ],
)
def test_indices_that_a_kernel_gives(given: int, outside: bool, value: int, allowed: list[bool]) -> None:
    """One of a row of three, of which the first and the last are allowed; beyond the row it stands for any element."""
    indices = Indices(torch.tensor([[True, False, True]]), torch.tensor([[0]]), torch.int32)
    own = torch.tensor([[given]])
    assert indices.outside(own).tolist() == [[outside]]
    only = indices.only(own)
    assert (only.value.tolist(), only.allowed.tolist(), only.dtype) == ([[value]], [allowed], torch.int32)
    bounds = indices.range
    assert (bounds.exact.item(), bounds.value.item(), bounds.lo.item(), bounds.hi.item()) == (0, 0, 0, 2)


def test_elements_at_an_index_that_may_be_several() -> None:
    parts = torch.tensor([[1.0, 5.0, 2.0], [1.0, 5.0, 2.0], [0.5, 4.0, 1.5], [1.5, 6.0, 9.0]])[:, None].double()
    indices = Indices(torch.tensor([[True, False, True]]), torch.tensor([[2]]))
    found = indices.elements(Enclosure(parts))
    assert found.full.flatten().tolist() == [2.0, 2.0, 0.5, 9.0]
    nan, inf = math.nan, math.inf
    for place, ends, expected in (
        (1, (nan, nan), [0.5, 9.0]),
        (1, (-inf, inf), [0.5, 9.0]),
        (0, (-inf, inf), [-inf, inf]),
        (0, (nan, nan), [-inf, inf]),
    ):
        own = parts.clone()
        own[2, 0, place], own[3, 0, place] = ends
        found = indices.elements(Enclosure(own))
        assert [found.lo.item(), found.hi.item()] == expected, (place, ends)
    both = parts.clone()
    both[2:, 0, [0, 2]] = nan
    assert torch.isnan(indices.elements(Enclosure(both)).lo).all()
