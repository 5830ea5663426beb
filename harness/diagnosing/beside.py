"""Stages of a kernel beside the way to its wrong result: of other results, and of rows that it adds up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from lastbit.diagnosing.culprits import Search
from lastbit.diagnosing.grid import MOST, WIDEST, Grid
from lastbit.diagnosing.traced_stages import Stages
from lastbit.interpret.formats import Array
from lastbit.judging.problem import Problem
from lastbit.tracing import Log
from lastbit.tracing.cells import Ancestry, expressions


def beside(problem: Problem, log: Log, grid: Grid, written: Mapping[int, Array]) -> Search | None:
    """The stages among all that was recorded, by rows of a case; None where rows do not stand for themselves.

    The rows are those of the `grid` of a result, which the events `written` wrote; where the result has no rows, those
    that the recorded programs read.
    """
    if not problem.op.rows or not problem.leading:
        return None
    ancestry = Ancestry.of(log, [write.event for write in log.writes.all if write.event is not None])
    if not grid.leading:
        read = _read(problem, ancestry)
        own = _of_rows(problem, read)
        if own is None:
            return None
        grid, written = own, {number: np.full(own.size, -1) for number in read}
    found = expressions(ancestry.events, ancestry.cells(written, grid.cells_of_inputs(), astray=False))
    stages = Stages(grid, grid.problem.evaluate(), "", found, list(written), ancestry)
    return Search(stages, stages.matched({}))


def _read(problem: Problem, ancestry: Ancestry) -> dict[int, Array]:
    """Number of an event that reads the op's first input → which elements."""
    name, origins = problem.op.inputs[0], ancestry.origins()
    reads = [e for e in ancestry.events.values() if any(o.memory is not None for o in e.operands)]
    reads = [e for e in reads if name in origins[e.number]]
    inner = [e for e in reads if e.program is not None]  # where there are programs, PyTorch only moves rows for them
    return {event.number: origins[event.number][name] for event in inner or reads}


def _of_rows(problem: Problem, read: Mapping[int, Array]) -> Grid | None:
    """The rows of these elements of the first input by its columns, `MOST` cells at most."""
    columns = problem.main.shape[-1]
    if not read or not columns or columns > WIDEST:
        return None
    elements = np.concatenate(list(read.values()))
    rows = np.unique(elements[elements >= 0] // columns)
    rows = rows[:: max(1, -(-len(rows) // max(1, MOST // columns)))]
    at = torch.unravel_index(torch.from_numpy(rows), problem.leading)
    part = {n: t[at] if n in problem.op.rows else t for n, t in problem.tensors.items()}
    return Grid(problem, problem.on(part), problem.main, problem.leading, rows, columns) if len(rows) else None
