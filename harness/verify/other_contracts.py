"""The other contracts of an op: which of them a kernel's tensors rule out, and which explain what fails."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from torch import Tensor

from harness.errors import UsageError
from harness.op import Contract, Op
from harness.timing import OTHERS, timed
from harness.verify.block import Block
from harness.verify.compare import outside_mask
from harness.verify.evaluate import Params, Tensors, Trace, evaluate, same_computation
from harness.verify.latent import check_rows, has_latent
from harness.verify.roundings import expectations


class OtherContracts:
    """What is found out about them, block by block; `whole` blocks are all there is, sums over rows included.

    Attributes:
        ruled_out: alternative that is not `settled` → elements that it forbids: of the results, or of any stage given
            the kernel's own earlier ones, whichever are more.
    """

    def __init__(self, op: Op, contract: Contract, params: Params, settled: Collection[str]) -> None:
        self._op, self._contract, self._params, self._settled = op, contract, params, settled
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
    def rule_out(self, trace: Trace, block: Block, *, whole: bool) -> None:
        """Count what each alternative forbids, where it is another computation than that of `trace`."""
        results = _results(trace, block)
        for other in self._op.alternatives(self._contract):
            if str(other) in self._settled or self._is_same(trace, other, block):
                continue
            with suppress(UsageError):  # the alternative is not defined for these arguments
                counts = [self._forbidden(other, block, results, {}, whole)]
                if len(block.actual) > 1:
                    counts.append(self._only_by(other, block, whole))
                self.ruled_out[str(other)] = max(counts)

    @timed(OTHERS)
    def identify(self, trace: Trace, block: Block, *, whole: bool) -> None:
        """Keep the contracts that allow every bit of the results of this block too, and of its stages."""
        pool = self._op.candidates(self._contract) if self._explaining is None else self._explaining
        self._explaining = [c for c in pool if self._explains(c, trace, block, whole)]
        pool = self._explaining if self._with_stages is None else self._with_stages
        self._with_stages = [c for c in pool if c in self._explaining and self._allows_stages(c, block, whole)]

    def _explains(self, contract: Contract, trace: Trace, block: Block, whole: bool) -> bool:
        """Whether `contract` is another computation than that of `trace`, has all stages, and allows all results."""
        results = _results(trace, block)
        if self._is_same(trace, contract, block):
            return False
        try:
            other = evaluate(self._op, contract, block.tensors, self._params)
        except UsageError:
            return False
        if not block.actual.keys() <= other.formats.keys() or self._forbidden(contract, block, results, {}, whole):
            return False
        if not has_latent(self._op, results):
            return True
        return not check_rows(self._op, contract, block.tensors, self._params, results, other).unexplained

    def _allows_stages(self, contract: Contract, block: Block, whole: bool) -> bool:
        try:
            return not self._forbidden(contract, block, block.actual, block.actual, whole)
        except UsageError:  # it is not defined for what the kernel shows
            return False

    def _is_same(self, trace: Trace, other: Contract, block: Block) -> bool:
        return same_computation(trace, self._op, self._contract, other, block.tensors)

    def _forbidden(self, contract: Contract, block: Block, actual: Tensors, given: Tensors, whole: bool) -> int:
        """Elements of `actual` that `contract` forbids, if the reference goes on from the `given` stages."""
        return sum(int(mask.sum()) for mask in self._outside(contract, block, actual, given, whole).values())

    def _only_by(self, other: Contract, block: Block, whole: bool) -> int:
        """Elements of any stage that `other` forbids, given the earlier ones, and the claimed contract does not.

        The claimed one forbids elements of a right kernel where lanes disagree: a saved statistic is that of one half.
        """
        own, theirs = (
            self._outside(contract, block, block.actual, block.actual, whole) for contract in (self._contract, other)
        )
        return sum(int((mask & ~own[name] if name in own else mask).sum()) for name, mask in theirs.items())

    def _outside(
        self, contract: Contract, block: Block, actual: Tensors, given: Tensors, whole: bool
    ) -> dict[str, Tensor]:
        trace = evaluate(self._op, contract, block.tensors, self._params, given)
        expected = expectations(trace, contract) if whole else trace.expected
        return {name: outside_mask(actual[name], e) for name, e in expected.items() if name in actual}


def _results(trace: Trace, block: Block) -> Tensors:
    return {name: block.actual[name] for name in trace.results}
