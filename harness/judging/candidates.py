"""The search for a row's value of one stage: candidates are tried, and the elements say where to look next.

An element above what a candidate allows asks for a larger value, one below for a smaller (or the reverse, by its own
sign). If one candidate is asked both ways, or every candidate is asked away, no value explains the elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.judging.problem import Problem, Tensors
from harness.numerics.formats import FP32, from_ordinals

_AT_ONCE = {"cpu": 1 << 15}  # elements: below, the cost is in the number of operations, above, in their size
_AT_ONCE_ELSEWHERE = 1 << 22
_MOST_CANDIDATES = 31


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a problem: the reference after one of its stages, as a function of candidates for that stage.

    Attributes:
        problem: the problem; those of its inputs that the op declares as rows are [rows, ...].
        seen: stages that the candidates must explain, [rows, groups, size].
        stage: the stage whose values are tried; the next three are [rows, groups].
        low, high: positions of the smallest and the largest fp32 number to try.
        tried: groups that have something to explain.
        given: other stages, whose values are known: [rows, ...].
        counted: elements of each group that must be explained, [rows, 1, size]; None for all.
    """

    problem: Problem
    seen: Tensors
    stage: str
    low: Tensor
    high: Tensor
    tried: Tensor
    given: Tensors = field(default_factory=dict)
    counted: Tensor | None = None

    @property
    def elements(self) -> int:
        return max(1, *(t.numel() for t in self.seen.values()))

    @property
    def at_once(self) -> int:
        """Elements that are best evaluated together on this device."""
        device = next(iter(self.seen.values())).device.type
        return _AT_ONCE.get(device, _AT_ONCE_ELSEWHERE)

    def only(self, rows: Tensor) -> Rows:
        """The rows of these indices, one of which may occur several times."""
        return replace(
            self,
            low=self.low[rows],
            high=self.high[rows],
            tried=self.tried[rows],
            problem=self._of_rows(lambda t: t[rows]),
            seen={n: t[rows] for n, t in self.seen.items()},
            given={n: t[rows] for n, t in self.given.items()},
            counted=None if self.counted is None else self.counted[rows],
        )

    def forward(self, positions: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Lowest and highest legal elements for each candidate: [candidates, rows, groups] → [..., group size]."""
        given = {n: t.unsqueeze(0) for n, t in self.given.items()}
        given[self.stage] = from_ordinals(positions, FP32)
        trace = self._of_rows(lambda t: t.unsqueeze(0)).evaluate(given)
        groups = (positions.shape[-1], -1)
        ends = {name: trace.enclosure(name) for name in self.seen}
        return {name: (e.lo.unflatten(-1, groups), e.hi.unflatten(-1, groups)) for name, e in ends.items()}

    def _of_rows(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with every input that is of rows changed."""
        rows, tensors = self.problem.op.rows, self.problem.tensors
        return self.problem.on({n: change(t) if n in rows else t for n, t in tensors.items()})

    def slopes(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Sign of the change of both ends of each element as the value grows; 0 if nothing changes."""
        ends = self.forward(torch.stack([self.low, self.high]))
        return {name: (_slope(below), _slope(above)) for name, (below, above) in ends.items()}

    def asked(self, positions: Tensor, slopes: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Per candidate and group: whether some element asks for a larger, and for a smaller value."""
        up = torch.zeros_like(positions, dtype=torch.bool)
        down = torch.zeros_like(up)
        for name, (lo, hi) in self.forward(positions).items():
            y = self.seen[name]
            lo_slope, hi_slope = slopes[name]
            # Where the end does not move, no candidate changes it: no group with such an element is explained.
            too_low, too_high = (wrong if self.counted is None else wrong & self.counted for wrong in (y < lo, y > hi))
            up |= ((too_high & (hi_slope >= 0)) | (too_low & (lo_slope <= 0))).any(-1)
            down |= ((too_high & (hi_slope <= 0)) | (too_low & (lo_slope >= 0))).any(-1)
        return up, down


def explained_groups(rows: Rows) -> tuple[Tensor, Tensor]:
    """Which groups some candidate explains, and the position of that candidate; both are [rows, groups].

    Groups that are not `tried` count as explained.
    """
    explained, found = ~rows.tried, rows.low.clone()
    slopes = rows.slopes() if len(found) else {}
    left = torch.arange(len(found), device=found.device)
    while len(left):
        low, high = rows.low, rows.high
        count = max(1, min(_MOST_CANDIDATES, rows.at_once // rows.elements))
        at = _spread(low, high, count)
        up, down = rows.asked(at, slopes)
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
    return explained, found


def _spread(low: Tensor, high: Tensor, count: int) -> Tensor:
    """`count` positions from low to high, stacked in front."""
    steps = torch.arange(1, count + 1, device=low.device).reshape(-1, 1, 1)
    return low + ((high - low) * steps) // (count + 1)


def _slope(ends: Tensor) -> Tensor:
    """1 where the last of two stacked tensors is the larger, -1 where the first is, else 0."""
    return (ends[1] > ends[0]).to(torch.int8) - (ends[1] < ends[0]).to(torch.int8)
