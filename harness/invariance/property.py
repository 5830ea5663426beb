"""A property, what pairs of calls show of it, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness.errors import UnsupportedCase
from harness.inputs import Inputs
from harness.invariance.basis import Basis, Difference, difference
from harness.property_result import Outcome, PropertyResult
from harness.relation import Matched, NotApplicable, Related, Relation, Tensors


@dataclass(frozen=True, eq=False)
class Broken:
    """A pair of calls that differs.

    Attributes:
        second: the other call in words, or its case line.
        difference: what differs.
        legal: the contract allows what the other call gave; None if that is not known.
    """

    second: str
    difference: Difference
    legal: bool | None = None


@dataclass(eq=False)
class Pairs:
    """What the pairs of calls of a property showed so far.

    Attributes:
        tried: how many there were.
        first: the first pair that differs.
        most: the one in which most elements differ.
        where: what the change depends on, once that was found.
        untried: what was not tried, and why; empty if all was.
    """

    tried: int = 0
    first: Broken | None = None
    most: Broken | None = None
    where: str = ""
    untried: list[str] = field(default_factory=list)

    def compare(self, basis: Basis, second: str, matched: Matched, inputs: Inputs, results: Tensors) -> bool:
        """Count a pair, and say whether it is equal. `inputs` and `results` are those of the second call."""
        self.tried += 1
        found = difference(matched)
        if found is None:
            return True
        if self.first is None:
            self.first = self.most = Broken(second, found, basis.allows(inputs, results))
        elif self.most is not None and found.elements > self.most.difference.elements:
            self.most = Broken(second, found)
        return False


@dataclass(frozen=True)
class Property:
    """Something that the bits of a kernel's results may depend on, or not.

    Attributes:
        name: as kernels declare it.
        promise: what a kernel promises that has it, as a sentence without a period.
        show: makes pairs of calls. Raises `NotApplicable` where it means nothing, before any call.
        quick: few calls, so that `lastbit verify` looks at it also where no kernel promises it.
    """

    name: str
    promise: str
    show: Callable[[Basis, Pairs], None]
    quick: bool = True


def of_relation(relation: Relation) -> Property:
    """The property that a relation defines: each of its calls is compared with the first.

    A call that has nothing in common with the first is no pair, nor is one that the kernel does not take.
    """

    def show(basis: Basis, pairs: Pairs) -> None:
        for related in relation.related(basis.inputs.tensors, basis.case.params, basis.random):
            try:
                first = basis.results if related.first is None else _taken(basis, related.first)[1]
                inputs, results = _taken(basis, related)
            except UnsupportedCase as reason:
                pairs.untried.append(f"{related.what}: {reason}")
                continue
            if matched := related.matched(first, results):
                pairs.compare(basis, related.what, matched, inputs, results)

    return Property(relation.name, relation.promise, show)


def _taken(basis: Basis, related: Related) -> tuple[Inputs, Tensors]:
    """Inputs and results of a related call; `UnsupportedCase` if the kernel has no parameter for one of its inputs."""
    inputs = basis.related(related)
    if unknown := sorted(inputs.case.names - basis.kernel.accepts):
        raise UnsupportedCase(f"the kernel does not take {', '.join(unknown)}")
    return inputs, basis.call(inputs)


def both(one: Property, other: Property) -> Property:
    """A property that means two things, of which one may not apply."""

    def show(basis: Basis, pairs: Pairs) -> None:
        reasons = []
        for part in (one, other):
            try:
                part.show(basis, pairs)
            except NotApplicable as reason:
                reasons.append(str(reason))
        if len(reasons) == 2:
            raise NotApplicable("; ".join(reasons))

    return Property(one.name, f"{one.promise}; {other.promise}", show, one.quick and other.quick)


def result_of(property: Property, basis: Basis) -> PropertyResult:
    """What is found of a property: its pairs of calls are made."""
    found = PropertyResult(property.name, Outcome.HOLDS, property.name in basis.kernel.invariant)
    pairs = Pairs()
    try:
        property.show(basis, pairs)
    except NotApplicable as reason:
        return replace(found, outcome=Outcome.NOT_APPLICABLE, reason=str(reason))
    found = replace(found, pairs=pairs.tried, reason="; ".join(pairs.untried))
    if pairs.first is None or pairs.most is None:
        return found if pairs.tried else replace(found, outcome=Outcome.NOT_APPLICABLE)
    most = pairs.most.difference
    return replace(
        found,
        outcome=Outcome.BROKEN,
        first=str(basis.case),
        second=pairs.first.second,
        where=pairs.where,
        result=most.result,
        elements=most.elements,
        numel=most.numel,
        rows=most.row_count,
        ulp=max(most.ulp, pairs.first.difference.ulp),
        legal=pairs.first.legal,
    )
