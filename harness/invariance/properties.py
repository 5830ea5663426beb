"""The properties that are asked of the kernels of an op: of rows, layouts and results, and of ways of calling."""

from __future__ import annotations

from collections.abc import Iterable

from lastbit.errors import UsageError, no_such, unknown
from lastbit.invariance.again import RUN_TO_RUN
from lastbit.invariance.aliasing import IN_PLACE
from lastbit.invariance.batches import PADDING, PERMUTATION
from lastbit.invariance.fusion import FP_FUSION
from lastbit.invariance.gradients import GRAD
from lastbit.invariance.graphs import GRAPH
from lastbit.invariance.independent import of_independent
from lastbit.invariance.other_device import DEVICE
from lastbit.invariance.other_layouts import LAYOUT
from lastbit.invariance.property import Property, both, of_relation
from lastbit.invariance.rows import ROWS
from lastbit.invariance.streams import CONTENTION, STREAM
from lastbit.invariance.torch_compile import COMPILED
from lastbit.kernel import Kernel
from lastbit.ops import Op
from lastbit.relations import Independent

GENERIC: tuple[Property, ...] = (ROWS, PERMUTATION, PADDING, LAYOUT, IN_PLACE)


WAYS: tuple[Property, ...] = (RUN_TO_RUN, STREAM, GRAPH, COMPILED, GRAD, CONTENTION, DEVICE, FP_FUSION)


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
