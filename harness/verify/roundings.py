"""Contracts that are no point of an op's axes, because a stage is rounded otherwise, and what a contract forbids."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from harness.numerics import FORMATS, Format, format_of
from harness.numerics.formats import FP32
from harness.op import Contract, Op
from harness.verify.compare import outside_mask
from harness.verify.evaluate import Expected, Tensors, Trace, finished

FIXED = ("bf16", "fp16")
"""Formats that a stage may be rounded to, whatever the inputs have."""


@dataclass(frozen=True)
class Rounding:
    """Another rounding at a stage: to the format of an input or of that name, or None for none."""

    stage: str
    target: str | None

    def __str__(self) -> str:
        return f"{self.stage} {f'rounded to {self.target}' if self.target else 'unrounded'}"


@dataclass(frozen=True, eq=False)
class Variant:
    """A contract of an op, or one with other roundings at some stages."""

    base: Contract
    changes: tuple[Rounding, ...] = ()

    @cached_property
    def contract(self) -> Contract:
        """What it asks for, named after the base and the changes."""
        if not self.changes:
            return self.base
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


def expectations(trace: Trace, contract: Contract) -> dict[str, Expected]:
    """What every stage must be, sums over rows included: the trace has seen all rows."""
    formats = ((name, total, trace.formats[name]) for name, total in trace.sums.items())
    sums = {name: finished(name, total, contract, f) for name, total, f in formats if isinstance(f, Format)}
    return {**trace.expected, **sums}


def allowed(trace: Trace, contract: Contract, actual: Tensors) -> dict[str, Expected]:
    """What every result must be, as stored: a result has its dtype, also where the contract does not round it."""
    expected = expectations(trace, contract)
    return {name: _stored(expected[name], trace.formats[name], actual[name]) for name in trace.results}


def forbidden(trace: Trace, contract: Contract, actual: Tensors) -> int:
    """Elements of the results that the contract forbids."""
    return sum(int(outside_mask(actual[n], e).sum()) for n, e in allowed(trace, contract, actual).items())


def _stored(expected: Expected, fmt: object, actual: Tensor) -> Expected:
    if isinstance(expected, Tensor) or fmt == (own := format_of(actual.dtype)):
        return expected
    return expected.rounded(own)


def as_stored(contract: Contract, trace: Trace, actual: Tensors) -> Contract:
    """The contract that also rounds every result that it leaves in fp32 to the dtype in which that is stored."""
    formats = {name: format_of(actual[name].dtype) for name in trace.results if actual[name].is_floating_point()}
    rounds = {name: fmt.name for name, fmt in formats.items() if trace.formats[name] == FP32 != fmt}
    return Contract(contract.options, {**contract.rounds, **rounds}, str(contract)) if rounds else contract
