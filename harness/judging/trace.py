"""Traces: the stages that a reference went through, in order, and the computation that it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lastbit.judging.expected import Expected, Numbers, RowSum
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.formats import Integers


@dataclass
class Trace:
    """The stages that the reference went through.

    Attributes:
        stages: stage → values it must have, in order.
        formats: stage → format, in order.
        results: stages that a kernel must return.
        consulted: contract options that the reference asked for.
    """

    stages: dict[str, Expected] = field(default_factory=dict)
    formats: dict[str, Format | Integers] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)
    consulted: set[str] = field(default_factory=set)

    def record(self, name: str, expected: Expected) -> None:
        """Take note of the next stage; if it is a result, `results` says so already."""
        self.formats[name] = expected.format
        self.stages[name] = expected

    def numbers(self, stage: str) -> Numbers:
        """Return the allowed values of a stage of floating-point numbers that is no sum over rows."""
        expected = self.stages[stage]
        assert isinstance(expected, Numbers), f"stage {stage!r} is of integers, or a sum over rows"
        return expected

    def enclosure(self, stage: str) -> Enclosure:
        """Return the enclosure of a stage of floating-point numbers that is no sum over rows."""
        return self.numbers(stage).enclosure

    @property
    def sums(self) -> dict[str, RowSum]:
        """The stages that are sums over rows."""
        return {name: expected for name, expected in self.stages.items() if isinstance(expected, RowSum)}

    @property
    def nbytes(self) -> int:
        """Bytes of the enclosures."""
        return sum(e.enclosure.parts.nbytes for e in self.stages.values() if isinstance(e, Numbers))


@dataclass(frozen=True)
class Steps:
    """The computation that a reference made.

    Attributes:
        consulted, chosen: contract options that it asked for, and those of them that the contract has.
        formats: stage → format.
        sums: stages that are sums over rows.
        idle: options of the contract that change nothing here; see `Op.idle`.
    """

    consulted: frozenset[str] = frozenset()
    chosen: frozenset[str] = frozenset()
    formats: Mapping[str, Format | Integers] = field(default_factory=dict)
    sums: frozenset[str] = frozenset()
    idle: tuple[str, ...] = ()

    @cached_property
    def numbers(self) -> dict[str, Format]:
        """The formats of the stages of floating-point numbers."""
        return {name: fmt for name, fmt in self.formats.items() if isinstance(fmt, Format)}

    def roundoff(self, stage: str) -> float:
        """Sum the unit roundoffs of the stages up to this one: to first order, all that rounding alone can lose."""
        names = list(self.formats)
        return sum(fmt.roundoff for n in names[: names.index(stage) + 1] if (fmt := self.numbers.get(n)) is not None)
