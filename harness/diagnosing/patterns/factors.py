"""The contract's values times or plus something: a constant, an input or stage, a number per row or column."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.terms import Term, products_of
from lastbit.diagnosing.patterns.words import number, times
from lastbit.diagnosing.patterns.wrong import ENOUGH, Wrong

_LARGEST = 4  # of the factors of a summand
_MOST_TERMS = 24  # of which products are tried


@dataclass(frozen=True, eq=False)
class Factors:
    """What the wrong elements of a region are of what the contract has there."""

    wrong: Wrong
    region: Tensor
    terms: Sequence[Term]

    def sentences(self) -> tuple[list[str], list[str]]:
        """What the errors are of the case's own numbers, and what is left to say if nothing explains them.

        The latter is a factor, or else one for each row or column.
        """
        if self.wrong.format is None:
            return [], []
        telling = itertools.chain(self.constant(named=True), self.summands())
        if found := list(itertools.islice(telling, 1)):
            return found, []
        rest = itertools.chain(self.constant(named=False), self.terms_as_factors(), self.along_axes())
        return [], list(itertools.islice(rest, 1))

    def fits(self, predicted: Tensor, fitted: int = 0) -> bool:
        """Whether the elements are what is predicted; `fitted` numbers of the prediction come from them."""
        wrong = self.wrong
        predicted = predicted.expand_as(wrong.actual)
        if not self._is_sharper(predicted):
            return False
        fit = wrong.fit(wrong.around(predicted), self.region)
        return fit.holds(0.0) and fit.bits * (1 - fitted / wrong.count) > ENOUGH

    def _is_sharper(self, predicted: Tensor) -> bool:
        """Whether the prediction leaves less than an eighth of the error of the wrong elements."""
        return 8 * self._left(predicted) < self._left(self.wrong.exact)

    def _left(self, predicted: Tensor) -> float:
        """The norm of what a prediction leaves of the wrong elements."""
        return float((self.wrong.actual - predicted)[self.wrong.finite].norm())

    def others(self) -> Iterator[str]:
        """The values of an input or another stage in place of those of the stage."""
        for term in self.terms:
            for sign, words in ((1, ""), (-1, "minus ")):
                if not self._is_own(term) and self.fits(sign * term.values):
                    yield f"The values are those of {words}{term.name}, in place of those of {self.wrong.stage}."

    def _is_own(self, term: Term) -> bool:
        """Whether the stage has the same values as a stage before it."""
        return term.values.shape == self.wrong.exact.shape and torch.equal(term.values, self.wrong.exact)

    def constant(self, *, named: bool) -> Iterator[str]:
        """One factor for all elements, be it a number of the case or any."""
        exact, mask = self.wrong.exact, self.wrong.finite
        ratio = self._ratio(exact)
        if ratio is None or not self.fits(ratio * exact, 1):
            return
        squares = exact[mask].square()
        room = 2 * self.wrong.coarsest * float(squares.square().sum().sqrt() / squares.sum()) + 1e-6
        name, known = next((pair for pair in self._known() if abs(ratio / pair[1] - 1) < room), ("", ratio))
        digits = max(2, min(7, -math.floor(math.log10(room))))
        if bool(name) == named:
            yield f"Every {self._element} is {known:.{digits}g} times the contract's{name}."

    @property
    def _element(self) -> str:
        return "element" if self.region.all() else "wrong element"

    def terms_as_factors(self) -> Iterator[str]:
        """An input or stage as a factor."""
        for term in self.terms:
            for power, words in ((1, "multiplied by"), (-1, "divided by")):
                if self.fits(self.wrong.exact * term.values**power):
                    yield f"Every {self._element} is the contract's {words} {term.name}, as if {_once(power)}."

    def summands(self) -> Iterator[str]:
        """An input or stage, or a product of two, added or left out."""
        error = self.wrong.actual - self.wrong.exact
        own = [term for term in self.terms if not self._is_own(term)]
        for term in [*own, *products_of(own[:_MOST_TERMS])]:
            values = term.values.expand_as(error)
            ratio = self._ratio(values, error)
            if ratio is None:
                continue
            simple = round(2 * ratio) / 2
            if 0 < abs(simple) <= _LARGEST and self.fits(self.wrong.exact + simple * values):
                yield _summand(simple, term.name)

    def along_axes(self) -> Iterator[str]:
        """A factor, or a summand, of its own for each index into one axis: a weight, a bias, a statistic.

        One factor for all must leave more than twice as much: as many numbers as indices always fit better.
        """
        exact, actual, mask = self.wrong.exact, self.wrong.actual, self.wrong.mask
        most = self._left((self._ratio(exact) or 1.0) * exact) / 2
        for axis in range(mask.ndim):
            others = [n for n in range(mask.ndim) if n != axis]
            if not others or self.wrong.count < 3 * mask.shape[axis]:
                continue
            used = torch.where(self.wrong.finite, 1.0, 0.0)
            own, given = (torch.where(used > 0, t, 0.0) for t in (exact, actual))
            ratios = (own * given).sum(others, keepdim=True) / own.square().sum(others, keepdim=True)
            shifts = (given - own).sum(others, keepdim=True) / used.sum(others, keepdim=True)
            scaled, shifted = (torch.where(mask, made, exact) for made in (exact * ratios, exact + shifts))
            if self._left(scaled) < most and self.fits(scaled, mask.shape[axis]):
                yield f"{self._each(axis)} is off by a factor of its own, {_range(ratios)} times the contract's."
            elif self._left(shifted) < most and self.fits(shifted, mask.shape[axis]):
                yield f"{self._each(axis)} is off by a number of its own, {_range(shifts)}."

    def _each(self, axis: int) -> str:
        last = self.wrong.mask.ndim - 1
        return "Every column" if axis == last else "Every row" if last == 1 else f"Every index of dimension {axis}"

    def _ratio(self, of: Tensor, what: Tensor | None = None) -> float | None:
        """The factor by which `of` is nearest to `what`, the actual values, over the wrong elements."""
        mask = self.wrong.finite
        y = (self.wrong.actual if what is None else what)[mask]
        x = of.expand_as(self.wrong.actual)[mask]
        ratio = float((x * y).sum() / x.square().sum())
        return ratio if math.isfinite(ratio) and ratio else None

    def _known(self) -> Iterator[tuple[str, float]]:
        yield ": the sign is wrong", -1.0
        yield from ((": a power of two", 2.0**n) for n in range(-16, 17) if n)
        for name, value in self.wrong.problem.params.items():
            if isinstance(value, int | float) and value and math.isfinite(value) and not isinstance(value, bool):
                yield f": {name} once more", float(value)
                yield f": without {name}", 1 / value
        sizes = {size for tensor in self.wrong.problem.tensors.values() for size in tensor.shape if size > 2}
        for n in sorted(sizes):
            padded = 1 << (n - 1).bit_length()
            yield ": the size of a dimension", float(n)
            for name, m in ((f"{n}", n), (f"{n} / {padded}", n / padded), (f"{n} / {n - 1}", n / (n - 1))):
                for text, function in _FUNCTIONS[m == n :]:
                    yield f", {text.format(name)}", function(m)
        yield from ((f", {p} / {q}", p / q) for q in (2, 3) for p in (1, 2, 3, 4) if p % q)
        yield ", 1 / ln 2", 1 / math.log(2)
        yield ", ln 2", math.log(2)


_FUNCTIONS: tuple[tuple[str, Callable[[float], float]], ...] = (
    ("{}", float),
    ("1 / ({})", lambda n: 1 / n),
    ("the root of {}", math.sqrt),
    ("1 / the root of {}", lambda n: 1 / math.sqrt(n)),
)


def _once(power: int) -> str:
    return "it were applied once more" if power > 0 else "it had not been applied"


def _summand(factor: float, name: str) -> str:
    if abs(factor) == 1:
        return f"The error is {'minus ' * (factor < 0)}{name}, as if that were {_ADDED[factor > 0]}."
    return f"The error is {number(factor)} times {name}."


_ADDED = {True: "added once more", False: "left out"}


def _range(values: Tensor) -> str:
    known = values[torch.isfinite(values)]
    return f"from {times(float(known.min()))} to {times(float(known.max()))}"
