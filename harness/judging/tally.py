"""Counts over some rows of a problem, added up over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from lastbit.judging.expected import RowSum
from lastbit.result import Comparison
from lastbit.row_check import RowCheck

_Addend = TypeVar("_Addend", Comparison, RowSum, int)


@dataclass(frozen=True)
class Tally:
    """The counts over some rows; `+` adds those over other rows.

    Attributes:
        cumulative, isolated: stage → statistics, from the inputs and from the kernel's own earlier stages.
        sums, isolated_sums: stage → its sum over these rows, unless these are all rows.
        rows: the row check, None where there is none.
        in_rows: stage → elements in the rows that it tried.
        beyond: rows that count as explained by arithmetic beyond fp32.
    """

    cumulative: Mapping[str, Comparison] = field(default_factory=dict)
    isolated: Mapping[str, Comparison] = field(default_factory=dict)
    sums: Mapping[str, RowSum] = field(default_factory=dict)
    isolated_sums: Mapping[str, RowSum] = field(default_factory=dict)
    rows: RowCheck | None = None
    in_rows: Mapping[str, int] = field(default_factory=dict)
    beyond: int = 0

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
            beyond=self.beyond + other.beyond,
        )


def _joined(first: Mapping[str, _Addend], second: Mapping[str, _Addend]) -> dict[str, _Addend]:
    joined = dict(first)
    for name, value in second.items():
        joined[name] = joined[name] + value if name in joined else value
    return joined
