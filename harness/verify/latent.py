"""The row check: one value of the latent stage must explain a whole row, bit for bit; in groups, each for itself.

For each row, candidates for the latent value are tried within its enclosure. An element above what a candidate allows
asks for a larger value, one below for a smaller (or the reverse, by its own sign). If one candidate is asked both ways,
or every candidate is asked away, no value explains the row. This is the strong check for fp32 results, whose enclosures
never close to a single number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics.formats import FP32, from_ordinals, ordinals
from harness.op import Contract, Op
from harness.result import RowCheck
from harness.verify.evaluate import Params, Tensors, Trace, evaluate

_AT_ONCE = {"cpu": 1 << 15}  # elements: below, the cost is in the number of operations, above, in their size
_AT_ONCE_ELSEWHERE = 1 << 22
_MOST_CANDIDATES = 31


def has_latent(op: Op, actual: Tensors) -> bool:
    """Whether `actual` has elements of stages that a latent value must explain."""
    return op.latent is not None and any(actual[s].numel() for s in op.latent.through if s in actual)


def check_rows(op: Op, contract: Contract, tensors: Tensors, params: Params, actual: Tensors, trace: Trace) -> RowCheck:
    """How many rows of `actual` one value of the op's latent stage explains; one per group where a row has several."""
    assert op.latent is not None
    stage = op.latent.under(contract)
    latent = trace.enclosure(stage)
    lo, hi = _as_rows(latent.lo), _as_rows(latent.hi)
    groups = lo.shape[-1]
    seen = {
        s: _as_rows(actual[s]).to(torch.float64).unflatten(-1, (groups, -1)) for s in op.latent.through if s in actual
    }
    several = min(t.shape[-1] for t in seen.values()) > 1
    tried = torch.isfinite(lo) & torch.isfinite(hi) & several
    rows = tried.any(-1).nonzero().reshape(-1)
    problem = _Rows(op, contract, {n: _as_rows(t) if n in op.rows else t for n, t in tensors.items()}, params, seen)
    low, high = (ordinals(torch.where(tried, end, 1.0)[rows], FP32) for end in (lo, hi))
    unexplained = _search(problem.only(rows), low, high, tried[rows]) if len(rows) else 0
    return RowCheck(stage, len(rows), len(rows) - unexplained)


def _search(problem: _Rows, low: Tensor, high: Tensor, tried: Tensor) -> int:
    """Number of rows with a group, of those `tried`, that no candidate from `low` to `high` explains.

    Candidates are positions of fp32 numbers, [rows, groups].
    """
    slopes = problem.slopes(low, high)
    unexplained = 0
    while len(low):
        count = max(1, min(_MOST_CANDIDATES, problem.at_once // problem.elements))
        at = _spread(low, high, count)
        up, down = problem.asked(at, slopes)
        fits = ~up & ~down
        explained = fits.any(0) | ~tried
        low = torch.maximum(low, torch.where(up, at + 1, low).amax(0))
        high = torch.minimum(high, torch.where(down, at - 1, high).amin(0))
        impossible = (~explained & ((up & down).any(0) | (low > high))).any(-1)
        unexplained += int(impossible.sum())
        rest = (~impossible & ~explained.all(-1)).nonzero().reshape(-1)
        found = at.gather(0, fits.to(torch.uint8).argmax(0, keepdim=True))[0]  # stays the candidate of its group
        low, high = (torch.where(explained, found, end)[rest] for end in (low, high))
        problem, tried = problem.only(rest), tried[rest]
        slopes = {name: (below[rest], above[rest]) for name, (below, above) in slopes.items()}
    return unexplained


def _spread(low: Tensor, high: Tensor, count: int) -> Tensor:
    """`count` positions from low to high, stacked in front."""
    steps = torch.arange(1, count + 1, device=low.device).reshape(-1, 1, 1)
    return low + ((high - low) * steps) // (count + 1)


def _slope(ends: Tensor) -> Tensor:
    """1 where the last of two stacked tensors is the larger, -1 where the first is, else 0."""
    return (ends[1] > ends[0]).to(torch.int8) - (ends[1] < ends[0]).to(torch.int8)


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class _Rows:
    """Some rows of a problem: the reference after the latent stage, as a function of candidates for it."""

    op: Op
    contract: Contract
    tensors: Tensors
    params: Params
    seen: Tensors

    @property
    def elements(self) -> int:
        return max(1, *(t.numel() for t in self.seen.values()))

    @property
    def at_once(self) -> int:
        device = next(iter(self.seen.values())).device.type
        return _AT_ONCE.get(device, _AT_ONCE_ELSEWHERE)

    def only(self, rows: Tensor) -> _Rows:
        tensors = {n: t[rows] if n in self.op.rows else t for n, t in self.tensors.items()}
        return _Rows(self.op, self.contract, tensors, self.params, {n: t[rows] for n, t in self.seen.items()})

    def forward(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Lowest and highest legal elements for each candidate: [candidates, rows, groups] → [..., group size]."""
        assert self.op.latent is not None
        tensors = {n: t.unsqueeze(0) if n in self.op.rows else t for n, t in self.tensors.items()}
        given = {self.op.latent.under(self.contract): from_ordinals(positions, FP32)}
        trace = evaluate(self.op, self.contract, tensors, self.params, given)
        groups = (positions.shape[-1], -1)
        ends = {name: trace.enclosure(name) for name in self.seen}
        return {name: (e.lo.unflatten(-1, groups), e.hi.unflatten(-1, groups)) for name, e in ends.items()}

    def slopes(self, low: Tensor, high: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Sign of the change of both ends of each element as the latent value grows; 0 if nothing changes."""
        ends = self.forward(torch.stack([low, high]))
        return {name: (_slope(below), _slope(above)) for name, (below, above) in ends.items()}

    def asked(self, positions: Tensor, slopes: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Per candidate and group: whether some element asks for a larger, and for a smaller latent value."""
        up = torch.zeros_like(positions, dtype=torch.bool)
        down = torch.zeros_like(up)
        for name, (lo, hi) in self.forward(positions).items():
            y = self.seen[name]
            lo_slope, hi_slope = slopes[name]
            # Where the end does not move, no candidate changes it: no group with such an element is explained.
            too_low, too_high = y < lo, y > hi
            up |= ((too_high & (hi_slope >= 0)) | (too_low & (lo_slope <= 0))).any(-1)
            down |= ((too_high & (hi_slope <= 0)) | (too_low & (lo_slope >= 0))).any(-1)
        return up, down
