"""Inputs of a case: values from a counter-based generator, layouts by stride, guards around every tensor.

inputs = build(case, "cuda")
with guarded_allocations(0) as allocations:
    result = kernel.call(**(handed := inputs.hand_out()), **case.params)
problems = [*inputs.rebound(handed), *inputs.violations(), *allocations.violations({"result": result})]
"""

from harness.inputs.allocations import Allocations, guarded_allocations
from harness.inputs.bare import bare
from harness.inputs.bits import bits_of, unequal
from harness.inputs.blocks import row_blocks
from harness.inputs.fingerprint import fingerprint, fingerprints_of, value_fingerprint
from harness.inputs.layouts import LAYOUTS, Layout, applicable_layouts, tensor_layouts
from harness.inputs.of_case import Inputs, build, fingerprints
from harness.inputs.overlap import overlaps
from harness.inputs.poison import Differences, Poison, differences, poison_mask, unwritten
from harness.inputs.rebound import Rebound
from harness.inputs.shapes import TAILS, cut_rows, leading_dims, strided, widths, widths_with_tail
from harness.inputs.values import regimes
from harness.inputs.written import Violation, violations

__all__ = [
    "LAYOUTS",
    "TAILS",
    "Allocations",
    "Differences",
    "Inputs",
    "Layout",
    "Poison",
    "Rebound",
    "Violation",
    "applicable_layouts",
    "bare",
    "bits_of",
    "build",
    "cut_rows",
    "differences",
    "fingerprint",
    "fingerprints",
    "fingerprints_of",
    "guarded_allocations",
    "leading_dims",
    "overlaps",
    "poison_mask",
    "regimes",
    "row_blocks",
    "strided",
    "tensor_layouts",
    "unequal",
    "unwritten",
    "value_fingerprint",
    "violations",
    "widths",
    "widths_with_tail",
]
