"""A property, what pairs of calls show of it, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from harness.inputs import Inputs
from harness.invariance.basis import Basis, Difference, difference
from harness.property_result import Outcome, PropertyResult
from harness.relation import Matched, NotApplicable, Relation, Tensors


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
        left_out: results that are not compared.
        tried: how many pairs there were.
        first: the first pair that differs.
        most: the one in which most elements differ.
        where: what the change depends on, once that was found.
        untried: what was not tried, and why; empty if all was.
    """

    left_out: frozenset[str] = frozenset()
    tried: int = 0
    first: Broken | None = None
    most: Broken | None = None
    where: str = ""
    untried: list[str] = field(default_factory=list)

    def compare(self, basis: Basis, second: str, matched: Matched, inputs: Inputs, results: Tensors) -> bool:
        """Count a pair, and say whether it is equal. `inputs` and `results` are those of the second call."""
        compared = {name: pair for name, pair in matched.items() if name not in self.left_out}
        if not compared:
            return True
        self.tried += 1
        found = difference(compared)
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
        unordered: results whose bits may change between two calls by declaration are compared, too.
    """

    name: str
    promise: str
    show: Callable[[Basis, Pairs], None]
    quick: bool = True
    unordered: bool = False


def of_relation(relation: Relation) -> Property:
    """The property that a relation defines: each of its calls is compared with the first."""

    def show(basis: Basis, pairs: Pairs) -> None:
        for related in relation.related(basis.inputs.tensors, basis.case.params, basis.random):
            inputs = basis.related(related)
            results = basis.call(inputs)
            pairs.compare(basis, related.what, related.matched(basis.results, results), inputs, results)

    return Property(relation.name, relation.promise, show)


def result_of(property: Property, basis: Basis) -> PropertyResult:
    """What is found of a property: its pairs of calls are made."""
    found = PropertyResult(property.name, Outcome.HOLDS, property.name in basis.kernel.invariant)
    unordered = frozenset(basis.kernel.unordered)
    pairs = Pairs(frozenset() if property.unordered else unordered)
    try:
        property.show(basis, pairs)
    except NotApplicable as reason:
        return replace(found, outcome=Outcome.NOT_APPLICABLE, reason=str(reason))
    found = replace(found, pairs=pairs.tried, reason="; ".join(pairs.untried))
    if pairs.first is None or pairs.most is None:
        return found if pairs.tried else _nothing_tried(found, pairs)
    most = pairs.most.difference
    return replace(
        found,
        outcome=Outcome.BROKEN,
        declared=found.declared and most.result not in unordered,
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


def _nothing_tried(found: PropertyResult, pairs: Pairs) -> PropertyResult:
    declared = f"{', '.join(sorted(pairs.left_out))} declared as unordered" if pairs.left_out else ""
    return replace(found, outcome=Outcome.NOT_APPLICABLE, reason=found.reason or declared)
