"""Arithmetic of stacked parts, elementwise: every operation on enclosures, for exact, value, lo and hi at once.

A function takes fp64 tensors [parts, ...shape] with 1, 2 or 4 parts (see `Enclosure`), whose shapes broadcast, and
returns a new one. Where it takes a format, the contract's side of the result is rounded to it. Each function is the
definition, and runs on the CPU; those marked `one_kernel_on_cuda` are a single kernel on a CUDA device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lastbit.numerics.formats import PRECISE, Format, are_fp32, round_ends, round_to, sum_to_odd
from lastbit.numerics.fused import one_kernel_on_cuda

LEAST = 2.0**-1022
"""The smallest normal number of fp64."""


def full(parts: Tensor) -> Tensor:
    """Return all four parts."""
    return parts if len(parts) == 4 else torch.cat([parts[:1], parts[-1:].expand(3, *parts.shape[1:])])


def all_finite(ends: Tensor) -> bool:
    """Return True where no element is infinite or NaN, so that nothing can be unknown; False may mean anything.

    It looks on the CPU only: an accelerator would have to finish everything before it could answer.
    """
    return ends.device.type == "cpu" and math.isfinite(float(ends.sum()))


def unknown(parts: Tensor) -> Tensor | None:
    """Return a mask of the elements about which nothing is known, NaN included; None where there can be none."""
    return torch.isneginf(parts[2]) & torch.isposinf(parts[3]) if len(parts) == 4 else None


def unknown_where(parts: Tensor, *masks: Tensor | None) -> Tensor:
    """Mark the masked elements as unknown, and those of which one end alone is NaN."""
    if len(parts) < 4:
        return parts
    lost = torch.isnan(parts[2]) ^ torch.isnan(parts[3])
    for mask in masks:
        lost = lost if mask is None else lost | mask
    ends = torch.where(lost, -torch.inf, parts[2]), torch.where(lost, torch.inf, parts[3])
    return torch.stack([parts[0], parts[1], *ends])


@one_kernel_on_cuda
def unknown_if(x: Tensor, lost: Tensor) -> Tensor:
    """Mark the elements as unknown where `lost` (one part) is not zero."""
    return unknown_where(x, lost[0] != 0)


@one_kernel_on_cuda
def rounded(x: Tensor, fmt: Format) -> Tensor:
    """Round value and ends correctly, in the direction of the format; the exact part stays."""
    if fmt is PRECISE:
        return unknown_where(x, unknown(x))  # its ends cover what fp64 errs
    x, result = _rounded(x, fmt)
    if len(x) < 4 or all_finite(result[2:]):
        return result
    if fmt.overflow == "nan":  # both ends overflow, on either side of what is finite
        return unknown_where(result, unknown(x), torch.isnan(result[2]) & (x[2] < 0) & (x[3] > 0))
    return unknown_where(result, unknown(x))


def _rounded(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Return the parts, four where a number may be rounded to either neighbour, and the rounded parts."""
    if fmt.direction == "either":
        x = full(x)
        return x, torch.stack([x[0], round_to(x[1], fmt), *round_ends(x[2], x[3], fmt)])
    return x, torch.cat([x[:1], round_to(x[1:] if len(x) > 1 else x, fmt)])


def converted(x: Tensor, fmt: Format) -> Tensor:
    """Convert value and ends to integers of `fmt`, in its direction; the exact part stays.

    Nothing is known where that may be a number beyond the range of `fmt`, or NaN.
    """
    _, result = _rounded(x, fmt)
    if all_finite(result):
        return result
    four = full(result)
    lost = ~torch.isfinite(four[2:]).all(0)
    ends = torch.where(lost, -torch.inf, four[2]), torch.where(lost, torch.inf, four[3])
    return torch.stack([four[0], four[1], *ends])


@one_kernel_on_cuda
def negated(x: Tensor) -> Tensor:
    """Return -x, whose ends are exchanged."""
    return -x if len(x) < 4 else -torch.stack([x[0], x[1], x[3], x[2]])


@one_kernel_on_cuda
def added(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Return x + y."""
    if fmt is PRECISE:
        x, y = (full(parts) for parts in aligned(x, y))
        total = x + y
        return covered(total, (total - x == y) & (total - y == x))
    return rounded(unrounded_sum(x, y), fmt)


@one_kernel_on_cuda
def subtracted(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Return x - y."""
    return added(x, negated(y), fmt)


@one_kernel_on_cuda
def multiplied(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Return x · y."""
    product = unrounded_product(x, y)
    if fmt is PRECISE:
        x, y = (full(parts) for parts in aligned(x, y))
        point = (x[2] == x[3]) & (y[2] == y[3])
        return covered(product, (x == 0) | (y == 0) | point & holds_fp32(x) & holds_fp32(y))
    return rounded(product, fmt)


def unrounded_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, such that rounding it to fp32 is one correct rounding.

    For numbers of fp32 the fp64 sum is (53 >= 2 * 24 + 2, Figueroa 1995); for a product that was not rounded it is not.
    """
    x, y = aligned(x, y)
    plain = all(are_fp32(parts[1:] if len(parts) > 1 else parts) for parts in (x, y))  # the exact part need not be
    return x + y if plain else sum_to_odd(x, y)


@one_kernel_on_cuda
def unrounded_product(x: Tensor, y: Tensor) -> Tensor:
    """Return x · y, exact in fp64 for numbers of fp32."""
    x, y = aligned(x, y)
    product = x * y
    if len(product) < 4:
        return product
    ends = [product[2], product[3]]
    if len(x) == len(y) == 4:
        ends += [x[2] * y[3], x[3] * y[2]]
    product[2], product[3] = extremes(ends)
    return product if all_finite(product[2:]) else unknown_where(product, unknown(x), unknown(y))


def aligned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with equally many dimensions, and equally many parts unless one is a number that is known exactly."""
    if {len(x), len(y)} == {2, 4}:
        x, y = full(x), full(y)
    rank = max(x.ndim, y.ndim)
    return tuple(p.reshape(len(p), *[1] * (rank - p.ndim), *p.shape[1:]) for p in (x, y))  # type: ignore[return-value]


def extremes(ends: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest of several tensors, elementwise; where only some are NaN, nothing is known."""
    lo = hi = ends[0]
    for end in ends[1:]:
        lo, hi = torch.minimum(lo, end), torch.maximum(hi, end)
    if all_finite(lo):  # a NaN would have been the smallest
        return lo, hi
    lost = torch.isnan(lo) & ~torch.stack([torch.isnan(end) for end in ends]).all(0)
    return torch.where(lost, -torch.inf, lo), torch.where(lost, torch.inf, hi)


@one_kernel_on_cuda
def hull(*options: Tensor) -> Tensor:
    """Enclose numbers that may be any of the options; exact part and value are those of the first."""
    first = options[0]
    ends = [end for option in options for end in (option[-2:] if len(option) == 4 else option[-1:])]
    return torch.stack([first[0], first[min(1, len(first) - 1)], *extremes(ends)])


@one_kernel_on_cuda
def fusible_product(x: Tensor, y: Tensor, fmt: Format) -> Tensor:
    """Return x · y, its ends rounded or not."""
    if fmt is PRECISE:
        return multiplied(x, y, fmt)
    product = unrounded_product(x, y)
    settled = full(rounded(product, fmt))
    return hull(settled, torch.cat([settled[:2], full(product)[2:]]))


@one_kernel_on_cuda
def product_in_any_order(*factors: Tensor, fmt: Format) -> Tensor:
    """Multiply all factors, two at a time in whichever order; the value is that from left to right."""
    everything = (1 << len(factors)) - 1
    products = {1 << position: factor for position, factor in enumerate(factors)}
    for part in range(1, everything + 1):
        if part not in products:
            ways = [multiplied(products[one], products[part ^ one], fmt) for one in _halves(part)]
            single = len(ways) == 1 and len(ways[0]) < 4 and part != everything
            products[part] = ways[0] if single else hull(*ways)
    return products[everything]


def _halves(part: int) -> Iterator[int]:
    """Yield one side of each split of the bits of `part` in two, the one without the last bit first."""
    last = 1 << (part.bit_length() - 1)
    rest = part ^ last
    one = rest
    while one:
        yield one
        one = (one - 1) & rest


@one_kernel_on_cuda
def multiply_add(x: Tensor, y: Tensor, z: Tensor, fmt: Format) -> Tensor:
    """Return x · y + z with the product rounded or not."""
    if fmt is PRECISE:
        return added(multiplied(x, y, fmt), z, fmt)
    product = unrounded_product(x, y)
    return hull(added(rounded(product, fmt), z, fmt), added(product, z, fmt))


@one_kernel_on_cuda
def clamped(x: Tensor, low: float, high: float) -> Tensor:
    """Limit x to [low, high]; NaN stays NaN."""
    return unknown_where(x.clamp(low, high), unknown(x))


@one_kernel_on_cuda
def magnitudes(x: Tensor) -> Tensor:
    """Return |x|, exact: an interval that holds zero has it as its lower end."""
    parts = x.abs()
    if len(parts) < 4:
        return parts
    near = torch.where((x[2] <= 0) & (x[3] >= 0), 0.0, torch.minimum(parts[2], parts[3]))
    return torch.stack([parts[0], parts[1], near, torch.maximum(parts[2], parts[3])])


def covered(parts: Tensor, exact: Tensor) -> Tensor:
    """Return four parts with ends widened by the error of fp64, underflow included, except where `exact`, a mask."""
    four = full(parts)
    return unknown_where(torch.where(exact, four, widened(four, 0.0, LEAST)), unknown(four))


def holds_fp32(x: Tensor) -> Tensor:
    """Return a mask of the numbers (fp64) that fp32 holds."""
    return x == x.to(torch.float32).to(torch.float64)


@one_kernel_on_cuda
def spread(x: Tensor, relative: float, absolute: float) -> Tensor:
    """Move the ends of x outward by a relative and an absolute error."""
    return widened(x, relative, absolute)


def widened(parts: Tensor, relative: float | Tensor, absolute: float | Tensor = 0.0) -> Tensor:
    """Return four parts with the ends of `parts` moved outward by a relative and an absolute error, maybe one per end.

    The fp64 evaluation of the ends is itself rounded, by at most a few 2^-53; 2^-50 is added for it.
    """
    four = full(parts)
    margin = four[2:].abs() * (relative + 2.0**-50) + absolute
    lo, hi = four[2] - margin[0], four[3] + margin[1]
    if not all_finite(four[2:]):
        lo, hi = torch.where(torch.isfinite(four[2]), lo, four[2]), torch.where(torch.isfinite(four[3]), hi, four[3])
    return torch.stack([four[0], four[1], lo, hi])
