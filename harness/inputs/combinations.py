"""Combinations of what cases are made of, such as dtypes and options, so that every two that go together meet.

Most faults that depend on several options depend on two: Kuhn, Wallace and Gallo, Software Fault Interactions and
Implications for Software Testing, IEEE Transactions on Software Engineering 30 (2004).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from lastbit.case import Option
from lastbit.errors import UsageError
from lastbit.inputs.choices import DRAWN


class Accepted(frozenset[str]):
    """The names of what a kernel accepts, as `groups` of a file of cases is given them, and which rows it takes.

    Attributes:
        requires: names that it is never called without.
        takes: `T dtype` or a parameter → the options that it declares to take.
        strength: how many options at least are to meet in a row.
    """

    requires: Collection[str] = ()
    takes: Mapping[str, Collection[Any]] = {}
    strength: int = 2

    @classmethod
    def of(
        cls,
        accepts: Collection[str],
        requires: Collection[str] = (),
        takes: Mapping[str, Collection[Any]] = MappingProxyType({}),
        strength: int = 2,
    ) -> Self:
        made = cls(accepts)
        made.requires, made.takes, made.strength = requires, takes, strength
        return made

    def ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Return the ranges of sizes that hold one which the kernel takes, or one for each size if none does.

        Of a kernel that names no sizes for `key`, such as `q columns`, they are all.
        """
        sizes = [size for size in self.takes.get(key, ()) if isinstance(size, int)]
        fitting = [(low, high) for low, high in ranges if any(low <= size <= high for size in sizes)]
        return fitting or [(size, size) for size in sizes] or ranges

    def sizes(self, key: str, low: int, high: int) -> Sequence[int]:
        """Return the sizes of a range that the kernel takes, all if it takes none of them or names none."""
        every = range(low, high + 1)
        return [size for size in every if size in self.takes.get(key, ())] or every

    def has(self, row: Mapping[str, Option]) -> bool:
        """Return whether the kernel takes the options of a row."""
        for axis, option in row.items():
            name = axis.partition(" ")[0]
            if name in self.requires if option is None else name not in self:
                return False
            left_out = option is None and axis.endswith(" dtype")
            taken = [row.get(str(o), o) for o in self.takes.get(axis, (option,))]  # `x dtype`: what the row has for it
            if not left_out and option != DRAWN and option not in taken:
                return False
        return True


def combinations(
    axes: Mapping[str, Sequence[Option]],
    together: Callable[[Mapping[str, Any]], bool] = lambda row: True,
    *,
    accepts: frozenset[str] | None = None,
    means: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda row: row,
    strength: int = 2,
) -> tuple[dict[str, Any], ...]:
    """Return rows with one option of each axis in which every two options that go together meet at least once.

    With a `strength` of 3 every three options meet.

    `together` tells of a whole row whether its options do. With `accepts`, the rows are those that a kernel with these
    tensors and parameters takes: an axis is then called `x dtype` or as a parameter, and None leaves that out. Of other
    axes, such as ranks, `means` maps a row to what it gives, called so. There may be no row. The rows are the same each
    time, and few: each is the one with most new pairs, the earliest of several. Listing all rows to choose from is what
    limits the axes.

    >>> combinations({"x": ("bf16", "fp16"), "weight": ("bf16", "fp16")}, lambda row: row["x"] == row["weight"])
    ({'x': 'bf16', 'weight': 'bf16'}, {'x': 'fp16', 'weight': 'fp16'})

    Raises:
        UsageError: no row has options that go together, or there are more than 100,000 rows.
    """
    taken = accepts if isinstance(accepts, Accepted | None) else Accepted(accepts)
    if taken is not None:
        strength = max(strength, taken.strength)
    rows = []
    for number, options in enumerate(itertools.product(*axes.values())):
        if number == _MOST_ROWS:
            raise UsageError(
                f"the axes {', '.join(axes)} have more than {_MOST_ROWS:,} combinations; give fewer options"
            )
        row = dict(zip(axes, options, strict=True))
        if together(row) and (taken is None or taken.has(means(row))):
            rows.append(row)
    if not rows and taken is not None:
        return ()
    if not rows:
        raise UsageError(f"no options of the axes {', '.join(axes)} go together")
    bits: dict[Any, int] = {}  # one for each pair, or each three, for sets that are numbers
    pairs = [
        sum(
            1 << bits.setdefault(pair, len(bits))
            for pair in itertools.combinations(row.items(), min(strength, len(axes)))
        )
        for row in rows
    ]
    left, found = (1 << len(bits)) - 1, list[dict[str, Any]]()
    while left or not found:
        best = max(range(len(rows)), key=lambda number: (pairs[number] & left).bit_count())
        found.append(rows[best])
        left &= ~pairs[best]
    return tuple(found)


Pair = tuple[tuple[str, Any], ...]
"""Two axes with an option each."""


def pairs_of(rows: Iterable[Mapping[str, Any]]) -> dict[Pair, None]:
    """Return every two options that meet in some row, in the order of the rows."""
    return {pair: None for row in rows for pair in itertools.combinations(row.items(), 2)}


def told(*options: tuple[str, Any]) -> str:
    """Say options in words: `x=bf16 × no residual × eps`."""
    return " × ".join(map(_told, options))


def _told(selected: tuple[str, Any]) -> str:
    axis, option = selected
    name = axis.removesuffix(" dtype")
    if option is None:
        return f"no {name}"
    return name if option is True or option == DRAWN else f"{name}={option}"


# A second's work; a product of ten axes with three options has 59,049.
_MOST_ROWS = 100_000
