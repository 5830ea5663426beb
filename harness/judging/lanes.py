"""Narrow rows whose lanes disagree: each half of the columns has a value of the latent stage for itself.

Up to 32 columns are spread over the lanes of one warp, and are added by a butterfly of shuffles. A compiler that fuses
makes its first step one FMA in each lane, of the lane's own product with its partner's rounded one. Lane i then holds
RN(a_i·b_i + RN(a_j·b_j)) and lane j holds RN(a_j·b_j + RN(a_i·b_i)), which differ. All later steps add in both halves
alike, so the columns whose index has one certain bit and those that lack it carry two different sums, both legitimate.

Such a row is *split*: for one bit of the column's index, each half is explained by one value within the enclosure. Of
the statistics that the kernel shows, the other half follows from none; but one half must follow from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lastbit.judging.candidates import explained_groups
from lastbit.judging.expected import Numbers
from lastbit.judging.rows import Rows
from lastbit.judging.trace import Trace
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FP32, from_ordinals
from lastbit.ops import Latent

MOST_COLUMNS = 32
"""Columns that the lanes of one warp hold one each of."""

# In ulp. A sum of 32 terms errs by 2 u in its first step and by 4 u in the others, its mean plus eps by 2 u more. Two
# sums differ by 16 u at most, and their inverse roots by half of that and by the 4 u that each of those errs.
_FARTHEST = 16


@dataclass(frozen=True, eq=False)
class Shown:
    """The statistics of each row that a kernel shows: those of one half where a row is split.

    Attributes:
        latent: ordinals of its own latent values, [rows, groups]; None if it does not show them.
        others: other stages with one value per group → lowest and highest ordinal that the inputs allow.
        stray: elements that do not follow from the kernel's own earlier stages, [rows, groups, size].
    """

    latent: Tensor | None
    others: Mapping[str, tuple[Tensor, Tensor]]
    stray: Tensor

    def only(self, rows: Tensor) -> Shown:
        """Keep only the rows of these indices, one of which may occur several times."""
        others = {n: (low[rows], high[rows]) for n, (low, high) in self.others.items()}
        return Shown(None if self.latent is None else self.latent[rows], others, self.stray[rows])


def split_rows(rows: Rows, shown: Shown | None) -> tuple[Tensor, Tensor]:
    """Return masks of the rows that are split, all groups of a row by the same bit, and of those left open by a search.

    `shown` is None where the kernel shows no earlier stages.
    """
    sizes = {t.shape[-1] for t in rows.seen.values()}
    split, unsure = torch.zeros_like(rows.tried[:, 0]), torch.zeros_like(rows.tried[:, 0])
    if len(sizes) > 1 or not 2 <= max(sizes) <= MOST_COLUMNS:
        return split, unsure
    halves = _halves(max(sizes), split.device)
    together = max(1, rows.at_once * len(split) // (rows.elements * len(halves) * 2))
    for at in torch.arange(len(split), device=split.device).split(together):
        split[at], unsure[at] = _split(rows.only(at), None if shown is None else shown.only(at), halves)
    return split, unsure


def _halves(size: int, device: torch.device) -> Tensor:
    """Return masks of the columns that lack, and that have, each bit of their index: [bits, 2, size]."""
    bits = torch.arange((size - 1).bit_length(), device=device).reshape(-1, 1)
    has = (torch.arange(size, device=device) >> bits) & 1 == 1
    return torch.stack([~has, has], dim=1)


def _split(rows: Rows, shown: Shown | None, halves: Tensor) -> tuple[Tensor, Tensor]:
    bits, _, size = halves.shape
    count = len(rows.low)
    each = torch.arange(count, device=halves.device).repeat(2 * bits)  # every row once for each half by each bit
    counted = halves.reshape(-1, 1, size).repeat_interleave(count, 0)
    half_rows = replace(rows.only(each), counted=counted)
    searched = explained_groups(half_rows)
    explained, unsure = searched.explained, searched.open
    if shown is None:
        return _answers(*(t.unflatten(0, (bits, 2, count)).all(1) for t in (explained & ~unsure, explained)))
    follows = ~(shown.stray & halves[:, :, None, None]).any(-1)  # [bits, 2, rows, groups]
    tried = ~explained & follows.flip(1).flatten(0, 2)
    explained |= _with_other_statistics(replace(half_rows, tried=tried), shown.only(each))
    return _answers(
        *(t.unflatten(0, (bits, 2, count)).all(1) & follows.any(1) for t in (explained & ~unsure, explained))
    )


def _answers(known: Tensor, possible: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the rows that are split, and that may be, from groups by bit: [bits, rows, groups] → [rows]."""
    split = _by_one_bit(known)
    return split, _by_one_bit(possible) & ~split


def _by_one_bit(groups: Tensor) -> Tensor:
    """Return a mask of the rows all of whose groups are split by one bit: [bits, rows, groups] → [rows]."""
    split: Tensor = groups.all(-1).any(0)
    return split


def _with_other_statistics(rows: Rows, shown: Shown) -> Tensor:
    """Return a mask of the tried groups that a latent value near the shown one explains with another statistic.

    A mean of products is a sum in which lanes disagree, too.
    """
    explained = torch.zeros_like(rows.tried)
    together = max(1, rows.at_once * len(explained) // (rows.elements * (2 * _FARTHEST + 1)))
    for name in shown.others if shown.latent is not None else ():
        unsure = rows.tried & ~explained
        for at in unsure.any(-1).nonzero().reshape(-1).split(together):
            explained[at] |= _with_another(replace(rows, tried=unsure).only(at), shown.only(at), name)
    return explained


def _with_another(rows: Rows, shown: Shown, name: str) -> Tensor:
    """Return a mask of the tried groups that a value of `name` explains with a latent value near the shown one."""
    assert shown.latent is not None
    low, high = shown.others[name]
    offsets = torch.arange(-_FARTHEST, _FARTHEST + 1, device=low.device).reshape(-1, 1, 1)
    near = from_ordinals((shown.latent + offsets).clamp(rows.low, rows.high), FP32).flatten(0, 1)
    each = torch.arange(len(low), device=low.device).repeat(len(offsets))
    given = {n: t[each] for n, t in rows.given.items() if n != name} | {rows.stage: near}
    known = replace(replace(rows, stage=name, low=low, high=high, given={}).only(each), given=given)
    explained: Tensor = explained_groups(known).explained.unflatten(0, (len(offsets), -1)).any(0)
    return explained & rows.tried


def forgiven(local: Trace, trace: Trace, latent: Latent, split: Tensor) -> Trace:
    """Return `local`, seen from the kernel's own stages, with the stages of split rows seen from the inputs instead.

    There a statistic that the kernel shows is one of two. `split` has one entry per row.
    """
    stages = (latent.stage, *latent.instead.values(), *latent.also, *latent.through)
    mixed = {name: _mixed(local, trace, name, split) for name in stages if name in local.stages}
    return replace(local, stages={**local.stages, **mixed})


def _mixed(local: Trace, trace: Trace, name: str, split: Tensor) -> Numbers:
    own, everything = local.numbers(name), trace.enclosure(name)
    mask = split.reshape(*everything.shape[:-1], 1)
    return Numbers(Enclosure(torch.where(mask, everything.full, own.enclosure.full)), own.format)
