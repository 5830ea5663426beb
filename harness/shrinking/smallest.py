"""The smallest tensors on which a kernel fails as it does on a case, to be checked by hand.

What is tried are parts of the case's own tensors: one row, few columns, then plainer numbers. Every step fails as the
case does: at the same first stage with the same first finding, or with the same error.
"""

from __future__ import annotations

import io
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr
from itertools import chain

from torch import Tensor

from lastbit.case import Case, parse_case
from lastbit.inputs.given import is_given
from lastbit.result import BAD, OF_STAGES, CaseResult
from lastbit.shrinking.drafts import Draft, plainer_elements, plainer_tensors
from lastbit.verify.check import Subject, takes, verify_case
from lastbit.verify.formula_check import by_formula
from lastbit.verify.shrink import Place, Places, Sizes, shrink, together
from lastbit.verify.worker import Watch, Workplace, unwatched

# In smallest.md the medians of all ops are below half of it.
MOST_TRIES = 300
"""Calls of the kernel on smaller tensors."""

# Arbitrary: ops have up to a dozen inputs and parameters, of which some are tried twice.
_LEAVING_OUT = 40  # of them, to find out which inputs and parameters can be left out
# Arbitrary: later rounds seldom find something, and the tries are counted above.
_MOST_ROUNDS = 4
# Small first, for these are what is looked for; repeated, as the random choice of columns is another one each time.
_AT_ONCE = (1, 1, 2, 2, 2, 3, 4, 8)  # columns, rows and so on that are tried of everything
# Small first; from 64 on halving is as quick.
_COUNTS = (2, 3, 4, 6, 8, 16, 32, 64)  # columns of which some are tried at random
# Arbitrary: each is a try.
_SAMPLES = 6  # of each count
# Arbitrary: more take a try each, and nobody reads the numbers one by one.
_MOST_PLAIN = 64  # elements of a tensor that are replaced one by one
_COARSE = 16  # parts into which many columns are divided to find those that can be left out


def smallest_of(place: Workplace, name: str, line: str, *, seconds: float) -> Case | None:
    """Find the smallest tensors for a kernel on a case line; see `smallest`."""
    return smallest(place.subjects[name], parse_case(line), watch=place.watch, seconds=seconds)


def judged(place: Workplace, name: str, line: str) -> CaseResult:
    """Judge a kernel on a case line."""
    with place.watch(line), redirect_stderr(io.StringIO()):
        return verify_case(place.subjects[name], parse_case(line), settled=None)


def smallest(subject: Subject, case: Case, *, watch: Watch = unwatched, seconds: float) -> Case | None:
    """Search for the smallest case that fails as `case` does, in so many seconds of the processor.

    Its line holds the values. Return None if the case does not fail, not with its values in the line, or has too many.
    """
    trial = _Trial(subject, case, watch, seconds)
    draft = Draft.of(case)
    if not trial.known or not trial.fails(draft.case):
        return None
    sizes = draft.sizes
    draft = _with_few_of_all(draft, sizes, trial)
    for _ in range(_MOST_ROUNDS):
        before = draft.case
        for place in _places(draft):
            draft = _with_few_of(draft, place, sizes, trial)
        draft = draft.without(shrink(draft.case, trial.op, (), trial.takes, trial.fails, most=_LEAVING_OUT))
        draft = _plainer(draft, trial)
        if draft.case == before:
            break
    return draft.case if any(is_given(tensor.regime) for tensor in draft.case.tensors) else None


class _Trial:
    """The calls of a kernel on drafts, and the way in which these must fail, until tries or time run out.

    Attributes:
        known: whether the case fails at all.
        worst: index of the worst element in the last draft that failed.
        tries: how many drafts the kernel was called on.
    """

    def __init__(self, subject: Subject, case: Case, watch: Watch, seconds: float) -> None:
        self._subject, self._watch, self.op = subject, watch, subject.op
        self._until = time.process_time() + seconds
        self._seen: set[Case] = set()
        self.tries = 0
        for self._repeat, self._by_formula in ((False, False), (False, True), (True, False)):
            result = self._result(case)
            if result.verdict in BAD:
                break
        self._way, self.known, self.worst = result.way, result.verdict in BAD, _worst(result)

    @property
    def over(self) -> bool:
        """Return whether tries or time have run out."""
        return self.tries >= MOST_TRIES or time.process_time() > self._until

    def takes(self, case: Case) -> bool:
        """Return whether the op takes a case, and tries and time are left."""
        return not self.over and takes(self._subject, case)

    def fails(self, case: Case) -> bool:
        """Return whether a case that was not tried before fails in the same way."""
        if self.over or case in self._seen:
            return False
        self._seen.add(case)
        self.tries += 1
        result = self._result(case)
        if self._by_formula:  # a wrong formula may fail by values, too, as sums get short
            alike = any(finding.kind in OF_STAGES for finding in result.faults[:1])
        else:
            alike = result.way == self._way
        if result.verdict not in BAD or not alike:
            return False
        self.worst = _worst(result)
        return True

    def _result(self, case: Case) -> CaseResult:
        with self._watch(case), redirect_stderr(io.StringIO()):  # what a try raises is no news
            result = verify_case(self._subject, case, repeat=self._repeat, settled=None)
            return by_formula(self._subject, case, result, alternatives=False)[0] if self._by_formula else result


def _worst(result: CaseResult) -> tuple[int, ...]:
    """Return the index of the worst element of the first stage that is wrong."""
    stage = result.failing_stage
    if stage is None:
        return ()
    worst = stage.isolated.worst if stage.isolated.outside else stage.cumulative.worst
    return () if worst is None else worst.index


def _places(draft: Draft) -> list[Place]:
    """List the dimensions that can be cut, the largest first."""
    sizes = sorted(draft.sizes.items(), key=lambda item: -item[1])
    return [place for place, size in sizes if size > 1 and place[1] < 0]


def _linked(draft: Draft, place: Place, sizes: Sizes) -> Iterator[Places]:
    """Yield sets of places that may have to be cut together: one alone, of equal sizes, or of sizes that divide it.

    They are so now, and were when the case had these sizes.
    """
    return chain([frozenset({place})], together(place, draft.sizes, (sizes, draft.sizes)))


def _with_few_of_all(draft: Draft, sizes: Sizes, trial: _Trial) -> Draft:
    """Cut all dimensions at once to as few indices as still fail, so that later tries are fast."""
    for count in _AT_ONCE:
        few = draft
        for place in _places(draft):
            cuts = (_Cutting(few, places, trial).sample(count) for places in _linked(few, place, sizes))
            if few.sizes[place] > count:
                few = next((cut for cut in cuts if cut is not None), few)
        if trial.fails(few.case):
            return few
    return draft


def _with_few_of(draft: Draft, place: Place, sizes: Sizes, trial: _Trial) -> Draft:
    """Cut a place, and those that the op wants cut with it, to as few parts as still fail."""
    for places in _linked(draft, place, sizes):
        if _Cutting(draft, places, trial).taken:
            return _Cutting(draft, _needed(draft, place, places, trial), trial).least()
    return draft


def _needed(draft: Draft, place: Place, places: Places, trial: _Trial) -> Places:
    """Leave out places whose sizes are equal by chance: the op takes fewer parts of the others without them.

    First all of one dimension, as of two tensors that have as many rows as columns; numbers that refer to parts stay.
    """
    dims = sorted({dim for _, dim in places if dim != 1})
    alike = (frozenset(other for other in places if other[1] == dim) for dim in dims)
    for some in (*alike, *(frozenset({other}) for other in sorted(places) if other[1] in dims)):
        fewer = places - some
        if place in fewer != places and _Cutting(draft, fewer, trial).taken:
            places = fewer
    return places


class _Cutting:
    """Search for the parts of a draft, at some places, that it needs to fail."""

    def __init__(self, draft: Draft, places: Places, trial: _Trial) -> None:
        self._draft, self._places, self._trial = draft, places, trial
        self._parts = math.gcd(*(draft.sizes[place] for place in places))
        self._kept: Sequence[int] = range(self._parts)
        self._least = draft
        self._first = list(dict.fromkeys(i for i in (*trial.worst, 0) if i < self._parts))
        self._chance = random.Random(trial.tries)

    @property
    def taken(self) -> bool:
        """Return whether the op takes fewer parts than there are; the likeliest to matter are tried first."""
        few = chain(([i] for i in self._first), (self._sample(self._first[0], n) for n in (2, 4) if n < self._parts))
        return self._parts > 1 and any(self._cut(kept) is not None for kept in few)

    def sample(self, count: int) -> Draft | None:
        """Keep some parts: the likeliest and others at random; return None if the op does not take that."""
        first = self._first[self._trial.tries % len(self._first)]
        return self._cut(self._sample(first, count)) if self._parts > count else None

    def least(self) -> Draft:
        """Return the draft with the fewest parts found that still fail."""
        if not any(self._fails([i]) for i in self._first) and not any(self._fails(kept) for kept in self._samples()):
            self._halve()
        self._halve()
        return self._least

    def _samples(self) -> Iterator[list[int]]:
        for count in _COUNTS:
            for number in range(_SAMPLES if count < self._parts else 0):
                yield self._sample(self._first[number % len(self._first)], count)

    def _sample(self, first: int, count: int) -> list[int]:
        others = [i for i in range(self._parts) if i != first]
        return sorted((first, *self._chance.sample(others, count - 1)))

    def _halve(self) -> None:
        """Leave out runs of parts, ever smaller ones, as long as the draft fails without them; of many, then the last.

        Where many parts are needed, the size itself matters, and the rest is not tried part by part.
        """
        size = len(self._kept) // 2
        finest = 1 if len(self._kept) <= _COUNTS[-1] else len(self._kept) // _COARSE
        while size >= finest and len(self._kept) > 1:
            for start in reversed(range(0, len(self._kept), size)):
                self._fails([*self._kept[:start], *self._kept[start + size :]])
            size //= 2
        low, high = 0, len(self._kept) if finest > 1 else 0
        while high - low > 1:  # shorten from the end, by bisection
            middle = (low + high) // 2
            low, high = (low, middle) if self._fails(self._kept[:middle]) else (middle, high)

    def _fails(self, kept: Sequence[int]) -> bool:
        smaller = self._cut(kept) if kept else None
        if smaller is None or not self._trial.fails(smaller.case):
            return False
        self._kept, self._least = kept, smaller
        return True

    def _cut(self, kept: Sequence[int]) -> Draft | None:
        smaller = self._draft.cut(self._places, self._parts, kept)
        return smaller if smaller is not None and self._trial.takes(smaller.case) else None


def _plainer(draft: Draft, trial: _Trial) -> Draft:
    """Replace numbers by plainer ones, the first tensor last: first whole tensors, then single elements."""
    for name in reversed([tensor.name for tensor in draft.case.tensors]):
        tensor = draft.values[name]
        draft = _first_that_fails(draft, name, plainer_tensors(tensor), trial)
    for name in reversed([tensor.name for tensor in draft.case.tensors]):
        for place in range(n if (n := draft.values[name].numel()) <= _MOST_PLAIN else 0):
            draft = _first_that_fails(draft, name, plainer_elements(draft.values[name], place), trial)
    return draft


def _first_that_fails(draft: Draft, name: str, tensors: Iterable[Tensor], trial: _Trial) -> Draft:
    """Return the draft with the first of these tensors with which it fails; unchanged if there is none."""
    for tensor in tensors:
        other = draft.with_values({name: tensor})
        if other is not None and other.case != draft.case and trial.takes(other.case) and trial.fails(other.case):
            return other
    return draft
