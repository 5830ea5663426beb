"""The statistics of a comparison written down plainly, each on whole tensors: what every other way must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from lastbit.numerics import Enclosure, Format, round_to
from lastbit.numerics.formats import ordinals
from lastbit.result import NEAR, ULP_BINS, Comparison, Worst

FARTHEST = 2.0**40


def compare(actual: Tensor, expected: Enclosure, fmt: Format) -> Comparison:
    a = actual.to(torch.float64)
    exact, value, lo, hi = (p.expand(a.shape) for p in (expected.exact, expected.value, expected.lo, expected.hi))
    outside = outside_mask(a, expected)
    special = outside & (class_of(a) != class_of(lo)) & (class_of(lo) == class_of(hi))
    finite = torch.isfinite(a) & torch.isfinite(exact) & torch.isfinite(value)
    error, reference = torch.where(finite, a - exact, 0.0), torch.where(finite, exact, 0.0)
    inward = torch.where(finite, (a.abs() - exact.abs()) / spacing(reference, fmt), 0.0)
    near = finite & (inward.abs() <= NEAR)
    distance = ulp_distance(a, value, fmt)
    radius = (hi - lo) / 2
    free = torch.isfinite(radius) & (radius > 0) & torch.isfinite(a) & torch.isfinite(exact)
    ratio = torch.where(free, (a - (lo + radius)).abs() / torch.where(free, radius, 1.0), 0.0)
    bins = torch.bucketize(distance, torch.tensor(ULP_BINS, dtype=torch.float64))
    severity = (distance.clamp(max=FARTHEST) + outside * 2 * FARTHEST).reshape(-1)
    at = int(severity.argmax())
    return Comparison(
        numel=a.numel(),
        decided=int(((lo == hi) | torch.isnan(lo)).sum()),
        mismatched=int(((a != value) & ~(torch.isnan(a) & torch.isnan(value))).sum()),
        outside=int(outside.sum()),
        special=int(special.sum()),
        squared_error=float(error.square().sum()),
        squared_exact=float(reference.square().sum()),
        squared_contract=float(torch.where(finite, value - exact, 0.0).square().sum()),
        bias_sum=float((inward * near).sum()),
        bias_count=int(near.sum()),
        max_error=float(error.abs().max()),
        max_ulp=float(distance.max()),
        ulp_histogram=tuple(int((bins == b).sum()) for b in range(len(ULP_BINS) + 1)),
        budget_ratio=float(ratio.max()),
        worst=Worst(index_of(at, a.shape), *(float(t.reshape(-1)[at]) for t in (a, value, exact, lo, hi, distance))),
    )


def outside_mask(actual: Tensor, expected: Enclosure) -> Tensor:
    actual, lo, hi = actual.to(torch.float64), expected.lo, expected.hi
    inside = torch.where(torch.isnan(lo), torch.isnan(actual), (actual >= lo) & (actual <= hi))
    return ~(inside | (torch.isneginf(lo) & torch.isposinf(hi)))


def class_of(x: Tensor) -> Tensor:
    """0 finite, 1 and -1 the infinities, 2 NaN."""
    return torch.where(torch.isnan(x), 2.0, torch.nan_to_num(torch.isinf(x) * x.sign()))


def spacing(x: Tensor, fmt: Format) -> Tensor:
    exponent = torch.where(x == 0, fmt.min_exponent, torch.frexp(x).exponent - 1).clamp(min=fmt.min_exponent)
    return torch.ldexp(torch.ones_like(x), exponent - fmt.precision + 1)


def ulp_distance(a: Tensor, value: Tensor, fmt: Format) -> Tensor:
    a_nan, value_nan = torch.isnan(a), torch.isnan(value)
    actual, expected = (ordinals(torch.where(torch.isnan(t), 0.0, round_to(t, fmt)), fmt) for t in (a, value))
    distance = (actual - expected).abs().to(torch.float64)
    return torch.where(a_nan | value_nan, torch.where(a_nan & value_nan, 0.0, torch.inf), distance).contiguous()


def index_of(position: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(position), shape))
