"""The elements of a stage that cannot be, and how well a guess about them fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.judging.expected import Expected, Numbers
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Given, Problem, Tensors
from lastbit.judging.trace import Trace
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.formats import FP32
from lastbit.result import CaseResult

NEARLY = 0.98
"""Share of the wrong elements that a guess must explain."""

ENOUGH = 24.0
"""Bits of evidence for one of some hundred guesses."""

_LEAST_BITS = 0.3  # that one element says for a guess on average
_SIDES = 16  # elements that are no chance all on one side
_MOST_BITS = 20.0  # that one element says for a guess; a gross error is no better evidence than that


@dataclass(frozen=True, eq=False)
class Ends:
    """What a guess says about each element: the lowest and the highest value; NaN where it must be NaN."""

    lo: Tensor
    hi: Tensor

    def allow(self, actual: Tensor) -> Tensor:
        """Which elements of `actual` (fp64) may be."""
        inside = (self.lo <= actual) & (actual <= self.hi)
        return inside | (torch.isnan(actual) & torch.isnan(self.lo))


@dataclass(frozen=True)
class Fit:
    """How well a guess fits.

    Attributes:
        share: of the wrong elements, those that it explains.
        spoiled: elements that are right and could not be under the guess, per wrong element.
        bits: how much the wrong elements say for it: each the binary logarithm of its error over the room that the
            guess leaves.
        count: how many are wrong.
    """

    share: float
    spoiled: float
    bits: float
    count: int

    def holds(self, least: float) -> bool:
        """Whether it explains nearly all, with so many bits of evidence, and does not leave everything open."""
        nearly = self.share >= NEARLY and self.spoiled <= 1 - NEARLY
        return nearly and self.bits >= max(least, _LEAST_BITS * self.count)


@dataclass(frozen=True, eq=False)
class Wrong:
    """The elements of a stage that cannot be.

    Attributes:
        seen: the problem and what the kernel gave.
        stage: the first stage with such elements.
        given: the kernel's own earlier stages, from which the reference goes on.
        trace: that reference, up to the stage.
        expected: what the stage must be, as it is stored.
        actual: what the kernel gave for it, in fp64.
        mask: which of its elements cannot be.
    """

    seen: Observation
    stage: str
    given: Tensors
    trace: Trace
    expected: Expected
    actual: Tensor
    mask: Tensor

    @classmethod
    def of(cls, seen: Observation, result: CaseResult) -> Wrong | None:
        """Those of the first failing stage; None if no stage has any."""
        failing = result.failing_stage
        if failing is None or failing.name not in seen.actual:
            return None
        order = list(seen.problem.trace.stages)
        earlier = order[: order.index(failing.name)] if failing.isolated.outside else []
        wrong = cls._of_stage(seen, failing.name, [name for name in earlier if name in seen.actual])
        return wrong if wrong.count else None

    @classmethod
    def _of_stage(cls, seen: Observation, stage: str, earlier: Iterable[str]) -> Wrong:
        given = {name: seen.actual[name] for name in earlier}
        trace = upto(seen.problem, given, stage)
        assert trace is not None  # as when the kernel was judged
        expected = seen.as_given(stage, trace.stages[stage], result=stage in trace.results)
        actual = seen.actual[stage]
        return cls(seen, stage, given, trace, expected, actual.to(torch.float64), expected.outside(actual))

    def part(self, most: int) -> tuple[Wrong, tuple[slice, ...]]:
        """The first rows of about `most` elements that have wrong ones, with their index; itself where that is all."""
        if self.trace.stages[self.stage].of_all_rows or self.problem.in_one(most):
            return self, ()
        for index, part in self.problem.blocks(most):
            if bool(self.mask[index].any()):
                seen = self.seen.block(index, part, self.problem.steps.sums)
                return self._of_stage(seen, self.stage, self.given), index
        return self, ()

    @property
    def problem(self) -> Problem:
        return self.seen.problem

    @cached_property
    def count(self) -> int:
        """How many elements are wrong."""
        return int(self.mask.sum())

    @cached_property
    def finite(self) -> Tensor:
        """The wrong elements that are finite and must be."""
        return self.mask & torch.isfinite(self.actual) & torch.isfinite(self.exact)

    @cached_property
    def exact(self) -> Tensor:
        """The exact value of each element."""
        own = self.expected
        return own.enclosure.exact if isinstance(own, Numbers) else own.value.to(torch.float64)

    @cached_property
    def value(self) -> Tensor:
        """The contract's value of each element."""
        return self.expected.value.to(torch.float64)

    @cached_property
    def ends(self) -> Ends:
        """What the contract allows."""
        own = self.expected
        return Ends(own.enclosure.lo, own.enclosure.hi) if isinstance(own, Numbers) else Ends(self.value, self.value)

    @cached_property
    def error(self) -> Tensor:
        """How far each element lies outside of what the contract allows; infinite where one of both is NaN."""
        ends = self.ends
        distance = torch.maximum(ends.lo - self.actual, self.actual - ends.hi).clamp(min=0.0)
        return torch.where(self.mask, distance.nan_to_num(torch.inf, torch.inf), 0.0)

    @property
    def format(self) -> Format | None:
        """The format of the stage as stored; None of integers."""
        return self.expected.format if isinstance(self.expected.format, Format) else None

    @cached_property
    def coarsest(self) -> float:
        """The spacing of numbers near 1 in the coarsest format that any stage has."""
        formats = (fmt for fmt in (*self.trace.formats.values(), self.format) if isinstance(fmt, Format))
        return max((fmt.epsilon for fmt in formats), default=0.0)

    @cached_property
    def room(self) -> Tensor:
        """How far a right kernel may be from the exact value, about: some roundings, and the freedom of sums."""
        if self.format is None:
            return torch.zeros_like(self.actual)
        width = (self.ends.hi - self.ends.lo).nan_to_num(0.0, 0.0)
        return width + 2 * (self.value - self.exact).abs().nan_to_num(0.0, 0.0)

    @property
    def is_one_sided(self) -> bool:
        """Whether so many elements all have a magnitude on the same side of the right one that one cause moves all.

        Then they are no evidence of their own each, and any small change to that side explains them.
        """
        apart = (self.actual.abs() - self.value.abs())[self.finite]
        return len(apart) >= _SIDES and bool((apart > 0).all() | (apart < 0).all())

    def around(self, predicted: Tensor) -> Ends:
        """A number that a guess predicts before it is rounded, with room for the roundings on the way to it."""
        if self.format is None:
            return Ends(predicted, predicted)
        room = self.room + 2 * self.coarsest * predicted.abs() + self.format.quantum
        return Ends(predicted - room, predicted + room)

    def fit(self, guess: Ends, within: Tensor | None = None) -> Fit:
        """How well a guess fits, in the elements `within` a region."""
        allowed = guess.allow(self.actual)
        spoiled = ~allowed & ~self.mask
        if within is not None:
            spoiled = spoiled & within
        explained = allowed & self.mask
        bits = self._bits(guess, explained)
        return Fit(int(explained.sum()) / self.count, int(spoiled.sum()) / self.count, bits, self.count)

    def _bits(self, guess: Ends, explained: Tensor) -> float:
        fmt = self.format
        ulp = 1.0 if fmt is None else (self.actual.abs() * fmt.epsilon + fmt.quantum).nan_to_num(1.0)
        room = torch.maximum(guess.hi - guess.lo, torch.as_tensor(ulp, dtype=torch.float64, device=self.mask.device))
        bits = torch.log2(1 + self.error / room.nan_to_num(torch.inf)).nan_to_num(0.0, _MOST_BITS)
        return float(torch.where(explained, bits.clamp(max=_MOST_BITS), 0.0).sum())

    def otherwise(self, problem: Problem, stages: Mapping[str, Enclosure] | None = None) -> Ends | None:
        """What the stage must be for another problem, or if the stages given are these; None where that means nothing.

        The other problem has the same rows.
        """
        trace = upto(problem, {**self.given, **(stages or {})}, self.stage)
        if trace is None:
            return None
        for name, enclosure in (stages or {}).items():
            trace.stages[name] = Numbers(enclosure, FP32)
        found = trace.stages.get(self.stage)
        if found is None or found.shape != self.expected.shape:
            return None
        found = self.seen.as_given(self.stage, found, result=self.stage in self.trace.results)
        if not isinstance(found, Numbers):
            return Ends(found.value.to(torch.float64), found.value.to(torch.float64))
        return Ends(found.enclosure.lo, found.enclosure.hi)


class _Reached(Exception):
    """The stage that was asked for has been recorded."""


@dataclass
class _Upto(Trace):
    """A trace that ends with a stage."""

    last: str = ""

    def record(self, name: str, expected: Expected) -> None:
        super().record(name, expected)
        if name == self.last:
            raise _Reached


def upto(problem: Problem, given: Given, stage: str) -> Trace | None:
    """The reference up to a stage, going on from the stages given; None where it has no answer to what was changed."""
    trace = _Upto(last=stage)
    try:
        return problem.evaluate(given, trace)
    except _Reached:
        return trace
    except Exception:  # anybody's reference may raise anything, such as ZeroDivisionError for a group size of 0
        return None
