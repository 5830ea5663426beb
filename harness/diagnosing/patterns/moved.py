"""Right values in wrong places: shifted, reversed, transposed, rows of others, one row repeated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lastbit.diagnosing.patterns.words import listed
from lastbit.diagnosing.patterns.wrong import ENOUGH, Ends, Wrong

_FARTHEST = 8  # places by which values are looked for along an axis, and every power of two beyond
_MOST_PAIRS = 1 << 25  # elements that are compared when rows are looked for among the others
_DISTINCT = 8  # values, fewer of which are everywhere


def moves(wrong: Wrong, region: Tensor) -> Iterator[str]:
    """The first way found in which right values were moved, if there is one."""
    if len(wrong.value.unique()) < _DISTINCT:
        return
    ways = (words for words, ends in _moved(wrong) if wrong.fit(ends, region).holds(ENOUGH))
    for words in itertools.islice(itertools.chain(ways if bool(region.all()) else (), _other_rows(wrong)), 1):
        yield f"The values are right, in the wrong places: {words}."


def _moved(wrong: Wrong) -> Iterator[tuple[str, Ends]]:
    shape, ends = wrong.mask.shape, wrong.ends
    for axis, size in enumerate(shape):
        for shift in _shifts(size):
            where = f"shifted by {abs(shift)} along dimension {axis}, {'up' if shift > 0 else 'down'}"
            yield where, _rolled(ends, shift, axis)
        if size > 1:
            yield f"in reverse order along dimension {axis}", Ends(ends.lo.flip(axis), ends.hi.flip(axis))
    for a, b in itertools.combinations(range(len(shape)), 2):
        if min(shape[a], shape[b]) > 1:
            turned = (end.transpose(a, b).reshape(shape) for end in (ends.lo, ends.hi))
            yield f"dimensions {a} and {b} are exchanged, as if transposed", Ends(*turned)


def _shifts(size: int) -> list[int]:
    powers = [1 << n for n in range(size.bit_length()) if 1 << n < size]
    steps = sorted({*range(1, min(size, _FARTHEST + 1)), *powers})
    return [sign * step for step in steps if 2 * step <= size for sign in (1, -1)]


def _rolled(ends: Ends, shift: int, axis: int) -> Ends:
    """Nothing is said about elements that come from beyond the edge."""
    size = ends.lo.shape[axis]
    at = torch.arange(size, device=ends.lo.device) - shift
    beyond = ((at < 0) | (at >= size)).reshape([size if n == axis else 1 for n in range(ends.lo.ndim)])
    lo, hi = (end.roll(shift, axis) for end in (ends.lo, ends.hi))
    return Ends(lo.masked_fill(beyond, -torch.inf), hi.masked_fill(beyond, torch.inf))


def _other_rows(wrong: Wrong) -> Iterator[str]:
    """That each wrong row, or column, has the values of another one."""
    if wrong.mask.ndim < 2:
        return
    tables = [t.flatten(0, -2) for t in (wrong.actual, wrong.ends.lo, wrong.ends.hi, wrong.mask)]
    for unit, (actual, lo, hi, mask) in (("row", tables), ("column", [t.T for t in tables])):
        count, width = actual.shape
        at = mask.any(-1).nonzero().reshape(-1)
        if count < 2 or width < 4 or len(at) * count * width > _MOST_PAIRS:
            continue
        own = actual[at][:, None]
        same = ((lo <= own) & (own <= hi)).all(-1)
        distinct = width - (hi - lo == torch.inf).sum(-1).max()
        if bool(same.any(-1).all()) and _is_telling(wrong, len(at), count) and int(distinct) > 3:
            yield _named(unit, at.tolist(), same)


def _is_telling(wrong: Wrong, wrong_rows: int, rows: int) -> bool:
    """Whether so many elements that fit say more than the choice among the rows."""
    return wrong.count * 6.0 - wrong_rows * math.log2(rows) > ENOUGH


def _named(unit: str, at: list[int], same: Tensor) -> str:
    source = same.to(torch.uint8).argmax(-1).tolist()
    common = same.all(0).nonzero().reshape(-1).tolist()
    if common and len(at) > 1:
        return f"all {len(at)} wrong {unit}s are {unit} {common[0]}"
    shifts = {b - a for a, b in zip(at, source, strict=True)}
    if len(shifts) == 1 and len(at) > 1:
        [shift] = shifts
        return f"each of the {len(at)} wrong {unit}s is the one {abs(shift)} {'after' if shift > 0 else 'before'} it"
    pairs = [f"{unit} {a} is {unit} {b}" for a, b in zip(at[:3], source[:3], strict=True)]
    more = "" if len(at) <= 3 else f", and so on for all {len(at)} wrong {unit}s"
    return f"{listed(pairs)}{more}"
