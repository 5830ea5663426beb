"""Rows of options in which every two that go together meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from lastbit import combinations
from lastbit.errors import UsageError

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


def test_what_cannot_be_combined_is_said() -> None:
    with pytest.raises(UsageError, match="no options of the axes x, weight, residual, limit go together"):
        combinations(_AXES, lambda row: False)
    with pytest.raises(UsageError, match="more than 100,000 combinations; give fewer options"):
        combinations({f"axis{number}": range(10) for number in range(6)})
