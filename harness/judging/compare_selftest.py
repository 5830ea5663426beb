"""Test of the kernels of `fused_compare` against the definition, on numbers where they are most likely to differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lastbit import trust
from lastbit.judging import torch_compare
from lastbit.judging.compare import finished
from lastbit.judging.fused_compare import ComparedPair, Sort
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FORMATS, FP64, cast
from lastbit.result import NEAR, Comparison

TESTED = tuple(fmt for fmt in FORMATS.values() if fmt is not FP64)


def trusted(sort: Sort) -> bool:
    """Check whether the kernels for tensors of this sort are trusted."""
    return trust.trusted(sort.device, sort, f"comparing {sort.actual}", lambda: difference(sort))


def difference(sort: Sort) -> str:
    """Describe the first comparison of special values in which the kernels and torch differ; empty if none."""
    return next(_of_floats(sort) if isinstance(sort.expected, int) else _of_integers(sort, sort.expected), "")


def agree(fused: Comparison, defined: Comparison) -> bool:
    """Check whether all figures are equal, but for the rounding errors of sums in another order.

    A sum of n terms of fp64 has an error of at most (n - 1) 2^-53 times the sum of their magnitudes, to first order.
    """
    error, contract = 2 * defined.numel * 2.0**-53, defined.squared_contract or 0.0
    sums = (
        (fused.squared_error, defined.squared_error, error * defined.squared_error),
        (fused.squared_exact, defined.squared_exact, error * defined.squared_exact),
        (fused.squared_contract or 0.0, contract, error * contract),
        (fused.bias_sum, defined.bias_sum, error * NEAR * defined.bias_count),
    )
    if not all(repr(a) == repr(b) or abs(a - b) <= bound < math.inf for a, b, bound in sums):
        return False
    none = {"squared_error": 0.0, "squared_exact": 0.0, "squared_contract": 0.0, "bias_sum": 0.0}
    rest = (replace(c, **none) for c in (fused, defined))  # type: ignore[arg-type]
    return repr(next(rest)) == repr(next(rest))  # NaN and signs of zeros included


def corners() -> Tensor:
    """Return fp64 numbers of both signs where formats begin, end and are halfway between neighbours, inf and NaN."""
    found = [0.0, math.inf, math.nan, 5e-324, 2.0**-1000, 2.0**1000, 3.0, 1e30]
    for fmt in TESTED:
        last = fmt.max * fmt.epsilon / 2
        found += [fmt.quantum * x for x in (0.5, 1.0, 1.5, 2.5)]
        found += [2.0**fmt.min_exponent, 2.0**fmt.min_exponent - fmt.quantum / 2, fmt.max, fmt.max + last / 2]
        found += [1 + fmt.epsilon * x for x in (0.5, 1.0, 1.5, 3.0, 16.0, 40.0)]
    positive = torch.tensor(found, dtype=torch.float64)
    return torch.cat([positive, -positive])


def specials(dtype: torch.dtype, parts: int) -> tuple[Tensor, Enclosure]:
    """Return actual values of `dtype` and an enclosure: corners in points, in intervals and where nothing is known."""
    x = corners()
    shifts = (0, 1, 2, 7, len(x) // 2, len(x) - 1)
    a = x.repeat(len(shifts))
    value, exact, other = (torch.cat([x.roll(s * k + (k > 1)) for s in shifts]) for k in (1, 2, 3))
    kind = torch.arange(len(a)) % 7
    ends = torch.stack([torch.minimum(value, other), torch.maximum(value, other)])
    ends = torch.where(kind % 3 == 0, value, ends)
    ends[:, kind == 1] = torch.tensor([[-math.inf], [math.inf]], dtype=torch.float64)
    return cast(a, dtype), Enclosure(torch.stack([exact, value, *ends] if parts > 1 else [value])[:parts])


def sets_of(a: Tensor, e: Enclosure) -> dict[str, Tensor]:
    """Return masks of subsets of the special values, so that infinities in one figure hide no error in another."""
    x = a.to(torch.float64)
    moderate = (torch.stack([x, e.exact, e.value]).abs() < 2.0**20).all(0)
    return {
        "all": torch.ones_like(moderate),
        "moderate": moderate,
        "negative": moderate & (x < e.exact),
        "allowed": moderate & ~torch_compare.outside_mask(a, e),
    }


def _of_floats(sort: Sort) -> Iterator[str]:
    assert isinstance(sort.expected, int)
    kinds = [(sort.expected, sort.flat)] if sort.large else [(1, True), (2, True), (4, False)]
    for parts, flat in kinds:
        a, e = specials(sort.actual, parts)
        for which, chosen in sets_of(a, e).items():
            actual, stacked = _laid_out(a[chosen], flat), _laid_out(e.parts[:, chosen], flat)
            actual, expected = actual.to(sort.device), Enclosure(stacked.to(sort.device))
            pair = ComparedPair.of(actual, expected, large=sort.large)
            assert pair is not None
            for fmt in TESTED:
                [fused] = finished([pair.begin(fmt)])
                defined = torch_compare.compare(actual, expected, fmt)
                if not agree(fused, defined):
                    yield f"{which} special values in {fmt.name}: {fused} instead of {defined}"
            if pair.outside_count() != torch_compare.outside_count(actual, expected):
                yield f"the number outside among {which} special values"


def _of_integers(sort: Sort, dtype: torch.dtype) -> Iterator[str]:
    edges = torch.tensor([0, 1, -1, 2, 3, 5, 16, 17, 127, -128, 2**31 - 1, -(2**31), 2**53 + 1, 2**63 - 1, -(2**63)])
    actual = _laid_out(edges.repeat(4).to(sort.actual), sort.flat).to(sort.device)
    expected = _laid_out(torch.cat([edges.roll(k) for k in range(4)]).to(dtype), sort.flat).to(sort.device)
    pair = ComparedPair.of(actual, expected, large=sort.large)
    assert pair is not None
    [fused] = finished([pair.begin_integers()])
    defined = torch_compare.compare_integers(actual, expected)
    if not agree(fused, defined):
        yield f"special integers: {fused} instead of {defined}"
    if pair.outside_count() != torch_compare.outside_count(actual, expected):
        yield "the number outside among special integers"


def _laid_out(x: Tensor, flat: bool) -> Tensor:
    """Return x as it is, or in two dimensions of which the first is contiguous in memory."""
    if flat:
        return x
    even: Tensor = x[..., : x.shape[-1] // 2 * 2].unflatten(-1, (2, -1))
    return even.transpose(-1, -2).contiguous().transpose(-1, -2)
