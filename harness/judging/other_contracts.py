"""The other contracts of an op: some are ruled out by a kernel's tensors, some explain a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.inputs.bits import numbers
from lastbit.judging.latent import check_rows
from lastbit.judging.observation import Observation
from lastbit.ops import Contract
from lastbit.timing import OTHERS, timed


class OtherContracts:
    """The findings about other contracts, block by block.

    Attributes:
        ruled_out: alternative that is not `settled` → elements outside: of the results, or where there are none, of
            any stage given the kernel's own earlier ones.
    """

    def __init__(self, settled: Collection[str]) -> None:
        self._settled = settled
        self.ruled_out: dict[str, int] = {}
        self._explaining: list[Contract] | None = None
        self._with_stages: list[Contract] | None = None

    @property
    def explained(self) -> tuple[str, ...]:
        """The contracts that allow every bit of the blocks that failed, the stages included if one of them does."""
        return tuple(map(str, self._with_stages or self._explaining or ()))

    def explain_nothing(self) -> None:
        """Take back every explanation."""
        self._explaining = self._with_stages = []

    @timed(OTHERS)
    def rule_out(self, seen: Observation) -> None:
        """Count the elements outside each alternative of another computation that no earlier block ruled out."""
        problem = seen.problem
        unknown = {
            name: other
            for other in problem.op.alternatives(problem.contract)
            if (name := str(other)) not in self._settled and not self.ruled_out.get(name)
        }
        if not unknown or not seen.count:
            return
        results = _results(seen)
        asked = {name: other for name, other in unknown.items() if not _is_same(seen, other)}
        found = _counted(asked, lambda other: results.count_outside(problem.under(other).trace))
        left = {name: asked[name] for name, count in found.items() if not count}
        of_stages = _counted(left, lambda other: _count_only_outside(other, seen))
        for name, count in found.items():
            if count or name in of_stages:
                self.ruled_out[name] = count or of_stages[name]

    @timed(OTHERS)
    def identify(self, seen: Observation) -> None:
        """Keep the contracts that allow every bit of the results of this block too, and of its stages."""
        problem = seen.problem
        pool = problem.op.candidates(problem.contract) if self._explaining is None else self._explaining
        self._explaining = [c for c in pool if not _is_same(seen, c) and _explains(c, seen)]
        pool = self._explaining if self._with_stages is None else self._with_stages
        self._with_stages = [c for c in pool if c in self._explaining and _allows_stages(c, seen)]


def _explains(contract: Contract, seen: Observation) -> bool:
    """Check whether `contract` has all stages that the kernel gave, and allows all its results."""
    results = _results(seen).under(contract)
    try:
        trace = results.problem.trace
    except UsageError:
        return False
    if not seen.actual.keys() <= trace.stages.keys() or results.count_outside(trace):
        return False
    return not results.has_latent or not check_rows(results).unexplained


def _allows_stages(contract: Contract, seen: Observation) -> bool:
    try:
        other = seen.under(contract)
        return not other.count_outside(other.onward)
    except UsageError:  # it is not defined for what the kernel shows
        return False


def _counted(contracts: Mapping[str, Contract], count: Callable[[Contract], Tensor]) -> dict[str, int]:
    """Count for each contract that is defined for these arguments; the device is waited for once."""
    found = {}
    for name, contract in contracts.items():
        with suppress(UsageError):
            found[name] = count(contract)
    return dict(zip(found, numbers(list(found.values())), strict=True))


def _count_only_outside(contract: Contract, seen: Observation) -> Tensor:
    """Count the elements of all stages outside `contract`, given the earlier ones, and not outside the claimed one.

    The claimed one excludes elements of a right kernel where lanes disagree: a saved statistic is that of one half.
    """
    none = torch.zeros((), dtype=torch.int64, device=seen.problem.main.device)
    if len(seen.actual) == 1:
        return none  # there is no earlier stage
    own, theirs = seen.astray, seen.under(contract).astray
    counts = [(mask & ~own[name] if name in own else mask).sum() for name, mask in theirs.items()]
    return torch.stack([none, *counts]).sum()


def _is_same(seen: Observation, other: Contract) -> bool:
    return seen.problem.under(other).takes(seen.problem.steps)


def _results(seen: Observation) -> Observation:
    return seen.of_stages(name for name in seen.problem.trace.results if name in seen.actual)
