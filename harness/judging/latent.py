"""The row check: one value of the latent stage must explain a whole row, bit for bit; in groups, each for itself.

For each row, candidates for the latent value are tried within its enclosure. This is the strong check for fp32 results,
whose enclosures never close to a single number. What is tried of a row that no value explains: whether its lanes
disagree (`lanes.py`), and whether some other value explains it, beyond the enclosure.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.judging.candidates import Rows, explained_groups
from harness.judging.expected import Numbers
from harness.judging.lanes import Shown, split_rows
from harness.judging.observation import Observation
from harness.judging.problem import Tensors
from harness.judging.trace import Trace
from harness.numerics.formats import FP32, from_ordinals, ordinals
from harness.row_check import Need, Needs, RowCheck
from harness.timing import ROWS, timed

_MOST_NEEDS = 64  # rows of a block that are searched for a value beyond the enclosure
_LARGEST = int(ordinals(torch.tensor(FP32.max, dtype=torch.float64), FP32))


@dataclass(frozen=True, eq=False)
class ExplainedRows:
    """The row check, and which rows of the block are split, [rows]."""

    check: RowCheck
    split: Tensor


@timed(ROWS)
def check_rows(seen: Observation) -> RowCheck:
    """How many rows one value of the op's latent stage explains; one per group where a row has several."""
    return explain_rows(seen, None).check


@timed(ROWS)
def explain_rows(seen: Observation, own: Trace | None) -> ExplainedRows:
    """The row check of what a kernel gave, whatever that is of the stages that a latent value must explain.

    `own` is the reference that goes on from the kernel's own stages, where elements do not follow from these: the lanes
    of such rows may disagree although one value explains the row, because other statistics differ.
    """
    every = _rows(seen)
    shown = _shown(every, seen, own)
    at = every.tried.any(-1).nonzero().reshape(-1)
    whole = explained_groups(every.only(at))[0].all(-1)
    doubtful = at[~whole] if shown is None else at[~whole | shown.stray[at].flatten(1).any(-1)]
    split = torch.zeros_like(every.tried[:, 0])
    if not len(doubtful):
        return ExplainedRows(RowCheck(every.stage, len(at), len(at), 0, Needs()), split)
    given = {} if shown is None else {n: _as_rows(seen.actual[n]) for n in _earlier(seen, every.stage)}
    part = None if shown is None else shown.only(doubtful)
    split[doubtful] = split_rows(replace(every, given=given).only(doubtful), part)
    unexplained = at[~whole & ~split[at]]
    latent = seen.problem.trace.enclosure(every.stage)
    needs = _needs(every, unexplained, _as_rows(latent.value)) if len(unexplained) else Needs()
    counts = len(at), int((whole & ~split[at]).sum()), int(split.sum())
    return ExplainedRows(RowCheck(every.stage, *counts, needs), split)


def any_value_explains(seen: Observation) -> bool:
    """Whether each row comes from some value of the latent stage, within its enclosure or not."""
    every = _rows(seen)
    tried = torch.full_like(every.tried, _several(every.seen))
    return bool(tried.any() and explained_groups(_without_bounds(replace(every, tried=tried)))[0].all())


def _needs(every: Rows, wrong: Tensor, expected: Tensor) -> Needs:
    """What the rows `wrong` need: another value than `expected`, beyond the enclosure; some of them are searched."""
    at = wrong[:: -(-len(wrong) // _MOST_NEEDS)]
    rows = every.only(at)
    explained, found = explained_groups(_without_bounds(rows))
    beyond = rows.tried & ((found < rows.low) | (found > rows.high))
    other = beyond & explained.all(-1, keepdim=True)
    pairs = torch.stack([from_ordinals(found, FP32), expected[at]], -1)[other].tolist()
    needed = [Needs(0, 0, need, need) for need in (Need(*pair) for pair in pairs)]
    return functools.reduce(operator.add, needed, Needs(len(at), int(other.any(-1).sum())))


def _without_bounds(rows: Rows) -> Rows:
    """The same rows, with every finite number as a candidate, or every one of the sign that both ends have."""
    return replace(
        rows,
        low=torch.where(rows.low > 0, 1, -_LARGEST),
        high=torch.where(rows.high < 0, -1, _LARGEST),
    )


def _rows(seen: Observation) -> Rows:
    """All rows of a block, with the values of the latent stage within its enclosure as candidates."""
    problem = seen.problem
    assert problem.op.latent is not None
    stage = problem.op.latent.under(problem.contract)
    latent = problem.trace.enclosure(stage)
    lo, hi = _as_rows(latent.lo), _as_rows(latent.hi)
    through = {s: _as_rows(seen.actual[s]).to(torch.float64).unflatten(-1, (lo.shape[-1], -1)) for s in seen.through}
    own = {name: _as_rows(t) if name in problem.op.rows else t for name, t in problem.tensors.items()}
    tried = torch.isfinite(lo) & torch.isfinite(hi) & _several(through)
    low, high = (ordinals(torch.where(tried, end, 1.0), FP32) for end in (lo, hi))
    return Rows(problem.on(own), through, stage, low, high, tried)


def _several(seen: Tensors) -> bool:
    """Whether groups have more than one element: one element tells nothing."""
    return min(t.shape[-1] for t in seen.values()) > 1


def _earlier(seen: Observation, stage: str) -> list[str]:
    """The stages of numbers before `stage` that the kernel gave."""
    stages = seen.problem.trace.stages
    names = list(stages)
    return [n for n in names[: names.index(stage)] if n in seen.actual and isinstance(stages[n], Numbers)]


def _shown(every: Rows, seen: Observation, own: Trace | None) -> Shown | None:
    """What the kernel shows of each row's statistics, unless every element follows from it."""
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
    """Positions of fp32 numbers; of the largest ones where they are infinite, and 0 for NaN."""
    return ordinals(values.to(torch.float64).nan_to_num(0.0, FP32.max, -FP32.max), FP32).reshape(like.shape)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
