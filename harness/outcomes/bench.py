"""Measurements of `lastbit bench`, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

VERIFIED = "verified case"
MEMORY = "peak memory"
BUSY = "device busy"
OPERATIONS = "device operations"
PARTS = "parts"
COMPARED = "comparing"
ASSERTED = "assert_contract"
RATE = "cases per second"

FIGURES = (VERIFIED, MEMORY, BUSY, OPERATIONS, PARTS, COMPARED, ASSERTED, RATE)


@dataclass(frozen=True)
class Sample:
    """Quartiles of what was measured `count` times."""

    low: float
    median: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Compute the quartiles of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = quantiles(values, method="inclusive")
        return cls(low, median, high, len(values))

    def rate(self, amount: float) -> Sample:
        """Convert the seconds that an amount took into amounts per second."""
        return Sample(amount / self.high, amount / self.median, amount / self.low, self.count)


@dataclass(frozen=True)
class Measurement:
    """A figure of something, beside what it is measured against.

    Attributes:
        figure: one of `FIGURES`.
        of: a case line, the name of an op or the shape of a tensor.
        what: what was measured; kernels by their names.
        unit: of both samples.
        against, base: what it is measured against, and that; empty and None where a number stands for itself.
    """

    figure: str
    of: str
    what: str
    unit: str
    value: Sample
    against: str = ""
    base: Sample | None = None

    @property
    def ratio(self) -> float | None:
        """The ratio of the value to the base; None without a base."""
        return self.value.median / self.base.median if self.base is not None and self.base.median else None


@dataclass(frozen=True)
class Bench:
    """All measurements of a run of the command.

    Attributes:
        failed: what could not be measured, with the reason.
        command: the command line.
        environment: versions and devices.
    """

    measurements: tuple[Measurement, ...]
    failed: tuple[str, ...]
    command: str
    environment: Mapping[str, str]
