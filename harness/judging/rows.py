"""Some rows of a problem: the reference after its latent stages, as a function of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lastbit.judging.problem import Given, Problem, Tensors
from lastbit.numerics.formats import from_ordinals, ordinals
from lastbit.ops import Contract

Range = tuple[Tensor, Tensor]
"""The lowest and the highest of something."""

_AT_ONCE = {"cpu": 1 << 15}  # elements: below, the cost is in the number of operations, above, in their size
_AT_ONCE_ELSEWHERE = 1 << 22


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a problem: the reference after its latent stages, as a function of their values.

    Attributes:
        problem: the problem; those of its inputs that the op declares as rows are [rows, ...].
        seen: stages that the latent values must explain, [rows, groups, size].
        stage: the stage whose values are tried; the next three are [rows, groups].
        low, high: ordinals of the smallest and the largest fp32 number to try.
        tried: groups that have something to explain.
        given: other stages, whose values are known: [rows, ...].
        counted: elements of each group that must be explained, [rows, 1, size]; None for all.
        also: lowest and highest ordinals of other stages that are tried together with it. None where there is but one
        stage, and every element grows or falls with it.
        likely: ordinals that a kernel shows, for each of these stages in order; none if it does not show them all.
    """

    problem: Problem
    seen: Tensors
    stage: str
    low: Tensor
    high: Tensor
    tried: Tensor
    given: Tensors = field(default_factory=dict)
    counted: Tensor | None = None
    also: Mapping[str, Range] | None = None
    likely: Sequence[Tensor] = ()

    @property
    def elements(self) -> int:
        return max(1, *(t.numel() for t in self.seen.values()))

    @property
    def at_once(self) -> int:
        """Elements that are best evaluated together on this device."""
        device = next(iter(self.seen.values())).device.type
        return _AT_ONCE.get(device, _AT_ONCE_ELSEWHERE)

    @property
    def unrounded(self) -> Rows:
        """These rows under a contract that does not round the stages that are to be explained."""
        contract = self.problem.contract
        rounds = {name: target for name, target in contract.rounds.items() if name not in self.seen}
        return replace(self, problem=replace(self.problem, contract=Contract(contract.options, rounds), siblings=None))

    def rounding(self, stage: str) -> Range:
        """Return the ends of the interval that is rounded to each element of a stage: the middles between it and its
        neighbours in the format of the stage, or where that rounds otherwise than to nearest, these or itself.
        """
        seen, fmt = self.seen[stage], self.problem.format(stage)
        at = ordinals(seen.nan_to_num(0.0, fmt.max, -fmt.max), fmt)
        below, above = (from_ordinals(at + step, fmt) for step in (-1, 1))
        if fmt.direction == "either":
            return below, above
        if fmt.direction == "zero":
            return torch.where(seen > 0, seen, below), torch.where(seen < 0, seen, above)
        return (seen + below) / 2, (seen + above) / 2

    def only(self, rows: Tensor) -> Rows:
        """Keep only the rows of these indices, one of which may occur several times."""
        return replace(
            self,
            low=self.low[rows],
            high=self.high[rows],
            tried=self.tried[rows],
            problem=self._of_rows(lambda t: t[rows]),
            seen={n: t[rows] for n, t in self.seen.items()},
            given={n: t[rows] for n, t in self.given.items()},
            counted=None if self.counted is None else self.counted[rows],
            also=None if self.also is None else {n: (low[rows], high[rows]) for n, (low, high) in self.also.items()},
            likely=[t[rows] for t in self.likely],
        )

    def forward(self, values: Given) -> dict[str, Range]:
        """Evaluate the lowest and highest legal elements for latent values, or intervals of them, side by side.

        [candidates, rows, groups] → [candidates, rows, groups, size].
        """
        given = {n: t.unsqueeze(0) for n, t in self.given.items()}
        trace = self._of_rows(lambda t: t.unsqueeze(0)).evaluate({**given, **values})
        groups = (self.low.shape[-1], -1)
        ends = {name: trace.enclosure(name) for name in self.seen}
        return {name: (e.lo.unflatten(-1, groups), e.hi.unflatten(-1, groups)) for name, e in ends.items()}

    def _of_rows(self, change: Callable[[Tensor], Tensor]) -> Problem:
        """Apply a function to every input that is of rows."""
        rows, tensors = self.problem.op.rows, self.problem.tensors
        return self.problem.on({n: change(t) if n in rows else t for n, t in tensors.items()})


@dataclass(frozen=True, eq=False)
class Searched:
    """The answers of a search, each [rows, groups].

    Attributes:
        explained: groups that some values explain, or that were not `tried`.
        found: ordinal of the value of the first stage that explains the group.
        open: groups for which the search ended without an answer; they count as explained, too.
    """

    explained: Tensor
    found: Tensor
    open: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Searched:
        """Return the state before anything was searched."""
        return cls(~rows.tried, rows.low.clone(), torch.zeros_like(rows.tried))

    @classmethod
    def joined(cls, parts: Sequence[Searched]) -> Searched:
        """Join the answers of consecutive parts of the rows."""
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in ("explained", "found", "open")))

    def add(self, rows: Tensor, fits: Tensor, at: Tensor) -> None:
        """Take note of groups that these ordinals explain, in the rows of these indices."""
        new = fits & ~self.explained[rows]
        self.found[rows] = torch.where(new, at, self.found[rows])
        self.explained[rows] |= new

    def replace(self, rows: Tensor, other: Searched) -> None:
        """Take the answers of another search in the rows of these indices."""
        self.explained[rows], self.found[rows], self.open[rows] = other.explained, other.found, other.open
