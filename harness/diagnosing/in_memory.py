"""Where a kernel of several launches first goes wrong, seen from the stages that it keeps in memory between them.

Its buffers are taken in the order in which they were written. The reference goes on from those that are right, so that
each next one is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
import torch

from lastbit.diagnosing.buffers import Buffer, Held, agreeing, alike, parts_of, worst_outside
from lastbit.judging.expected import Numbers
from lastbit.judging.problem import Given, Problem
from lastbit.judging.trace import Trace
from lastbit.numerics import Enclosure

_AHEAD = 6  # later buffers that are asked whether they follow from another reading of one


@dataclass(frozen=True, eq=False)
class Onward(Problem):
    """A problem whose reference goes on from some stages."""

    given: Mapping[str, Enclosure] = field(default_factory=dict)

    @classmethod
    def of(cls, problem: Problem, given: Mapping[str, Enclosure]) -> Onward:
        """A problem seen from these stages."""
        own = {f.name: getattr(problem, f.name) for f in fields(Problem)}
        return cls(**(own | {"siblings": None}), given=given)

    def evaluate(self, given: Given | None = None, trace: Trace | None = None) -> Trace:
        return super().evaluate({**self.given, **(given or {})}, trace)


@dataclass(frozen=True, eq=False)
class FirstWrong:
    """The first stage in memory that does not follow from those before it.

    Attributes:
        problem: seen from the stages before it, as the kernel had them.
        held: the stage, in its buffer.
        worst: the element of the buffer that is farthest from what it must be, as flat index.
    """

    problem: Onward
    held: Held
    worst: int

    @property
    def index(self) -> tuple[int, ...]:
        """Of the element in the stage."""
        return tuple(int(i) for i in np.unravel_index(int(self.held.part[self.worst]), self.held.shape))


def first_wrong(problem: Problem, found: Sequence[Buffer]) -> FirstWrong | None:
    """The first of these buffers that is a stage and has an element that cannot be; None if there is none."""
    return _Walk(problem, found).wrong()


@dataclass
class _Walk:
    """What is known of buffers up to one."""

    problem: Problem
    found: Sequence[Buffer]
    held: list[Held] = field(default_factory=list)
    unlike: list[Buffer] = field(default_factory=list)

    @cached_property
    def _returned(self) -> set[str]:
        return {buffer.result for buffer in self.found if buffer.result}

    def wrong(self) -> FirstWrong | None:
        for buffer in self.found:
            trace = self._seen().trace
            some = [h for h in agreeing(trace, buffer, self._returned) if not self._is_taken(h)]
            one = min(some, key=lambda h: (worst_outside(trace, h) is not None, h.error), default=None)
            if one is None:
                guess = self._guess(buffer)
                if guess is not None:
                    return self._told(guess)
                self.unlike.append(buffer)
            elif worst_outside(trace, one) is None:
                self.held.append(one)
            else:
                return self._told(self._instead(one))
        return None

    def _seen(self, *, without: Held | None = None, more: Held | None = None) -> Onward:
        """The problem seen from what is held, or another choice of that."""
        held = [h for h in self.held if h is not without] + ([more] if more else [])
        return Onward.of(self.problem, dict(_known(self.problem.trace, held)))

    def _told(self, one: Held) -> FirstWrong:
        held = [h for h in self.held if h.buffer is not one.buffer]
        problem = Onward.of(self.problem, dict(_known(self.problem.trace, held)))
        return FirstWrong(problem, one, worst_outside(problem.trace, one) or 0)

    def _is_taken(self, one: Held) -> bool:
        return any(h.name == one.name and torch.equal(h.part, one.part) for h in self.held)

    def _guesses(self, buffer: Buffer) -> Iterator[Held]:
        """The stages that a buffer may be which agrees with none."""
        trace = self.problem.trace
        for name in alike(trace, buffer, self._returned):
            shape = tuple(trace.stages[name].shape)
            for part in parts_of(shape, tuple(buffer.tensor.shape)):
                one = Held(name, buffer, part, float("inf"), shape)
                if not self._is_taken(one):
                    yield one
                    break

    def _guess(self, buffer: Buffer) -> Held | None:
        """The stage that such a buffer is if most of the next ones follow from it."""
        before = self._agreeing_after(buffer, self._seen().trace)
        gained = [
            (self._agreeing_after(buffer, self._seen(more=one).trace) - before, -number, one)
            for number, one in enumerate(self._guesses(buffer))
        ]
        gain, _, one = max(gained, key=lambda g: g[:2], default=(0, 0, None))
        return one if gain > 0 else None

    def _agreeing_after(self, buffer: Buffer, trace: Trace) -> int:
        later = [b for b in self.found if b.rank > buffer.rank][:_AHEAD]
        right = 0
        for one in later:
            some = [h for h in agreeing(trace, one, self._returned) if not self._is_taken(h)]
            right += any(worst_outside(trace, h) is None for h in some)
        return right

    def _instead(self, one: Held) -> Held:
        """A stage that is wrong before this one, if that explains it: a buffer that was taken for another stage."""
        order = list(self.problem.trace.stages)
        for h in reversed([h for h in self.held if not h.buffer.result]):
            for other in self._guesses(h.buffer):
                if order.index(h.name) < order.index(other.name) < order.index(one.name):
                    trace = self._seen(without=h, more=other).trace
                    if worst_outside(trace, one) is None:
                        return other
        return next((guess for buffer in self.unlike for guess in self._guesses(buffer)), one)


def _known(trace: Trace, held: Sequence[Held]) -> Iterator[tuple[str, Enclosure]]:
    """What the reference goes on from: stages as the kernel had them, and as they must be where that is not known."""
    for name in dict.fromkeys(one.name for one in held):
        expected = trace.stages[name]
        if isinstance(expected, Numbers):
            parts = expected.enclosure.full.expand(4, *expected.shape).clone()
            for one in held:
                if one.name == name:
                    parts.view(4, -1)[:, one.part] = one.buffer.tensor.reshape(-1).to(torch.float64)
            yield name, Enclosure(parts)
