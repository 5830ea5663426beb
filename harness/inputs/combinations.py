"""Combinations of what cases are made of, such as dtypes and options, so that every two that go together meet.

Most faults that depend on several options depend on two: Kuhn, Wallace and Gallo, Software Fault Interactions and
Implications for Software Testing, IEEE Transactions on Software Engineering 30 (2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lastbit.case import Option
from lastbit.errors import UsageError


def combinations(
    axes: Mapping[str, Sequence[Option]], together: Callable[[Mapping[str, Any]], bool] = lambda row: True
) -> tuple[dict[str, Option], ...]:
    """Return rows with one option of each axis in which every two options that go together meet at least once.

    `together` tells of a whole row whether its options do. The rows are the same each time, and few: each is the one
    with most new pairs, the earliest of several. Listing all rows to choose from is what limits the axes.

    >>> combinations({"x": ("bf16", "fp16"), "weight": ("bf16", "fp16")}, lambda row: row["x"] == row["weight"])
    ({'x': 'bf16', 'weight': 'bf16'}, {'x': 'fp16', 'weight': 'fp16'})

    Raises:
        UsageError: no row has options that go together, or there are more than 100,000 rows.
    """
    rows = []
    for number, options in enumerate(itertools.product(*axes.values())):
        if number == _MOST_ROWS:
            raise UsageError(
                f"the axes {', '.join(axes)} have more than {_MOST_ROWS:,} combinations; give fewer options"
            )
        row = dict(zip(axes, options, strict=True))
        if together(row):
            rows.append(row)
    if not rows:
        raise UsageError(f"no options of the axes {', '.join(axes)} go together")
    pairs = [frozenset(itertools.combinations(row.items(), min(2, len(axes)))) for row in rows]
    left, found = frozenset[Any]().union(*pairs), []
    while left or not found:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & left))
        found.append(rows[best])
        left -= pairs[best]
    return tuple(found)


# A second's work; a product of ten axes with three options has 59,049.
_MOST_ROWS = 100_000
