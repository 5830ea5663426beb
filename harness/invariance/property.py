"""A property of a kernel's bits: the call that others are compared with, what pairs of calls show, and its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random

import torch

from lastbit.case import Case, TensorSpec
from lastbit.dtypes import DTYPE_NAMES
from lastbit.errors import UnsupportedCase, UsageError
from lastbit.inputs import Inputs, build, holding, unequal
from lastbit.inputs.bits import bits_with_one_nan, distance
from lastbit.kernel import Kernel
from lastbit.ops import Op
from lastbit.relations import Matched, NotApplicable, Related, Relation, Tensors, same

Call = Callable[[Inputs], Tensors]
Anew = Callable[[Mapping[str, str]], Tensors]
"""The results of a call with these variables in the environment of its process."""


@dataclass(frozen=True, eq=False)
class Basis:
    """A kernel and its call on a case, with which every other call is compared.

    Attributes:
        kernel, op, device: what is asked.
        inputs: of the case.
        results: what the kernel gave for them, copies.
        call: the kernel on other inputs: its results, copies.
        allows: whether the contract allows the results of a call on these inputs.
        direct: the kernel may be called in this process, in other ways than `call` does.
        thorough: pairs may cost seconds.
        line: the case line of the inputs; empty where that is the line of their case.
        anew: the results of the call in a new process with these environment variables, where one can be started.
    """

    kernel: Kernel
    op: Op
    device: torch.device
    inputs: Inputs
    results: Tensors
    call: Call
    allows: Callable[[Inputs, Tensors], bool]
    direct: bool = True
    thorough: bool = False
    line: str = ""
    anew: Anew | None = None

    @property
    def case(self) -> Case:
        return self.inputs.case

    @cached_property
    def allowed(self) -> bool:
        """Return whether the contract allows the results of the call itself."""
        return self.allows(self.inputs, self.results)

    @property
    def random(self) -> Random:
        """Random numbers that depend on the case alone."""
        return Random(self.case.seed)

    def related(self, related: Related) -> Inputs:
        """Return the inputs of a related call, apart; contiguous where their shape is new or elements share memory."""
        own, specs = {spec.name: spec for spec in self.case.apart().tensors}, list[TensorSpec]()
        for name, tensor in related.tensors.items():
            shape, dtype = tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
            spec = own.get(name, TensorSpec(name, dtype, shape))
            if spec.shape != shape or spec.repeats:
                spec = replace(spec, shape=shape, dtype=dtype, strides=None, offset=0)
            specs.append(spec)
        case = replace(self.case, tensors=tuple(specs), params={**self.case.params, **related.params})
        return holding(case, related.tensors, self.device)


def contiguous(basis: Basis) -> Basis:
    """Return the basis with contiguous, aligned copies of the inputs; itself if no tensor has strides or an offset."""
    specs = basis.case.tensors
    if all(spec.strides is None and not spec.offset for spec in specs):
        return basis
    case = replace(basis.case, tensors=tuple(replace(spec, strides=None, offset=0, memory="") for spec in specs))
    inputs = holding(case, basis.inputs.tensors, basis.device)
    line = f"{basis.case}, its tensors contiguous" if any(spec.repeats for spec in specs) else ""
    return replace(basis, inputs=inputs, results=basis.call(inputs), line=line)


def line_of(inputs: Inputs, device: torch.device) -> str:
    """Return the case line that builds these inputs; empty if its regimes and seed build other values."""
    try:
        built = build(inputs.case, device)
    except UsageError:  # given values for another number of elements
        return ""
    pairs = ((built.tensors[name], tensor) for name, tensor in inputs.tensors.items())
    return str(inputs.case) if not any(unequal(list(pairs))) else ""


@dataclass(frozen=True)
class BitDifference:
    """Elements of a result in which two calls differ; NaNs are equal, whatever their sign and payload.

    Attributes:
        result: its name.
        elements, numel: how many differ, of how many.
        rows: indices of the rows that these are in, as far as the first `_MOST_ROWS`.
        row_count: how many there are; 0 for a result of one dimension or none.
        ulp: the largest distance.
    """

    result: str
    elements: int
    numel: int
    rows: tuple[int, ...] = ()
    row_count: int = 0
    ulp: float = 0.0


# Of more, sentences name a range or a number; a result keeps these in its record.
_MOST_ROWS = 256


def difference(matched: Matched) -> BitDifference | None:
    """Return the difference of the result with the most differing elements; None if all results are bitwise equal."""
    found = list[BitDifference]()
    for name, (a, b) in matched.items():
        if a.shape != b.shape or a.dtype != b.dtype:
            most = max(a.numel(), b.numel())
            found.append(BitDifference(name, most, most, ulp=math.inf))
            continue
        a, b = a.detach(), b.detach().to(a.device)
        changed = bits_with_one_nan(a) != bits_with_one_nan(b)
        if elements := int(changed.sum()):
            ulp, rows = float(distance(a[changed], b[changed]).max()), changed.new_zeros(0)
            if changed.ndim > 1:
                rows = changed.reshape(-1, changed.shape[-1]).any(-1).nonzero().flatten()
            shown = tuple(rows[:_MOST_ROWS].tolist())
            found.append(BitDifference(name, elements, a.numel(), shown, len(rows), ulp))
    return max(found, key=lambda d: d.elements, default=None)


_JUDGED, _JUDGED_QUICKLY = 8, 2  # pairs that differ of which the contract is asked, however small the difference is


@dataclass(frozen=True, eq=False)
class Broken:
    """A pair of calls that differs.

    Attributes:
        first: the case line of the call that the other one is compared with.
        second: the other call in words, or its case line.
        difference: what differs.
        legal: the contract allows what both calls gave; None if that was not asked.
    """

    first: str
    second: str
    difference: BitDifference
    legal: bool | None = None


@dataclass(eq=False)
class Pairs:
    """Findings so far from the pairs of calls of one property.

    Attributes:
        left_out: results that are not compared.
        tried: how many pairs there were.
        first: the first pair that differs, or the one to be shown in its place: with bits that are not legal, if any.
        judged: of how many pairs the contract was asked.
        furthest: the largest distance of a pair that differs, in ulp.
        most: the one in which most elements differ, or the one to be counted in its place.
        where: what the change depends on, once that was found.
        untried: what was not tried, and why; empty if all was.
        notes: what else was seen.
    """

    left_out: frozenset[str] = frozenset()
    tried: int = 0
    first: Broken | None = None
    judged: int = 0
    furthest: float = 0.0
    most: Broken | None = None
    where: str = ""
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def again(self, basis: Basis, second: str, results: Tensors) -> bool:
        """Count a pair whose second call is one on the same values, and say whether it is equal."""
        return self.compare(basis, second, same(basis.results, results), basis.inputs, results)

    def compare(
        self, basis: Basis, second: str, matched: Matched, inputs: Inputs, results: Tensors, *, shown: bool = False
    ) -> bool:
        """Count a pair, and say whether it is equal. `inputs` and `results` are those of the second call.

        A pair that is `shown` and differs is the first one from then on, unless bits of another one are not legal.
        """
        compared = self.without_left_out(matched)
        if not any(tensor.numel() for pair in compared.values() for tensor in pair):
            return True
        self.tried += 1
        found = difference(compared)
        if found is None:
            return True
        legal = None
        if self.asks(found, basis, shown=shown):
            self.judged += 1
            legal = basis.allowed and basis.allows(inputs, results)
        broken = Broken(basis.line or str(basis.case), second, found, legal)
        if self.first is None or legal is False or (shown and self.first.legal):
            self.first = broken
        self.furthest = max(self.furthest, found.ulp)
        if self.most is None or found.elements > self.most.difference.elements:
            self.most = broken
        return False

    def asks(self, found: BitDifference, basis: Basis, *, shown: bool = False) -> bool:
        """Tell whether to ask the contract about a pair that differs; no more once it has excluded bits of one.

        Asked about are the first few, pairs further apart than any before, and the pair that is shown.
        """
        few = _JUDGED if basis.thorough else _JUDGED_QUICKLY
        excluded = self.first is not None and self.first.legal is False
        return not excluded and (shown or self.judged < few or found.ulp > self.furthest)

    def count(self, basis: Basis, second: str, matched: Matched) -> None:
        """Count the changed elements of a pair that many calls make up, in place of those of single calls."""
        self.tried += 1
        found = difference(self.without_left_out(matched))
        if found is not None:
            self.most = Broken(basis.line or str(basis.case), second, found)

    def without_left_out(self, matched: Matched) -> Matched:
        return {name: pair for name, pair in matched.items() if name not in self.left_out}

    def called(self, basis: Basis, inputs: Inputs, what: str) -> Tensors | None:
        """Return the results of a call; None, with a note, if the kernel does not take it."""
        try:
            return basis.call(inputs)
        except UnsupportedCase as reason:
            self.skip(what, reason)
            return None

    def skip(self, what: str, reason: object) -> None:
        """Say what was not tried; of calls for one reason the first."""
        if not any(said.endswith(f": {reason}") for said in self.untried):
            self.untried.append(f"not tried: {what}: {reason}")


@dataclass(frozen=True)
class Property:
    """A circumstance that the bits of a kernel's results may depend on, or not.

    Attributes:
        name: as kernels declare it.
        promise: what a kernel promises that has it, as a sentence without a period.
        show: makes pairs of calls. Raises `NotApplicable` where it means nothing.
        quick: few calls, so that `lastbit verify` looks at it also where no kernel promises it.
        unordered: results whose bits may change between two calls by declaration are compared, too.
    """

    name: str
    promise: str
    show: Callable[[Basis, Pairs], None]
    quick: bool = True
    unordered: bool = False


def of_relation(relation: Relation) -> Property:
    """Make a property of a relation; each of the relation's calls is compared with the first call."""

    def show(basis: Basis, pairs: Pairs) -> None:
        for related in relation.related(basis.inputs.tensors, basis.case.params, basis.random):
            compare_related(basis, pairs, related)

    return Property(relation.name, relation.promise, show)


def compare_related(basis: Basis, pairs: Pairs, related: Related) -> bool:
    """Make a related call and compare it; return whether it is equal, which a declined call counts as."""
    if related.first is not None:
        inputs, results = _called(basis, pairs, related.first)
        if results is None:
            return True
        basis = replace(basis, inputs=inputs, results=results, line=f"{basis.case}, {related.first.what}")
    inputs, results = _called(basis, pairs, related)
    if results is None:
        return True
    return pairs.compare(basis, related.what, related.matched(basis.results, results), inputs, results)


def _called(basis: Basis, pairs: Pairs, related: Related) -> tuple[Inputs, Tensors | None]:
    """Return inputs and results of a related call; no results if the kernel lacks a parameter for one of its inputs."""
    inputs = basis.related(related)
    if unknown := sorted(inputs.case.names - basis.case.names - basis.kernel.accepts):
        pairs.skip(related.what, f"the kernel does not take {', '.join(unknown)}")
        return inputs, None
    return inputs, pairs.called(basis, inputs, related.what)


def both(one: Property, other: Property) -> Property:
    """Combine two properties into one; it is not applicable only if neither of the two applies."""

    def show(basis: Basis, pairs: Pairs) -> None:
        reasons = []
        for part in (one, other):
            try:
                part.show(basis, pairs)
            except NotApplicable as reason:
                reasons.append(str(reason))
        if len(reasons) == 2:
            raise NotApplicable("; ".join(reasons))

    return Property(
        one.name, f"{one.promise}; {other.promise}", show, one.quick and other.quick, one.unordered or other.unordered
    )
