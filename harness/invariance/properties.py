"""The properties that are asked of the kernels of an op."""

from __future__ import annotations

from harness.errors import UsageError, no_such
from harness.invariance.generic import GENERIC
from harness.invariance.property import Property, of_relation
from harness.invariance.ways import WAYS
from harness.kernel import Kernel
from harness.op import Op


def properties_of(op: Op) -> dict[str, Property]:
    """Name → property; what the op declares comes before, and in place of, what holds for any op."""
    own = [of_relation(relation) for relation in op.relations]
    return {property.name: property for property in [*GENERIC, *WAYS, *own]}


def check_declared(kernel: Kernel, op: Op) -> None:
    """Raise `UsageError` unless what a kernel promises are properties of its op."""
    for name in kernel.invariant:
        if name not in (known := properties_of(op)):
            raise UsageError(no_such(f"property in invariant of {kernel.where}:", name, known))
