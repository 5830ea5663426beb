"""Rows of options in which every two that go together meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from lastbit import combinations
from lastbit.errors import UsageError
from lastbit.inputs import DRAWN
from lastbit.inputs.combinations import Accepted, pairs_of, told

_AXES = {
    "x": ("bf16", "fp16", "fp32"),
    "weight": (None, "bf16", "fp16", "fp32"),
    "residual": (True, False),
    "limit": (None, 7.0),
}


def _pairs(rows: Any) -> set[Any]:
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


def _no_narrow_weight(row: Mapping[str, Any]) -> bool:
    return not (row["x"] == "fp32" and row["weight"] in ("bf16", "fp16"))


@pytest.mark.parametrize("together", [lambda row: True, _no_narrow_weight], ids=["all", "some"])
def test_every_two_options_that_go_together_meet_in_few_rows(together: Any) -> None:
    every = [row for o in itertools.product(*_AXES.values()) if together(row := dict(zip(_AXES, o, strict=True)))]
    rows = combinations(_AXES, together)
    assert _pairs(rows) == _pairs(every)
    assert all(map(together, rows))
    assert len(rows) <= 14  # of 48; no fewer than 12 are possible


def test_one_axis_has_a_row_for_each_option_and_none_has_one_row() -> None:
    assert combinations({"x": ("bf16", "fp16")}) == ({"x": "bf16"}, {"x": "fp16"})
    assert combinations({}) == ({},)


def test_every_three_options_meet_with_a_strength_of_3() -> None:
    axes = {"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (0, 1)}

    def met(rows: Any, count: int) -> int:
        return len({some for row in rows for some in itertools.combinations(row.items(), count)})

    rows = combinations(axes, strength=3)
    assert met(rows, 3) == 4 * 8
    assert len(rows) <= 10
    assert met(combinations(axes), 2) == 6 * 4
    assert len(combinations(axes)) <= 6
    assert len(combinations(axes, strength=1)) == 2
    assert combinations({"a": (0, 1)}, strength=3) == ({"a": 0}, {"a": 1})


def test_of_several_rows_with_as_many_new_pairs_the_first_is_taken() -> None:
    axes = {"a": (0, 1), "b": (0, 1)}
    assert [tuple(row.values()) for row in combinations(axes)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    three = [tuple(row.values()) for row in combinations(axes | {"c": (0, 1)})]
    assert three == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]


@pytest.mark.parametrize(
    ("row", "taken"),
    [
        ({"x dtype": "bf16", "eps": DRAWN}, True),
        ({"x dtype": "fp16"}, False),  # the kernel takes another dtype
        ({"x dtype": "bf16", "eps": None}, True),
        ({"x dtype": None}, False),  # required
        ({"weight dtype": "fp16"}, True),  # of which no dtype is declared
        ({"weight dtype": None}, True),
        ({"residual dtype": "bf16"}, False),  # not accepted
        ({"residual dtype": None}, True),
        ({"ranks": 2}, True),
        ({"ranks": 3}, False),
        ({"ranks": DRAWN}, True),
        ({"ranks": None}, False),  # of what it takes, leaving out is not
        ({"eps": 0.5, "ranks": 3}, False),
        ({"eps": 0.5, "ranks": 4}, True),
        ({}, True),
    ],
)
def test_rows_that_a_kernel_takes(row: dict[str, Any], taken: bool) -> None:
    takes = {"x dtype": ("bf16",), "ranks": (2, 4)}
    accepted = Accepted.of(["x", "weight", "eps", "ranks"], requires=["x"], takes=takes)
    assert accepted == {"x", "weight", "eps", "ranks"}
    assert accepted.has(row) is taken


def test_rows_are_those_that_a_kernel_takes() -> None:
    axes = {"x dtype": ("bf16", "fp16"), "residual dtype": (None, "bf16")}
    known = Accepted.of(["x"], requires=[], takes={"x dtype": ("fp16",)})
    assert combinations(axes, accepts=known) == ({"x dtype": "fp16", "residual dtype": None},)
    assert [row["x dtype"] for row in combinations(axes, accepts=frozenset(["x"]))] == ["bf16", "fp16"]
    assert combinations(axes, lambda row: row["residual dtype"] is not None, accepts=known) == ()
    assert combinations(axes, accepts=Accepted.of([], ["x"], {})) == ()


def test_what_an_axis_means_is_asked_of_the_kernel() -> None:
    ranks = {"ranks": (1, 2, 3)}
    known = Accepted.of(["world"], requires=["world"], takes={"world": (2, 3)})
    assert combinations(ranks, accepts=known, means=lambda row: {"world": row["ranks"]}) == ({"ranks": 2}, {"ranks": 3})


def test_pairs_that_meet_come_in_the_order_of_rows() -> None:
    rows = [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 2, "c": 4}]
    assert list(pairs_of(rows)) == [
        (("a", 1), ("b", 2)),
        (("a", 1), ("c", 3)),
        (("b", 2), ("c", 3)),
        (("a", 1), ("c", 4)),
        (("b", 2), ("c", 4)),
    ]
    assert pairs_of([]) == {}


def test_options_in_words() -> None:
    assert told(("x dtype", "bf16"), ("residual dtype", None), ("eps", DRAWN)) == "x=bf16 × no residual × eps"
    assert told(("bias", True), ("limit", False), ("k", 1)) == "bias × limit=False × k=1"


def test_what_cannot_be_combined_is_said() -> None:
    with pytest.raises(UsageError, match="no options of the axes x, weight, residual, limit go together"):
        combinations(_AXES, lambda row: False)
    with pytest.raises(UsageError, match="more than 100,000 combinations; give fewer options"):
        combinations({f"axis{number}": range(10) for number in range(6)})


def test_just_so_many_rows_are_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(combinations.__globals__, "_MOST_ROWS", 6)
    assert len(combinations({"a": range(3), "b": range(2)})) == 6
    with pytest.raises(UsageError, match="the axes a, b have more than 6 combinations"):
        combinations({"a": range(7), "b": range(1)})


def test_sizes_are_those_that_a_kernel_takes() -> None:
    accepted = Accepted.of({"q"}, takes={"columns": (16, 64, None), "named": ("bf16",)})
    assert accepted.sizes("columns", 8, 64) == [16, 64] and accepted.sizes("columns", 16, 63) == [16]
    assert list(accepted.sizes("columns", 17, 19)) == [17, 18, 19] and list(accepted.sizes("rows", 1, 2)) == [1, 2]
    assert accepted.ranges("columns", [(1, 15), (16, 32), (60, 64)]) == [(16, 32), (60, 64)]
    assert accepted.ranges("columns", [(1, 15)]) == [(16, 16), (64, 64)]
    assert accepted.ranges("named", [(1, 15)]) == accepted.ranges("rows", [(1, 15)]) == [(1, 15)]


def test_a_kernel_asks_for_more_options_in_a_row() -> None:
    axes = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    accepts = set(axes)
    assert Accepted.of(accepts).strength == Accepted(accepts).strength == 2
    assert len(combinations(axes, accepts=Accepted.of(accepts, strength=3))) == 8
    assert len(combinations(axes, accepts=Accepted.of(accepts, strength=1), strength=3)) == 8
    assert len(combinations(axes, accepts=Accepted.of(accepts, strength=1), strength=1)) == 2
