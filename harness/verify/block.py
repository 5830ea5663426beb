"""Some rows of a problem together with what a kernel gave for them: what is judged at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from harness.numerics import Sum
from harness.op import Op
from harness.result import Comparison
from harness.row_check import RowCheck
from harness.verify.evaluate import Tensors

_Addend = TypeVar("_Addend", Comparison, Sum, int)


@dataclass(frozen=True)
class Block:
    """Rows of a problem.

    Attributes:
        tensors: the inputs; those of the op's `rows` hold these rows only.
        actual: stage → what the kernel gave, these rows of it.
        sums: those stages of `actual` that are sums over all rows and stay whole.
        index: slices of the leading dimensions by which the rows were taken from the whole; none for everything.
        leading: the sizes of the leading dimensions after that.
        numbers: which of those rows these are, in one dimension; None for all of them.
    """

    tensors: Tensors
    actual: Tensors
    sums: frozenset[str]
    index: tuple[slice, ...]
    leading: tuple[int, ...]
    numbers: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.prod(self.leading) if self.numbers is None else len(self.numbers)

    @property
    def has_rows(self) -> bool:
        """Whether every stage but the sums has a row for each row of the inputs."""
        leading = self.leading if self.numbers is None else tuple(self.numbers.shape)
        return all(t.shape[: len(leading)] == leading for n, t in self.actual.items() if n not in self.sums)

    def only(self, op: Op, rows: Tensor) -> Block:
        """The rows with these numbers, in one dimension."""
        tensors = {n: self._taken(t, rows) if n in op.rows else t for n, t in self.tensors.items()}
        actual = {n: t if n in self.sums else self._taken(t, rows) for n, t in self.actual.items()}
        numbers = rows if self.numbers is None else self.numbers[rows]
        return replace(self, tensors=tensors, actual=actual, numbers=numbers)

    def _taken(self, tensor: Tensor, rows: Tensor) -> Tensor:
        if self.numbers is not None:
            return tensor[rows]
        return tensor.reshape(self.count, *tensor.shape[len(self.leading) :])[rows]

    def located(self, comparison: Comparison) -> Comparison:
        """The same statistics with the worst element's index counted from the start of the whole tensor."""
        worst = comparison.worst
        if worst is None:
            return comparison
        index = worst.index
        if self.numbers is not None:
            index = (*_unravelled(int(self.numbers[index[0]]), self.leading), *index[1:])
        starts = [s.start or 0 for s in self.index] + [0] * (len(index) - len(self.index))
        moved = tuple(i + s for i, s in zip(index, starts, strict=True))
        return replace(comparison, worst=replace(worst, index=moved))


@dataclass(frozen=True)
class Tally:
    """What was counted in a block; `+` joins those of two blocks.

    Attributes:
        cumulative, isolated: stage → statistics, from the inputs and from the kernel's own earlier stages.
        sums, isolated_sums: stage → its sum over the rows of the block.
        rows: the row check, None where there is none.
        in_rows: stage → elements in the rows that it tried.
    """

    cumulative: dict[str, Comparison] = field(default_factory=dict)
    isolated: dict[str, Comparison] = field(default_factory=dict)
    sums: Mapping[str, Sum] = field(default_factory=dict)
    isolated_sums: Mapping[str, Sum] = field(default_factory=dict)
    rows: RowCheck | None = None
    in_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether an element lies outside, or a row is not explained."""
        outside = any(c.outside for c in (*self.cumulative.values(), *self.isolated.values()))
        return outside or (self.rows is not None and self.rows.unexplained > 0)

    def __add__(self, other: Tally) -> Tally:
        rows = [r for r in (self.rows, other.rows) if r is not None]
        return Tally(
            cumulative=_joined(self.cumulative, other.cumulative),
            isolated=_joined(self.isolated, other.isolated),
            sums=_joined(self.sums, other.sums),
            isolated_sums=_joined(self.isolated_sums, other.isolated_sums),
            rows=rows[0] + rows[1] if len(rows) == 2 else next(iter(rows), None),
            in_rows=_joined(self.in_rows, other.in_rows),
        )


def _joined(first: Mapping[str, _Addend], second: Mapping[str, _Addend]) -> dict[str, _Addend]:
    joined = dict(first)
    for name, value in second.items():
        joined[name] = joined[name] + value if name in joined else value
    return joined


def _unravelled(number: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a row from its number."""
    index: list[int] = []
    for size in reversed(sizes):
        number, position = divmod(number, size)
        index.append(position)
    return tuple(reversed(index))
