"""Comparison of actual values with an enclosure, in one pass; it knows no threshold.

`torch_compare` is the definition. On a GPU, `fused_compare` reads everything once and gives the same figures; several
comparisons are begun before the first is asked for, because each time that the host waits is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lastbit.judging import torch_compare
from lastbit.numerics import Enclosure, Format, Indices
from lastbit.numerics.formats import FP64
from lastbit.result import Comparison
from lastbit.timing import COMPARING, timed
from lastbit.trust import fuses

if TYPE_CHECKING:
    from lastbit.judging.fused_compare import ComparedPair


@dataclass(frozen=True, eq=False)
class Begun:
    """A comparison that a device makes.

    Attributes:
        figures: where its figures will be.
        comparison: makes the statistics from them, as numbers of the host.
    """

    figures: Tensor
    comparison: Callable[[list[float]], Comparison]


@timed(COMPARING)
def begin(actual: Tensor, expected: Enclosure, fmt: Format) -> Begun | Comparison:
    """Begin to compare `actual` (any float dtype) with `expected`, which broadcasts to its shape.

    Distances in ulp are those of `fmt`, the format that the stage has under the contract.
    """
    if actual.numel() == 0:
        return Comparison()
    if fmt is FP64 or fmt.direction == "either" or (pair := _pair(actual, expected)) is None:
        return torch_compare.compare(actual, expected, fmt)
    return pair.begin(fmt)


@timed(COMPARING)
def begin_integers(actual: Tensor, expected: Tensor) -> Begun | Comparison:
    """Begin to compare `actual` with integers or truth values, all of which must be equal; an ulp is 1."""
    if actual.numel() == 0:
        return Comparison()
    if (pair := _pair(actual, expected)) is None:
        return torch_compare.compare_integers(actual, expected)
    return pair.begin_integers()


@timed(COMPARING)
def begin_choices(actual: Tensor, expected: Indices) -> Comparison:
    """Compare `actual` with indices: a kernel may give any index that is allowed in its row."""
    return Comparison() if actual.numel() == 0 else torch_compare.compare_choices(actual, expected)


@timed(COMPARING)
def finished(comparisons: Sequence[Begun | Comparison]) -> list[Comparison]:
    """Return the statistics of all comparisons, in order; the device is waited for once."""
    begun = [c.figures for c in comparisons if isinstance(c, Begun)]
    if not begun:
        return [c for c in comparisons if isinstance(c, Comparison)]
    figures = iter(torch.cat(begun).tolist())
    return [c.comparison(list(islice(figures, len(c.figures)))) if isinstance(c, Begun) else c for c in comparisons]


def compare(actual: Tensor, expected: Enclosure, fmt: Format) -> Comparison:
    """Compare and wait for the statistics; see `begin`."""
    return finished([begin(actual, expected, fmt)])[0]


def outside_count(actual: Tensor, expected: Enclosure | Tensor) -> Tensor:
    """Count the elements of `actual` outside `expected`, which broadcasts to its shape: int64, on their device."""
    if actual.numel() == 0 or (pair := _pair(actual, expected)) is None:
        return torch_compare.outside_count(actual, expected)
    return pair.outside_count()


def _pair(actual: Tensor, expected: Enclosure | Tensor) -> ComparedPair | None:
    """Return both as the fused kernels take them, None where none is used; Triton is not imported for CPU tensors."""
    if not fuses(actual):
        return None
    from lastbit.judging.fused_compare import ComparedPair, trusted

    pair = ComparedPair.of(actual, expected)
    return pair if pair is not None and trusted(pair.sort) else None
