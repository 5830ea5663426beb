"""What a reference passed through: its stages, in order, and which computation that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from lastbit.judging.expected import Expected, Numbers, RowSum
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.formats import Integers


@dataclass
class Trace:
    """What the reference passed through.

    Attributes:
        stages: stage → what it must be, in order.
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
        """What a stage of floating-point numbers must be that has one value per row at least."""
        expected = self.stages[stage]
        assert isinstance(expected, Numbers), f"stage {stage!r} is of integers, or a sum over rows"
        return expected

    def enclosure(self, stage: str) -> Enclosure:
        """The enclosure of such a stage."""
        return self.numbers(stage).enclosure

    @property
    def sums(self) -> dict[str, RowSum]:
        """The stages that are sums over rows."""
        return {name: expected for name, expected in self.stages.items() if isinstance(expected, RowSum)}

    @property
    def nbytes(self) -> int:
        """Memory of the enclosures."""
        return sum(e.enclosure.parts.nbytes for e in self.stages.values() if isinstance(e, Numbers))


@dataclass(frozen=True)
class Steps:
    """Which computation a reference made.

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
        """The sum of the unit roundoffs of the stages up to this one: what rounding alone can lose, to first order."""
        names = list(self.formats)
        return sum(fmt.roundoff for n in names[: names.index(stage) + 1] if (fmt := self.numbers.get(n)) is not None)
