"""The values that every stage must have, and traces: the stages that a reference went through, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from lastbit.judging.compare import Begun, begin, begin_choices, begin_integers, finished, outside_count
from lastbit.judging.torch_compare import are_decided, outside_mask
from lastbit.numerics import AfterSums, Enclosure, Format, Indices, Premises, Sum, format_of, using
from lastbit.numerics.formats import Integers
from lastbit.result import Comparison
from lastbit.timing import REFERENCES, timed


class Expected(ABC):
    """The values that a stage may have under a contract; an element with another one is *outside*.

    Attributes:
        format: the format of the stage under the contract.
        of_all_rows: it is a sum over rows, which is known only when all rows have been seen.
    """

    format: Format | Integers
    of_all_rows = False

    @property
    @abstractmethod
    def allowed(self) -> Enclosure | Tensor:
        """The values that its elements may have: an enclosure, or integers."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the stage."""
        return self.allowed.shape

    @property
    @abstractmethod
    def value(self) -> Tensor:
        """The contract's own value of every element, as fp64 unless it is an integer."""

    @abstractmethod
    def begin(self, actual: Tensor) -> Begun | Comparison:
        """Begin to compare the values that a kernel gave for the stage."""

    def compare(self, actual: Tensor) -> Comparison:
        """Compare the values that a kernel gave for the stage with those that are allowed."""
        return finished([self.begin(actual)])[0]

    def outside(self, actual: Tensor) -> Tensor:
        """Return a mask of the elements of `actual` that are not allowed, of its shape."""
        return outside_mask(actual, self.allowed)

    def count_outside(self, actual: Tensor) -> Tensor:
        """Count the elements of `actual` that are not allowed: int64, on its device."""
        return outside_count(actual, self.allowed)

    @abstractmethod
    def same(self, other: Expected) -> bool:
        """Check whether both have equal values and ends."""

    @abstractmethod
    def apart(self, other: Expected) -> bool:
        """Check whether some element has no value that both allow."""

    @property
    def finished(self) -> Expected:
        """The final values of a sum over rows, all of which have been seen; itself for any other stage."""
        return self

    def stored_as(self, dtype: torch.dtype) -> Expected:
        """Round the allowed values to the dtype that the stage is stored in."""
        return self


# 2¹² units of fp64, and 2⁻¹⁶ of fp32's: the nine digits that are printed of it are right.
KNOWN = 2.0**-40
"""Largest relative error of an exact value that is shown."""


def known_exactly(expected: Expected) -> Tensor:
    """Return the exact values of a stage in fp64: integers, and numbers known to 2^-40 of themselves; NaN elsewhere.

    No other exact value is shown to anybody. The stage is one of a problem that is `unrounded`, whose ends enclose the
    exact value of each number.
    """
    allowed = expected.finished.allowed
    if isinstance(allowed, Tensor):
        return allowed.to(torch.float64)
    exact, _, lo, hi = allowed.full
    narrow = (lo == hi) | (hi - lo <= KNOWN * exact.abs())
    return torch.where((lo <= exact) & (exact <= hi) & narrow, exact, torch.nan)


@dataclass(frozen=True, eq=False)
class Numbers(Expected):
    """Numbers within an enclosure."""

    enclosure: Enclosure
    format: Format

    @property
    def allowed(self) -> Enclosure:
        return self.enclosure

    @property
    def value(self) -> Tensor:
        return self.enclosure.value

    def begin(self, actual: Tensor) -> Begun | Comparison:
        return begin(actual, self.enclosure, self.format)

    def same(self, other: Expected) -> bool:
        other = other.finished
        if not isinstance(other, Numbers):
            return False
        return torch.equal(self.enclosure.full.nan_to_num(), other.enclosure.full.nan_to_num())

    def apart(self, other: Expected) -> bool:
        other = other.finished
        if not isinstance(other, Numbers):
            return True
        a, b = self.enclosure, other.enclosure
        return bool(((a.lo > b.hi) | (a.hi < b.lo)).any())

    def stored_as(self, dtype: torch.dtype) -> Numbers:
        fmt = format_of(dtype)
        return self if fmt == self.format.nearest else Numbers(self.enclosure.rounded(fmt), fmt)

    @property
    def decided(self) -> Tensor:
        """Mask of the decided elements: they have one legal value, or are rounded to either neighbour of one number."""
        e = self.enclosure
        return are_decided(e.lo, e.hi, self.format)


@dataclass(frozen=True, eq=False)
class Exact(Expected):
    """Integers or truth values, all of which must be equal."""

    values: Tensor
    format: Integers

    @property
    def allowed(self) -> Tensor:
        return self.values

    @property
    def value(self) -> Tensor:
        return self.values

    def begin(self, actual: Tensor) -> Begun | Comparison:
        return begin_integers(actual, self.values)

    def same(self, other: Expected) -> bool:
        return isinstance(other, Exact) and torch.equal(self.values, other.values)

    def apart(self, other: Expected) -> bool:
        return not self.same(other)


@dataclass(frozen=True, eq=False)
class ChosenIndices(Expected):
    """Indices, each of which may be any of those that are allowed in its row."""

    indices: Indices
    format: Integers

    @property
    def allowed(self) -> Enclosure:
        """The range from the first allowed index to the last, which may hold others."""
        return self.indices.range

    @property
    def shape(self) -> torch.Size:
        return self.indices.shape

    @property
    def value(self) -> Tensor:
        return self.indices.value

    def begin(self, actual: Tensor) -> Begun | Comparison:
        return begin_choices(actual, self.indices)

    def outside(self, actual: Tensor) -> Tensor:
        return self.indices.outside(actual)

    def count_outside(self, actual: Tensor) -> Tensor:
        return self.outside(actual).count_nonzero()

    def same(self, other: Expected) -> bool:
        return isinstance(other, ChosenIndices) and torch.equal(self.indices.allowed, other.indices.allowed)

    def apart(self, other: Expected) -> bool:
        if not isinstance(other, ChosenIndices) or self.shape != other.shape:
            return True
        return bool((~(self.indices.allowed & other.indices.allowed).any(-1)).any())


@dataclass(frozen=True, eq=False)
class RowSum(Expected):
    """A sum over the rows seen so far, or a value that follows from such sums; `+` adds the sum over further rows.

    Attributes:
        sum: facts about its terms, or about those of the sums that it follows from.
        format: the format of the stage.
        rounds: the contract rounds it to that, and does not keep it in fp32.
        premises: the premises under which it is finished.
    """

    sum: Sum | AfterSums
    format: Format
    rounds: bool
    premises: Premises
    of_all_rows = True

    @property
    def allowed(self) -> Enclosure:
        return self.finished.enclosure

    @property
    def shape(self) -> torch.Size:
        with using(self.premises):
            return self.sum.shape

    @property
    def finished(self) -> Numbers:
        with using(self.premises), timed(REFERENCES):
            enclosure = self.sum.enclosure
            return Numbers(enclosure.rounded(self.format) if self.rounds else enclosure, self.format)

    @property
    def value(self) -> Tensor:
        return self.finished.value

    def __add__(self, other: RowSum) -> RowSum:
        if isinstance(self.sum, Sum) and isinstance(other.sum, Sum):
            return replace(self, sum=self.sum + other.sum)
        assert isinstance(self.sum, AfterSums) and isinstance(other.sum, AfterSums)
        return replace(self, sum=self.sum + other.sum)

    def begin(self, actual: Tensor) -> Begun | Comparison:
        return self.finished.begin(actual)

    def same(self, other: Expected) -> bool:
        return self.finished.same(other)

    def apart(self, other: Expected) -> bool:
        return self.finished.apart(other)

    def stored_as(self, dtype: torch.dtype) -> Numbers:
        return self.finished.stored_as(dtype)


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
