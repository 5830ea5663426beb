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

_MOST_BYTES = 1 << 30
_LARGE = 1 << 20  # elements of a case beyond which a kernel's call costs more than there is to share


@dataclass
class Problems:
    """The problems of the cases seen last, as many as fit into some memory."""

    _families: OrderedDict[Hashable, dict[Hashable, Problem]] = field(default_factory=OrderedDict)

    def of(self, op: Op, contract: Contract, inputs: Inputs, premises: Premises) -> Problem:
        """The problem of a case, which was given to another kernel, or is new."""
        params, tensors = dict(inputs.case.params), inputs.tensors
        if sum(tensor.numel() for tensor in tensors.values()) > _LARGE:
            return Problem(op, contract, tensors, params, premises)
        key = id(op), str(inputs.case), tensors[op.inputs[0]].device, premises  # an op that is kept keeps its id
        if key not in self._families:
            self._make_room()
            self._families[key] = {}
        self._families.move_to_end(key)
        family = self._families[key]
        known = next(iter(family.values()), None)
        return (known or Problem(op, contract, tensors, params, premises, family)).under(contract)

    def forget(self) -> None:
        """Forget all of them: their inputs may not be what they were."""
        self._families.clear()

    def _make_room(self) -> None:
        sizes = {key: sum(p.nbytes for p in family.values()) for key, family in self._families.items()}
        excess = sum(sizes.values()) - _MOST_BYTES
        while excess > 0:
            excess -= sizes[self._families.popitem(last=False)[0]]


PROBLEMS = Problems()
"""Those of this process."""
