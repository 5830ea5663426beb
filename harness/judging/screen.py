"""Blocks of rows: what is counted in them, and those in which all numbers are expected to lie within their enclosures.

Most blocks of a large case are of the latter kind. Each stage is compared as soon as the reference records it, and
nothing of it is kept. The figures are asked for later: the device compares one block while the host begins the next. A
block in which an element lies outside has to be judged in full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lastbit.judging.compare import Begun, finished
from lastbit.judging.expected import Expected, RowSum, Trace
from lastbit.judging.latent import explain_rows
from lastbit.judging.observation import Observation
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
        """Return whether an element lies outside, or a row is not explained."""
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


@dataclass
class _Compared(Trace):
    """A trace that compares each recorded stage with the kernel's values.

    It keeps only sums over rows and the latent stages.
    """

    seen: Observation = field(kw_only=True)
    begun: dict[str, Begun | Comparison] = field(default_factory=dict)

    def record(self, name: str, expected: Expected) -> None:
        self.formats[name] = expected.format
        if isinstance(expected, RowSum) or name in self.seen.latent_stages:
            self.stages[name] = expected
        if not isinstance(expected, RowSum) and self.seen.says(name, expected):
            allowed = self.seen.as_given(name, expected, result=name in self.results)
            self.begun[name] = allowed.begin(self.seen.actual[name])


@dataclass(frozen=True, eq=False)
class Screened:
    """Some rows, but not all, that are being compared: from the inputs, and from the kernel's own earlier stages."""

    seen: Observation
    cumulative: _Compared
    isolated: _Compared

    @classmethod
    def begin(cls, seen: Observation) -> Screened:
        """Begin to compare; errors as of `Problem.evaluate`."""
        cumulative = isolated = _Compared(seen=seen)
        seen.problem.evaluate(trace=cumulative)
        if len(seen.actual) > 1:
            isolated = _Compared(seen=seen)
            seen.problem.evaluate(seen.actual, isolated)
        return cls(seen, cumulative, isolated)

    @property
    def tally(self) -> Tally:
        """The tally of these rows; the device is waited for. Rows are checked if no element lies outside."""
        traces = [self.cumulative, self.isolated]
        found = iter(finished([begun for trace in traces for begun in trace.begun.values()]))
        cumulative, isolated = ({name: self.seen.located(next(found)) for name in trace.begun} for trace in traces)
        tally = Tally(cumulative, isolated, self.cumulative.sums, self.isolated.sums)
        through = self.seen.through_latent(self.cumulative)
        if tally.failed or not any(self.seen.actual[name].numel() for name in through):
            return tally
        check = explain_rows(self.seen, self.cumulative).check
        return replace(tally, rows=check, in_rows=self.seen.in_rows(check, through))
