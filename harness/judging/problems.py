"""Problems that several kernels are given: what was evaluated for one of them is not evaluated again for the next.

Kernels of an op get the same case lines, and the contract of one is an alternative of another. A problem is the same
for two kernels if case, device, contract and premises are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from harness.inputs import Inputs
from harness.judging.problem import Problem
from harness.numerics import Premises
from harness.op import Contract, Op

_MOST_BYTES = 1 << 29
_LARGE = 1 << 20  # elements of a case beyond which a kernel's call costs more than there is to share


@dataclass(eq=False)
class _Family:
    """A problem under the contracts that were asked for, and the memory of what was evaluated when last weighed."""

    problems: dict[Hashable, Problem] = field(default_factory=dict)
    nbytes: int = 0

    def weigh(self) -> None:
        self.nbytes = sum(problem.nbytes for problem in self.problems.values())


@dataclass(eq=False)
class Problems:
    """The problems of the cases seen last, as many as fit into some memory."""

    _families: OrderedDict[Hashable, _Family] = field(default_factory=OrderedDict)
    _last: _Family = field(default_factory=_Family)

    def of(self, op: Op, contract: Contract, inputs: Inputs, premises: Premises) -> Problem:
        """The problem of a case, which was given to another kernel, or is new."""
        params, tensors = dict(inputs.case.params), inputs.tensors
        if sum(tensor.numel() for tensor in tensors.values()) > _LARGE:
            return Problem(op, contract, tensors, params, premises)
        key = id(op), str(inputs.case), tensors[op.inputs[0]].device, premises  # an op that is kept keeps its id
        self._make_room()
        self._last = self._families.setdefault(key, _Family())
        self._families.move_to_end(key)
        family = self._last.problems
        known = next(iter(family.values()), None)
        return (known or Problem(op, contract, tensors, params, premises, family)).under(contract)

    def forget(self) -> None:
        """Forget all of them: their inputs may not be what they were."""
        self._families.clear()

    def _make_room(self) -> None:
        """Let those go that were not asked for the longest; only the last one has grown since they were weighed."""
        self._last.weigh()
        excess = sum(family.nbytes for family in self._families.values()) - _MOST_BYTES
        while excess > 0:
            excess -= self._families.popitem(last=False)[1].nbytes


PROBLEMS = Problems()
"""Those of this process."""
