"""The row check: one value of the latent stage must explain a whole row, bit for bit.

For each row, candidates for the latent value are tried within its enclosure. An element above what a candidate allows
asks for a larger value, one below for a smaller (or the reverse, by its own sign). If one candidate is asked both ways,
or every candidate is asked away, no value explains the row. This is the strong check for fp32 results, whose enclosures
never close to a single number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.numerics import Enclosure
from harness.numerics.formats import FP32, from_ordinals, ordinals
from harness.op import Contract, Op
from harness.result import RowCheck
from harness.verify.evaluate import Params, Tensors, Trace, evaluate

_AT_ONCE = {"cpu": 1 << 15}  # elements: below, the cost is in the number of operations, above, in their size
_AT_ONCE_ELSEWHERE = 1 << 22
_MOST_CANDIDATES = 31


def check_rows(op: Op, contract: Contract, tensors: Tensors, params: Params, actual: Tensors, trace: Trace) -> RowCheck:
    """How many rows of `actual` one value of the op's latent stage explains."""
    assert op.latent is not None
    latent = trace.enclosures[op.latent.stage]
    seen = {s: _as_rows(actual[s]).to(torch.float64) for s in op.latent.through if s in actual}
    lo, hi = _as_rows(latent.lo), _as_rows(latent.hi)
    several = min(t.shape[-1] for t in seen.values()) > 1
    rows = (torch.isfinite(lo) & torch.isfinite(hi) & several).reshape(-1).nonzero().reshape(-1)
    problem = _Rows(op, contract, {n: _as_rows(t) if n in op.rows else t for n, t in tensors.items()}, params, seen)
    problem = problem.only(rows)
    low, high = ordinals(lo[rows], FP32), ordinals(hi[rows], FP32)
    unexplained = _search(problem, low, high) if len(rows) else 0
    return RowCheck(op.latent.stage, len(rows), len(rows) - unexplained)


def _search(problem: _Rows, low: Tensor, high: Tensor) -> int:
    """Number of rows that no candidate from `low` to `high` (positions of fp32 numbers, [rows, 1]) explains."""
    increasing = problem.increasing(low, high)
    unexplained = 0
    while len(low):
        count = max(1, min(_MOST_CANDIDATES, problem.at_once // problem.elements))
        at = _spread(low, high, count)
        up, down = problem.asked(at, increasing)
        explained = (~up & ~down).any(0)
        low = torch.maximum(low, torch.where(up, at + 1, low).amax(0))
        high = torch.minimum(high, torch.where(down, at - 1, high).amin(0))
        impossible = ~explained & ((up & down).any(0) | (low > high))
        unexplained += int(impossible.sum())
        rest = (~explained & ~impossible).reshape(-1).nonzero().reshape(-1)
        problem, low, high = problem.only(rest), low[rest], high[rest]
        increasing = {name: t[rest] for name, t in increasing.items()}
    return unexplained


def _spread(low: Tensor, high: Tensor, count: int) -> Tensor:
    """`count` positions from low to high, stacked in front."""
    steps = torch.arange(1, count + 1, device=low.device).reshape(-1, 1, 1)
    return low + ((high - low) * steps) // (count + 1)


def _direction(ends: Sequence[Tensor]) -> Tensor:
    """1 or -1 where any of the tensors (first and last candidate in front) grows or falls, 0 where all stay."""
    grows = torch.stack([t[1] > t[0] for t in ends]).any(0)
    falls = torch.stack([t[1] < t[0] for t in ends]).any(0)
    return grows.to(torch.int8) - falls.to(torch.int8)


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

    def forward(self, positions: Tensor) -> dict[str, Enclosure]:
        """What the contract allows for each candidate: leading dimension of `positions`, [candidates, rows, 1]."""
        assert self.op.latent is not None
        tensors = {n: t.unsqueeze(0) if n in self.op.rows else t for n, t in self.tensors.items()}
        given = {self.op.latent.stage: from_ordinals(positions, FP32)}
        trace = evaluate(self.op, self.contract, tensors, self.params, given)
        return {name: trace.enclosures[name] for name in self.seen}

    def increasing(self, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """Sign of the change of each element as the latent value grows; 0 if nothing about it changes."""
        ends = self.forward(torch.stack([low, high]))
        return {name: _direction([e.value, e.lo, e.hi]) for name, e in ends.items()}

    def asked(self, positions: Tensor, increasing: Tensors) -> tuple[Tensor, Tensor]:
        """Per candidate and row: whether some element asks for a larger, and for a smaller latent value."""
        up = torch.zeros_like(positions, dtype=torch.bool)
        down = torch.zeros_like(up)
        for name, allowed in self.forward(positions).items():
            y, sign = self.seen[name], increasing[name]
            above, below = y > allowed.hi, y < allowed.lo
            stuck = (above | below) & (sign == 0)  # no candidate changes this element: no row with it is explained
            up |= (stuck | torch.where(sign > 0, above, below)).any(-1, keepdim=True)
            down |= (stuck | torch.where(sign > 0, below, above)).any(-1, keepdim=True)
        return up, down
