"""An op: its reference function with named stages, and the contracts that a kernel may claim for it.

A contract is a point in independent axes. Each axis has options, the first of which is the default; an option says at
which stages values are rounded and to whose format. The reference asks `contract.has(option)` where an option changes
more than a rounding. The first option of an axis may have no name: the others then are deviations, and the name of a
contract that does not deviate leaves the axis out.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lastbit.bundles import flat
from lastbit.declared import (
    PASSED_BY_HARNESS,
    check_contracts,
    check_names,
    check_signature,
    is_names,
    place_of,
)
from lastbit.errors import OpError, UsageError, unknown
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import DIRECTIONS, TARGETS, Direction, Format, split_target
from lastbit.relations import Independent, Relation

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "default"
"""Name of the only contract of an op without axes."""

REQUIRED = inspect.Parameter.empty
"""Default of a parameter that has none."""

NO_DIRECTIONS: Mapping[str, Direction] = {}
Rounds = Mapping[str, str]
Value = TypeVar("Value")


Arguments = Callable[["Tensor", float], Mapping[str, Any]]
"""Terms [Q, N] and a tuning from 0 to 1 → inputs and parameters of a call that adds up the terms of each row."""


@dataclass(frozen=True)
class ProbedSum:
    """A sum that a kernel of the op computes, and how probes are placed and read, to reveal the order of its additions.

    Attributes:
        arguments: tensors and parameters of a call, by name, in which each of Q rows of N terms is a sum of its own.
            Terms are powers of two and a few bits more, zeros mostly; all of them reach the sum exactly. The function
            may let a parameter follow the tuning, so that results round elsewhere.
        results: result or stage → its dimension that counts the Q sums, the first choice first. Each is a function of
            the sum, and of no term but those at its own place.
        squares: what is added are the squares of the terms.
        dot: the sum is a dot, to which the declaration `order=` of a kernel applies.
        about: what is added, for a reader.
    """

    arguments: Arguments
    results: Mapping[str, int]
    squares: bool = False
    dot: bool = False
    about: str = ""


class StageRecorder(Protocol):
    """The function that a reference calls at each named point: it rounds where the contract says, records and returns.

    `result` marks a stage that a kernel must return. The value returned may be the kernel's own of that stage. A
    tensor of integers is exact and is not rounded; of the indices that `argmax` allows any will do. A sum over rows
    (`sum_of_rows`) is not finished before all rows have been seen: its `then` takes the steps that follow from it.
    """

    def __call__(self, name: str, value: Value, *, result: bool = False) -> Value: ...

    def format_of(self, name: str) -> Format:
        """Return the format of an input of numbers."""
        ...


@dataclass(frozen=True)
class Contract:
    """One option per axis, and the rounding points that follow: stage name → name of an input or of a format.

    An input that a case lacks stands for the op's first input; a stage that is not listed stays in fp32. Rounding is to
    nearest unless a direction follows: `x:zero`. `name` is how it is called where that is not its options joined by
    `+`; the `directions` in which its points round otherwise than the op says, stage → direction, are added to that.

    >>> contract = Contract(("rounded_steps",), {"scaled": "x", "output": "x:zero"}, directions={"output": "zero"})
    >>> contract.has("rounded_steps"), str(contract)
    (True, 'rounded_steps+output:zero')
    """

    options: tuple[str, ...]
    rounds: Rounds
    name: str = ""
    directions: Mapping[str, Direction] = field(default_factory=dict)

    def has(self, option: str) -> bool:
        return option in self.options

    def __str__(self) -> str:
        points = [f"{stage}:{self.directions[stage]}" for stage in self.rounds if stage in self.directions]
        return joined([*([self.name] if self.name else self.options), *points])


def joined(options: Iterable[str]) -> str:
    """Join options to the name of a contract that no preset names; options without a name are left out."""
    return "+".join(filter(None, options)) or DEFAULT


@dataclass(frozen=True)
class Latent:
    """A stage with one value per row, or a few such stages, that alone must explain the row, bit for bit.

    Attributes:
        stage: the stage.
        through: stages that it must explain, as far as the reference records them after it. Without `also`, each of
            their elements is a monotone function of its value, so that the set of values which explain an element is an
            interval, and a row is explained if all of its intervals intersect.
        instead: option → the stage that takes the place of `stage` under it.
        also: other stages that explain the row together with it, where the reference records them. Of an op that has
            such stages nothing is assumed about how elements depend on their values.
    """

    stage: str
    through: tuple[str, ...]
    instead: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def following(self, contract: Contract, stages: Iterable[str]) -> list[str]:
        """Return the stages of `through` that come after the latent stage; `stages` are all, in order."""
        names = list(stages)
        start = names.index(self.under(contract)) if self.under(contract) in names else len(names)
        return [name for name in self.through if name in names[start:]]

    def under(self, contract: Contract) -> str:
        """Return the name of the latent stage under a contract."""
        return next((stage for option, stage in self.instead.items() if contract.has(option)), self.stage)


@dataclass(frozen=True)
class Op:
    """Name, reference function, inputs, parameters and axes of contracts.

    Attributes:
        reference: called with enclosures for the inputs (but see `integers`), plain values for the parameters,
            `contract` and `stage`.
        inputs: names of the tensors, in order; the first is the main one.
        optional: inputs that a case may leave out.
        params: names and defaults of the parameters (`REQUIRED` where there is none).
        rows: inputs whose leading dimensions index independent rows; the others are shared by all rows.
        integers: inputs of integers or truth values, which reach the reference as plain tensors.
        plain: other inputs that reach it so: it takes parts of them, and knows what they stand for.
        axes: axis name → option name → rounding points.
        rounds: rounding points that every contract of the op has.
        presets: name → one option per axis, where there are too many axes to name; see `with_presets`.
        latent: see `Latent`.
        optional_results: results that a kernel may leave out; it is judged on the others.
        returns: results in the order in which they stand where they are given without names, those that may be left
            out after the others; results that are not named here follow as recorded.
        flops: what its products take on given tensors and parameters, where these are what takes time.
        torch_ops: operators of torch, such as `aten::add`, that compute the whole op for some parameters.
        relations: properties of its kernels' bits that mean something for this op: see `lastbit.relations`.
        sums: sums whose order of additions can be revealed; see `ProbedSum`.
        stand_ins: optional input → input or format whose dtype it has where a case lacks it, if not the first input's.
    """

    name: str
    reference: Callable[..., Any]
    inputs: tuple[str, ...]
    optional: frozenset[str]
    params: Mapping[str, Any]
    rows: frozenset[str]
    integers: frozenset[str] = frozenset()
    plain: frozenset[str] = frozenset()
    axes: Mapping[str, Mapping[str, Rounds]] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=dict)
    presets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    latent: Latent | None = None
    optional_results: frozenset[str] = frozenset()
    returns: tuple[str, ...] = ()
    flops: Callable[..., int] | None = None
    torch_ops: tuple[str, ...] = ()
    relations: tuple[Relation | Independent, ...] = ()
    sums: Mapping[str, ProbedSum] = field(default_factory=dict)
    stand_ins: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        """The name of the module that declares the op."""
        return str(getattr(self.reference, "module", self.reference.__module__))

    @property
    def where(self) -> str:
        """Name and place of the op, for messages about its declaration."""
        return f"op {self.name} ({place_of(self.reference)})"

    def in_order(self, results: Iterable[str]) -> list[str]:
        """Return results in the order in which they are given without names; those that may be left out come last."""
        place = {name: number for number, name in enumerate(self.returns)}
        return sorted(results, key=lambda name: (name in self.optional_results, place.get(name, len(place))))

    def contract(self, text: str = "") -> Contract:
        """Return the contract named by options joined with `+`, the first of which may be a preset.

        An axis that is not named takes the option of the preset, or else its first. A word such as `output:zero` is the
        direction in which a rounding point rounds.

        Raises:
            UsageError: an option or direction is unknown, two are of one axis or point, or a stage is not rounded.
        """
        axis_of = {option: axis for axis, choices in self.axes.items() for option in choices if option}
        start = tuple(next(iter(choices)) for choices in self.axes.values())
        words = [*filter(None, text.removeprefix(DEFAULT).split("+"))]
        points, words = [w for w in words if ":" in w], [w for w in words if ":" not in w]
        if words and words[0] in self.presets:
            start = self.presets[words.pop(0)]
        named: dict[str, str] = {}
        for option in words:
            if option in self.presets:
                raise UsageError(
                    f"contract {text!r} names the preset {option!r} after other options; it must come first"
                )
            if option not in axis_of:
                raise unknown(f"contract option of {self.name}", option, [*self.presets, *axis_of])
            if axis_of[option] in named:
                raise UsageError(f"contract {text!r} names two options of the axis {axis_of[option]!r}")
            named[axis_of[option]] = option
        found = self._point(tuple(named.get(axis, own) for axis, own in zip(self.axes, start, strict=True)))
        directions: dict[str, Direction] = {}
        for stage, way in map(split_target, points):
            if stage not in found.rounds:
                raise unknown(f"rounding point in the contract {text!r},", stage, found.rounds)
            if way not in DIRECTIONS:
                raise unknown(f"direction in the contract {text!r},", way, DIRECTIONS)
            if stage in directions:
                raise UsageError(f"contract {text!r} names two directions of {stage!r}")
            directions[stage] = way
        return self.directed(found, directions) if points else found

    def contracts(self) -> tuple[Contract, ...]:
        """Return every contract of the op: all combinations of the options of its axes."""
        return tuple(self._point(options) for options in itertools.product(*self.axes.values()))

    def candidates(self, contract: Contract) -> tuple[Contract, ...]:
        """Return the contracts that a kernel which breaks `contract` may keep: all, or those next to it and to presets.

        If it has directions, also contracts with the same ones, and with one of them at another or at all points.
        """
        if self.presets:
            centers = [contract, *map(self._point, self.presets.values())]
            found = [*centers, *(other for center in centers for other in self.alternatives(center))]
        else:
            found = [*self.contracts()]
            found += [self.directed(c, contract.directions) for c in found if contract.directions]
        for way in dict.fromkeys(contract.directions.values()):
            points: list[Collection[str]] = [contract.rounds, *([stage] for stage in contract.rounds)]
            found += [self.directed(contract, dict.fromkeys(stages, way)) for stages in points]
        return tuple({str(c): c for c in found}.values())

    def alternatives(self, contract: Contract) -> Iterator[Contract]:
        """Yield the contracts that differ from `contract` in exactly one axis, or lack one of its own directions."""
        for axis, choices in enumerate(self.axes.values()):
            for option in choices:
                if option != contract.options[axis]:
                    options = (*contract.options[:axis], option, *contract.options[axis + 1 :])
                    yield self._point(options, contract.directions)
        for stage in contract.directions:
            yield self.directed(contract, {other: d for other, d in contract.directions.items() if other != stage})

    def directed(self, contract: Contract, directions: Mapping[str, Direction]) -> Contract:
        """Return the contract of the same options whose rounding points round in these directions, if it has them."""
        return self._point(contract.options, directions)

    def idle(self, contract: Contract, consulted: Collection[str], stages: Collection[str]) -> tuple[str, ...]:
        """Return the options of a contract that change nothing if the reference asks for the options `consulted` alone
        and records `stages`: no other option of their axis would, either.
        """
        axes = zip(self.axes.values(), contract.options, strict=True)
        return tuple(
            own
            for choices, own in axes
            if own and not any(name in consulted or set(stages) & rounds.keys() for name, rounds in choices.items())
        )

    def deviations(self, contract: Contract) -> int:
        """Count the axes in which the contract has a named option where there is a nameless one, and its directions."""
        axes = zip(self.axes.values(), contract.options, strict=True)
        return sum("" in choices and option != "" for choices, option in axes) + len(contract.directions)

    def _point(self, options: tuple[str, ...], directions: Mapping[str, Direction] = NO_DIRECTIONS) -> Contract:
        rounds = dict(self.rounds)
        for choices, option in zip(self.axes.values(), options, strict=True):
            rounds |= choices[option]
        own = {stage: split_target(rounds[stage]) for stage in directions if stage in rounds}
        others = {stage: directions[stage] for stage, (_, way) in own.items() if way != directions[stage]}
        rounds |= {stage: f"{own[stage][0]}:{way}" for stage, way in others.items()}
        # With presets it is called by the nearest one, joined with the options that differ from it.
        names = [
            [preset, *(o for o, own in zip(options, chosen, strict=True) if o != own)]
            for preset, chosen in self.presets.items()
        ]
        nearest = min(names, key=len) if names else []
        return Contract(options, rounds, "+".join(nearest), others)


def deviation(own: Contract, other: Contract) -> str:
    """Name the option or direction in which another contract differs from one's own."""
    if own.options == other.options:
        stage = next(name for name in own.rounds if own.rounds[name] != other.rounds[name])
        return f"rounded {DIRECTIONS[split_target(other.rounds[stage])[1]]}"
    old, new = next((a, b) for a, b in zip(own.options, other.options, strict=True) if a != b)
    if not new:
        return f"without {old}"
    return f"under {new}" + (f" in place of {old}" if old else "")


def op(
    *bare: object,
    rows: tuple[str, ...] | None = None,
    integers: tuple[str, ...] = (),
    plain: tuple[str, ...] = (),
    axes: Mapping[str, Mapping[str, Rounds]] | None = None,
    rounds: Rounds | None = None,
    presets: Mapping[str, str] | None = None,
    latent: Latent | None = None,
    optional_results: tuple[str, ...] = (),
    returns: tuple[str, ...] = (),
    flops: Callable[..., int] | None = None,
    torch_ops: tuple[str, ...] = (),
    relations: tuple[Relation | Independent, ...] = (),
    sums: Mapping[str, ProbedSum] | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Make a reference function an `Op` of the same name.

    The function's positional parameters are its inputs (optional with a default of None), its keyword-only parameters
    are the parameters of the op, apart from `contract` and `stage`, which the harness passes. A parameter that is a
    dataclass of tensors stands for its fields: see `lastbit.bundles`.

    Raises:
        OpError: the declaration names an input, option or format that there is not, or the function takes something
            else. Whether the reference records the stages that are named is known once its file has been loaded.
    """
    if bare or rows is None:
        function = f" above {getattr(bare[0], '__name__', bare[0])!r}" if bare else ""
        raise OpError(f"@op needs the inputs whose rows are independent: write @op(rows=(…)){function}, or rows=()")

    def build(written: Callable[..., Any]) -> Op:
        where = f"op {written.__name__} ({place_of(written)})"
        reference = flat(written, where, (Enclosure,), error=OpError)
        parameters = inspect.signature(reference).parameters.values()
        inputs = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in PASSED_BY_HARNESS]
        made = Op(
            name=reference.__name__,
            reference=reference,
            inputs=tuple(p.name for p in inputs),
            optional=frozenset(p.name for p in inputs if p.default is not REQUIRED),
            params={p.name: p.default for p in keywords},
            rows=frozenset(rows),
            integers=frozenset(integers),
            plain=frozenset(plain),
            axes=axes or {},
            rounds=rounds or {},
            latent=latent,
            optional_results=frozenset(optional_results),
            returns=returns,
            flops=flops,
            torch_ops=torch_ops,
            relations=relations,
            sums=sums or {},
        )
        check_signature(where, parameters)
        named = {"rows": rows, "integers": integers, "plain": plain}
        named |= {one.name: one.inputs for one in relations if isinstance(one, Independent)}
        for what, given in named.items():
            check_names(where, what, given, made.inputs)
        tuples = {"optional_results": optional_results, "returns": returns, "torch_ops": torch_ops}
        for what, given in tuples.items():
            if not is_names(given):
                raise OpError(f"{where}: {what}={given!r} must be a tuple of names")
        if latent is not None:
            for what, given in {"through": latent.through, "also": latent.also}.items():
                if not is_names(given):
                    raise OpError(f"{where}: {what}={given!r} of its Latent must be a tuple of names")
            options = [option for choices in made.axes.values() for option in choices]
            check_names(where, "instead of its Latent", tuple(latent.instead), options)
        targets = [*(name for name in made.inputs if name not in made.integers), *TARGETS]
        check_contracts(where, made.axes, presets or (), made.rounds, targets, tuple(DIRECTIONS))
        return with_presets(made, where, presets or {})

    return build


def with_presets(made: Op, where: str, presets: Mapping[str, str]) -> Op:
    """Return the op with presets, each written as the text of a contract: `rounded_base+fp32_middle`, or `default`.

    Raises:
        OpError: a text names no contract of the op, or one with a deviation or direction: no contract that is called by
            the preset could then be named without it.
    """
    options = {}
    for name, text in presets.items():
        preset = f"{where}: preset {name!r}"
        if not isinstance(text, str):
            raise OpError(f"{preset} is {text!r}; join its options in one text: {joined(text)!r}")
        try:
            contract = made.contract(text)
        except UsageError as error:
            raise OpError(f"{preset}: {error}") from None
        if made.deviations(contract):
            raise OpError(f"{preset} deviates, which leaves no name for what does not: {text!r}")
        options[name] = contract.options
    return replace(made, presets=options)


def check_arguments(op: Op, tensors: Collection[str], params: Collection[str]) -> None:
    """Raise `UsageError` unless the names are those of `op` and none that it needs is missing."""
    for name in tensors:
        if name not in op.inputs:
            raise unknown(f"tensor of {op.name}", name, op.inputs)
    for name in params:
        if name not in op.params:
            raise unknown(f"parameter of {op.name}", name, op.params)
    required = [n for n in op.inputs if n not in op.optional]
    required += [n for n, default in op.params.items() if default is REQUIRED]
    missing = [n for n in required if n not in tensors and n not in params]
    if missing:
        raise UsageError(f"{op.name} was not given {', '.join(missing)}")
