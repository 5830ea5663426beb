"""Every statistic of a comparison in torch: the definition, which is used wherever no fused kernel is.

Rare figures are computed where they occur: distances of elements that differ, ratios of undecided ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lastbit.numerics import Enclosure, Format, Indices, round_to
from lastbit.numerics.formats import ordinals, round_bits
from lastbit.result import NEAR, ULP_BINS, Comparison, Worst

FARTHEST = 2.0**40
"""More than any distance in ulp of a format of 32 bits; an infinite distance counts as this."""

_EXPONENT = 0x7FF << 52


class _Strays(NamedTuple):
    """Figures of the elements that differ from the contract's value or lie outside; every other one is at 0 ulp."""

    mismatched: int = 0
    outside: int = 0
    special: int = 0
    max_ulp: float = 0.0
    histogram: tuple[int, ...] = (0,) * (len(ULP_BINS) + 1)
    worst: int = 0
    worst_ulp: float = 0.0


def compare(actual: Tensor, expected: Enclosure, fmt: Format) -> Comparison:
    """Compare `actual`, which is not empty, with an enclosure; see `lastbit.judging.compare.compare`."""
    a = actual.to(torch.float64)
    e = expected[(None,) * (a.ndim - len(expected.shape))]
    e = Enclosure(e.parts.expand(len(e.parts), *a.shape))
    undecided, budget_ratio = _freedom(a, e, fmt)
    strays = _strays(a, e, fmt)
    index = unravel(strays.worst, a.shape)
    known = e[index].parts.tolist()
    exact, value, lo, hi = (known + known[-1:] * 3)[:4]
    return Comparison(
        numel=a.numel(),
        decided=a.numel() - undecided,
        mismatched=strays.mismatched,
        outside=strays.outside,
        special=strays.special,
        **_errors(a, e, fmt, strays.mismatched),
        max_ulp=strays.max_ulp,
        ulp_histogram=(a.numel() - sum(strays.histogram[1:]), *strays.histogram[1:]),
        budget_ratio=budget_ratio,
        worst=Worst(index, float(a[index]), value, exact, lo, hi, strays.worst_ulp),
    )


def _freedom(a: Tensor, e: Enclosure, fmt: Format) -> tuple[int, float]:
    """Count undecided elements; tell how far they use what they are free in, the largest |actual - middle| / radius."""
    if len(e.parts) < 4:
        return 0, 0.0
    free = (~are_decided(e.lo, e.hi, fmt)).reshape(-1).nonzero().squeeze(-1)
    if not len(free):
        return 0, 0.0
    x, exact, _, lo, hi = (part.reshape(-1)[free] for part in (a, *e.parts))
    radius = (hi - lo) / 2
    bounded = torch.isfinite(radius) & (radius > 0) & torch.isfinite(x) & torch.isfinite(exact)
    ratio = torch.where(bounded, (x - (lo + radius)).abs() / radius, 0.0)
    return len(free), float(ratio.max())


def compare_integers(actual: Tensor, expected: Tensor) -> Comparison:
    """Compare `actual`, which is not empty, with integers; see `lastbit.judging.compare.begin_integers`."""
    return _of_integers(actual, expected, actual != expected, actual.numel())  # fp64 does not hold all of int64


def compare_choices(actual: Tensor, expected: Indices) -> Comparison:
    """Compare `actual`, which is not empty, with indices; see `lastbit.judging.compare.begin_choices`.

    An index that is allowed and not the contract's own is a mismatch, at 0 ulp.
    """
    decided = int((expected.allowed.count_nonzero(-1) == 1).count_nonzero())
    found = _of_integers(actual, expected.value, expected.outside(actual), decided)
    return replace(found, mismatched=int((actual != expected.value).count_nonzero()))


def _of_integers(actual: Tensor, expected: Tensor, wrong: Tensor, decided: int) -> Comparison:
    """Return the statistics of integers, of which `wrong` masks the wrong ones; an ulp is 1."""
    a, value = actual.to(torch.float64), expected.expand(actual.shape).to(torch.float64)
    distance = torch.where(wrong, (a - value).abs().clamp(min=1.0), 0.0)
    at = int(distance.argmax())
    first, second, farthest = (float(t.reshape(-1)[at]) for t in (a, value, distance))
    return Comparison(
        numel=a.numel(),
        decided=decided,
        mismatched=(count := int(wrong.count_nonzero())),
        outside=count,
        squared_error=float(distance.square().sum()),
        squared_exact=float(value.square().sum()),
        squared_contract=0.0,
        max_error=farthest,
        max_ulp=farthest,
        ulp_histogram=_histogram(distance),
        worst=Worst(unravel(at, a.shape), first, second, second, second, second, farthest),
    )


def outside_mask(actual: Tensor, expected: Enclosure | Tensor) -> Tensor:
    """Return a mask of the elements outside `expected`; NaN is inside only if required, or where nothing is known."""
    if isinstance(expected, Tensor):
        return actual != expected
    actual = actual.to(torch.float64)
    lo, hi = expected.lo, expected.hi
    inside = (actual >= lo) & (actual <= hi)
    if actual.device.type == "cpu" and inside.all():  # to ask another device takes longer than the rest
        return ~inside
    inside |= torch.isnan(lo) & torch.isnan(actual)
    return ~(inside | (torch.isneginf(lo) & torch.isposinf(hi)))


def outside_count(actual: Tensor, expected: Enclosure | Tensor) -> Tensor:
    """Count the elements of `actual` outside `expected`."""
    return outside_mask(actual, expected).count_nonzero()


def unravel(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the element at `position` in row-major order."""
    index = []
    for size in reversed(shape):
        position, remainder = divmod(position, size)
        index.append(remainder)
    return tuple(reversed(index))


def _errors(a: Tensor, e: Enclosure, fmt: Format, mismatched: int) -> dict[str, Any]:
    """Return errors against the exact part where it, the actual and the contract's value are finite."""
    finite, exact, sums = None, e.exact, {"max_error": math.inf}
    value = e.value if mismatched else None  # otherwise the kernel's values are the contract's
    if a.is_contiguous() and exact.is_contiguous():
        sums = _squares(a, exact, value, None)
    if not math.isfinite(sum(sums.values())):
        finite = torch.isfinite(a) & torch.isfinite(exact) & torch.isfinite(e.value)
        sums = _squares(a, exact, value, finite)
    center = _where(finite, exact)
    power = (center.view(torch.int64) & _EXPONENT).view(torch.float64).clamp(min=2.0**fmt.min_exponent)
    inward = a.abs().sub_(exact.abs()).div_(power * fmt.epsilon)  # in distances between neighbours of `fmt` around it
    inward = _where(finite, inward)
    bias_count = a.numel()
    if finite is not None or not _largest(inward) <= NEAR:
        near = inward.abs() <= NEAR
        near = near if finite is None else finite & near
        inward, bias_count = inward.mul_(near), int(near.count_nonzero())
    return {**sums, "bias_sum": float(inward.sum()), "bias_count": bias_count}


def _squares(a: Tensor, exact: Tensor, value: Tensor | None, finite: Tensor | None) -> dict[str, float]:
    """Sum squares over the elements that are `finite`, or all of them; in one piece of memory, which is faster."""
    error, reference = _where(finite, a - exact), _where(finite, exact)
    largest = _largest(error)
    squared_error = squared_contract = float(error.square_().sum())
    if value is not None:
        squared_contract = float(torch.sub(_where(finite, value), reference, out=error).square_().sum())
    squared_exact = float(torch.mul(reference, reference, out=error).sum())
    return {
        "max_error": largest,
        "squared_error": squared_error,
        "squared_exact": squared_exact,
        "squared_contract": squared_contract,
    }


def _where(finite: Tensor | None, x: Tensor) -> Tensor:
    return x if finite is None else torch.where(finite, x, 0.0)


def are_decided(lo: Tensor, hi: Tensor, fmt: Format) -> Tensor:
    """Return a mask of the decided elements: those with one legal value, NaN included, or where the contract rounds to
    either neighbour of a number, with these two.
    """
    one = (lo == hi) | torch.isnan(lo)
    if fmt.direction != "either":
        return one
    known = torch.isfinite(lo) & torch.isfinite(hi)
    low, high = (ordinals(torch.where(known, end, 0.0), fmt) for end in (lo, hi))
    return one | (known & (high - low <= 1))


def _strays(a: Tensor, e: Enclosure, fmt: Format) -> _Strays:
    stray = a != e.value
    if len(e.parts) == 4:
        stray |= ~((a >= e.lo) & (a <= e.hi))
    position = stray.reshape(-1).nonzero().squeeze(-1)
    if not len(position):
        return _Strays()
    x, *parts = (part.reshape(-1)[position] for part in (a, *e.parts))
    at = Enclosure(torch.stack(parts))
    outside = outside_mask(x, at)
    distance = _ulp_distance(x, at.value, fmt)
    severity = distance.clamp(max=FARTHEST) + outside * 2 * FARTHEST
    worst = int(severity.argmax())
    first = float(severity[worst]) == 0  # as severe as the elements that are no strays
    special = 0  # of those outside, elements of a wrong class: 0 finite, 1 and -1 the infinities, 2 NaN
    if bool(outside.any()):
        values = torch.stack((x[outside], at.lo[outside], at.hi[outside]))
        classes = torch.where(torch.isnan(values), 2.0, torch.nan_to_num(torch.isinf(values) * values.sign()))
        special = int(((classes[0] != classes[1]) & (classes[1] == classes[2])).count_nonzero())
    return _Strays(
        mismatched=int(((x != at.value) & ~(torch.isnan(x) & torch.isnan(at.value))).count_nonzero()),
        outside=int(outside.count_nonzero()),
        special=special,
        max_ulp=float(distance.max()),
        histogram=_histogram(distance),
        worst=0 if first else int(position[worst]),
        worst_ulp=float(distance[worst]),
    )


def _histogram(distance: Tensor) -> tuple[int, ...]:
    edges = torch.tensor(ULP_BINS, dtype=torch.float64, device=distance.device)
    return tuple(torch.bucketize(distance.reshape(-1), edges).bincount(minlength=len(ULP_BINS) + 1).tolist())


def _largest(x: Tensor) -> float:
    """Return the largest |element|; NaN if any is."""
    low, high = torch.aminmax(x)
    return abs(max(float(high), -float(low)))


def _ulp_distance(a: Tensor, value: Tensor, fmt: Format) -> Tensor:
    """Return the distance in ulp of `fmt`, as fp64; 0 for two NaN, inf for one."""
    both = torch.stack((a, value))
    nan = torch.isnan(both)
    rounded = (round_bits if fmt.is_integer else round_to)(both.masked_fill(nan, 0.0), fmt)
    positions = ordinals(rounded.masked_fill(torch.isnan(rounded), torch.inf), fmt)  # what overflows to NaN
    distance = (positions[0] - positions[1]).abs().to(torch.float64)
    return torch.where(nan[0] == nan[1], distance, torch.inf)
