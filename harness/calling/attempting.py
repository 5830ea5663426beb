"""A call with tensors that may be on any device: what it gave, what it raised, and of what it warned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from lastbit.calling.performing import Said
from lastbit.inputs.allocations import guarded_allocations

Results = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Calls a kernel with tensors by name, waits for the device, and gives its results by name."""


@dataclass(frozen=True)
class Attempt:
    """One call: its results, its exception and its warnings.

    Attributes:
        results: copies of what it returned, by name; none where it raised.
        error: what it raised.
        warnings: what it warned of.
        rebound: what became of the tensors that it was handed.
        violations: what it wrote outside of memory that it allocated.
    """

    results: Mapping[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    warnings: tuple[Warning, ...] = ()
    rebound: tuple[Said, ...] = ()
    violations: tuple[Said, ...] = ()


def attempted(call: Results, tensors: Mapping[str, Tensor]) -> Attempt:
    """Call the kernel and record results, error and every warning."""
    with guarded_allocations(0) as allocations, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            # Copies, because a result may share memory with an input that is restored afterwards.
            results, error = {name: result.clone() for name, result in call(tensors).items()}, None
        except Exception as raised:  # the kernel's own code runs here
            results, error = {}, raised
    told = tuple(w.message for w in caught if isinstance(w.message, Warning))
    return Attempt(results, error, told, violations=tuple(allocations.violations()))
