"""Suspects: unseen stages which, computed otherwise, would explain what a kernel gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.expected import Numbers, Trace
from lastbit.judging.latent import any_value_explains
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem, Tensors
from lastbit.numerics import FORMATS, Enclosure, Format
from lastbit.numerics.enclosure import widened
from lastbit.numerics.formats import FP32
from lastbit.ops import Contract, deviation
from lastbit.reports.stages import Suspect

_NARROW = ("bf16", "fp16")
_WIDENINGS = (1, 4, 16)  # ulp of the op's first input


def suspects(seen: Observation, target: str, earlier: Sequence[str]) -> tuple[int, tuple[Suspect, ...]]:
    """Count the elements of `target` outside given the kernel's `earlier` stages, and find changes that explain most.

    Suspects are the stages between those and `target`, and `target` itself. First another contract and other roundings
    are tried, then another latent value, then room for error. Changes that explain less than half are left out.
    """
    question = StageQuestion(seen, target, {name: seen.actual[name] for name in earlier})
    outside = question.left(seen.problem)
    found = [*question.contracts(), *question.roundings()]
    for freer in (question.latent, question.widenings):
        if all(suspect.left for suspect in found):
            found += freer()
    best = min((suspect.left for suspect in found), default=outside)
    return outside, tuple(suspect for suspect in found if suspect.left == best) if 2 * best <= outside else ()


@dataclass(frozen=True, eq=False)
class StageQuestion:
    """The question which change of an unseen stage explains `target`, given the kernel's own earlier stages."""

    seen: Observation
    target: str
    given: Tensors

    @property
    def problem(self) -> Problem:
        return self.seen.problem

    @cached_property
    def own(self) -> Trace:
        return self.problem.evaluate(self.given)

    @cached_property
    def between(self) -> list[str]:
        """Unseen stages of numbers on which the target depends, and the target itself."""
        names = list(self.own.stages)
        upto = names[: names.index(self.target) + 1]
        free = (name for name in upto if name not in self.given and isinstance(self.own.formats[name], Format))
        return [name for name in free if name == self.target or self._matters(name)]

    def _matters(self, stage: str) -> bool:
        """Return whether the target's bounds widen if nothing is known about a stage."""
        if self.own.stages[stage].of_all_rows:
            return False
        unknown = self.own.enclosure(stage).full.clone()
        unknown[2], unknown[3] = -torch.inf, torch.inf
        otherwise = self.problem.evaluate({**self.given, stage: Enclosure(unknown)})
        return not self.own.stages[self.target].same(otherwise.stages[self.target])

    def outside(self, problem: Problem, otherwise: Mapping[str, Enclosure] | None = None) -> Tensor:
        """Return the mask of the target's elements outside, with some stages replaced."""
        trace = problem.evaluate({**self.given, **(otherwise or {})})
        for stage, enclosure in (otherwise or {}).items():
            trace.stages[stage] = Numbers(enclosure, FP32)  # a result is stored in its own format after that
        return self.seen.of_stages([self.target]).outside(trace)[self.target]

    def left(self, problem: Problem, otherwise: Mapping[str, Enclosure] | None = None) -> int:
        """Count the target's elements outside, with some stages replaced."""
        return int(self.outside(problem, otherwise).sum())

    def contracts(self) -> Iterator[Suspect]:
        """Yield a suspect for each contract of the op that differs in one axis; its stage is the first that changes."""
        contract = self.problem.contract
        for other in self.problem.op.alternatives(contract):
            problem = self.problem.under(other)
            try:
                trace = problem.evaluate(self.given)
            except UsageError:  # it is not defined for these arguments
                continue
            if self.target not in trace.stages:  # another stage takes its place
                continue
            own = self.own.stages
            differing = (s for s in self.between if s in trace.stages and not own[s].same(trace.stages[s]))
            yield Suspect(next(differing, self.target), deviation(contract, other), self.left(problem))

    def latent(self) -> Iterator[Suspect]:
        """Yield the latent stage, if one other value per row explains every row."""
        latent = self.problem.op.latent
        if latent is None or self.target not in latent.through:
            return
        if (stage := latent.under(self.problem.contract)) not in self.between:
            return
        if torch.isnan(self.seen.actual[self.target][self.outside(self.problem)]).any():  # which no value explains
            return
        if any_value_explains(self.seen.of_stages([self.target])):
            yield Suspect(stage, "with another value in each row", 0)

    def roundings(self) -> Iterator[Suspect]:
        """Yield a suspect for every other rounding of every stage."""
        for stage in self.between:
            for change, enclosure in self.variants(stage):
                yield Suspect(stage, change, self.left(self.problem, {stage: enclosure}))

    def variants(self, stage: str) -> Iterator[tuple[str, Enclosure]]:
        """Yield variants of a stage: not rounded, rounded to another format, or cut off."""
        unrounded, own = self.unrounded(stage), self.problem.format(stage)
        if own != FP32 and stage not in self.own.results:
            yield "not rounded", unrounded
        for name in dict.fromkeys((self.problem.main_format.name, *_NARROW)):
            if name not in (own.name, FP32.name):
                yield f"rounded to {name}", unrounded.rounded(FORMATS[name])
        if own.direction != "nearest":
            yield "rounded to nearest", unrounded.rounded(own.nearest)
        if own != FP32 and own.direction != "zero":
            yield "cut off, not rounded", unrounded.rounded(own.toward("zero"))

    def unrounded(self, stage: str) -> Enclosure:
        """Return a stage as it is before the contract rounds it."""
        contract = self.problem.contract
        rounds = {name: target for name, target in contract.rounds.items() if name != stage}
        bare = self.problem.under(Contract(contract.options, rounds))
        trace = self.own if stage not in contract.rounds else bare.evaluate(self.given)
        expected = trace.stages[stage].finished
        assert isinstance(expected, Numbers)
        return expected.enclosure

    def widenings(self) -> list[Suspect]:
        """Find the stages that explain everything with the least room for error; return all if none does."""
        free = [s for s in self.between if s != self.target and not self.own.stages[s].of_all_rows]
        found: list[Suspect] = []
        for ulps in _WIDENINGS:
            found = [self._widened(stage, ulps) for stage in free]
            if explaining := [suspect for suspect in found if not suspect.left]:
                return explaining
        return found

    def _widened(self, stage: str, ulps: int) -> Suspect:
        fmt = self.problem.main_format
        room = Enclosure(widened(self.own.enclosure(stage).parts, ulps * fmt.epsilon))
        change = f"within {ulps} ulp of {fmt.name}"
        return Suspect(stage, change, self.left(self.problem, {stage: room}), exact=False)
