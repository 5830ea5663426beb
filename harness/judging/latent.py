"""The row check: one value of the latent stage must explain a whole row, bit for bit; in groups, each for itself.

For each row, candidates for the latent value are tried within its enclosure. This is the strong check for fp32 results,
whose enclosures never close to a single number. What is tried of a row that no value explains: whether its lanes
disagree, and whether some other value explains it, beyond the enclosure.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lastbit.judging.candidates import Rows, explained_groups
from lastbit.judging.expected import Numbers, Trace
from lastbit.judging.observation import Observation
from lastbit.numerics import Enclosure
from lastbit.numerics.formats import FP32, from_ordinals, ordinals
from lastbit.ops import Latent
from lastbit.result import Need, Needs, RowCheck
from lastbit.timing import ROWS, timed

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
    device, size = split.device, max(sizes)
    bits = torch.arange((size - 1).bit_length(), device=device).reshape(-1, 1)
    has = (torch.arange(size, device=device) >> bits) & 1 == 1
    halves = torch.stack([~has, has], dim=1)  # of the columns, by each bit of their index: [bits, 2, size]
    together = max(1, rows.at_once * len(split) // (rows.elements * len(halves)))
    for at in torch.arange(len(split), device=device).split(together):
        known, possible = _split(rows.only(at), None if shown is None else shown.only(at), halves)
        split[at], maybe = (groups.all(-1).any(0) for groups in (known, possible))
        unsure[at] = maybe & ~split[at]
    return split, unsure


def _split(rows: Rows, shown: Shown | None, halves: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the groups that are split by each bit, and that may be, [bits, rows, groups].

    The second half of a row is searched only where all groups of the first are explained: no other row is split.
    """
    bits, _, size = halves.shape
    count, device = len(rows.low), halves.device
    follows = None if shown is None else ~(shown.stray & halves[:, :, None, None]).any(-1)  # [bits, 2, rows, groups]
    known = torch.ones(bits * count, rows.low.shape[-1], dtype=torch.bool, device=device)
    possible = known.clone()
    left = torch.arange(bits * count, device=device)  # each row once for each bit
    for half in range(2):
        each, bit = left % count, left // count
        half_rows = replace(rows.only(each), counted=halves[bit, half].reshape(-1, 1, size))
        searched = explained_groups(half_rows)
        explained = searched.explained
        if shown is not None and follows is not None:
            tried = ~explained & follows[bit, 1 - half, each]
            explained = explained | _with_other_statistics(replace(half_rows, tried=tried), shown.only(each))
        known[left] &= explained & ~searched.open
        possible[left] &= explained
        if not len(left := left[explained.all(-1)]):
            break
    known, possible = (t.unflatten(0, (bits, count)) for t in (known, possible))
    return (known, possible) if follows is None else (known & follows.any(1), possible & follows.any(1))


def _with_other_statistics(rows: Rows, shown: Shown) -> Tensor:
    """Return a mask of the tried groups that a latent value near the shown one explains with another statistic.

    A mean of products is a sum in which lanes disagree, too.
    """
    explained = torch.zeros_like(rows.tried)
    together = max(1, rows.at_once * len(explained) // (rows.elements * (2 * _FARTHEST + 1)))
    offsets = torch.arange(-_FARTHEST, _FARTHEST + 1, device=explained.device).reshape(-1, 1, 1)
    if (latent := shown.latent) is None:
        return explained
    for name, (low, high) in shown.others.items():
        unsure = rows.tried & ~explained
        for at in unsure.any(-1).nonzero().reshape(-1).split(together):
            some = replace(rows, tried=unsure).only(at)
            near = from_ordinals((latent[at] + offsets).clamp(some.low, some.high), FP32).flatten(0, 1)
            each = torch.arange(len(at), device=at.device).repeat(len(offsets))
            given = {n: t[each] for n, t in some.given.items() if n != name} | {rows.stage: near}
            known = replace(replace(some, stage=name, low=low[at], high=high[at], given={}).only(each), given=given)
            found = explained_groups(known).explained.unflatten(0, (len(offsets), -1)).any(0)
            explained[at] |= found & some.tried
    return explained


def forgiven(local: Trace, trace: Trace, latent: Latent, split: Tensor) -> Trace:
    """Return `local`, seen from the kernel's own stages, with the stages of split rows seen from the inputs instead.

    There a statistic that the kernel shows is one of two. `split` has one entry per row.
    """
    mixed = {}
    for name in (latent.stage, *latent.instead.values(), *latent.also, *latent.through):
        if name in local.stages:
            own, everything = local.numbers(name), trace.enclosure(name)
            mask = split.reshape(*everything.shape[:-1], 1)
            mixed[name] = Numbers(Enclosure(torch.where(mask, everything.full, own.enclosure.full)), own.format)
    return replace(local, stages={**local.stages, **mixed})


# Arbitrary: spread over the block, they stand for all in a sentence.
_MOST_NEEDS = 64  # rows of a block that are searched for a value beyond the enclosure
_LARGEST = int(ordinals(torch.tensor(FP32.max, dtype=torch.float64), FP32))
_NORMAL = 1 << (FP32.precision - 1)  # position of the smallest normal number


@dataclass(frozen=True, eq=False)
class ExplainedRows:
    """The row check, a mask of the split rows of the block, [rows], and the indices of those that nothing explains."""

    check: RowCheck
    split: Tensor
    unexplained: Tensor


@timed(ROWS)
def check_rows(seen: Observation) -> RowCheck:
    """Count the rows that one value of the op's latent stage explains; one per group where a row has several.

    What the others need is not searched for.
    """
    return explain_rows(seen, seen.problem.trace, needs=False).check


@timed(ROWS)
def explain_rows(seen: Observation, trace: Trace, own: Trace | None = None, *, needs: bool = True) -> ExplainedRows:
    """Check the rows of the stages that a kernel gave and a latent value must explain.

    `trace` is the reference from the inputs, of which no more than the latent stages may be kept. `own` is the one that
    goes on from the kernel's own stages, where elements do not follow from these: the lanes of such rows may disagree
    although one value explains the row, because other statistics differ. What rows need that nothing explains is
    searched for if `needs`.
    """
    every = _rows(seen, trace)
    undecided = every.tried  # without groups of one legal value per element, which every value explains
    if all(name in trace.stages for name in every.seen):
        open_ = torch.zeros_like(every.tried)
        for name, values in every.seen.items():
            enclosure = trace.enclosure(name)
            lo, hi = (end.reshape(values.shape) for end in (enclosure.lo, enclosure.hi))
            open_ |= ((lo != values) | (hi != values)).any(-1)
        undecided = every.tried & open_
    at = every.tried.any(-1).nonzero().reshape(-1)
    whole, answered = (torch.ones_like(at, dtype=torch.bool) for _ in range(2))
    asked = undecided[at].any(-1).nonzero().reshape(-1)
    if len(asked):
        searched = explained_groups(replace(every, tried=undecided).only(at[asked]))
        whole[asked] = searched.explained.all(-1)
        answered[asked] = ~(searched.open.any(-1) & whole[asked])
    at, whole = at[answered], whole[answered]

    shown, also = _shown(every, seen, own), tuple(every.also or ())
    doubtful = at[~whole] if shown is None else at[~whole | shown.stray[at].flatten(1).any(-1)]
    split = torch.zeros_like(every.tried[:, 0])
    if not len(doubtful):
        return ExplainedRows(RowCheck(every.stage, len(at), len(at), also=also), split, at[:0])
    given = {} if shown is None else {n: _as_rows(seen.actual[n]) for n in _earlier(seen, every.stage)}
    part = None if shown is None else shown.only(doubtful)
    split[doubtful], unsure = split_rows(replace(every, given=given).only(doubtful), part)
    answered = whole | ~torch.isin(at, doubtful[unsure])
    at, whole = at[answered], whole[answered]
    unexplained = at[~whole & ~split[at]]
    needed = Needs()
    if needs and len(unexplained) and every.also is None:
        needed = _needs(every, unexplained, _as_rows(trace.enclosure(every.stage).value))
    explained = int((whole & ~split[at]).sum())
    return ExplainedRows(RowCheck(every.stage, len(at), explained, int(split.sum()), needed, also), split, unexplained)


def _needs(every: Rows, wrong: Tensor, expected: Tensor) -> Needs:
    """Search some of the rows `wrong` for the latent values they need in place of `expected`, beyond the enclosure.

    Every finite number is a candidate, or every normal one of the sign that both ends have: of a quotient by a
    subnormal number nothing is known, so that it would explain everything.
    """
    at = wrong[:: -(-len(wrong) // _MOST_NEEDS)]
    rows = every.only(at)
    above, below = torch.where(rows.low >= _NORMAL, _NORMAL, 1), torch.where(rows.high <= -_NORMAL, -_NORMAL, -1)
    low, high = torch.where(rows.low > 0, above, -_LARGEST), torch.where(rows.high < 0, below, _LARGEST)
    searched = explained_groups(replace(rows, low=low, high=high))
    explained, found = searched.explained, searched.found
    beyond = rows.tried & ((found < rows.low) | (found > rows.high))
    other = beyond & explained.all(-1, keepdim=True)
    pairs = torch.stack([from_ordinals(found, FP32), expected[at]], -1)[other].tolist()
    needed = [Needs(0, 0, need, need) for need in (Need(*pair) for pair in pairs)]
    return functools.reduce(operator.add, needed, Needs(len(at), int(other.any(-1).sum())))


def _rows(seen: Observation, trace: Trace) -> Rows:
    """Return all rows of a block, with the values of the latent stages within their enclosures as candidates."""
    problem, latent = seen.problem, seen.problem.op.latent
    assert latent is not None
    stage, also = latent.under(problem.contract), [name for name in latent.also if name in trace.formats]
    enclosures = [trace.enclosure(name) for name in (stage, *also)]
    ends = [(_as_rows(e.lo), _as_rows(e.hi)) for e in enclosures]  # [rows, groups]
    groups = ends[0][0].shape[-1]
    through = {
        s: _as_rows(seen.actual[s]).to(torch.float64).unflatten(-1, (groups, -1)) for s in seen.through_latent(trace)
    }
    own = {name: _as_rows(t) if name in problem.op.rows else t for name, t in problem.tensors.items()}
    known = torch.stack([end.abs() <= FP32.max for pair in ends for end in pair]).all(0)
    # As many elements as there are values to explain them tell nothing.
    tried = known & (min(t.shape[-1] for t in through.values()) > len(ends))
    (low, high), *others = [
        (ordinals(torch.where(tried, lo, 1.0), FP32), ordinals(torch.where(tried, hi, 1.0), FP32)) for lo, hi in ends
    ]
    shown = [_position(seen.actual[name], low) for name in (stage, *also) if name in seen.actual]
    return Rows(
        problem.on(own),
        through,
        stage,
        low,
        high,
        tried,
        also=dict(zip(also, others, strict=True)) if latent.also else None,
        likely=shown if len(shown) == len(ends) else (),
    )


def _earlier(seen: Observation, stage: str) -> list[str]:
    """Return the stages of numbers before `stage` that the kernel gave."""
    stages = seen.problem.trace.stages
    names = list(stages)
    return [n for n in names[: names.index(stage)] if n in seen.actual and isinstance(stages[n], Numbers)]


def _shown(every: Rows, seen: Observation, own: Trace | None) -> Shown | None:
    """Return the statistics of each row that the kernel shows, None if every element follows from them."""
    if own is None:
        return None
    strays = [own.numbers(n).outside(seen.actual[n]).reshape(t.shape) for n, t in every.seen.items()]
    stray = torch.stack(strays).any(0)
    if not stray.any():
        return None
    trace = seen.problem.trace
    like = trace.enclosure(every.stage)
    statistics = [n for n in _earlier(seen, every.stage) if trace.stages[n].shape == like.shape]
    ends = {n: (trace.enclosure(n).lo, trace.enclosure(n).hi) for n in statistics}
    return Shown(
        latent=_position(seen.actual[every.stage], every.low) if every.stage in seen.actual else None,
        others={n: (_position(lo, every.low), _position(hi, every.low)) for n, (lo, hi) in ends.items()},
        stray=stray,
    )


def _position(values: Tensor, like: Tensor) -> Tensor:
    """Return the ordinals of fp32 numbers; of the largest ones where they are infinite, and 0 for NaN."""
    return ordinals(values.to(torch.float64).nan_to_num(0.0, FP32.max, -FP32.max), FP32).reshape(like.shape)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
