"""The parts of a chain, what each is called in it, and the reference that they make, one after the other."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any

from lastbit.errors import OpError, no_such
from lastbit.numerics import TARGETS, AfterSums, Format, Sum, Tensor
from lastbit.numerics.formats import split_target
from lastbit.ops import REQUIRED, Contract, Op, StageRecorder
from lastbit.stage_names import StageNames, stage_names


@dataclass(frozen=True)
class Part:
    """An op of a chain.

    Attributes:
        op: the op.
        takes: input of the op → stage of an earlier part, by its name in the chain.
        fixed: inputs (None) and parameters that the chain does not have, with what they are.
        renamed: input or parameter of the op → its name in the chain.
        label: what tells it from other parts; the name of the op unless it is given.
    """

    op: Op
    takes: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    label: str = ""


@dataclass(frozen=True, eq=False)
class Link:
    """A part in its chain.

    Attributes:
        part: the part.
        label: what tells it from the others.
        others: the stages and options of each other part.
    """

    part: Part
    label: str
    others: tuple[tuple[StageNames | None, frozenset[str]], ...]

    @property
    def op(self) -> Op:
        return self.part.op

    @cached_property
    def known(self) -> StageNames | None:
        """The stages of the op by its own names; None where its source cannot be read."""
        return stage_names(self.op.reference)

    def stage(self, own: str) -> str:
        """Name a stage of the op in the chain."""
        return f"{self.label}_{own}" if any(names is not None and own in names for names, _ in self.others) else own

    def own_stage(self, name: str) -> str | None:
        """Return the op's own name of a stage of the chain; None if the stage is not the op's."""
        found = (
            own
            for own in (name, name.removeprefix(f"{self.label}_"))
            if self.known is not None and own in self.known and self.stage(own) == name
        )
        return next(found, None)

    @property
    def stages(self) -> tuple[str, ...]:
        """Names in the chain to suggest."""
        return tuple(map(self.stage, self.known.known)) if self.known is not None else ()

    def word(self, own: str) -> str:
        """Name an axis or an option of the op in the chain; one without a name stays without."""
        return f"{self.label}_{own}" if own and any(own in words for _, words in self.others) else own

    def option(self, own: str) -> str:
        """Name an option of the op in the chain.

        Raises:
            OpError: the op does not have it.
        """
        known = [option for choices in self.op.axes.values() for option in choices]
        if own not in known:
            raise OpError(no_such(f"contract option that the reference of {self.op.where} asks for:", own, known))
        return self.word(own)

    def name(self, own: str) -> str:
        """Name an input or parameter of the op in the chain."""
        return self.part.renamed.get(own, own)

    @property
    def inputs(self) -> list[str]:
        """The inputs that the chain has, by the op's own names."""
        return [name for name in self.op.inputs if name not in self.part.takes and name not in self.part.fixed]

    @property
    def params(self) -> list[str]:
        """The parameters of the op that are parameters of the chain."""
        return [name for name in self.op.params if name not in self.part.fixed]

    def needs(self, own: str) -> bool:
        """Check whether an input or parameter is required."""
        return own not in self.op.optional if own in self.op.inputs else self.op.params[own] is REQUIRED


def links_of(where: str, parts: Sequence[Part]) -> tuple[Link, ...]:
    """Link the parts to their chain, and check them.

    Raises:
        OpError: what a part declares is not the op's, or two parts have one label.
    """
    if len(parts) < 2:
        raise OpError(f"{where}: a chain has two parts or more, and this one has {len(parts)}")
    for part in parts:
        _check_part(where, part)
    labels = [part.label or part.op.name for part in parts]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise OpError(f"{where}: two parts are called {twice[0]!r}; give one a label: Part(…, label=…)")
    words = []
    for op in (part.op for part in parts):
        options = (option for choices in op.axes.values() for option in choices)
        words.append((stage_names(op.reference), frozenset([*op.axes, *options])))
    return tuple(
        Link(part, label, tuple(words[:number] + words[number + 1 :]))
        for number, (part, label) in enumerate(zip(parts, labels, strict=True))
    )


def _check_part(where: str, part: Part) -> None:
    """Raise `OpError` unless all that a part names is its op's, and named once."""
    if not isinstance(part, Part):
        raise OpError(f"{where}: {getattr(part, 'name', part)!r} is no part; write Part(OP)")
    op = part.op
    names = (*op.inputs, *op.params)
    _check_known(where, f"input in takes of {op.name}:", part.takes, op.inputs)
    _check_known(where, f"input or parameter in fixed of {op.name}:", part.fixed, names)
    _check_known(where, f"input or parameter in renamed of {op.name}:", part.renamed, names)
    for word in (part.label or op.name, *part.renamed.values()):
        check_word(where, f"label or new name of {op.name}", word)
    for name in names:
        given = [what for what in ("takes", "fixed", "renamed") if name in getattr(part, what)]
        if len(given) > 1:
            raise OpError(f"{where}: {name!r} of {op.name} is in {' and in '.join(given)}; one of them can hold")
    for name, value in part.fixed.items():
        if name in op.inputs and (value is not None or name not in op.optional):
            raise OpError(
                f"{where}: the input {name!r} of {op.name} is fixed to {value!r}; only an optional one to None"
            )
    for name in part.takes:
        if name in op.plain:
            raise OpError(f"{where}: the input {name!r} of {op.name} is plain: it holds codes, which no stage gives")


def check_word(where: str, what: str, word: object) -> None:
    """Raise `OpError` unless a word can stand in case lines and contracts."""
    if not (isinstance(word, str) and word.isidentifier()):
        raise OpError(f"{where}: {word!r} cannot be the {what}; write letters, digits and underscores")


def _check_known(where: str, what: str, given: Collection[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise OpError(f"{where}: {no_such(what, name, known)}")


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
        own = [(link.label, s) for link, names in known if names is not None for s in names.spellings]
        spellings = [spelling for label, s in own for spelling in (s, (f"{label}_", *s))]
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
