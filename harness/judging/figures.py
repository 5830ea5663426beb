"""The figures of a comparison that the kernels of `fused_compare` write, and the statistics made of them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from lastbit.judging.torch_compare import FARTHEST, unravel
from lastbit.result import Comparison, Worst


class FloatFigures(NamedTuple):
    """The figures that `finish` writes of a comparison with an enclosure; the parts of the worst element follow.

    `undecided` elements are not decided, `far` ones do not count in the bias, and `beyond_16` are those farther than
    16 ulp from the contract's value.
    """

    undecided: float
    mismatched: float
    outside: float
    special: float
    far: float
    beyond_0: float
    beyond_1: float
    beyond_2: float
    beyond_4: float
    beyond_16: float
    squared_error: float
    squared_exact: float
    squared_contract: float
    bias_sum: float
    max_error: float
    max_ulp: float
    budget_ratio: float
    position: float
    severity: float
    actual: float


class IntegerFigures(NamedTuple):
    """The figures that `finish` writes of a comparison of integers."""

    wrong: float
    beyond_0: float
    beyond_1: float
    beyond_2: float
    beyond_4: float
    beyond_16: float
    squared_error: float
    squared_exact: float
    position: float
    farthest: float
    actual: float
    expected: float


def comparison(shape: torch.Size, numbers: list[float]) -> Comparison:
    """Make the statistics of floating-point numbers from `FloatFigures` and the parts of the worst element."""
    figures, numel = FloatFigures(*numbers[: len(FloatFigures._fields)]), shape.numel()
    known = numbers[len(FloatFigures._fields) :]
    exact, value, lo, hi = (known + known[-1:] * 3)[:4]
    index = unravel(int(figures.position), shape)
    return Comparison(
        numel=numel,
        decided=numel - int(figures.undecided),
        mismatched=int(figures.mismatched),
        outside=int(figures.outside),
        special=int(figures.special),
        squared_error=figures.squared_error,
        squared_exact=figures.squared_exact,
        squared_contract=figures.squared_contract,
        max_error=figures.max_error,
        bias_sum=figures.bias_sum,
        bias_count=numel - int(figures.far),
        max_ulp=figures.max_ulp,
        ulp_histogram=_histogram(numel, figures),
        budget_ratio=figures.budget_ratio,
        worst=Worst(index, figures.actual, value, exact, lo, hi, _ulp_of(figures.severity)),
    )


def comparison_of_integers(shape: torch.Size, numbers: list[float]) -> Comparison:
    """Make the statistics of integers from `IntegerFigures`."""
    figures, numel = IntegerFigures(*numbers), shape.numel()
    index, value = unravel(int(figures.position), shape), figures.expected
    return Comparison(
        numel=numel,
        decided=numel,
        mismatched=int(figures.wrong),
        outside=int(figures.wrong),
        squared_error=figures.squared_error,
        squared_exact=figures.squared_exact,
        squared_contract=0.0,
        max_error=figures.farthest,
        max_ulp=figures.farthest,
        ulp_histogram=_histogram(numel, figures),
        worst=Worst(index, figures.actual, value, value, value, value, figures.farthest),
    )


def _histogram(numel: int, figures: FloatFigures | IntegerFigures) -> tuple[int, ...]:
    f = figures
    beyond = map(int, (numel, f.beyond_0, f.beyond_1, f.beyond_2, f.beyond_4, f.beyond_16, 0))
    return tuple(more - less for more, less in pairwise(beyond))


def _ulp_of(severity: float) -> float:
    """Return the distance in ulp of an element of that severity."""
    distance = severity - 2 * FARTHEST if severity >= 2 * FARTHEST else severity
    return math.inf if distance == FARTHEST else distance
