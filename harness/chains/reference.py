"""The reference of a chain: those of its parts, one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import CodeType
from typing import Any

from lastbit.chains.parts import Link
from lastbit.errors import OpError
from lastbit.numerics import TARGETS, AfterSums, Format, Sum, Tensor
from lastbit.numerics.formats import split_target
from lastbit.ops import Contract, Op, StageRecorder
from lastbit.stage_names import StageNames, stage_names


@dataclass(frozen=True)
class Passed:
    """A stage that one part gives and a later one takes.

    Attributes:
        stage: its name in the chain.
        target: the input or format whose dtype it has between two kernels; None where no part rounds it.
        returned: it is a result of the chain, too.
    """

    stage: str
    target: str | None
    returned: bool

    @property
    def option(self) -> str:
        """The contract option under which it is passed on without being rounded."""
        return f"unrounded_{self.stage}"


@dataclass(frozen=True, eq=False)
class ChainReference:
    """Calls the references of its parts; the attributes beside those are what an op is asked for its reference.

    Attributes:
        name: of the chain.
        place, module: where it is declared.
        links: its parts.
        passed: stage → how it is passed on.
        inputs: of the chain, in order.
    """

    name: str
    place: str
    module: str
    links: tuple[Link, ...]
    passed: Mapping[str, Passed]
    inputs: tuple[str, ...]

    def __call__(self, *inputs: Any, contract: Contract, stage: StageRecorder, **params: Any) -> None:
        """Compute the parts.

        Raises:
            ValueError: a part does not take what it is given, or needs a stage that is not recorded here.
        """
        given, values = dict(zip(self.inputs, inputs, strict=True)), dict[str, Any]()
        for link in self.links:
            recorder = PartRecorder(self, link, contract, stage, values)
            operands = [self._operand(link, own, given, values) for own in link.op.inputs]
            own_params = {own: params[link.name(own)] for own in link.params if link.name(own) in params}
            fixed = {own: value for own, value in link.part.fixed.items() if own in link.op.params}
            link.op.reference(*operands, **own_params, **fixed, contract=PartContract(link, contract), stage=recorder)

    def _operand(self, link: Link, own: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
        if own in link.part.fixed:
            return None
        if own not in link.part.takes:
            return given[link.name(own)]
        taken = link.part.takes[own]
        if taken not in values and own not in link.op.optional:
            raise ValueError(f"{link.label} takes {taken!r}, which no part before it records here")
        value = values.get(taken)
        of_rows = isinstance(value, Sum | AfterSums)
        if of_rows or (value is not None and isinstance(value, Tensor) != (own in link.op.integers)):
            kind = "a sum over rows" if of_rows else "not of the kind that this input is"
            raise OpError(f"chain {self.name} ({self.place}): {own!r} of {link.label} takes {taken!r}, which is {kind}")
        return value

    def stage_names(self) -> StageNames | None:
        """Return the names of stages that the chain can record; None if the source of a part cannot be read."""
        known = [(link, stage_names(link.op.reference)) for link in self.links]
        words = frozenset(link.stage(word) for link, names in known if names is not None for word in names.words)
        spellings = [s for link, names in known if names is not None for t in names.spellings for s in _ways(link, t)]
        return None if any(names is None for _, names in known) else StageNames(words, tuple(spellings))

    @cached_property
    def codes(self) -> dict[CodeType, dict[str, str]]:
        """The code of each part's reference → its variables' inputs in the chain; code of two parts is left out."""
        found = [(code, link, names) for link in self.links for code, names in reference_codes(link.op).items()]
        once = [one for one in found if [code for code, _, _ in found].count(one[0]) == 1]
        return {
            code: {variable: link.name(own) for variable, own in names.items() if own in link.inputs}
            for code, link, names in once
        }


def _ways(link: Link, spelling: Any) -> tuple[Any, Any]:
    """Return a spelling as it is, and with the label of its part in front."""
    return spelling, (f"{link.label}_", *spelling)


@dataclass(frozen=True, eq=False)
class PartContract:
    """The contract of a chain as a part asks for it."""

    link: Link
    contract: Contract

    def has(self, option: str) -> bool:
        """Check whether the contract has an option of the part."""
        return self.contract.has(self.link.option(option))


@dataclass(frozen=True, eq=False)
class PartRecorder:
    """The recorder of a chain as a part calls it, which keeps what is passed on in `values`."""

    chain: ChainReference
    link: Link
    contract: Contract
    recorder: StageRecorder
    values: dict[str, Any]

    def __call__(self, name: str, value: Any, *, result: bool = False) -> Any:
        own = self.link.stage(name)
        passed = self.chain.passed.get(own)
        if passed is None:
            return self.recorder(own, value, result=result)
        found = self.recorder(own, value, result=passed.returned)
        unrounded = passed.returned and passed.target is not None and self.contract.has(passed.option)
        self.values[own] = value if unrounded else found
        return found

    def format_of(self, name: str) -> Format:
        """Return the format of an input of the part."""
        taken = self.link.part.takes.get(name)
        if taken is None:
            return self.recorder.format_of(self.link.name(name))
        target, _ = split_target(self.chain.passed[taken].target or "fp32")
        return self.recorder.format_of(target) if target in self.chain.inputs else TARGETS[target]


def reference_codes(op: Op) -> Mapping[CodeType, Mapping[str, str]]:
    """Map the code of each function of an op's reference to its variables that are inputs of the op.

    One function, as it was written; those of its parts for an op that is made of others.
    """
    if (codes := getattr(op.reference, "codes", None)) is not None:
        of_parts: Mapping[CodeType, Mapping[str, str]] = codes
        return of_parts
    return {inspect.unwrap(op.reference).__code__: {name: name for name in op.inputs}}
