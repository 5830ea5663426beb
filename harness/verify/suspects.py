"""Which stage, computed otherwise, would explain what a kernel gave, where the stages in between cannot be seen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.errors import UsageError
from harness.numerics import FORMATS, Enclosure, Format, format_of, round_to
from harness.numerics.enclosure import widened
from harness.numerics.formats import FP32
from harness.op import Contract, Op
from harness.outcomes.stages import Suspect
from harness.verify.compare import outside_mask
from harness.verify.evaluate import Expected, Params, Tensors, Trace, evaluate
from harness.verify.latent import any_value_explains
from harness.verify.roundings import expectations

_NARROW = ("bf16", "fp16")
_WIDENINGS = (1, 4, 16)  # ulp of the op's first input


@dataclass(frozen=True, eq=False)
class Situation:
    """A case of an op under a contract, and the stages that a kernel gave for it."""

    op: Op
    contract: Contract
    tensors: Tensors
    params: Params
    actual: Tensors

    def trace(self, given: Mapping[str, Expected]) -> Trace:
        """The reference, which goes on from the stages that are given."""
        return evaluate(self.op, self.contract, self.tensors, self.params, given)

    @property
    def main(self) -> Format:
        """The format of the op's first input; fp32 for integers, which are never rounded."""
        first = self.tensors[self.op.inputs[0]]
        return format_of(first.dtype) if first.is_floating_point() else FP32


def suspects(situation: Situation, target: str, earlier: Sequence[str]) -> tuple[int, tuple[Suspect, ...]]:
    """How many elements of `target` are wrong given the kernel's `earlier` stages, and what explains the most of them.

    Suspects are the stages between those and `target`, and `target` itself. First another contract and other roundings
    are tried, then another latent value, then room for error. What explains less than half is left out.
    """
    question = _Question(situation, target, {name: situation.actual[name] for name in earlier})
    wrong = question.left(situation)
    found = [*question.contracts(), *question.roundings()]
    for freer in (question.latent, question.widenings):
        if all(suspect.left for suspect in found):
            found += freer()
    best = min((suspect.left for suspect in found), default=wrong)
    return wrong, tuple(suspect for suspect in found if suspect.left == best) if 2 * best <= wrong else ()


@dataclass(frozen=True, eq=False)
class _Question:
    """What makes `target` come out as it did, given the kernel's own earlier stages?"""

    situation: Situation
    target: str
    given: Tensors

    @cached_property
    def own(self) -> Trace:
        return self.situation.trace(self.given)

    @cached_property
    def between(self) -> list[str]:
        """The stages of numbers that are not given and on which the target depends, and the target itself."""
        names = list(self.own.formats)
        upto = names[: names.index(self.target) + 1]
        free = (name for name in upto if name not in self.given and isinstance(self.own.formats[name], Format))
        return [name for name in free if name == self.target or self._matters(name)]

    def _matters(self, stage: str) -> bool:
        """Whether the target would be another if nothing were known about the stage."""
        if stage in self.own.sums:
            return False
        unknown = self.own.enclosure(stage).full.clone()
        unknown[2], unknown[3] = -torch.inf, torch.inf
        traces = self.own, self.situation.trace({**self.given, stage: Enclosure(unknown)})
        return not _equal(*(expectations(trace, self.situation.contract)[self.target] for trace in traces))

    def wrong(self, situation: Situation, otherwise: Mapping[str, Enclosure] | None = None) -> Tensor:
        """Elements of the target that are impossible, also if some stages are computed otherwise."""
        trace = situation.trace({**self.given, **(otherwise or {})})
        expected = {**expectations(trace, situation.contract), **(otherwise or {})}[self.target]
        return outside_mask(self.situation.actual[self.target], self._stored(expected))

    def left(self, situation: Situation, otherwise: Mapping[str, Enclosure] | None = None) -> int:
        """How many they are."""
        return int(self.wrong(situation, otherwise).sum())

    def _stored(self, expected: Expected) -> Expected:
        """A result is stored in its dtype; of other stages a kernel shows what it computed."""
        if isinstance(expected, Tensor) or self.target not in self.own.results:
            return expected
        return expected.rounded(format_of(self.situation.actual[self.target].dtype))

    def contracts(self) -> Iterator[Suspect]:
        """The contracts of the op that differ in one axis; the stage is the first that differs."""
        contract = self.situation.contract
        for other in self.situation.op.alternatives(contract):
            situation = replace(self.situation, contract=other)
            try:
                trace = situation.trace(self.given)
            except UsageError:  # it is not defined for these arguments
                continue
            if self.target not in trace.formats:  # another stage takes its place
                continue
            left = self.left(situation)
            differing = (
                s for s in self.between if s in trace.expected and not _equal(self.own.expected[s], trace.expected[s])
            )
            yield Suspect(next(differing, self.target), _deviation(contract, other), left)

    def latent(self) -> Iterator[Suspect]:
        """The latent stage, if one other value of it per row explains every row."""
        latent = self.situation.op.latent
        if latent is None or self.target not in latent.through:
            return
        if (stage := latent.under(self.situation.contract)) not in self.between:
            return
        actual = self.situation.actual[self.target]
        if torch.isnan(actual[self.wrong(self.situation)]).any():  # which no value explains
            return
        p = self.situation
        if any_value_explains(p.op, p.contract, p.tensors, p.params, {self.target: actual}, self.own):
            yield Suspect(stage, "with another value in each row", 0)

    def roundings(self) -> Iterator[Suspect]:
        """Every stage in every other rounding."""
        for stage in self.between:
            for change, enclosure in self._variants(stage):
                yield Suspect(stage, change, self.left(self.situation, {stage: enclosure}))

    def _variants(self, stage: str) -> Iterator[tuple[str, Enclosure]]:
        """The stage not rounded, rounded to another format, or cut off."""
        unrounded, own = self._unrounded(stage), self.own.formats[stage]
        assert isinstance(own, Format)
        if own != FP32 and stage not in self.own.results:
            yield "not rounded", unrounded
        for name in dict.fromkeys((self.situation.main.name, *_NARROW)):
            if name not in (own.name, FP32.name):
                yield f"rounded to {name}", unrounded.rounded(FORMATS[name])
        if own != FP32:
            yield "cut off, not rounded", _cut_off(unrounded, own)

    def _unrounded(self, stage: str) -> Enclosure:
        """What the stage is before the contract rounds it."""
        contract = self.situation.contract
        rounds = {name: target for name, target in contract.rounds.items() if name != stage}
        bare = Contract(contract.options, rounds)
        trace = self.own if stage not in contract.rounds else replace(self.situation, contract=bare).trace(self.given)
        expected = expectations(trace, bare)[stage]
        assert isinstance(expected, Enclosure)
        return expected

    def widenings(self) -> list[Suspect]:
        """The stages that explain everything with the least room for error, or else all of them with the most."""
        free = [stage for stage in self.between if stage != self.target and stage in self.own.expected]
        found: list[Suspect] = []
        for ulps in _WIDENINGS:
            found = [self._widened(stage, ulps) for stage in free]
            if explaining := [suspect for suspect in found if not suspect.left]:
                return explaining
        return found

    def _widened(self, stage: str, ulps: int) -> Suspect:
        fmt = self.situation.main
        room = Enclosure(widened(self.own.enclosure(stage).parts, ulps * fmt.epsilon))
        change = f"within {ulps} ulp of {fmt.name}"
        return Suspect(stage, change, self.left(self.situation, {stage: room}), exact=False)


def _deviation(own: Contract, other: Contract) -> str:
    """The option in which a contract differs from one's own."""
    old, new = next((a, b) for a, b in zip(own.options, other.options, strict=True) if a != b)
    if not new:
        return f"without {old}"
    return f"under {new}" + (f" in place of {old}" if old else "")


def _equal(a: Expected, b: Expected) -> bool:
    x, y = (e if isinstance(e, Tensor) else e.full.nan_to_num() for e in (a, b))
    return torch.equal(x, y)


def _cut_off(x: Enclosure, fmt: Format) -> Enclosure:
    """Value and ends rounded toward zero."""
    return Enclosure(torch.cat([x.parts[:1], round_to(x.full[1:], fmt, mode="zero")]))
