"""Terms of a probe: a large one that swallows a small one, and pairs of small ones that it does not swallow.

Signed terms. M and -M cancel; a small u between them is lost if it is added to a sum that holds one of them and not the
other. So u is in the smallest node that holds both if the sum is zero.

Squares. Nothing cancels, but with B in place of M and h with ulp(B) / 4 < h² < ulp(B) / 2, B² + h² rounds to B², while
B² + (h² + h²) rounds to B² + ulp. So B is outside the smallest node that holds both h if the sum is larger than B².
x · x has at most 22 bits here, so that nothing changes where it is fused into the addition. Where additions cut off
instead of rounding, as in tensor cores, h² is between ulp(B) / 2 and ulp(B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MOST_BITS = 11
"""Significant bits of B, so that its square is exact in fp32."""

# In ulps of B², with room for what the fillers add. _LOST: h², which is lost alone and not twice, where sums are
# rounded and where they are cut off. _SEEN: another square, which makes B² + ulp alone.
_LOST = {False: (0.26, 0.48), True: (0.70, 0.95)}
_SEEN = (1.05, 1.40)
_FILLED = 0.01  # all fillers together, in ulps of B²
_ULP = 2.0**-23


@dataclass(frozen=True)
class Values:
    """The numbers at the three columns of a probe, and elsewhere.

    Attributes:
        asked: at the column of which is asked whether it lies within the node of the two others.
        pair: at the two others.
        alone: where there are no negative terms, the one that does alone what the two do together.
        filler: at all other columns.
        tuning: for `ProbedSum.arguments`.
    """

    asked: float
    pair: tuple[float, float]
    alone: float = 0.0
    filler: float = 0.0
    tuning: float = 1.0


def signed_values(dtype: torch.dtype) -> Iterator[tuple[Values, Values]]:
    """Yield numbers for signed terms, each with a variant in which nothing is lost, to see whether results show it."""
    info = torch.finfo(dtype)
    ranges = [(40, -20), (60, 0), (30, -4)] if info.max > 2.0**64 else [(15, -14), (15, -20), (8, -24)]
    for high, low in ranges:
        if info.smallest_normal * info.eps <= 2.0**low and info.max > 2.0**high:
            unit = 2.0**low
            yield Values(unit, (2.0**high, -(2.0**high))), Values(unit, (4 * unit, -4 * unit))


def squared_values(large: float, filling: float, terms: int, dtype: torch.dtype, *, cut: bool = False) -> Values | None:
    """Choose numbers to be squared, with B = `large` and a filler of mantissa `filling`; None if there are none.

    `cut` is for sums that are cut off and not rounded.
    """
    ulp = _ULP * 2.0 ** math.floor(math.log2(large * large))
    small, alone = (_square_near(low * ulp, high * ulp, dtype) for low, high in (_LOST[cut], _SEEN))
    filler = filling * 2.0 ** math.floor(math.log2(math.sqrt(_FILLED * ulp / terms) / 2))
    if small is None or alone is None or filler != _rounded(filler, dtype):
        return None
    return Values(large, (small, small), alone, filler)


def _square_near(low: float, high: float, dtype: torch.dtype) -> float | None:
    """Round a number to the dtype whose square is between `low` and `high`; None if there is none."""
    number = _rounded(math.sqrt((low + high) / 2), dtype)
    return number if low < number * number < high else None


def mantissas(dtype: torch.dtype) -> torch.Tensor:
    """List all numbers of the dtype from 1 to 2 with at most `MOST_BITS` bits, in fp64."""
    bits = min(MOST_BITS, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return 1 + torch.arange(1 << (bits - 1), dtype=torch.float64) / (1 << (bits - 1))


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))
