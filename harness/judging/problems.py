"""Problems that several kernels share: an evaluation for one of them is not repeated for the next.

Kernels of an op get the same case lines, and the contract of one is an alternative of another. A problem is the same
for two kernels if case, device, contract and premises are.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from lastbit.inputs import Inputs, unequal
from lastbit.judging.problem import Problem, Tensors
from lastbit.numerics import Premises
from lastbit.ops import Contract, Op

_MOST_BYTES = 1 << 29
_MOST_CASES = 256
_TOGETHER = 2  # problems that a case asks for before it is judged: its own, and that of other values
_LARGE = 1 << 20  # elements of a case beyond which it is not kept
_LARGE_ROWS = 1 << 16  # elements of rows beyond which a case is not kept


@dataclass(eq=False)
class _Family:
    """A problem under the contracts that were asked for, and the bytes of its evaluations when last counted."""

    problems: dict[Hashable, Problem] = field(default_factory=dict)
    nbytes: int = 0

    def weigh(self) -> None:
        problems = self.problems.values()
        self.nbytes = sum(p.nbytes for p in problems) + _nbytes(*(p.tensors for p in problems))


@dataclass(eq=False)
class Problems:
    """The problems of the cases seen last, as many as fit into some memory; their inputs are compared bit by bit."""

    _families: OrderedDict[Hashable, _Family] = field(default_factory=OrderedDict)
    _recent: deque[_Family] = field(default_factory=lambda: deque(maxlen=_TOGETHER))

    def of(self, op: Op, contract: Contract, inputs: Inputs, premises: Premises) -> Problem:
        """Return the problem of a case, which was given to another kernel before, or is new."""
        params, tensors = dict(inputs.case.params), inputs.tensors
        main = tensors[op.inputs[0]]
        rows = main.numel() if op.rows else 0
        if sum(t.numel() for t in tensors.values()) > _LARGE or rows > _LARGE_ROWS or _nbytes(tensors) > _MOST_BYTES:
            return Problem(op, contract, tensors, params, premises)
        key = id(op), str(inputs.case), main.device, premises  # an op that is kept keeps its id
        self._make_room()
        self._recent.append(self._families.setdefault(key, _Family()))
        self._families.move_to_end(key)
        family = self._recent[-1].problems
        known = next(iter(family.values()), None)
        if known is not None and not _same_bits(known.tensors, tensors):
            family.clear()
            known = None
        return (known or Problem(op, contract, tensors, params, premises, family)).under(contract)

    def forget(self) -> None:
        """Forget all of them: their inputs may not be what they were."""
        self._families.clear()
        self._recent.clear()

    def _make_room(self) -> None:
        """Evict the least recently used; only the recent ones have grown since they were weighed."""
        for family in self._recent:
            family.weigh()
        excess = sum(family.nbytes for family in self._families.values()) - _MOST_BYTES
        while excess > 0 or len(self._families) > _MOST_CASES:
            excess -= self._families.popitem(last=False)[1].nbytes


def _nbytes(*problems: Tensors) -> int:
    """Count the bytes of the storages of tensors, which may be far more than their elements."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for tensors in problems for t in tensors.values()}
    return sum(storage.nbytes() for storage in storages.values())


def _same_bits(one: Tensors, other: Tensors) -> bool:
    """Check whether tensors of one case have equal bits: not if one was overwritten, or the file of captured values."""
    return not any(unequal([(one[name], tensor) for name, tensor in other.items()]))


PROBLEMS = Problems()
"""The problems of this process."""
