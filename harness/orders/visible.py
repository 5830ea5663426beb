"""Ways to see a lost term in the results of a kernel, found on the kernel itself, with sums that have one order only.

A sum that is larger by one ulp of fp32 seldom changes a result of bf16. So numbers are drawn until some result rounds
to the other side: B, what stands at the other columns, and a parameter that the op lets follow a tuning. B² + h² and
B² + (a square of about an ulp) are sums of two terms, which every order adds alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lastbit.orders.probing import (
    NotRevealed,
    NotVisible,
    ProbeReading,
    Probes,
    Values,
    mantissas,
    signed_values,
    squared_values,
    witnesses,
)
from lastbit.orders.tree import Indices

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
