"""Probes put to a kernel: many rows in a call, always as many of them, and what comes back, bit by bit.

Signed terms. M and -M cancel; a small u between them is lost if it is added to a sum that holds one of them and not the
other. So u is in the smallest node that holds both if the sum is zero.

Squares. Nothing cancels, but with B in place of M and h with ulp(B) / 4 < h² < ulp(B) / 2, B² + h² rounds to B², while
B² + (h² + h²) rounds to B² + ulp. So B is outside the smallest node that holds both h if the sum is larger than B².
x · x has at most 22 bits here, so that nothing changes where it is fused into the addition. Where additions cut off
instead of rounding, as in tensor cores, h² is between ulp(B) / 2 and ulp(B).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from lastbit.errors import LastbitError
from lastbit.orders.tree import Indices, Truths

MOST_BITS = 11
"""Significant bits of B, so that its square is exact in fp32."""

# In ulps of B², with room for what the fillers add. _LOST: h², which is lost alone and not twice, where sums are
# rounded and where they are cut off. _SEEN: another square, which makes B² + ulp alone.
_LOST = {False: (0.26, 0.48), True: (0.70, 0.95)}
# Beyond the nearest half, so that the sum is rounded up by one ulp.
_SEEN = (1.05, 1.40)
# As much as _LOST keeps from a quarter of an ulp, below which h² would be lost twice.
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


SumOf = Callable[[Tensor, float], Tensor]
"""Rows of terms [R, N] and a tuning → results [R, …], whose row is a function of the sum of that row of terms."""

_WITNESSES = 4  # one of so many columns is none of the three of a probe
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class NotRevealed(LastbitError):
    """The reason why no order can be told."""


class NotVisible(NotRevealed):
    """Results do not show whether a small term was lost."""


@dataclass(eq=False)
class Probes:
    """A sum under test, and the number of rows that it was asked for.

    Attributes:
        rows: of each call.
        places: how many rows of a call are used, from the first on.
    """

    sum_of: SumOf
    terms: int
    rows: int
    dtype: torch.dtype
    device: torch.device
    places: int = 0
    calls: int = 0
    asked: int = 0
    result: str = field(default="")

    def __post_init__(self) -> None:
        self.places = self.places or self.rows

    def bits(self, terms: Tensor, tuning: float) -> Tensor:
        """Return the words of the results [Q, W] for rows of terms [Q, N]."""
        self.asked += len(terms)
        return torch.cat([self._call(part, tuning) for part in terms.split(self.places)])

    def _call(self, terms: Tensor, tuning: float) -> Tensor:
        """Make one call with the fixed number of rows; rows that are not used repeat the first."""
        self.calls += 1
        count = len(terms)
        if count < self.rows:
            terms = torch.cat([terms, terms[:1].expand(self.rows - count, -1)])
        results = self.sum_of(terms.contiguous(), tuning)
        if results.shape[:1] != (self.rows,):
            raise NotRevealed(f"a call with {self.rows} sums gave results of shape {tuple(results.shape)}")
        self.result = str(results.dtype).removeprefix("torch.")
        return words(results.reshape(self.rows, -1))[:count]

    def placed(self, triples: Indices, values: Values) -> Tensor:
        """Make rows with the values of a probe at each triple of columns [Q, 3]."""
        return self.rows_of(triples, [(values.asked, *values.pair)], values.filler)

    def rows_of(self, columns: Indices, values: Sequence[Sequence[float]] | Tensor, filler: float) -> Tensor:
        """Make rows with values at columns [Q, C], equal in each row or one line per row, and a filler elsewhere."""
        made = torch.full((len(columns), self.terms), filler, dtype=self.dtype, device=self.device)
        there = torch.as_tensor(values, dtype=torch.float64, device=self.device).to(self.dtype)
        made.scatter_(1, torch.from_numpy(columns).to(self.device), there.expand(len(columns), -1).contiguous())
        return made


def words(results: Tensor) -> Tensor:
    """View numbers as integers of their bits; integers stay as they are."""
    return results.contiguous().view(_WORDS[results.itemsize]) if results.is_floating_point() else results


@dataclass(frozen=True, eq=False)
class ProbeReading:
    """A way to read the results of a probe.

    Attributes:
        values: of the probe.
        columns: of the results that are read: for each probe the first one that is none of its own.
        lost: the words there if the small terms are lost.
        seen: those if they are not; None where it is anything else.
    """

    probes: Probes
    values: Values
    columns: Tensor
    lost: Tensor
    seen: Tensor | None = None

    def ask(self, triples: Indices) -> Truths:
        """Ask for triples (i, j, k) [Q, 3] whether i lies in the smallest node that holds j and k.

        Raises:
            NotRevealed: a result is neither of the two.
        """
        parts = [triples[start : start + self.probes.places] for start in range(0, len(triples), self.probes.places)]
        return np.concatenate([self._answers(part) for part in parts])

    def _answers(self, triples: Indices) -> Truths:
        found = self.probes.bits(self.probes.placed(triples, self.values), self.values.tuning)
        at = self._witness(torch.from_numpy(triples).to(found.device))
        read = found[:, self.columns].gather(1, at[:, None])[:, 0]
        lost = read == self.lost[at]
        if self.seen is not None and (other := ~lost & (read != self.seen[at])).any():
            where = triples[int(other.nonzero()[0])].tolist()
            raise NotRevealed(f"with terms at the columns {where} a result is neither of the two that it can be")
        answers: Truths = lost.cpu().numpy()
        return answers

    def _witness(self, triples: Tensor) -> Tensor:
        """Choose for each probe the number of the column that is read."""
        if len(self.columns) == 1:
            return torch.zeros(len(triples), dtype=torch.int64, device=triples.device)
        taken = (triples[:, :, None] == self.columns.to(triples.device)).any(1)
        return (~taken).int().argmax(1)

    def with_values(self, values: Values) -> ProbeReading:
        return replace(self, values=values)


def witnesses(probes: Probes, results: Tensor) -> Tensor:
    """Return the columns of results [R, W] to be read: several where a result stands beside each term.

    Raises:
        NotVisible: results stand beside terms, and there are too few.
    """
    width = results.shape[1]
    if width != probes.terms:
        return torch.zeros(1, dtype=torch.int64, device=results.device)
    if width < _WITNESSES:
        raise NotVisible(f"{width} terms leave no column to read beside three of them; give {_WITNESSES} or more")
    return torch.arange(_WITNESSES, device=results.device)
