"""Inputs of a case: values from a counter-based generator, layouts by stride, guards around every tensor.

inputs = build(case, "cuda")
with guarded_allocations(0) as allocations:
    result = kernel.call(**(handed := inputs.hand_out()), **case.params)
problems = [*inputs.rebound(handed), *inputs.violations(), *allocations.violations({"result": result})]
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lastbit.inputs.allocations import Allocations, guarded_allocations
from lastbit.inputs.bits import bits_of, unequal
from lastbit.inputs.blocks import row_blocks
from lastbit.inputs.choices import DRAWN, chosen_tensor, layouts_like, least_rows, residues, row_layouts, tensor_choices
from lastbit.inputs.combinations import Accepted, combinations
from lastbit.inputs.fingerprint import fingerprint, fingerprints_of
from lastbit.inputs.layouts import LAYOUTS, Layout, applicable_layouts
from lastbit.inputs.of_case import Inputs, bare, build, fingerprints, holding, refilled
from lastbit.inputs.overlap import is_folded, overlaps
from lastbit.inputs.poison import Differences, Poison, differences, unwritten
from lastbit.inputs.values import regimes
from lastbit.inputs.written import violations

if TYPE_CHECKING:
    from lastbit.inputs.shapes import cut_rows, leading_dims, widths, widths_with

_STRATEGIES = frozenset({"cut_rows", "leading_dims", "widths", "widths_with"})
"""What cases draw from by Hypothesis, which takes longer to import than all of lastbit; judging needs none of it."""

__all__ = [
    "DRAWN", "LAYOUTS", "Accepted", "Allocations", "Differences", "Inputs", "Layout", "Poison",
    "applicable_layouts", "bare", "bits_of", "build", "chosen_tensor", "combinations", "cut_rows", "differences",
    "fingerprint", "fingerprints", "fingerprints_of", "guarded_allocations", "holding", "is_folded", "layouts_like",
    "leading_dims", "least_rows", "overlaps", "refilled", "regimes", "residues", "row_blocks", "row_layouts",
    "tensor_choices", "unequal", "unwritten", "violations", "widths", "widths_with",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a Hypothesis strategy of `shapes` when it is first asked for: nothing else here needs Hypothesis."""
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lastbit.inputs.shapes"), name)
