"""The search for latent values beside trying them all, and the parts that it is made of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lastbit.judging import candidates
from lastbit.judging.candidates import Rows, Searched, explained_groups
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure, product_in_any_order, total
from lastbit.numerics.formats import FP32, from_ordinals, ordinals
from lastbit.ops import Latent, op

SIZE = 5
FACTORS = torch.tensor([[1.25, -0.7, 3.1, 0.013, -45.0], [0.3, 0.9, -2.2, 7.5, -0.1], [5.0, -6.0, 1.1, 0.9, 2.0]])


@op(rows=("x",), latent=Latent("a", through=("y",)))
def scaled(x: Enclosure, *, contract, stage) -> None:
    a = stage("a", total(x))
    stage("y", product_in_any_order(a, x), result=True)


@op(rows=("x",), latent=Latent("a", through=("y",), also=("b",)))
def shifted(x: Enclosure, *, contract, stage) -> None:
    a, b = stage("a", total(x)), stage("b", total(-x))
    stage("y", product_in_any_order(a, x) + b, result=True)


def at(*values: float) -> Tensor:
    """Return the ordinals of numbers of fp32, one for each row."""
    return ordinals(torch.tensor(values).to(torch.float64), FP32)[:, None]


def rows_of(which: object, y: Tensor, low: Tensor, high: Tensor, **more: object) -> Rows:
    problem = Problem(which, which.contract(), {"x": FACTORS[: len(y)]}, {})  # type: ignore[arg-type, attr-defined]
    tried = torch.ones_like(low, dtype=torch.bool)
    return Rows(problem, {"y": y.to(torch.float64)[:, None]}, "a", low, high, tried, **more)  # type: ignore[arg-type]


def floats(of: Tensor) -> Tensor:
    return from_ordinals(of, FP32).to(torch.float32)


def moved(y: Tensor, column: int, ulps: int) -> Tensor:
    y = y.clone()
    y.view(torch.int32)[:, column] += ulps
    return y


@settings(max_examples=25)
@given(
    true=st.lists(st.integers(-4, 44), min_size=3, max_size=3),
    column=st.integers(0, SIZE - 1),
    ulps=st.integers(-2, 2),
    size=st.sampled_from((1, 2, 7, 31)),
    likely=st.none() | st.integers(-9, 50),
    hidden=st.none() | st.integers(0, SIZE - 1),
    untried=st.none() | st.integers(0, 2),
)
def test_one_value_is_found_where_one_explains_the_elements(
    true: list[int], column: int, ulps: int, size: int, likely: int | None, hidden: int | None, untried: int | None
) -> None:
    low = at(1.0, -2.0, 0.75) + torch.tensor([[0], [-20], [0]])
    high = low + torch.tensor([[40], [39], [0]])
    y = moved(floats(low + torch.tensor(true)[:, None]) * FACTORS, column, ulps)
    rows = rows_of(scaled, y, low, high)
    if likely is not None:
        rows = replace(rows, likely=[low + likely])
    if hidden is not None:
        counted = torch.ones(3, 1, SIZE, dtype=torch.bool)
        counted[..., hidden] = False
        rows = replace(rows, counted=counted)
    if untried is not None:
        rows.tried[untried] = False
    every = low + torch.arange(41).reshape(-1, 1, 1)
    lo, hi = rows.forward({"a": from_ordinals(every, FP32)})["y"]
    right = (rows.seen["y"] >= lo) & (rows.seen["y"] <= hi)
    right = right if rows.counted is None else right | ~rows.counted
    explains = right.all(-1) & (every <= high)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_MOST_CANDIDATES", size)
        answer = explained_groups(rows)
    assert answer.explained.tolist() == (explains.any(0) | ~rows.tried).tolist() and not answer.open.any()
    for row in range(3):
        if rows.tried[row, 0] and answer.explained[row, 0]:
            assert explains[int(answer.found[row, 0] - low[row, 0]), row, 0]


@settings(max_examples=8)
@given(
    true=st.tuples(st.integers(-1, 9), st.integers(-1, 7)),
    column=st.integers(0, SIZE - 1),
    ulps=st.integers(-2, 2),
    likely=st.none() | st.tuples(st.integers(-1, 9), st.integers(-1, 7)),
    at_once=st.sampled_from((1, 11, 1 << 15)),
)
def test_values_are_found_where_they_explain_the_elements_together(
    true: tuple[int, int], column: int, ulps: int, likely: tuple[int, int] | None, at_once: int
) -> None:
    low, b = at(1.0, -2.0), at(-0.5, 3.0)
    y = moved((floats(low + true[0]).double() * FACTORS[:2] + floats(b + true[1])).float(), column, ulps)
    rows = rows_of(shifted, y, low, low + 8, also={"b": (b, b + 6)})
    if likely is not None:
        rows = replace(rows, likely=[low + likely[0], b + likely[1]])
    points = torch.cartesian_prod(torch.arange(9), torch.arange(7))
    each = torch.stack([low + points[:, 0, None, None], b + points[:, 1, None, None]], 1)
    explains = ~candidates._refuted(rows, candidates._Boxes(each, each))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "_AT_ONCE", {"cpu": at_once})
        answer = explained_groups(rows)
    if at_once > 11:  # otherwise the search of some rows is left out
        assert not answer.open.any()
    assert (answer.explained & ~answer.open).logical_or(answer.open).equal(explains.any(0) | answer.open)
    assert not (answer.open & ~answer.explained).any()
    for row in range(2):
        if answer.explained[row, 0] and not answer.open[row, 0]:
            chosen = points[explains[:, row, 0]][:, 0]
            assert int(answer.found[row, 0] - low[row, 0]) in chosen.tolist()


def test_no_rows_are_no_answers() -> None:
    nothing = rows_of(scaled, FACTORS[:0], at()[:0].reshape(0, 1), at()[:0].reshape(0, 1))
    assert explained_groups(nothing).explained.shape == (0, 1)
    low = torch.zeros(0, 1, dtype=torch.int64)
    assert explained_groups(rows_of(shifted, FACTORS[:0], low, low, also={"b": (low, low)})).found.shape == (0, 1)


def test_answers_are_added_once() -> None:
    answer = Searched.of(rows_of(scaled, FACTORS, at(1, 2, 3), at(4, 5, 6)))
    assert answer.found.equal(at(1, 2, 3)) and not answer.explained.any() and not answer.open.any()
    answer.add(torch.tensor([2, 0]), torch.tensor([[True], [False]]), at(7, 8))
    assert answer.found.equal(at(1, 2, 7)) and answer.explained.tolist() == [[False], [False], [True]]
    answer.add(torch.tensor([1, 2]), torch.tensor([[True], [True]]), at(9, 10))
    assert answer.found.equal(at(1, 9, 7)) and answer.explained.tolist() == [[False], [True], [True]]


@pytest.mark.parametrize(
    ("direction", "below", "above"),
    [
        ("nearest", (1 - 2**-25, -1 - 2**-24), (1 + 2**-24, -1 + 2**-25)),
        ("zero", (1.0, -1 - 2**-23), (1 + 2**-23, -1.0)),
        ("either", (1 - 2**-24, -1 - 2**-23), (1 + 2**-23, -1 + 2**-24)),
    ],
)
def test_what_rounds_to_an_element(
    direction: str, below: tuple[float, ...], above: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(scaled, torch.tensor([[1.0, -1.0, 1, 1, 1]]), at(1), at(2))
    monkeypatch.setattr(Problem, "format", lambda self, stage: replace(FP32, direction=direction))
    lowest, highest = rows.rounding("y")
    assert lowest[0, 0, :2].tolist() == list(below) and highest[0, 0, :2].tolist() == list(above)


def test_rows_are_kept_with_all_that_belongs_to_them() -> None:
    low, b = at(1.0, -2.0), at(-0.5, 3.0)
    rows = rows_of(shifted, FACTORS[:2], low, low + 8, also={"b": (b, b + 6)}, likely=[low, b], given={"g": b})
    rows = replace(rows, counted=torch.tensor([[[True]], [[False]]]))
    assert rows.elements == 10
    kept = rows.only(torch.tensor([1, 1, 0]))
    which = [1, 1, 0]
    assert kept.low.equal(low[which]) and kept.high.equal(low[which] + 8) and kept.elements == 15
    assert kept.seen["y"].equal(rows.seen["y"][which]) and kept.problem.tensors["x"].equal(FACTORS[which])
    assert kept.also is not None and all(x.equal(y[which]) for x, y in zip(kept.also["b"], (b, b + 6), strict=True))
    assert [x.tolist() for x in kept.likely] == [low[which].tolist(), b[which].tolist()]
    assert kept.given["g"].equal(b[which])
    assert kept.counted is not None and kept.counted.flatten().tolist() == [False, False, True]


def boxes(*sides: tuple[int, int]) -> candidates._Boxes:
    """Return the box of these intervals, one for each value, of one row with one group."""
    low, high = torch.tensor(sides).T[..., None, None]
    return candidates._Boxes(low, high)


def test_values_that_are_not_yet_known_take_turns() -> None:
    box = boxes((0, 5), (3, 3), (1, 2))
    assert [int(box.axis(number)) for number in range(6)] == [0, 2, 2, 0, 2, 2]
    low, high = box.along(torch.tensor([[2]]))
    assert (int(low), int(high)) == (1, 2)
    cut = box.cut(torch.tensor([[0]]), torch.tensor([[4]]), torch.tensor([[5]]))
    assert cut.low.flatten().tolist() == [4, 3, 1] and cut.high.flatten().tolist() == [5, 3, 2]
    assert box.only(torch.tensor([0, 0])).low.shape == (3, 2, 1)
    stacked = candidates._Boxes.stack(box, cut)
    assert stacked.low[1].equal(cut.low) and stacked.high[0].equal(box.high)


def test_the_middle_and_the_distance_of_numbers() -> None:
    one, three, most = at(1.0), at(3.0), at(FP32.max)
    assert floats(candidates._between(one, three)).item() == 2
    assert candidates._between(one, one + 1).item() in (one.item(), one.item() + 1)
    assert candidates._between(one, one).equal(one) and candidates._between(most, most).equal(most)
    assert candidates._distance(one, three).item() == 2
    wide = candidates._Boxes(torch.stack([one, one]), torch.stack([three, one]))
    assert floats(wide.middle.low).flatten().tolist() == [2, 1]
    assert wide.middle.high.equal(wide.middle.low)


def test_elements_on_a_line_admit_a_share_of_the_way() -> None:
    """Between a of 1 and 2, x · a is to be 1.25, 3 and 1.5 for x of 1, 2 and 1, and that of 0 says nothing."""
    rows = rows_of(shifted, torch.tensor([[1.25, 3.0, 1.5, 0.0, 0.0]]), at(1), at(2))
    faces = torch.tensor([[1.0, 2.0, 1.0, 0.0, 0.0], [2.0, 4.0, 2.0, 0.0, 0.0]]).double()[:, None, None]
    least, most = candidates._shares(rows, "y", faces, faces)
    near = pytest.approx(0.5, abs=1e-5)
    assert least.item() == near and most.item() == pytest.approx(0.25, abs=1e-5)  # no share suits all
    only = replace(rows, counted=torch.tensor([[[True, False, False, True, True]]]))
    least, most = candidates._shares(only, "y", faces, faces)
    assert (least.item(), most.item()) == (pytest.approx(0.25, abs=1e-5),) * 2 and least < 0.25 < most
    turned = candidates._shares(only, "y", faces.flip(0), faces.flip(0))
    assert [x.item() for x in turned] == [pytest.approx(0.75, abs=1e-5)] * 2 and turned[0] < 0.75 < turned[1]
    nothing = replace(rows, counted=torch.tensor([[[False, False, False, True, True]]]))
    assert [x.item() for x in candidates._shares(nothing, "y", faces, faces)] == [0, 1]


def test_an_added_value_may_lie_between_two_numbers() -> None:
    """Half of the way to either neighbour of an odd number lies a tie, which rounds to that neighbour."""
    rows = rows_of(shifted, FACTORS[:1], at(1), at(2), also={"b": (at(1), at(2))})
    rows = replace(rows, problem=rows.problem.on({"x": torch.zeros(1, SIZE)}))
    point = torch.stack([at(1.5), at(1.0) + 1])[None]
    lo, hi = candidates._ends(rows, candidates._Boxes(point, point))["y"]
    assert lo.unique().tolist() == [1] and hi.unique().tolist() == [1 + 2**-22]
    rows = replace(rows, problem=rows.problem.on({"x": torch.ones(1, SIZE)}))  # the first value is a number
    lo, hi = candidates._ends(
        rows, candidates._Boxes(torch.stack([at(1), at(0)])[None], torch.stack([at(1), at(0)])[None])
    )["y"]
    assert lo.unique().tolist() == [1] and hi.unique().tolist() == [1]
