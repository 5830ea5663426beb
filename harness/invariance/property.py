"""A property, what pairs of calls show of it, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from lastbit.errors import UnsupportedCase
from lastbit.inputs import Inputs
from lastbit.invariance import library
from lastbit.invariance.basis import Basis, BitDifference, difference
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.relations import Matched, NotApplicable, Related, Relation, Tensors

# As _SHOWN of case.py.
_SHOWN = 300  # characters of what a kernel raised
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
        legal = self._legal(basis, inputs, results) if self.asks(found, basis, shown=shown) else None
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

    def _legal(self, basis: Basis, inputs: Inputs, results: Tensors) -> bool:
        self.judged += 1
        return basis.allowed and basis.allows(inputs, results)

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


def result_of(property: Property, basis: Basis) -> PropertyResult:
    """Return what is found of a property, and which operation of torch breaks it where that fails the kernel."""
    found = _found(property, basis)
    if not (found.outcome is PropertyOutcome.BROKEN and found.fails and basis.direct):
        return found
    return replace(found, library=library.breaking(found, basis, partial(_found, property)))


def _found(property: Property, basis: Basis) -> PropertyResult:
    """Make the property's pairs of calls and return its result; an exception of the kernel is reported, not raised."""
    found = PropertyResult(property.name, PropertyOutcome.HOLDS, property.name in basis.kernel.invariant)
    left_out = frozenset(() if property.unordered else basis.kernel.unordered) & basis.results.keys()
    pairs = Pairs(left_out)
    raised = ""
    try:
        property.show(basis, pairs)
    except (NotApplicable, UnsupportedCase) as reason:
        if not pairs.tried:
            return replace(found, outcome=PropertyOutcome.NOT_APPLICABLE, reason=str(reason))
        pairs.skip("other calls", reason)
    except Exception as error:  # of the kernel: it may raise anything
        raised = f"errored: {type(error).__name__}: {error}"[:_SHOWN]
    found = replace(found, pairs=pairs.tried, reason="; ".join(filter(None, [raised, *_said(pairs)])))
    if pairs.first is None or pairs.most is None:
        if not (raised or pairs.tried):
            nothing = found.reason or "no pair of calls was made whose results have elements to compare"
            return replace(found, outcome=PropertyOutcome.NOT_APPLICABLE, reason=nothing)
        return replace(found, outcome=PropertyOutcome.ERRORED if raised else PropertyOutcome.HOLDS)
    kept = pairs.most.difference.result not in basis.kernel.unordered  # whose bits may change by declaration
    return _broken(replace(found, declared=found.declared and kept), pairs, pairs.first, pairs.most.difference)


def _broken(found: PropertyResult, pairs: Pairs, first: Broken, most: BitDifference) -> PropertyResult:
    return replace(
        found,
        outcome=PropertyOutcome.BROKEN,
        first=first.first,
        second=first.second,
        where=pairs.where,
        result=most.result,
        elements=most.elements,
        numel=most.numel,
        rows=most.row_count,
        ulp=max(most.ulp, pairs.furthest),
        legal=first.legal,
    )


def _said(pairs: Pairs) -> Iterable[str]:
    """Yield remarks on the outcome: results left out, calls that were not tried, and notes."""
    if pairs.left_out:
        yield f"not compared: {', '.join(sorted(pairs.left_out))}, declared as unordered"
    yield from [*pairs.untried, *pairs.notes]
