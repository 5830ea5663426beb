"""Grids: cells of a case, a row and column each, at which values of a kernel and of the reference are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lastbit.interpret.numpy_formats import Array
from lastbit.judging.problem import Problem
from lastbit.tracing import Event, Log
from lastbit.tracing.of_torch import UNWRITTEN
from lastbit.tracing.writes import Addresses, Write

# Arbitrary: each cell is a number in every expression, and a wrong line is wrong in most cells of its row.
MOST = 4096
"""Cells that are compared, but one row at least."""
# Arbitrary: wider rows are of vocabularies, where 65,536 expressions of each line would be compared.
WIDEST = 1 << 16
"""Columns of a row beyond which nothing is compared."""
Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Grid:
    """Cells of a case: some of its rows by all of its columns; the first row has the cell to explain.

    Where the op's rows do not stand for themselves, there is one row of cells: elements of the tensor, all or some.

    Attributes:
        whole, problem: that of the case, and that of these rows only.
        tensor: what a kernel gave for a stage, whole.
        leading: the dimensions of the case that count rows; none where rows do not stand for themselves.
        rows, columns: the numbers of the rows, and how many columns they have.
        index: without rows, the cells in each dimension of the tensor.
        worst: the cell to explain.
    """

    whole: Problem
    problem: Problem
    tensor: Tensor
    leading: Shape = ()
    rows: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    columns: int = 1
    index: tuple[Array, ...] = ()
    worst: int = 0

    @property
    def size(self) -> int:
        """Number of cells."""
        return len(self.rows) * self.columns if self.leading else len(self.index[0])

    @cached_property
    def numbers(self) -> Array:
        """The flat index of the tensor's element for each cell."""
        found = self.in_case(tuple(self.tensor.shape))
        assert found is not None
        return found

    @cached_property
    def given_values(self) -> Array:
        """The tensor's value for each cell, as fp64."""
        return np.asarray(self.tensor.reshape(-1)[torch.from_numpy(self.numbers)].to(torch.float64).numpy())

    def in_case(self, shape: Shape) -> Array | None:
        """Return each cell's flat index into a tensor of the whole case; None if its shape has no element per cell."""
        if not self.leading:
            return _broadcast(shape, tuple(self.tensor.shape), self.index)
        if shape[: len(self.leading)] == self.leading and len(shape) > len(self.leading):
            return self._within(shape[len(self.leading) :], self.rows)
        return None

    def in_column(self, shape: Shape) -> Array | None:
        """Return each cell's flat index into a vector over columns or a tensor of one element; None for any other."""
        if math.prod(shape) == 1:
            return np.zeros(self.size, np.int64)
        if self.leading:
            return np.tile(np.arange(self.columns), len(self.rows)) if shape == (self.columns,) else None
        return self.index[-1] if shape == tuple(self.tensor.shape[-1:]) else None

    def in_stage(self, shape: Shape) -> Array | None:
        """Return each cell's flat index into a stage of `problem`; None if it has no element for each cell."""
        if not self.leading:
            return _broadcast(shape, tuple(self.tensor.shape), self.index)
        if shape[:1] == (len(self.rows),) and len(shape) > 1:
            return self._within(shape[1:], np.arange(len(self.rows)))
        return None

    def _within(self, shape: Shape, rows: Array) -> Array | None:
        """Return each cell's flat index into rows of a shape that has an element per column or group of columns."""
        width = math.prod(shape)
        if width != shape[-1] or not width or self.columns % width:
            return None
        columns = np.arange(self.columns) // (self.columns // width)
        return np.asarray((rows[:, None] * width + columns).reshape(-1))

    def cells_of_inputs(self) -> dict[str, Array]:
        """Map each input with one element per cell to the cell of each element; -1 for elements outside of the grid."""
        found = {}
        for name, tensor in self.whole.tensors.items():
            elements = self.in_case(tuple(tensor.shape))
            if elements is not None and len(np.unique(elements)) == self.size:
                found[name] = np.full(tensor.numel(), -1)
                found[name][elements] = np.arange(self.size)
        return found


def _broadcast(shape: Shape, whole: Shape, index: tuple[Array, ...]) -> Array | None:
    pairs = list(zip(shape, whole, strict=False))
    if len(shape) > len(whole) or any(a not in (1, b) for a, b in pairs):
        return None
    if not shape:
        return np.zeros(len(index[0]) if index else 1, np.int64)
    own = tuple(index[axis] * (size > 1) for axis, size in enumerate(shape))
    return np.asarray(np.ravel_multi_index(own, shape))


def grid_of(problem: Problem, tensor: Tensor, where: Addresses, write: Write, index: Shape) -> Grid | None:
    """Choose at most `MOST` cells: the row of `index`, and rows written together with it; None if that is too wide."""
    leading = problem.leading if problem.op.rows else ()
    worst = int(np.ravel_multi_index(index, tuple(tensor.shape))) if index else 0
    together = write.find(where.at(np.arange(tensor.numel()))) >= 0
    if not leading or tuple(tensor.shape[: len(leading)]) != leading or tensor.ndim == len(leading):
        others = np.nonzero(together)[0]
        chosen = np.concatenate([[worst], others[others != worst][:: max(1, -(-len(others) // MOST))]])
        cells = np.unravel_index(chosen, tuple(tensor.shape)) if tensor.ndim else ()
        return Grid(problem, problem, tensor, index=tuple(cells))
    width = math.prod(tensor.shape[len(leading) :])
    columns = max(width, problem.main.shape[-1])
    rows = np.unique(np.nonzero(together)[0] // width)
    first = worst // width
    rows = np.concatenate([[first], rows[rows != first]])[: max(1, MOST // columns)]
    if columns > WIDEST or columns % width or tensor.ndim != len(leading) + 1:
        return None
    at = tuple(map(torch.from_numpy, np.unravel_index(rows, leading)))  # torch's would import sympy
    part = {n: t[at] if n in problem.op.rows else t for n, t in problem.tensors.items()}
    cell = worst % width * (columns // width)
    return Grid(problem, problem.on(part), tensor, leading, rows, columns, worst=cell)


def ends(log: Log, grid: Grid, where: Addresses) -> dict[int, tuple[Event, Array]]:
    """Map event numbers to the events that wrote the tensor's cells, with the element of each cell, -1 for none."""
    found: dict[int, tuple[Event, Array]] = {}
    for write, positions, lanes in log.writes.last(where.at(grid.numbers), log.next()):
        if write.event is not None and write.event.name.rpartition(".")[2] not in UNWRITTEN:
            own = found.setdefault(write.event.number, (write.event, np.full(grid.size, -1)))[1]
            own[positions] = lanes
    return found
