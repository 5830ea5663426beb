"""Which guesses about the calculation give the kernel's values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from harness.diagnosing.patterns.guesses import Guess, of_inputs, of_params
from harness.diagnosing.patterns.statistics import Statistics
from harness.diagnosing.patterns.terms import Term, numbers_of, terms_of
from harness.diagnosing.patterns.wrong import Ends, Wrong
from harness.diagnosing.suspects import Question
from harness.errors import UsageError
from harness.numerics import Enclosure
from harness.numerics.enclosure import widened
from harness.op import deviation

_MOST = 2  # guesses that are told
_EVIDENCE = 8.0  # bits beyond what the choice among guesses takes


def explained(wrong: Wrong, region: Tensor, *, contracts: bool) -> Iterator[str]:
    """What the kernel seems to have computed: the guesses that fit, if they differ in what they say of it.

    Other contracts are tried with `contracts`.
    """
    told, statistics = list[Ends](), Statistics.of(wrong)
    for guess in itertools.chain.from_iterable(_families(wrong, statistics, contracts)):
        if not wrong.in_time or len(told) == _MOST:
            return
        ends = wrong.otherwise(guess.problem, guess.stages)
        if ends is None or not wrong.fit(ends, region).holds(guess.free + _EVIDENCE):
            continue
        if not any(_alike(wrong, ends, other) for other in told):
            told.append(ends)
            of_rows = statistics is not None and statistics.concerns(guess)
            yield f"As if {guess.words}: that gives {_all(wrong)}{statistics.ratio(guess) if of_rows else ''}."


def _all(wrong: Wrong) -> str:
    return "the one wrong element" if wrong.count == 1 else f"all {wrong.count:,} wrong elements"


def _alike(wrong: Wrong, a: Ends, b: Ends) -> bool:
    """Whether two guesses say the same of the wrong elements."""
    there = (a.lo <= b.hi) & (b.lo <= a.hi) | (torch.isnan(a.lo) & torch.isnan(b.lo))
    return bool(there[wrong.mask].all())


def _families(wrong: Wrong, statistics: Statistics | None, contracts: bool) -> Iterator[Iterator[Guess]]:
    """The likeliest first: where values are near the right ones, a rounding."""
    problem, near = wrong.problem, _is_near(wrong)
    if contracts:
        yield of_contracts(wrong)
    if near:
        yield of_roundings(wrong)
    if statistics is not None:
        yield statistics.guesses()
    yield of_params(problem)
    yield of_inputs(problem)
    yield of_stages(wrong)
    if not near:
        yield of_roundings(wrong)


def _is_near(wrong: Wrong) -> bool:
    """Whether most wrong elements are within some roundings of the right value."""
    error = wrong.error[wrong.mask] / wrong.exact[wrong.mask].abs()
    return float(error.median()) < 4 * wrong.coarsest


def of_contracts(wrong: Wrong) -> Iterator[Guess]:
    """The contracts that differ in one axis."""
    own = wrong.problem.contract
    for other in wrong.problem.op.alternatives(own):
        words = f"the contract were {other} ({deviation(own, other)})"
        yield Guess(words, wrong.problem.under(other), free=-_EVIDENCE)


def of_roundings(wrong: Wrong) -> Iterator[Guess]:
    """Every earlier stage not rounded, rounded to another format, or cut off."""
    question = Question(wrong.seen, wrong.stage, wrong.given)
    for stage in [*_free(wrong), wrong.stage]:
        if wrong.format is None or not wrong.in_time:
            return
        try:
            for change, enclosure in question.variants(stage):
                yield Guess(f"{stage} were {change}", wrong.problem, {stage: enclosure}, free=2.0)
        except UsageError:
            continue


def of_stages(wrong: Wrong) -> Iterator[Guess]:
    """Every earlier stage zero, doubled, or another one in its place, or with an input as a factor or summand."""
    for stage in _free(wrong):
        exact = wrong.trace.enclosure(stage).exact
        for words, values in (("zero", 0 * exact), ("added to itself", 2 * exact), ("of the other sign", -exact)):
            yield _stage(wrong, f"{stage} were {words}", stage, values)
        for name, value in wrong.problem.params.items():
            if isinstance(value, float) and value not in (0.0, 1.0, float("inf")):
                yield _stage(wrong, f"{stage} were multiplied by {name} once more", stage, exact * value)
                yield _stage(wrong, f"{stage} were divided by {name}", stage, exact / value)
        for term in terms_of(wrong, stage):
            yield from _with_term(wrong, stage, exact, term)


def _with_term(wrong: Wrong, stage: str, exact: Tensor, term: Term) -> Iterator[Guess]:
    values = term.values.expand_as(exact)
    forms = {
        f"{stage} were {term.name}": values,
        f"{stage} were multiplied by {term.name} once more": exact * values,
        f"{stage} were not multiplied by {term.name}": exact / values,
        f"{term.name} were added to {stage} once more": exact + values,
        f"{term.name} were not added to {stage}": exact - values,
    }
    for words, made in forms.items():
        yield _stage(wrong, words, stage, made)


def _stage(wrong: Wrong, words: str, stage: str, values: Tensor) -> Guess:
    """A stage with these values, rounded where the contract rounds it."""
    made = Enclosure(widened(values.unsqueeze(0), 2.0**-21))
    if stage in wrong.problem.contract.rounds:
        made = made.rounded(wrong.problem.format(stage))
    return Guess(words, wrong.problem, {stage: made}, free=12.0)


def _free(wrong: Wrong) -> list[str]:
    """The earlier stages of numbers that the kernel does not show."""
    names = {name for name, _ in numbers_of(wrong)} - wrong.problem.tensors.keys()
    return [name for name in wrong.trace.stages if name in names and name not in wrong.given]
