"""Comparison of actual values with an enclosure, in one pass; it knows no threshold.

`torch_compare` is the definition. On a GPU, `fused_compare` reads everything once and gives the same figures.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from harness.judging import torch_compare
from harness.numerics import Enclosure, Format
from harness.numerics.formats import FP64
from harness.result import Comparison
from harness.timing import COMPARING, timed
from harness.trust import fuses


@timed(COMPARING)
def compare(actual: Tensor, expected: Enclosure, fmt: Format) -> Comparison:
    """Statistics of `actual` (any float dtype) against `expected`, which broadcasts to its shape.

    Distances in ulp are those of `fmt`, the format that the stage has under the contract.
    """
    if actual.numel() == 0:
        return Comparison()
    module = torch_compare if fmt is FP64 else _module_for(actual, expected)
    return module.compare(actual, expected, fmt)  # type: ignore[no-any-return]


@timed(COMPARING)
def compare_integers(actual: Tensor, expected: Tensor) -> Comparison:
    """Statistics of `actual` against integers or truth values, all of which must be equal; an ulp is 1."""
    if actual.numel() == 0:
        return Comparison()
    return _module_for(actual, expected).compare_integers(actual, expected)  # type: ignore[no-any-return]


def outside_mask(actual: Tensor, expected: Enclosure | Tensor) -> Tensor:
    """Elements that lie outside what is expected. NaN is allowed only where it must be, or where nothing is known."""
    return torch_compare.outside_mask(actual, expected)


def outside_count(actual: Tensor, expected: Enclosure | Tensor) -> int:
    """How many elements of `actual` are outside `expected`, which broadcasts to its shape."""
    if actual.numel() == 0:
        return 0
    return _module_for(actual, expected).outside_count(actual, expected)  # type: ignore[no-any-return]


def _module_for(actual: Tensor, expected: Enclosure | Tensor) -> ModuleType:
    """What compares these tensors; Triton is not imported for tensors in the memory of the CPU."""
    if fuses(actual):
        from harness.judging import compare_selftest, fused_compare

        if compare_selftest.trusted(fused_compare.sort_of(actual, expected)):
            return fused_compare
    return torch_compare
