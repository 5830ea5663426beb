"""Observations: a problem and the values that a kernel gave for it, in all rows or some of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from lastbit.judging.compare import finished
from lastbit.judging.expected import Expected, Trace, known_exactly
from lastbit.judging.problem import Problem, Tensors
from lastbit.judging.torch_compare import unravel
from lastbit.numerics import Premises
from lastbit.numerics.premises import AS_WRITTEN, REAL
from lastbit.ops import Contract
from lastbit.result import Comparison, RowCheck

# Arbitrary: the search is for each sum by itself, and takes longer with every row.
_MOST = 1 << 17  # elements of the main input in which the exact value of a sum over all rows is sought


@dataclass(frozen=True, eq=False)
class Observation:
    """A problem and the values that a kernel gave for it.

    Attributes:
        problem: the problem; those of its inputs that are rows hold these rows only.
        actual: stage → values that the kernel gave, these rows of it; sums over rows stay whole.
        index: slices of the leading dimensions by which the rows were taken from the whole; none for everything.
        leading: the sizes of the leading dimensions after that.
        numbers: indices of these rows among them, in one dimension; None for all of them.
    """

    problem: Problem
    actual: Tensors
    index: tuple[slice, ...] = ()
    leading: tuple[int, ...] = ()
    numbers: Tensor | None = None

    @classmethod
    def of(cls, problem: Problem, actual: Tensors) -> Observation:
        """Observe all rows."""
        return cls(problem, {name: tensor.detach() for name, tensor in actual.items()}, leading=problem.leading)

    @property
    def whole(self) -> bool:
        """Return whether these are all rows, so that sums over rows are sums over these."""
        return not self.index and self.numbers is None

    @property
    def count(self) -> int:
        """Number of rows."""
        return math.prod(self.leading) if self.numbers is None else len(self.numbers)

    @property
    def latent_stages(self) -> tuple[str, ...]:
        """The names of the stages with latent values, recorded or not."""
        latent = self.problem.op.latent
        return () if latent is None else (latent.under(self.problem.contract), *latent.also)

    def through_latent(self, trace: Trace) -> list[str]:
        """Return the given stages that latent values must explain, by a trace with at least the order of stages."""
        latent, contract = self.problem.op.latent, self.problem.contract
        names = [] if latent is None else latent.following(contract, trace.formats)
        return [name for name in names if name in self.actual]

    @cached_property
    def through(self) -> list[str]:
        """The stages that a value of the latent stage must explain, as far as the kernel gave them."""
        return self.through_latent(self.problem.trace) if self.problem.op.latent is not None else []

    @property
    def has_latent(self) -> bool:
        """Return whether there are elements that a value of the latent stage must explain."""
        return any(self.actual[name].numel() for name in self.through)

    @property
    def has_rows(self) -> bool:
        """Return whether every stage but the sums over rows has a row for each row of the inputs."""
        leading = self.leading if self.numbers is None else tuple(self.numbers.shape)
        sums = self.problem.steps.sums
        return all(t.shape[: len(leading)] == leading for n, t in self.actual.items() if n not in sums)

    @cached_property
    def onward(self) -> Trace:
        """The values every stage must have, seen from the kernel's own values of earlier stages."""
        return self.problem.evaluate(self.actual) if len(self.actual) > 1 else self.problem.trace

    @cached_property
    def real(self) -> Trace:
        """The trace in real arithmetic from the inputs, and from values that the kernel rounded to 16 bits or chose."""
        return self._in_real_arithmetic(REAL)

    @cached_property
    def real_as_written(self) -> Trace:
        """The trace in real arithmetic as `real`, but with parameters as they are written, which fp32 may not hold."""
        return self._in_real_arithmetic(AS_WRITTEN)

    def _in_real_arithmetic(self, premises: Premises) -> Trace:
        real, rounds = replace(self.problem.in_real_arithmetic, premises=premises), self.problem.contract.rounds
        given = {name: t for name, t in self.actual.items() if name in rounds or not t.is_floating_point()}
        return real.evaluate(given) if given else real.trace

    @cached_property
    def _unrounded(self) -> Trace:
        return self.problem.unrounded.trace

    @cached_property
    def _unrounded_onward(self) -> Trace:
        """The exact values of all stages, seen from the kernel's own values of earlier stages."""
        return self.problem.unrounded.evaluate(self.actual) if len(self.actual) > 1 else self._unrounded

    @cached_property
    def astray(self) -> dict[str, Tensor]:
        """Stage → mask of the elements outside, seen from the kernel's own values of earlier stages."""
        return self.outside(self.onward)

    def under(self, contract: Contract) -> Observation:
        """Put the problem under another contract."""
        return replace(self, problem=self.problem.under(contract))

    def of_stages(self, names: Iterable[str]) -> Observation:
        """Keep only these stages, as if the kernel had given no others."""
        return replace(self, actual={name: self.actual[name] for name in names})

    def expected(self, trace: Trace) -> dict[str, Expected]:
        """Return the values that each given stage must have: the one rule by which a contract allows bits or does not.

        A result counts as it is stored, also where the contract does not round it. A sum over rows is left out where
        these are not all rows.
        """
        return {
            name: self.as_given(name, expected, result=name in trace.results)
            for name, expected in trace.stages.items()
            if self.says(name, expected)
        }

    def says(self, name: str, expected: Expected) -> bool:
        """Check whether the kernel gave the stage, and these are all rows if it is a sum over rows."""
        return name in self.actual and (self.whole or not expected.of_all_rows)

    def as_given(self, name: str, expected: Expected, *, result: bool) -> Expected:
        """Return the values that a given stage must have, rounded to the dtype it is stored in if it is a result."""
        stored = result and self.actual[name].is_floating_point()
        return expected.stored_as(self.actual[name].dtype) if stored else expected.finished

    def outside(self, trace: Trace) -> dict[str, Tensor]:
        """Return for each stage a mask of the elements outside."""
        return {name: expected.outside(self.actual[name]) for name, expected in self.expected(trace).items()}

    def count_outside(self, trace: Trace) -> Tensor:
        """Count the elements outside: int64, on the device of the inputs."""
        counts = [e.count_outside(self.actual[name]) for name, e in self.expected(trace).items()]
        return torch.stack([torch.zeros((), dtype=torch.int64, device=self.problem.main.device), *counts]).sum()

    def compare(self, *traces: Trace) -> list[dict[str, Comparison]]:
        """Compare every stage with each trace; the index of the worst element is one of the whole tensor."""
        expected = [self.expected(trace) for trace in traces]
        found = iter(finished([e.begin(self.actual[name]) for stages in expected for name, e in stages.items()]))
        return [{name: self.located(next(found)) for name in stages} for stages in expected]

    def block(self, index: tuple[slice, ...], part: Problem, sums: Collection[str]) -> Observation:
        """Return the rows at `index`, of which `part` is the problem; itself where that is the whole one.

        `sums` are the stages that are sums over rows.
        """
        if not index:
            return self
        actual = {n: t if n in sums else t[index] for n, t in self.actual.items()}
        return Observation(part, actual, index, part.leading)

    def samples(self, most: int, together: int, sums: Collection[str]) -> Iterator[Observation]:
        """Yield itself where it is evaluated at once, or else rows of up to `most` elements, spread evenly over it.

        The first row and the last one are among them, and each sample, of up to `together` elements, is spread itself.
        """
        if self.problem.in_one(together):
            yield self
            return
        width, count = max(1, self.problem.main.shape[-1]), self.count
        wanted = min(count, max(2, most // width))
        numbers = torch.linspace(0, count - 1, wanted, dtype=torch.float64).round().to(torch.int64)
        parts, rows = -(-wanted * width // together), self.problem.op.rows
        for part in range(parts):
            some = numbers[part::parts].to(self.problem.main.device)
            index = torch.unravel_index(some, self.leading)
            problem = self.problem.on({n: t[index] if n in rows else t for n, t in self.problem.tensors.items()})
            actual = {n: t if n in sums else t[index] for n, t in self.actual.items()}
            yield Observation(problem, actual, leading=self.leading, numbers=some)

    def in_rows(self, check: RowCheck | None, through: Iterable[str]) -> dict[str, int]:
        """Count the elements in the rows that were tried, for each stage that latent values must explain."""
        return {} if check is None else {name: check.rows * self.actual[name].shape[-1] for name in through}

    def only(self, rows: Tensor) -> Observation:
        """Keep only the rows with these indices, in one dimension."""

        def taken(tensor: Tensor) -> Tensor:
            if self.numbers is not None:
                return tensor[rows]
            return tensor.reshape(self.count, *tensor.shape[len(self.leading) :])[rows]

        tensors = {n: taken(t) if n in self.problem.op.rows else t for n, t in self.problem.tensors.items()}
        sums = self.problem.steps.sums
        actual = {n: t if n in sums else taken(t) for n, t in self.actual.items()}
        numbers = rows if self.numbers is None else self.numbers[rows]
        return replace(self, problem=self.problem.on(tensors), actual=actual, numbers=numbers)

    def with_exact(self, name: str, comparison: Comparison, *, isolated: bool) -> Comparison:
        """Set the exact value of the worst element, which is known to 2^-40 of itself, or else NaN.

        `isolated`: seen from the kernel's own earlier stages. This observation must hold all rows.
        """
        worst = comparison.worst
        if worst is None:
            return comparison
        of_all_rows = not self.problem.op.rows or not self.has_rows or name in self.problem.steps.sums
        if of_all_rows and self.problem.main.numel() > _MOST:
            return replace(comparison, worst=replace(worst, exact=math.nan))
        index, part = worst.index, self
        if not of_all_rows:
            number = 0
            for at, size in zip(index, self.leading, strict=False):
                number = number * size + at
            part, index = (
                self.only(torch.tensor([number], device=self.problem.main.device)),
                (0, *index[len(self.leading) :]),
            )
        trace = part._unrounded_onward if isolated else part._unrounded
        exact = known_exactly(trace.stages[name])[index]
        return replace(comparison, worst=replace(worst, exact=float(exact)))

    def located(self, comparison: Comparison) -> Comparison:
        """Count the index of the worst element from the start of the whole tensor."""
        worst = comparison.worst
        if worst is None or self.whole:
            return comparison
        index = worst.index
        if self.numbers is not None:
            index = (*unravel(int(self.numbers[index[0]]), self.leading), *index[1:])
        starts = [s.start or 0 for s in self.index] + [0] * (len(index) - len(self.index))
        moved = tuple(i + s for i, s in zip(index, starts, strict=True))
        return replace(comparison, worst=replace(worst, index=moved))
