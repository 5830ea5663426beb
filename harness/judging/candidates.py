"""The search for a row's value of one stage: candidates are tried, and the elements say where to look next.

An element above what a candidate allows asks for a larger value, one below for a smaller (or the reverse, by its own
sign). If one candidate is asked both ways, or every candidate is asked away, no value explains the elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lastbit.judging.boxes import explained_together
from lastbit.judging.rows import Range, Rows, Searched
from lastbit.numerics.formats import FP32, from_ordinals

_MOST_CANDIDATES = 31


def explained_groups(rows: Rows) -> Searched:
    """Search each group for a candidate that explains it, or for several where there are several latent stages."""
    if rows.also is not None:
        return explained_together(rows)
    found, fits = _tried_first(rows)
    explained = fits | ~rows.tried
    left = (~explained).any(-1).nonzero().reshape(-1)
    rows = replace(rows, tried=~explained).only(left)
    slopes = _slopes(rows) if len(left) else {}
    while len(left):
        low, high = rows.low, rows.high
        count = max(1, min(_MOST_CANDIDATES, rows.at_once // rows.elements))
        at = _spread(low, high, count)
        up, down = _asked(rows, at, slopes)
        fits = ~up & ~down
        fit = fits.any(0) & rows.tried
        explained[left] |= fit
        candidate = at.gather(0, fits.to(torch.uint8).argmax(0, keepdim=True))[0]
        found[left] = torch.where(fit, candidate, found[left])
        higher = torch.maximum(low, torch.where(up, at + 1, low).amax(0))
        lower = torch.minimum(high, torch.where(down, at - 1, high).amin(0))
        unsure = rows.tried & ~fit & ~(up & down).any(0) & (higher <= lower)
        rest = unsure.any(-1).nonzero().reshape(-1)
        low, high = torch.where(unsure, higher, low), torch.where(unsure, lower, high)
        rows, left = replace(rows, low=low, high=high, tried=unsure).only(rest), left[rest]
        slopes = {name: (below[rest], above[rest]) for name, (below, above) in slopes.items()}
    return Searched(explained, found, torch.zeros_like(explained))


def _tried_first(rows: Rows) -> tuple[Tensor, Tensor]:
    """Try the value that a kernel shows, or the middle one: it explains most groups of rounded results.

    Return its ordinals and a mask of the groups that it explains.
    """
    at = torch.maximum(torch.minimum(rows.likely[0], rows.high), rows.low) if rows.likely else _middle(rows)
    fits = rows.tried.clone()
    for name, (lo, hi) in _forward(rows, at[None]).items() if len(at) else ():
        wrong = (rows.seen[name] < lo[0]) | (rows.seen[name] > hi[0])
        fits &= ~(wrong if rows.counted is None else wrong & rows.counted).any(-1)
    return at, fits


def _middle(rows: Rows) -> Tensor:
    return rows.low + (rows.high - rows.low) // 2


def _slopes(rows: Rows) -> dict[str, Range]:
    """Return the sign of the change of both ends of each element as the value grows; 0 if nothing changes."""
    ends = _forward(rows, torch.stack([rows.low, rows.high]))
    return {name: (_slope(below), _slope(above)) for name, (below, above) in ends.items()}


def _asked(rows: Rows, positions: Tensor, slopes: Mapping[str, Range]) -> Range:
    """Return masks [candidates, rows, groups]: some element asks for a larger value, and for a smaller one."""
    up = torch.zeros_like(positions, dtype=torch.bool)
    down = torch.zeros_like(up)
    for name, (lo, hi) in _forward(rows, positions).items():
        y = rows.seen[name]
        lo_slope, hi_slope = slopes[name]
        # Where the end does not move, no candidate changes it: no group with such an element is explained.
        too_low, too_high = (wrong if rows.counted is None else wrong & rows.counted for wrong in (y < lo, y > hi))
        up |= ((too_high & (hi_slope >= 0)) | (too_low & (lo_slope <= 0))).any(-1)
        down |= ((too_high & (hi_slope <= 0)) | (too_low & (lo_slope >= 0))).any(-1)
    return up, down


def _forward(rows: Rows, positions: Tensor) -> dict[str, Range]:
    return rows.forward({rows.stage: from_ordinals(positions, FP32)})


def _spread(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Return `count` ordinals spread between low and high, in a new first dimension."""
    steps = torch.arange(1, count + 1, device=low.device).reshape(-1, 1, 1)
    return low + ((high - low) * steps) // (count + 1)


def _slope(ends: Tensor) -> Tensor:
    """Return 1 where the last of two stacked tensors is the larger, -1 where the first is, else 0."""
    return (ends[1] > ends[0]).to(torch.int8) - (ends[1] < ends[0]).to(torch.int8)
