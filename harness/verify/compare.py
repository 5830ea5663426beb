"""Comparison of actual values with an enclosure, in one pass; it knows no threshold."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.numerics import Enclosure, Format, round_to
from harness.numerics.formats import ordinals
from harness.result import NEAR, ULP_BINS, Comparison, Worst
from harness.timing import COMPARING, timed

_FARTHEST = 2.0**40  # more than any distance in ulp of a format of 32 bits; an infinite distance counts as this


@timed(COMPARING)
def compare(actual: Tensor, expected: Enclosure, fmt: Format) -> Comparison:
    """Statistics of `actual` (any float dtype) against `expected`, which broadcasts to its shape.

    Distances in ulp are those of `fmt`, the format that the stage has under the contract.
    """
    if actual.numel() == 0:
        return Comparison()
    a = actual.to(torch.float64)
    exact, value, lo, hi = (p.expand(a.shape) for p in (expected.exact, expected.value, expected.lo, expected.hi))
    outside = outside_mask(a, expected)
    decided = (lo == hi) | torch.isnan(lo)
    mismatched = (a != value) & ~(torch.isnan(a) & torch.isnan(value))
    special = outside & (_class_of(a) != _class_of(lo)) & (_class_of(lo) == _class_of(hi))

    finite = torch.isfinite(a) & torch.isfinite(exact)
    error = torch.where(finite, a - exact, 0.0)
    reference = torch.where(finite, exact, 0.0)
    inward = torch.where(finite, (a.abs() - exact.abs()) / _spacing(reference, fmt), 0.0)
    near = finite & (inward.abs() <= NEAR)
    distance = _ulp_distance(a, value, fmt)
    radius = (hi - lo) / 2
    free = torch.isfinite(radius) & (radius > 0) & finite
    ratio = torch.where(free, (a - (lo + radius)).abs() / torch.where(free, radius, 1.0), 0.0)
    bins = torch.bucketize(distance, torch.tensor(ULP_BINS, dtype=torch.float64, device=a.device))
    severity = (distance.clamp(max=_FARTHEST) + outside * 2 * _FARTHEST).reshape(-1)
    at = severity.argmax()

    sums = [decided, mismatched, outside, special, error.square(), reference.square(), inward * near, near]
    tops = [error.abs(), distance, ratio]
    numbers = torch.stack(
        [s.sum(dtype=torch.float64) for s in sums]
        + [t.max() for t in tops]
        + [(bins == b).sum(dtype=torch.float64) for b in range(len(ULP_BINS) + 1)]
        + [at.to(torch.float64)]
        + [t.reshape(-1)[at] for t in (a, value, exact, lo, hi, distance)]
    ).tolist()
    histogram = numbers[11 : 11 + len(ULP_BINS) + 1]
    position, *values = numbers[11 + len(ULP_BINS) + 1 :]
    return Comparison(
        numel=a.numel(),
        decided=int(numbers[0]),
        mismatched=int(numbers[1]),
        outside=int(numbers[2]),
        special=int(numbers[3]),
        squared_error=numbers[4],
        squared_exact=numbers[5],
        bias_sum=numbers[6],
        bias_count=int(numbers[7]),
        max_error=numbers[8],
        max_ulp=numbers[9],
        budget_ratio=numbers[10],
        ulp_histogram=tuple(map(int, histogram)),
        worst=Worst(_unravel(int(position), a.shape), *values),
    )


@timed(COMPARING)
def compare_integers(actual: Tensor, expected: Tensor) -> Comparison:
    """Statistics of `actual` against integers or truth values, all of which must be equal; an ulp is 1."""
    if actual.numel() == 0:
        return Comparison()
    wrong = actual != expected  # in integers: fp64 does not hold all of int64
    a, value = actual.to(torch.float64), expected.expand(actual.shape).to(torch.float64)
    distance = torch.where(wrong, (a - value).abs().clamp(min=1.0), 0.0)
    bins = torch.bucketize(distance, torch.tensor(ULP_BINS, dtype=torch.float64, device=a.device))
    at = int(distance.argmax())
    first, second, farthest = (float(t.reshape(-1)[at]) for t in (a, value, distance))
    return Comparison(
        numel=a.numel(),
        decided=a.numel(),
        mismatched=(count := int(wrong.sum())),
        outside=count,
        squared_error=float(distance.square().sum()),
        squared_exact=float(value.square().sum()),
        max_error=farthest,
        max_ulp=farthest,
        ulp_histogram=tuple(torch.bincount(bins.reshape(-1), minlength=len(ULP_BINS) + 1).tolist()),
        worst=Worst(_unravel(at, a.shape), first, second, second, second, second, farthest),
    )


def outside_mask(actual: Tensor, expected: Enclosure | Tensor) -> Tensor:
    """Elements that `expected` forbids. NaN is allowed only where it must be, or where nothing is known."""
    if isinstance(expected, Tensor):
        return actual != expected
    actual = actual.to(torch.float64)
    lo, hi = expected.lo, expected.hi
    inside = torch.where(torch.isnan(lo), torch.isnan(actual), (actual >= lo) & (actual <= hi))
    return ~(inside | (torch.isneginf(lo) & torch.isposinf(hi)))


def _class_of(x: Tensor) -> Tensor:
    """0 finite, 1 and -1 the infinities, 2 NaN."""
    infinite = torch.isinf(x) * x.sign()
    return torch.where(torch.isnan(x), 2.0, torch.nan_to_num(infinite))


def _spacing(x: Tensor, fmt: Format) -> Tensor:
    """Distance between neighbours of `fmt` around `x`."""
    exponent = torch.where(x == 0, fmt.min_exponent, torch.frexp(x).exponent - 1).clamp(min=fmt.min_exponent)
    return torch.ldexp(torch.ones_like(x), exponent - fmt.precision + 1)


def _ulp_distance(a: Tensor, value: Tensor, fmt: Format) -> Tensor:
    """Distance on the grid of `fmt`, as fp64; 0 for two NaN, inf for one."""
    a_nan, value_nan = torch.isnan(a), torch.isnan(value)
    actual, expected = (ordinals(torch.where(torch.isnan(t), 0.0, round_to(t, fmt)), fmt) for t in (a, value))
    distance = (actual - expected).abs().to(torch.float64)
    return torch.where(a_nan | value_nan, torch.where(a_nan & value_nan, 0.0, torch.inf), distance).contiguous()


def _unravel(position: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))
