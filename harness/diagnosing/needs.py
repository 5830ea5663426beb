"""What an element of a stage depends on, by the reference: inputs and stages are poisoned one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lastbit.diagnosing.in_memory import Onward
from lastbit.errors import LastbitError
from lastbit.interpret.formats import Array
from lastbit.judging.expected import Numbers
from lastbit.judging.problem import Given, Problem
from lastbit.numerics import Enclosure

_SAME = 1e-9  # torch may round an element otherwise where its neighbours are NaN


@dataclass(frozen=True, eq=False)
class Needs:
    """What a stage's element depends on, found by poisoning what it may be computed from.

    Attributes:
        problem: whose reference goes on from stages, and from its inputs.
        stage, element: of which stage, and which one, as flat index.
    """

    problem: Onward
    stage: str
    element: int

    def any_of(self, name: str, elements: Collection[int] | Array, *, others: bool = False) -> bool:
        """Whether it depends on one of these elements of a tensor or stage, or on one of the `others`."""
        mask = torch.zeros(math.prod(self._shape(name)), dtype=torch.bool)
        mask[torch.as_tensor(np.asarray(elements, np.int64))] = True
        mask = (~mask if others else mask).reshape(self._shape(name))
        return bool(mask.any()) and bool(self._changed(name, mask)[self.element])

    def is_beside(self, name: str) -> bool:
        """Whether it depends on no element of a tensor or stage on which other elements of its stage depend."""
        changed = self._changed(name, torch.ones(self._shape(name), dtype=torch.bool))
        return bool(changed.any()) and not changed[self.element]

    @property
    def is_unknown(self) -> bool:
        """Whether it is NaN, so that nothing changes it."""
        return bool(np.isnan(self._before[self.element]))

    def _shape(self, name: str) -> tuple[int, ...]:
        stage = self.problem.given.get(name)
        return tuple(self.problem.tensors[name].shape if stage is None else stage.shape)

    def _changed(self, name: str, mask: Tensor) -> Array:
        """Which elements of the stage are others if these of a tensor or stage are."""
        stage = self.problem.given.get(name)
        if stage is not None:
            return self._differs(self.problem, {name: Enclosure(stage.full.masked_fill(mask, torch.nan))})
        poisoned = _poisoned(self.problem.tensors[name], mask)
        return self._differs(self.problem.on({**self.problem.tensors, name: poisoned}), {})

    def _differs(self, problem: Problem, given: Given) -> Array:
        try:
            trace = problem.evaluate(given)
        except LastbitError:
            return np.zeros(len(self._before), np.bool_)
        values = _exact(trace.stages[self.stage].finished)
        return np.asarray(~np.isclose(values, self._before, _SAME, 0, equal_nan=True))

    def stage_matters(self, name: str) -> bool:
        """Whether it depends on a stage from which the reference does not go on."""
        expected = self.problem.trace.stages[name]
        poison = torch.full(tuple(expected.shape), torch.nan, dtype=torch.float64)
        return not isinstance(expected, Numbers) or bool(self._differs(self.problem, {name: poison})[self.element])

    @cached_property
    def _before(self) -> Array:
        return _exact(self.problem.trace.stages[self.stage].finished)


def _exact(expected: object) -> Array:
    """The exact value of each element of a stage of numbers, flat."""
    assert isinstance(expected, Numbers)
    return np.asarray(expected.enclosure.exact.expand(expected.shape).reshape(-1).numpy())


def _poisoned(tensor: Tensor, mask: Tensor) -> Tensor:
    poisoned = tensor.clone()
    if tensor.is_floating_point():
        poisoned[mask] = torch.nan
    else:
        poisoned[mask] = ~poisoned[mask]  # of every code that a word holds
    return poisoned
