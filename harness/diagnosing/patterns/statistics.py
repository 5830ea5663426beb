"""Guesses about the statistic of a row: its count, its eps, its columns, its row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.guesses import Guess, tails
from lastbit.diagnosing.patterns.terms import numbers_of
from lastbit.diagnosing.patterns.words import times
from lastbit.diagnosing.patterns.wrong import Wrong, upto
from lastbit.judging.latent import explaining_values
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure
from lastbit.numerics.enclosure import widened

_ROOM = 2.0**-21  # relative error of a statistic that is computed in fp64 here and in fp32 by a kernel
_POWERS = (-0.5, 0.5)


@dataclass(frozen=True, eq=False)
class Statistics:
    """The statistics of the rows of a problem, of which the latent stage is the last.

    Attributes:
        names: the stages with as many values as the latent one, in order; the kernel did not show them.
    """

    wrong: Wrong
    names: tuple[str, ...]

    @classmethod
    def of(cls, wrong: Wrong) -> Statistics | None:
        """None where the wrong stage does not follow from a latent stage that is not seen."""
        op, trace = wrong.problem.op, wrong.trace
        if op.latent is None or (latent := op.latent.under(wrong.problem.contract)) not in trace.stages:
            return None
        if latent in wrong.given or latent == wrong.stage:
            return None
        like = trace.stages[latent].shape
        numbers = {name for name, _ in numbers_of(wrong)}
        names = [n for n, e in trace.stages.items() if n in numbers and n not in wrong.given and e.shape == like]
        upto_latent = names[: names.index(latent) + 1] + [name for name in op.latent.also if name in names]
        return cls(wrong, tuple(dict.fromkeys(upto_latent)))

    @property
    def latent(self) -> str:
        op = self.wrong.problem.op
        assert op.latent is not None
        return op.latent.under(self.wrong.problem.contract)

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters, those that are missing with the op's default."""
        return {**self.wrong.problem.op.params, **self.wrong.problem.params}

    def exact(self, name: str) -> Tensor:
        """The exact values of a statistic."""
        return self.wrong.trace.enclosure(name).exact

    @property
    def count(self) -> int:
        """How many columns there are for each value."""
        return max(1, self.wrong.problem.main.shape[-1] // self.exact(self.latent).shape[-1])

    @cached_property
    def spread(self) -> str:
        """The stage of which the latent one is a root, empty if there is none."""
        return self.root[0]

    @cached_property
    def root(self) -> tuple[str, str, float]:
        """Stage, parameter and power, so that the latent value is (stage + parameter) to that power."""
        latent = self.exact(self.latent)
        for name in reversed(self.names):
            for param, eps in self.params.items():
                for power in _POWERS if isinstance(eps, float) and name != self.latent else ():
                    made = (self.exact(name) + eps) ** power
                    if torch.allclose(made, latent, rtol=1e-9, equal_nan=True):
                        return name, param, power
        return "", "", 1.0

    def concerns(self, guess: Guess) -> bool:
        """Whether it is a guess about statistics or their parameter."""
        param = self.root[1]
        return not guess.stages.keys().isdisjoint(self.names) or (
            param in self.params and guess.problem.params.get(param) != self.wrong.problem.params.get(param)
        )

    def changed(self, words: str, stage: str, values: Tensor) -> Guess:
        """The guess that a statistic has these values."""
        made = {stage: Enclosure(widened(values.to(torch.float64).unsqueeze(0), _ROOM))}
        return Guess(words, self.wrong.problem, made)

    def guesses(self) -> Iterator[Guess]:
        """All guesses, those that are read from the errors first.

        Where no latent value explains a wrong row, those alone about stages that elements follow from by themselves.
        """
        through_latent = {self.latent, self.spread} - {""}
        names = [name for name in self.names if name not in through_latent]
        if self.needed is not None:
            yield from self._solved()
            yield from self._of_padding()
            names = list(self.names)
        for name in names:
            if name != self.latent or not self.spread:
                yield from self._of_counts(name)
        if self.needed is not None:
            yield from self._of_roots()
            yield from self._of_tensors()
        for name in names:
            yield from self._of_rows(name)
        if names:
            yield from self._of_tails()

    def _of_counts(self, name: str) -> Iterator[Guess]:
        own, n = self.exact(name), self.count
        padded = 1 << (n - 1).bit_length()
        for m in dict.fromkeys((n - 1, n + 1, padded, padded // 2, 1, self.wrong.problem.main.shape[-1])):
            if m and m != n:
                yield self.changed(_over(name, m, n), name, own * n / m)
        yield self.changed(f"{name} were 0", name, torch.zeros_like(own))
        yield self.changed(f"the sign of {name} were the other one", name, -own)

    def _of_roots(self) -> Iterator[Guess]:
        name, param, power = self.root
        if not name:
            return
        own, eps, latent = self.exact(name), self.params[param], self.latent
        sign = 1 if power > 0 else -1
        forms = {
            f"{param} were added outside of the root": (own.sqrt() + eps) ** sign,
            f"{param} were the least value of {name}, not added to it": own.clamp(min=eps) ** power,
            f"{latent} were without a root": (own + eps) ** sign,
            f"{latent} were its own inverse": (own + eps) ** -power,
            f"{latent} were 1": torch.ones_like(own),
        }
        for words, values in forms.items():
            yield self.changed(words, latent, values)

    def _of_padding(self) -> Iterator[Guess]:
        """Columns beyond the row that a block has, and that count as far from the mean as zeros are."""
        name, n = self.spread, self.count
        if not name:
            return
        own = self.exact(name)
        powers = (1 << (n - 1).bit_length() + more for more in range(4))
        for mean, padded in itertools.product(self.names[: self.names.index(name)], powers):
            missing = (padded - n) * self.exact(mean).square()
            words = f"{padded - n} columns of padding took part in {name}, as (0 - {mean})²"
            yield self.changed(f"{words}, over {n} columns", name, own + missing / n)
            yield self.changed(f"{words}, over {padded} columns", name, (own * n + missing) / padded)

    def _of_tensors(self) -> Iterator[Guess]:
        """The mean of squares, or of squared deviations, of another tensor, or without the mean."""
        if not self.spread:
            return
        groups = self.exact(self.latent).shape[-1]
        for name, tensor in numbers_of(self.wrong):
            if tensor.shape == self.wrong.problem.main.shape:
                grouped = tensor.unflatten(-1, (groups, -1))
                squares = grouped.square().mean(-1)
                yield self.changed(f"{self.spread} were the mean of the squares of {name}", self.spread, squares)
                variance = grouped.var(-1, correction=0)
                yield self.changed(f"{self.spread} were the variance of {name} about its mean", self.spread, variance)

    def _of_rows(self, name: str) -> Iterator[Guess]:
        own = self.exact(name)
        for axis, size in enumerate(own.shape):
            if size < 2:
                continue
            what = "group" if axis == own.ndim - 1 else "row" if own.ndim == 2 else f"index of dimension {axis}"
            for shift, which in ((1, "before"), (-1, "after")):
                yield self.changed(f"each {what} had the {name} of the one {which} it", name, own.roll(shift, axis))
            first = own.narrow(axis, 0, 1).expand_as(own)
            yield self.changed(f"every {what} had the {name} of the first", name, first)
            last = own.narrow(axis, size - 1, 1).expand_as(own)
            yield self.changed(f"every {what} had the {name} of the last", name, last)
            mean = own.mean(axis, keepdim=True).expand_as(own)
            yield self.changed(f"every {what} had the mean {name} of all", name, mean)

    def _of_tails(self) -> Iterator[Guess]:
        """All statistics from the first columns, the rest counted as zeros or not counted."""
        problem = self.wrong.problem
        tensor = problem.main
        for words, made in tails(tensor, tensor.ndim - 1):
            yield from self._of_other_inputs(problem.on({**problem.tensors, problem.op.inputs[0]: made}), words)

    def _of_other_inputs(self, other: Problem, words: str) -> Iterator[Guess]:
        trace = upto(other, self.wrong.given, self.names[-1])
        if trace is None:
            return
        stages = {name: trace.enclosure(name) for name in self.names if name in trace.stages}
        which = " and ".join(self.names[:-1]) or self.names[-1]
        yield Guess(f"{which} were computed with {other.op.inputs[0]} {words}", self.wrong.problem, stages)

    def _solved(self) -> Iterator[Guess]:
        """A count, an eps or a column left out, as the latent values need it that explain the rows."""
        if not self.spread or self.needed is None or not len(self.needed[0]):
            return
        rows, other = self.needed
        name, param, power = self.root
        eps, n = self.params[param], self.count
        own = _rows(self.exact(name), 1)[rows]
        total = other ** (1 / power)
        count = n * float((own / (total - eps)).median())
        near = {round(count), round(count) - 1, round(count) + 1} if 0.5 < count < 2 * n else set()
        for m in sorted(near - {n, 0}, key=lambda m: abs(m - count)):
            yield self.changed(_over(name, m, n), name, self.exact(name) * n / m)
        yield from self._of_eps(param, (total - own).flatten())
        yield from self._without_column(rows, own - (total - eps))

    def _of_eps(self, param: str, needed: Tensor) -> Iterator[Guess]:
        own = self.params[param]
        about = float(needed.median())
        for digits in (".0e", ".1e", ".3e"):
            eps = float(f"{about:{digits}}")
            if eps != own and 0 < eps < 1e3:
                changed = replace(self.wrong.problem, params={**self.wrong.problem.params, param: eps}, siblings=None)
                yield Guess(f"{param} were {eps:g}, not {own:g}", changed)

    def _without_column(self, rows: Tensor, missing: Tensor) -> Iterator[Guess]:
        """One column without part in the sum: the one whose squares are nearest to what is missing."""
        groups, n = missing.shape[-1], self.count
        for name, tensor in numbers_of(self.wrong):
            if tensor.shape != self.wrong.problem.main.shape:
                continue
            squares = tensor.unflatten(-1, (groups, -1)).square() / n
            apart = (_rows(squares, 2)[rows] - missing[..., None]).abs().flatten(0, 1).sum(0)
            column = int(apart.nan_to_num(torch.inf).argmin())
            made = self.exact(self.spread) - squares[..., column]
            of = f" of each group of {n}" if groups > 1 else ""
            yield self.changed(f"column {column}{of} of {name} had no part in {self.spread}", self.spread, made)

    @cached_property
    def needed(self) -> tuple[Tensor, Tensor] | None:
        """Rows that another latent value explains, and these values; None if there are no such rows.

        Of several latent values together nothing is known: there are no rows then, and no values.
        """
        op = self.wrong.problem.op
        if op.latent is not None and op.latent.also:
            none = torch.zeros(0, dtype=torch.int64)
            return none, none.reshape(0, 1).to(torch.float64)
        seen = self.wrong.seen.of_stages([self.wrong.stage])
        rows, values = explaining_values(seen)
        return (rows, values) if len(rows) else None

    def ratio(self, guess: Guess) -> str:
        """How the latent values of a guess compare with the contract's, in the rows that are wrong."""
        trace = upto(guess.problem, {**self.wrong.given, **guess.stages}, self.latent)
        if trace is None:
            return ""
        own = self.exact(self.latent)
        made = guess.stages[self.latent] if self.latent in guess.stages else trace.enclosure(self.latent)
        rows = self.wrong.mask.flatten(own.ndim - 1).any(-1)
        ratios = (made.value / self.wrong.trace.enclosure(self.latent).value)[rows]
        low, high = float(ratios.min()), float(ratios.max())
        if not (math.isfinite(low) and math.isfinite(high)) or low == high == 1:
            return ""
        which = times(low) if high - low <= 1e-4 * abs(low) else f"{times(low)} to {times(high)}"
        return f" ({self.latent} {which} times the contract's, in {int(rows.sum()):,} of {rows.numel():,} rows)"


def _rows(values: Tensor, dims: int) -> Tensor:
    """Values with one dimension in place of all but so many of the last, also where there is none."""
    return values.reshape(-1, *values.shape[-dims:])


def _over(name: str, m: int, n: int) -> str:
    return f"{name} were a mean over {m} columns, not {n}"
