"""Which guesses about the calculation give the kernel's values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.guesses import FREE_OF_PARAMS, Guess, inputs_rounded, of_inputs, of_params
from lastbit.diagnosing.patterns.statistics import Statistics
from lastbit.diagnosing.patterns.terms import Term, numbers_of, terms_of
from lastbit.diagnosing.patterns.wrong import Ends, Wrong
from lastbit.diagnosing.suspects import Question
from lastbit.errors import UsageError
from lastbit.numerics import Enclosure, Format, round_to
from lastbit.numerics.enclosure import widened
from lastbit.numerics.formats import FP32, from_ordinals, ordinals
from lastbit.ops import deviation

_MOST = 2  # guesses that are told
_EVIDENCE = 8.0  # bits beyond what the choice among guesses takes
_FEW = 1 << 11  # elements that a guess is tried on first
_SOME = 0.5  # share of the wrong ones among these that it must explain


def explained(wrong: Wrong, region: Tensor, *, contracts: bool, until: float) -> Iterator[str]:
    """What the kernel seems to have computed: the likeliest guesses that fit, if they differ in what they say of it.

    Each is tried on some rows first. A guess may be wrong about no elements of the region. Other contracts are tried
    with `contracts`. The search ends at `until`, by `time.perf_counter`.
    """
    most = max(_FEW, 4 * wrong.problem.main.shape[-1])
    whole = Guesses(wrong)
    few = Guesses(wrong.part(most)[0])
    for families in few.families(contracts):
        told = 0
        for family in families:
            for sentence in _fitting(few, whole, family, region, until):
                told += 1
                yield sentence
        if told:
            return


def _fitting(few: Guesses, whole: Guesses, family: Family, region: Tensor, until: float) -> Iterator[str]:
    """Guesses of a family that fit."""
    told, wrong = list[Ends](), whole.wrong
    for tried in family(few):
        if time.perf_counter() > until or len(told) == _MOST:
            return
        guess = tried if few.wrong is wrong else _again(few, whole, family, tried)
        if guess is None or (ends := wrong.otherwise(guess.problem, guess.stages)) is None:
            continue
        if (
            _is_one_number(ends)
            or _says_little(wrong, guess)
            or not wrong.fit(ends, region).holds(guess.free + _EVIDENCE)
        ):
            continue
        if not any(_alike(wrong, ends, other) for other in told):
            told.append(ends)
            yield f"As if {guess.words}: that gives {_all(wrong)}{whole.ratio(guess)}."


Family = Callable[["Guesses"], Iterator[Guess]]


def _again(few: Guesses, whole: Guesses, family: Family, tried: Guess) -> Guess | None:
    """The guess about all rows, if it explains some of the wrong elements of a few."""
    ends = few.wrong.otherwise(tried.problem, tried.stages)
    if ends is None or few.wrong.fit(ends).share < _SOME:
        return None
    return next((guess for guess in family(whole) if guess.words == tried.words), None)


def _all(wrong: Wrong) -> str:
    return "the one wrong element" if wrong.count == 1 else f"all {wrong.count:,} wrong elements"


def _is_one_number(ends: Ends) -> bool:
    """Whether a guess says the same of all elements, as many guesses do that make them zero."""
    return ends.lo.numel() > 1 and bool(((ends.lo == ends.lo.flatten()[0]) & (ends.hi == ends.lo)).all())


def _says_little(wrong: Wrong, guess: Guess) -> bool:
    """Whether too few rows of integers, whose elements go together, are wrong to choose among many guesses."""
    rows = wrong.mask.any(-1) if wrong.mask.ndim else wrong.mask
    return wrong.format is None and guess.free > FREE_OF_PARAMS and int(rows.sum()) < guess.free + _EVIDENCE


def _alike(wrong: Wrong, a: Ends, b: Ends) -> bool:
    """Whether two guesses say the same of the wrong elements."""
    there = (a.lo <= b.hi) & (b.lo <= a.hi) | (torch.isnan(a.lo) & torch.isnan(b.lo))
    return bool(there[wrong.mask].all())


@dataclass(frozen=True, eq=False)
class Guesses:
    """What may be guessed about some wrong elements."""

    wrong: Wrong

    def families(self, contracts: bool) -> Iterator[tuple[Family, ...]]:
        """The likeliest first, those together that may well fit together: where values are near, a rounding."""
        if contracts and not self.wrong.seen.has_latent:  # of rows, the elements alone do not say that one fits
            yield (Guesses.of_contracts,)
        if self.are_near:
            yield (Guesses.of_roundings,)
        yield Guesses.of_params, Guesses.of_statistics
        yield (Guesses.of_inputs,)
        yield (Guesses.of_stages,)
        if not self.are_near:
            yield (Guesses.of_roundings,)

    @cached_property
    def statistics(self) -> Statistics | None:
        return Statistics.of(self.wrong)

    def ratio(self, guess: Guess) -> str:
        """What a guess about a statistic says of it, in brackets."""
        statistics = self.statistics
        return statistics.ratio(guess) if statistics is not None and statistics.concerns(guess) else ""

    @property
    def are_near(self) -> bool:
        """Whether most wrong elements are within some roundings of the right value."""
        wrong = self.wrong
        error = wrong.error[wrong.mask] / wrong.exact[wrong.mask].abs()
        return float(error.median()) < 4 * wrong.coarsest

    def of_statistics(self) -> Iterator[Guess]:
        """What may be wrong with a statistic of a row."""
        yield from () if self.statistics is None else self.statistics.guesses()

    def of_params(self) -> Iterator[Guess]:
        """Other parameters."""
        return of_params(self.wrong.problem)

    def of_inputs(self) -> Iterator[Guess]:
        """Other inputs, of those on which the stage depends."""
        return of_inputs(self.wrong.problem, self._matters)

    def _matters(self, name: str, other: Tensor) -> bool:
        problem = self.wrong.problem
        ends = self.wrong.otherwise(problem.on({**problem.tensors, name: other}))
        return ends is None or not self._is_own(ends)

    def _is_own(self, ends: Ends) -> bool:
        """Whether a guess says what the contract says."""
        own = self.wrong.ends
        return torch.equal(ends.lo.nan_to_num(), own.lo.nan_to_num()) and torch.equal(
            ends.hi.nan_to_num(), own.hi.nan_to_num()
        )

    def of_contracts(self) -> Iterator[Guess]:
        """The contracts that differ in one axis."""
        own = self.wrong.problem.contract
        for other in self.wrong.problem.op.alternatives(own):
            words = f"the contract were {other} ({deviation(own, other)})"
            yield Guess(words, self.wrong.problem.under(other), free=-_EVIDENCE)

    def of_roundings(self) -> Iterator[Guess]:
        """Every input and earlier stage rounded otherwise: not at all, to another format, cut off, ties away from 0."""
        wrong = self.wrong
        one_sided = wrong.is_one_sided
        if not one_sided:
            yield from inputs_rounded(wrong.problem)
        question = Question(wrong.seen, wrong.stage, wrong.given)
        hidden = [stage for stage in self._earlier if stage not in wrong.given]
        for stage in [*hidden, wrong.stage] if wrong.format is not None else ():
            with suppress(UsageError):
                for change, enclosure in question.variants(stage):
                    if not one_sided or change.startswith("cut off"):
                        yield Guess(f"{stage} were {change}", wrong.problem, {stage: enclosure}, free=2.0)
                if (fmt := wrong.problem.format(stage)) != FP32:
                    made = _half_away(question.unrounded(stage), fmt)
                    yield Guess(f"ties of {stage} were rounded away from zero", wrong.problem, {stage: made}, free=2.0)

    def of_stages(self) -> Iterator[Guess]:
        """Every earlier stage zero, doubled, or another one in its place, or with an input as a factor or summand."""
        for stage in self._earlier:
            exact = self.wrong.trace.enclosure(stage).exact
            zero = self._stage(f"{stage} were zero", stage, 0 * exact)
            ends = self.wrong.otherwise(zero.problem, zero.stages)
            if ends is None or not self._is_own(ends):
                yield zero
                yield from self._of_stage(stage, exact)

    def _of_stage(self, stage: str, exact: Tensor) -> Iterator[Guess]:
        yield self._stage(f"{stage} were of the other sign", stage, -exact)
        for name, value in self.wrong.problem.params.items():
            if isinstance(value, float) and value not in (0.0, 1.0) and math.isfinite(value):
                yield self._stage(f"{stage} were multiplied by {name} once more", stage, exact * value)
                yield self._stage(f"{stage} were divided by {name}", stage, exact / value)
        for term in terms_of(self.wrong, stage):
            for words, made in _with_term(stage, exact, term):
                yield self._stage(words, stage, made)
        yield self._stage(f"{stage} were added to itself", stage, 2 * exact)  # last: silu of small x is x / 2, say

    def _stage(self, words: str, stage: str, values: Tensor) -> Guess:
        """A stage with these values, rounded where the contract rounds it."""
        made = Enclosure(widened(values.unsqueeze(0), 2.0**-21))
        if stage in self.wrong.problem.contract.rounds:
            made = made.rounded(self.wrong.problem.format(stage))
        return Guess(words, self.wrong.problem, {stage: made}, free=12.0)

    @property
    def _earlier(self) -> list[str]:
        """The earlier stages of numbers, also those that the kernel shows: it may go on from other values."""
        names = {name for name, _ in numbers_of(self.wrong)} - self.wrong.problem.tensors.keys()
        return [name for name in self.wrong.trace.stages if name in names]


def _with_term(stage: str, exact: Tensor, term: Term) -> Iterator[tuple[str, Tensor]]:
    values = term.values.expand_as(exact)
    yield f"{stage} were {term.name}", values
    yield f"{stage} were multiplied by {term.name} once more", exact * values
    yield f"{stage} were not multiplied by {term.name}", exact / values
    yield f"{term.name} were added to {stage} once more", exact + values
    yield f"{term.name} were not added to {stage}", exact - values


def _half_away(x: Enclosure, fmt: Format) -> Enclosure:
    """Value and ends rounded to nearest, ties away from zero."""
    cut = round_to(x.full[1:], fmt, mode="zero")
    following = from_ordinals(ordinals(cut.abs(), fmt) + 1, fmt)
    up = x.full[1:].abs() >= (cut.abs() + following) / 2
    return Enclosure(torch.cat([x.parts[:1], torch.where(up, torch.copysign(following, x.full[1:]), cut)]))
