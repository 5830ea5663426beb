"""Where the wrong elements are: one column, the last ones, every fourth row, the rows of one index."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.terms import Term
from lastbit.diagnosing.patterns.words import listed, number, ordinal
from lastbit.diagnosing.patterns.wrong import Wrong

_DENSE = 0.75  # share of the indices of a pattern that have a wrong element
_PART = 0.9  # of an axis, the largest part that counts as one
_PERIODS = 65  # below, every period is tried, and from there on powers of two
_PART_OF_PERIOD = 0.75
_CHANCE = 1e-3  # that as many wrong elements, thrown at random, keep to a region as small
_PATTERNS = 100  # about so many are tried
_FEW = 3  # indices that are listed


@dataclass(frozen=True)
class Unit:
    """What an index is called, and several of them, with what stands behind the numbers."""

    one: str
    several: str
    of: str = ""


@dataclass(frozen=True, eq=False)
class Place:
    """Where all wrong elements are, as a sentence and a mask that broadcasts to the stage."""

    sentence: str
    region: Tensor


def places(wrong: Wrong, terms: Sequence[Term]) -> list[Place]:
    """The patterns of the places along each axis, of integer inputs, and of the size of an input or stage."""
    found = [*_along_axes(wrong.mask), *_of_integers(wrong)]
    if wrong.count >= _FEW and not found:
        found += list(_beyond_a_size(wrong, terms))[:1]
    return [place for place in found if _is_no_chance(wrong.mask, place.region)]


def region_of(wrong: Wrong, found: Sequence[Place]) -> Tensor:
    """The elements that lie in all places."""
    region = torch.ones_like(wrong.mask)
    for place in found:
        region = region & place.region
    return region


def _is_no_chance(mask: Tensor, region: Tensor) -> bool:
    inside = region.expand_as(mask)
    size, count = int(inside.sum()), int(mask.sum())
    if count >= _DENSE * size and count >= _FEW:
        return True
    return bool(count >= _FEW) and count * math.log(size / mask.numel()) + math.log(_PATTERNS) < math.log(_CHANCE)


def _along_axes(mask: Tensor) -> Iterator[Place]:
    for axis, size in enumerate(mask.shape):
        others = [other for other in range(mask.ndim) if other != axis]
        hit = mask.any(others) if others else mask
        at = hit.nonzero().reshape(-1).tolist()
        if len(at) == size or (pattern := pattern_of(at, size, _unit(mask, axis))) is None:
            continue
        sentence, indices = pattern
        region = torch.zeros(size, dtype=torch.bool, device=mask.device)
        region[torch.tensor(indices, device=mask.device)] = True
        region = region.reshape([size if other == axis else 1 for other in range(mask.ndim)])
        yield Place(f"{sentence}{_share(mask, region)}.", region)


def _unit(mask: Tensor, axis: int) -> Unit:
    """What an index into the axis is called."""
    if mask.ndim == 1:
        return Unit("element", "elements")
    if axis == mask.ndim - 1:
        return Unit("column", "columns")
    if mask.ndim == 2:
        return Unit("row", "rows")
    return Unit("index", "indices", f" of dimension {axis}")


def _share(mask: Tensor, region: Tensor) -> str:
    size, count = int(region.expand_as(mask).sum()), int(mask.sum())
    return f", in all of {size:,} elements" if count == size else f", in {count:,} of {size:,} elements"


def pattern_of(at: Sequence[int], size: int, unit: Unit) -> tuple[str, Sequence[int]] | None:
    """What is common to the indices `at` of `size`, in words, and all indices that have it; None if nothing is."""
    first, last = at[0], at[-1]
    if len(at) == 1:
        which = ", the last" if first == size - 1 else ", the first" if first == 0 else ""
        where = f"{unit.one} {first}{unit.of or f' of {size}'}"
        return _only(f"{where}{which and f'{which},'}", "is"), at
    span = range(first, last + 1)
    if len(at) >= _DENSE * len(span) and len(span) <= _PART * size:
        return _range(span, size, unit), span
    for step, start, stop in _repeated(at, size) if len(at) > _FEW else ():
        indices = [i for i in range(size) if start <= i % step < stop]
        if len(at) >= _DENSE * len(indices) and len(indices) < size:
            return _only(f"{_repeats(step, start, stop, unit)}", "are"), indices
    said = f"{unit.several} {listed(at)}{unit.of or f' of {size}'}"
    return (_only(said, "are"), at) if len(at) <= _FEW else None


def _only(what: str, verb: str) -> str:
    return f"Only {what} {verb} wrong"


def _range(span: range, size: int, unit: Unit) -> str:
    start, stop = span[0], span[-1] + 1
    sentence = _only(f"{unit.several} {start} to {stop - 1}{unit.of}", "are")
    if stop == size:
        return f"{sentence}: the last {len(span)}{_multiple(start, ' from {} on')}"
    if start == 0:
        return f"{sentence}: the first {len(span)}{_multiple(stop, ' up to {}')}"
    return f"{sentence}: {len(span)} of {size}{_multiple(start, ' from {} on')}"


def _multiple(index: int, text: str) -> str:
    """That an index is a multiple of a power of two, where that says something."""
    power = index & -index
    return f",{text.format(f'a multiple of {power}')}" if power >= 4 else ""


def _repeated(at: Sequence[int], size: int) -> Iterator[tuple[int, int, int]]:
    """Periods, and the first and the last but one residue of all indices, the sparsest patterns first."""
    found = []
    powers = (1 << n for n in range(size.bit_length()))
    for step in sorted({step for step in (*range(2, _PERIODS), *powers) if 1 < step <= size // 2}):
        residues = {i % step for i in at}
        start, stop = min(residues), max(residues) + 1
        if stop - start <= _PART_OF_PERIOD * step:
            found.append(((stop - start) / step, step, start, stop))
    for _, step, start, stop in sorted(found):
        yield step, start, stop


def _repeats(step: int, start: int, stop: int, unit: Unit) -> str:
    if stop - start == 1:
        return f"{unit.several} {start}, {start + step}, {start + 2 * step} and so on{unit.of}, every {ordinal(step)},"
    where = f"the last {step - start}" if stop == step else f"the first {stop}" if start == 0 else f"{stop - start}"
    which = "" if start == 0 or stop == step else f", from its {ordinal(start + 1)} on,"
    return f"{where} of every {step} {unit.several}{unit.of}{which}"


def _of_integers(wrong: Wrong) -> Iterator[Place]:
    """Rows that an input of integers tells from the others: those, and all of those, that have one number."""
    mask = wrong.mask
    for name in wrong.problem.op.integers & wrong.problem.tensors.keys():
        ids = wrong.problem.tensors[name]
        common = 0
        while common < min(ids.ndim, mask.ndim) and ids.shape[common] == mask.shape[common]:
            common += 1
        if not common or ids.ndim > common + 1:
            continue
        rows = mask.flatten(common).any(-1) if mask.ndim > common else mask
        if bool(rows.all()):
            continue
        for value in ids[rows].unique().tolist()[:64]:
            has = ids == value
            has = has.any(-1) if ids.ndim > common else has
            if torch.equal(has, rows) and not bool(has.all()) and int(has.sum()) > 1:
                region = has.reshape([*has.shape, *[1] * (mask.ndim - common)])
                where = "is" if ids.ndim == common else "has"
                yield Place(f"It is wrong exactly where {name} {where} {value}{_share(mask, region)}.", region)


def _beyond_a_size(wrong: Wrong, terms: Sequence[Term]) -> Iterator[Place]:
    """Where an input or stage is above or below a number."""
    right = ~wrong.mask & (wrong.value != 0)  # what is zero either way says nothing
    if int(right.sum()) < _FEW or wrong.count > _PART * wrong.mask.numel():
        return
    for term in terms:
        for sign, kind, values in ((1, "", term.values), (-1, "", -term.values), (1, "|", term.values.abs())):
            there = values.expand_as(wrong.mask)
            least, most = float(there[wrong.mask].min()), float(there[right].max())
            if not least > most:  # NaN too
                continue
            name = f"{kind}{term.name}{kind}"
            a, b = sign * most, sign * least
            which, rest = f"{number(b)} or {'more' if sign > 0 else 'less'}", f"; it is right up to {number(a)}"
            if a * b <= 0:
                signs = ("positive", "negative") if b else ("not negative", "not positive")
                which, rest = "not 0" if kind else signs[sign < 0], ""
            region = there > most
            share = _share(wrong.mask, region)
            yield Place(f"It is wrong exactly where {name} is {which}{share}{rest}.", region)
