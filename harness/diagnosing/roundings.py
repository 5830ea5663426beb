"""Contracts that are no point of an op's axes, because a stage is rounded otherwise, or in another direction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lastbit.judging.problem import Problem, Tensors
from lastbit.numerics import FORMATS, Format, format_of
from lastbit.numerics.formats import DIRECTIONS, FP32, Direction
from lastbit.ops import Contract, Op

FIXED = ("bf16", "fp16")
"""Formats that a stage may be rounded to, whatever the inputs have."""


@dataclass(frozen=True)
class Rounding:
    """Another rounding at a stage: to the format of an input or of that name, or None for none; with a `direction`, to
    what it is rounded to in any case.
    """

    stage: str
    target: str | None
    direction: Direction | None = None

    def __str__(self) -> str:
        if self.direction is not None:
            return f"{self.stage} rounded {DIRECTIONS[self.direction]}"
        return f"{self.stage} {f'rounded to {self.target}' if self.target else 'unrounded'}"


@dataclass(frozen=True, eq=False)
class Variant:
    """A contract of an op, or one with other roundings at some stages."""

    op: Op
    base: Contract
    changes: tuple[Rounding, ...] = ()

    @classmethod
    def of(cls, op: Op, contract: Contract) -> Variant:
        """A contract that may round in other directions than the op says."""
        base = op.directed(contract, {})
        return cls(op, base, tuple(Rounding(stage, None, way) for stage, way in contract.directions.items()))

    @cached_property
    def contract(self) -> Contract:
        """What it asks for, named after the base and the changes; directions alone, as a kernel declares them."""
        if not self.changes:
            return self.base
        if ways := {change.stage: change.direction for change in self.changes if change.direction is not None}:
            return self.op.directed(self.base, ways)
        moved = {change.stage for change in self.changes}
        rounds = {stage: target for stage, target in self.base.rounds.items() if stage not in moved}
        rounds |= {change.stage: change.target for change in self.changes if change.target is not None}
        return Contract(self.base.options, rounds, ", ".join([str(self.base), *map(str, self.changes)]))


def changes_of(op: Op, formats: Mapping[str, Format], main: Format) -> list[Rounding]:
    """What may be changed: each stage not rounded, where it is, or rounded to the op's first input, bf16 or fp16.

    `formats` are those of the stages, `main` that of the first input; to fp32, nothing is rounded.
    """
    found = []
    for stage, fmt in formats.items():
        if fmt != FP32:
            found.append(Rounding(stage, None))
        if main not in (FP32, fmt):
            found.append(Rounding(stage, op.inputs[0]))
        found += (Rounding(stage, name) for name in FIXED if FORMATS[name] not in (main, fmt))
    return found


def subsets(changes: Sequence[Rounding], size: int) -> Iterator[tuple[Rounding, ...]]:
    """All ways to change `size` stages at once; to a format that is no input's, one stage alone is rounded."""
    several = [change for change in changes if size == 1 or change.target not in FIXED]
    for chosen in itertools.combinations(several, size):
        if len({change.stage for change in chosen}) == size:
            yield chosen


def turns_of(
    contract: Contract, formats: Mapping[str, Format], directions: Sequence[Direction]
) -> Iterator[tuple[Rounding, ...]]:
    """The ways to round in other directions: each stage that a contract rounds by itself, and all of them alike.

    `formats` are those of the stages.
    """
    stages = [name for name, fmt in formats.items() if name in contract.rounds and fmt.precision < FP32.precision]
    for way in directions:
        turned = [Rounding(stage, None, way) for stage in stages if formats[stage].direction != way]
        yield from ((one,) for one in turned)
        if turned[1:]:
            yield tuple(turned)


def as_stored(problem: Problem, actual: Tensors) -> Contract:
    """The contract that also rounds every result that it leaves in fp32 to the dtype in which that is stored."""
    contract, trace = problem.contract, problem.trace
    given = [name for name in trace.results if name in actual]
    formats = {name: format_of(actual[name].dtype) for name in given if actual[name].is_floating_point()}
    rounds = {name: fmt.name for name, fmt in formats.items() if trace.stages[name].format == FP32 != fmt}
    return Contract(contract.options, {**contract.rounds, **rounds}, str(contract)) if rounds else contract
