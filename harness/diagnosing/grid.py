"""Grids: cells of a case, a row and column each, at which values of a kernel and of the reference are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lastbit.interpret.numpy_formats import Array
from lastbit.judging.problem import Problem
from lastbit.tracing import Event, Log
from lastbit.tracing.lanes import Addresses
from lastbit.tracing.log import Write
from lastbit.tracing.of_torch import UNWRITTEN

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
        shape, index: the dimensions of the case, and each cell's place in them.
        own_shape, own_index: the same of `problem`.
        rows: rows stand for themselves, and a tensor has an element per row, and per column or group of columns.
        worst: the cell to explain.
    """

    whole: Problem
    problem: Problem
    tensor: Tensor
    shape: Shape
    index: tuple[Array, ...]
    own_shape: Shape
    own_index: tuple[Array, ...]
    rows: bool = False
    worst: int = 0

    @property
    def size(self) -> int:
        """Number of cells."""
        return len(self.numbers)

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
        return self._elements(shape, self.shape, self.index)

    def in_stage(self, shape: Shape) -> Array | None:
        """Return each cell's flat index into a stage of `problem`; None if it has no element for each cell."""
        return self._elements(shape, self.own_shape, self.own_index)

    def in_column(self, shape: Shape) -> Array | None:
        """Return each cell's flat index into a vector over columns or a tensor of one element; None for any other."""
        if math.prod(shape) == 1:
            return np.zeros(self.size, np.int64)
        return self.index[-1] if shape == self.shape[-1:] else None

    def _elements(self, shape: Shape, whole: Shape, index: tuple[Array, ...]) -> Array | None:
        fits = len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(shape, whole, strict=False))
        if self.rows:
            fits = len(shape) == len(whole) and shape[:-1] == whole[:-1] and shape[-1] > 0 == whole[-1] % shape[-1]
        if not fits or not shape:
            return np.zeros(len(index[0]) if index else 1, np.int64) if fits else None
        own = tuple(i // (b // a) for i, a, b in zip(index, shape, whole, strict=False))
        return np.asarray(np.ravel_multi_index(own, shape))

    def cells_of_inputs(self) -> dict[str, Array]:
        """Map each input with one element per cell to the cell of each element; -1 for elements outside of the grid."""
        found = {}
        for name, tensor in self.whole.tensors.items():
            elements = self.in_case(tuple(tensor.shape))
            if elements is not None and len(np.unique(elements)) == self.size:
                found[name] = np.full(tensor.numel(), -1)
                found[name][elements] = np.arange(self.size)
        return found


def grid_of(problem: Problem, tensor: Tensor, where: Addresses, write: Write, index: Shape) -> Grid | None:
    """Choose at most `MOST` cells: the row of `index`, and rows written together with it; None if that is too wide."""
    leading = problem.leading if problem.op.rows else ()
    worst = int(np.ravel_multi_index(index, tuple(tensor.shape))) if index else 0
    together = write.find(where.at(np.arange(tensor.numel()))) >= 0
    if not leading or tuple(tensor.shape[: len(leading)]) != leading or tensor.ndim == len(leading):
        others = np.nonzero(together)[0]
        chosen = np.concatenate([[worst], others[others != worst][:: max(1, -(-len(others) // MOST))]])
        shape = tuple(tensor.shape)
        place = tuple(np.unravel_index(chosen, shape)) if shape else ()
        return Grid(problem, problem, tensor, shape, place, shape, place)
    width = math.prod(tensor.shape[len(leading) :])
    columns = max(width, problem.main.shape[-1])
    rows = np.unique(np.nonzero(together)[0] // width)
    first = worst // width
    rows = np.concatenate([[first], rows[rows != first]])[: max(1, MOST // columns)]
    if columns > WIDEST or columns % width or tensor.ndim != len(leading) + 1:
        return None
    at = np.unravel_index(rows, leading)
    row, column = np.divmod(np.arange(len(rows) * columns), columns)
    of_rows = tuple(map(torch.from_numpy, at))  # torch's would import sympy
    part = {n: t[of_rows] if n in problem.op.rows else t for n, t in problem.tensors.items()}
    cells, own, worst = (*(axis[row] for axis in at), column), (row, column), worst % width * (columns // width)
    own_shape = len(rows), columns
    return Grid(problem, problem.on(part), tensor, (*leading, columns), cells, own_shape, own, rows=True, worst=worst)


def ends(log: Log, grid: Grid, where: Addresses) -> dict[int, tuple[Event, Array]]:
    """Map event numbers to the events that wrote the tensor's cells, with the element of each cell, -1 for none."""
    found: dict[int, tuple[Event, Array]] = {}
    for event, positions, lanes in log.sources(where, grid.numbers, log.next()):
        if event.name.rpartition(".")[2] not in UNWRITTEN:
            own = found.setdefault(event.number, (event, np.full(grid.size, -1)))[1]
            own[positions] = lanes
    return found
