"""The properties that are asked of the kernels of an op: of rows, layouts and results, and of ways of calling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from lastbit.errors import UnsupportedCase, UsageError, no_such, unknown
from lastbit.invariance import library
from lastbit.invariance.other_layouts import IN_PLACE, LAYOUT
from lastbit.invariance.property import Basis, Pairs, Property, both, of_relation
from lastbit.invariance.rows import PADDING, PERMUTATION, ROWS, of_independent
from lastbit.invariance.ways import WAYS
from lastbit.kernel import Kernel
from lastbit.ops import Op
from lastbit.property_result import PropertyOutcome, PropertyResult
from lastbit.relations import Independent, NotApplicable

# As _SHOWN of case.py.
_SHOWN = 300  # characters of what a kernel raised

GENERIC: tuple[Property, ...] = (ROWS, PERMUTATION, PADDING, LAYOUT, IN_PLACE)


def properties_of(op: Op) -> dict[str, Property]:
    """Name → property: those of any op, and those that this one declares; of one name they are one property."""
    found = {property.name: property for property in (*GENERIC, *WAYS)}
    for declared in op.relations:
        own = of_independent(declared) if isinstance(declared, Independent) else of_relation(declared)
        found[own.name] = both(found[own.name], own) if own.name in found else own
    return found


def check_declared(kernel: Kernel, op: Op) -> None:
    """Raise `UsageError` unless what a kernel promises are properties of its op."""
    for name in kernel.invariant:
        if name not in (known := properties_of(op)):
            raise UsageError(no_such(f"property in invariant of {kernel.where}:", name, known))


def check_names(names: Iterable[str], ops: Iterable[Op]) -> None:
    """Raise `UsageError` unless each name is a property of the kernels of one of the ops."""
    known = {name for op in ops for name in properties_of(op)}
    for name in names:
        if name not in known:
            raise unknown("property", name, known)


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
    left = f"not compared: {', '.join(sorted(left_out))}, declared as unordered" if left_out else ""
    said = "; ".join(filter(None, [raised, left, *pairs.untried, *pairs.notes]))
    found = replace(found, pairs=pairs.tried, reason=said)
    first = pairs.first
    if first is None or pairs.most is None:
        if not (raised or pairs.tried):
            nothing = found.reason or "no pair of calls was made whose results have elements to compare"
            return replace(found, outcome=PropertyOutcome.NOT_APPLICABLE, reason=nothing)
        return replace(found, outcome=PropertyOutcome.ERRORED if raised else PropertyOutcome.HOLDS)
    most = pairs.most.difference
    return replace(
        found,
        outcome=PropertyOutcome.BROKEN,
        declared=found.declared and most.result not in basis.kernel.unordered,  # whose bits may change by declaration
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
