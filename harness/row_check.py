"""Measurements of the row check: rows that latent values explain, and the values that other rows need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Need:
    """The value of the latent stage that explains one row, or group, and the contract's."""

    value: float
    expected: float

    @property
    def ratio(self) -> float:
        return self.value / self.expected if self.expected else math.inf


@dataclass(frozen=True)
class Needs:
    """Latent values that rows need although no value within the enclosure of the latent stage explains them.

    Attributes:
        rows: those that were searched.
        found: those that another value explains, whatever it is.
        least, most: of these, the ones whose value has the smallest and the largest ratio to the contract's.
    """

    rows: int = 0
    found: int = 0
    least: Need | None = None
    most: Need | None = None

    def __add__(self, other: Needs) -> Needs:
        known = [need for need in (self.least, self.most, other.least, other.most) if need is not None]
        ratios = [need.ratio for need in known]
        return Needs(
            self.rows + other.rows,
            self.found + other.found,
            known[ratios.index(min(ratios))] if known else None,
            known[ratios.index(max(ratios))] if known else None,
        )


@dataclass(frozen=True)
class RowCheck:
    """A count of the rows that one value of the latent stage explains bit for bit, of those that could be tried.

    Attributes:
        split: rows of at most 32 columns that two values explain, one for each half of the columns.
        needs: of rows that are neither.
        also: other stages whose values explain a row together with it.
    """

    stage: str
    rows: int = 0
    explained: int = 0
    split: int = 0
    needs: Needs = field(default_factory=Needs)
    also: tuple[str, ...] = ()

    @property
    def stages(self) -> str:
        """The names of all stages whose values explain a row."""
        return " and ".join((self.stage, *self.also))

    @property
    def unexplained(self) -> int:
        return self.rows - self.explained - self.split

    def __add__(self, other: RowCheck) -> RowCheck:
        return RowCheck(
            self.stage,
            self.rows + other.rows,
            self.explained + other.explained,
            self.split + other.split,
            self.needs + other.needs,
            self.also,
        )
