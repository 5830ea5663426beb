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
from lastbit.orders.search import Indices, Truths

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
    filler = filling * 2.0 ** math.floor(math.log2(math.sqrt(_FILLED * ulp / terms) / 2))
    small, alone = (_rounded(math.sqrt((low + high) / 2 * ulp), dtype) for low, high in (_LOST[cut], _SEEN))
    fit = all(low * ulp < x * x < high * ulp for x, (low, high) in ((small, _LOST[cut]), (alone, _SEEN)))
    if not fit or filler != _rounded(filler, dtype):
        return None
    return Values(large, (small, small), alone, filler)


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
        found = []
        for part in terms.split(self.places):
            self.calls += 1
            if missing := self.rows - len(part):  # each call has the fixed number of rows
                given = torch.cat([part, part[:1].expand(missing, -1)])
            else:
                given = part.contiguous()
            results = self.sum_of(given, tuning)
            if results.shape[:1] != (self.rows,):
                raise NotRevealed(f"a call with {self.rows} sums gave results of shape {tuple(results.shape)}")
            self.result = str(results.dtype).removeprefix("torch.")
            found.append(words(results.reshape(self.rows, -1))[: len(part)])
        return torch.cat(found)

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
        at = torch.zeros(len(triples), dtype=torch.int64, device=found.device)
        if len(self.columns) > 1:  # for each probe the first column that is none of its own
            asked = torch.from_numpy(triples).to(found.device)
            at = (asked[:, :, None] != self.columns.to(found.device)).all(1).int().argmax(1)
        read = found[:, self.columns].gather(1, at[:, None])[:, 0]
        lost = read == self.lost[at]
        if self.seen is not None and (other := ~lost & (read != self.seen[at])).any():
            where = triples[int(other.nonzero()[0])].tolist()
            raise NotRevealed(f"with terms at the columns {where} a result is neither of the two that it can be")
        answers: Truths = lost.cpu().numpy()
        return answers

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


# Ways to see a lost term in the results of a kernel, found on the kernel itself, with sums that have one order only.
#
# A sum that is larger by one ulp of fp32 seldom changes a result of bf16. So numbers are drawn until some result rounds
# to the other side: B, what stands at the other columns, and a parameter that the op lets follow a tuning. B² + h² and
# B² + (a square of about an ulp) are sums of two terms, which every order adds alike.

_TRIES, _LEAST_ROWS = 96, 512
# Arbitrary: each is one more chance to find a B of few bits that is large enough.
_BINADES = 3  # of B: so many powers of two by which it may be larger than the root of the number of terms
# Arbitrary: as fine as fp32 shows, beside a factor of 32.
_FINEST = 1 << 20  # tunings are multiples of one of so many parts
_WEIGHTED = (
    "this is no sum of the terms: a number and its negative, with zeros at all other columns, do not cancel; between "
    "additions something is divided or multiplied, as in a running mean (Welford's), or a term is not counted once"
)
# Arbitrary: more different fillers in a row say no more, and cost a draw each.
_MIXED = 512  # different fillers in a row, at most
# Arbitrary: a reading that depends on its columns is the same at twelve pairs by rare chance only.
_PLACES = 12  # pairs of columns at which a reading must be the same


def signed_reading(probes: Probes, random: np.random.Generator) -> ProbeReading:
    """Find how to read a unit between M and -M from the results.

    Raises:
        NotVisible: no result shows it, or M and -M do not cancel at every two columns.
    """
    pairs, weighted = _pairs(probes.terms, random), False
    for values, kept in signed_values(probes.dtype):
        without = replace(values, asked=values.filler)
        found = probes.bits(probes.placed(_with_third(pairs, probes.terms), without), values.tuning)
        columns = witnesses(probes, found)
        lost = _same(found, columns, pairs)
        shown = ProbeReading(probes, kept, columns, lost) if lost is not None else None
        if shown is not None and not shown.ask(_with_third(pairs, probes.terms)).any():
            if shown.with_values(without).ask(_with_third(_every_column(probes.terms, random), probes.terms)).all():
                return shown.with_values(values)
            weighted = True
        weighted |= lost is None
    raise NotVisible(_WEIGHTED if weighted else f"no result shows what is left of a sum ({probes.result})")


def squared_reading(probes: Probes, random: np.random.Generator) -> ProbeReading:
    """Find how to read one ulp of fp32 of a sum of squares from the results.

    Raises:
        NotVisible: of all numbers that were tried none makes it visible, or there are too few columns to read.
    """
    tried, elsewhere = 0, 0
    witnesses(probes, probes.bits(torch.zeros(1, probes.terms, dtype=probes.dtype, device=probes.device), 1.0))
    for _ in range(_TRIES):
        drawn = _drawn(probes, random)
        for values in _visible(probes, drawn, random):
            if (reading := _checked(probes, values, random)) is not None:
                _check_every_square(reading, random)
                return reading
            elsewhere += 1
        tried += len(drawn)
    if elsewhere:
        raise NotVisible("what an ulp of fp32 of the sum changes depends on its columns, as where a term is left out")
    raise NotVisible(
        f"one ulp of fp32 of the sum changed no result ({probes.result}) with any of {tried:,} numbers that were tried"
    )


def _drawn(probes: Probes, random: np.random.Generator) -> list[Values]:
    """Draw values with fillers of mantissa 1, one for each pair of rows of a call or a few, all with one tuning."""
    known = mantissas(probes.dtype).numpy()
    least = int(np.ceil(np.log2(np.sqrt(probes.terms))))
    count = max(probes.rows, _LEAST_ROWS) // 2
    sizes = random.choice(known, count) * 2.0 ** random.integers(least, least + _BINADES + 1, count)
    found = (squared_values(float(large), 1.0, probes.terms, probes.dtype) for large in sizes)
    tuning = float(random.integers(_FINEST // 32, _FINEST)) / _FINEST
    return [replace(values, tuning=tuning) for values in found if values is not None]


def _visible(probes: Probes, drawn: list[Values], random: np.random.Generator) -> Iterator[Values]:
    """Yield the values that some result tells apart, with the filler beside which it does."""
    if not drawn:
        return
    known, kinds = mantissas(probes.dtype), random.integers(1 << 20, size=(len(drawn), min(probes.terms, _MIXED)))
    columns = np.tile(random.choice(probes.terms, 2, replace=False), (len(drawn), 1))
    fillers = torch.tensor([v.filler for v in drawn], dtype=torch.float64)[:, None]
    mixed = fillers * known[torch.from_numpy(kinds % len(known))]
    base = mixed.to(probes.device, probes.dtype)[:, torch.arange(probes.terms) % mixed.shape[1]]
    both = []
    for second in ([v.pair[0] for v in drawn], [v.alone for v in drawn]):
        there = torch.tensor([[v.asked for v in drawn], second], dtype=torch.float64).T.to(probes.device, probes.dtype)
        both.append(base.scatter(1, torch.from_numpy(columns).to(probes.device), there))
    lost, seen = probes.bits(torch.cat(both), drawn[0].tuning).chunk(2)
    apart = lost != seen
    if apart.shape[1] == probes.terms:
        apart[:, columns[0]] = False
    for row, column in apart.nonzero().tolist()[:_PLACES]:
        own = column if apart.shape[1] == probes.terms else 0
        yield replace(drawn[row], filler=float(mixed[row, own % mixed.shape[1]]))


def _checked(probes: Probes, values: Values, random: np.random.Generator) -> ProbeReading | None:
    """Return the reading with these values if their answer is the same at all columns; None otherwise."""
    pairs = _pairs(probes.terms, random)
    rows = [probes.rows_of(pairs, [(values.asked, second)], values.filler) for second in (values.pair[0], values.alone)]
    found = probes.bits(torch.cat(rows), values.tuning)
    columns = witnesses(probes, found)
    lost, seen = (_same(part, columns, pairs) for part in found.chunk(2))
    if lost is None or seen is None or (lost == seen).any():
        return None
    return _cut_or_rounded(ProbeReading(probes, values, columns, lost, seen), pairs)


def _check_every_square(reading: ProbeReading, random: np.random.Generator) -> None:
    """Raise `NotRevealed` if the square at some column does not show as those at others do."""
    probes, values = reading.probes, replace(reading.values, pair=(reading.values.alone, reading.values.filler))
    assert reading.seen is not None
    seen = ProbeReading(probes, values, reading.columns, lost=reading.seen)
    triples = _with_third(_every_column(probes.terms, random), probes.terms)[:, [1, 2, 0]]
    if not (as_others := seen.ask(triples)).all():
        large, small = triples[int(as_others.argmin())][:2].tolist()
        raise NotRevealed(f"terms at the columns {large} and {small} do not count as those at others do")


def _cut_or_rounded(reading: ProbeReading, pairs: Indices) -> ProbeReading | None:
    """Choose the reading's values by how a sum is shortened: cut off, if it loses more than half an ulp, or rounded."""
    probes, values = reading.probes, reading.values
    one = values.filler / 2.0 ** math.floor(math.log2(values.filler))
    larger = squared_values(values.asked, one, probes.terms, probes.dtype, cut=True)
    if larger is None:
        return None
    larger = replace(larger, tuning=values.tuning)
    rows = probes.rows_of(pairs, [(values.asked, larger.pair[0])], values.filler)
    found = _same(probes.bits(rows, values.tuning), reading.columns, pairs)
    if found is None:
        return None
    return reading.with_values(larger) if torch.equal(found, reading.lost) else reading


def _same(found: Tensor, columns: Tensor, pairs: Indices) -> Tensor | None:
    """Return the words at the columns if all rows agree outside their own terms; None otherwise."""
    read = found[:, columns]
    if len(columns) == 1:
        return read[0] if bool((read == read[0]).all()) else None
    own = (torch.from_numpy(pairs).to(found.device)[:, :, None] == columns).any(1)
    first = (~own).int().argmax(0)
    common = read.gather(0, first[None])[0]
    return common if bool(((read == common) | own).all()) else None


def _pairs(terms: int, random: np.random.Generator) -> Indices:
    """Draw pairs of columns, and add the first two and the last two where there are four."""
    drawn = [random.choice(terms, 2, replace=False) for _ in range(_PLACES)]
    ends = [(0, 1), (terms - 2, terms - 1)] if terms > 3 else []
    return np.array([*ends, *drawn], dtype=np.int64)


def _every_column(terms: int, random: np.random.Generator) -> Indices:
    """Draw pairs in which each column stands twice, so that a column whose term counts otherwise is met."""
    shuffled = random.permutation(terms)
    return np.stack([shuffled, np.roll(shuffled, 1)], axis=-1)


def _with_third(pairs: Indices, terms: int) -> Indices:
    """Put a column that is in neither place before each pair [Q, 2]."""
    third = [next(c for c in range(terms - 1, -1, -1) if c not in pair) for pair in pairs.tolist()]
    return np.concatenate([np.array(third, dtype=np.int64)[:, None], pairs], axis=1)
