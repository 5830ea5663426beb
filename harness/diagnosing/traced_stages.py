"""Match between a kernel's expressions and the reference's stages, by nearest values.

Both are compared in cells of a case, a row and column each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lastbit.diagnosing.worked import legal_of, ways_of_all
from lastbit.interpret.numpy_formats import Array
from lastbit.judging.expected import Expected, Numbers, Trace, known_exactly
from lastbit.judging.problem import Problem
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.residues import Residues
from lastbit.reports.why import StageMatch
from lastbit.tracing import Event, Log
from lastbit.tracing.ancestry import Ancestry, Expression, expressions, residues_of_cells
from lastbit.tracing.events import Made, Origin
from lastbit.tracing.lanes import Addresses
from lastbit.tracing.of_torch import is_unwritten
from lastbit.tracing.of_triton import MOVERS

# Arbitrary: each cell is a number in every expression, and a wrong line is wrong in most cells of its row.
MOST = 4096
"""Cells that are compared, but one row at least."""
# Arbitrary: wider rows are of vocabularies, where 65,536 expressions of each line would be compared.
WIDEST = 1 << 16
"""Columns of a row beyond which nothing is compared."""
LEAST = 8
"""Different numbers by which values are known to be those of a stage."""
Shape = tuple[int, ...]
NEAR = 2.0**-6
"""Relative L2 error up to which an expression agrees with a stage: the coarsest rounding that a stage may have here."""
_CASTS = ("fp_ext", "fp_trunc", "fp_to_fp", "int_cast", "bitcast")
HANDING = (*MOVERS, *_CASTS, "load", "store", "_to_copy", "copy_", "clone")
"""Operations that hand on what they are given, in another place or format."""


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


def grid_of(problem: Problem, tensor: Tensor, together: Array, index: Shape) -> Grid | None:
    """Choose at most `MOST` cells: the row of `index`, and rows written `together`; None if that is too wide."""
    leading = problem.leading if problem.op.rows else ()
    worst = int(np.ravel_multi_index(index, tuple(tensor.shape))) if index else 0
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


@dataclass(frozen=True, eq=False)
class Stage:
    """Values that the contract allows for a stage, for each of C cells: fp64 [C].

    Attributes:
        expected: what all of its elements must be.
        index: its element for each cell, as flat index.
    """

    name: str
    expected: Expected
    index: Array

    @cached_property
    def parts(self) -> tuple[Array, Array, Array, Array]:
        """Exact value, the contract's value, and the lower and upper end of the allowed interval, [C] each."""
        exact, value, lo, hi = legal_of(self.expected).reshape(4, -1)[:, torch.from_numpy(self.index)].numpy()
        return exact, value, lo, hi

    @cached_property
    def residues(self) -> Residues | None:
        """Residues of the contract's values, [C]; None where they are not followed."""
        allowed = self.expected.allowed
        if not isinstance(allowed, Enclosure) or allowed.algebra is None:
            return None
        whole = allowed.algebra.moved(lambda n: n.expand(4, *self.expected.shape).reshape(4, -1))
        return whole[torch.from_numpy(self.index)]

    def outside(self, e: Expression) -> Array:
        """Return the mask of cells in which an expression's value is not allowed or follows from another formula."""
        _, _, lo, hi = self.parts
        inside = (
            (e.values >= lo) & (e.values <= hi) | np.isnan(e.values) & np.isnan(lo) | np.isneginf(lo) & np.isposinf(hi)
        )
        if self.residues is not None and e.residues is not None:
            inside &= ~self.residues.differs(e.residues).numpy()
        return np.asarray(e.known & ~inside)

    def takes(self, e: Expression) -> bool:
        """Return whether an expression has the stage's kind of numbers, and one value per element of the stage."""
        kind = "int1" if self.expected.format.name == "bool" else isinstance(self.expected, Numbers)
        if not e.known.any() or kind != ("int1" if e.dtype == "int1" else e.events[-1].is_float):
            return False
        index, values = self.index[e.known], e.values[e.known]
        first = np.zeros(int(self.index.max()) + 1, np.int64)
        first[index[::-1]] = np.arange(len(index))[::-1]
        return bool(np.array_equal(values, values[first[index]], equal_nan=True))

    def agreement(self, e: Expression) -> tuple[float, float] | None:
        """Return the share of cells outside, and the error against the contract's value; None if that is too large."""
        exact, value, _, _ = self.parts
        outside = float(self.outside(e).sum() / e.known.sum())
        if not isinstance(self.expected, Numbers):
            return None if outside else (0.0, 0.0)
        error = distance(e.values, value, e.known)
        nearer = min(error, distance(e.values, exact, e.known))
        agrees = nearer <= NEAR if np.isfinite(nearer) else not outside
        return (outside, min(error, 1.0)) if agrees else None


def hands_on(event: Event) -> bool:
    """Return whether an event passes its operand on, rounded at most."""
    return event.name.rpartition(".")[2] in HANDING


def distance(values: Array, wanted: Array, known: Array) -> float:
    """Return the relative L2 error over cells where both are finite; infinite without any, or if `wanted` is zero."""
    both = known & np.isfinite(values) & np.isfinite(wanted)
    size, error = np.linalg.norm(wanted[both]), np.linalg.norm(values[both] - wanted[both])
    return float(error / size) if size else np.inf if error or not both.any() else 0.0


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a trace up to the kernel's result that have an element per cell, and the kernel's expressions.

    Attributes:
        last: the stage that the kernel gave.
        found: the expressions of the kernel, in order.
        ends: numbers of the events that wrote it.
        ancestry: what led to them.
        telling: the case's numbers are so many that a residue tells which element of a stage a number is.
    """

    grid: Grid
    trace: Trace
    last: str
    found: Sequence[Expression]
    ends: Collection[int]
    ancestry: Ancestry
    telling: bool = False

    @classmethod
    def of(cls, grid: Grid, last: str, log: Log, where: Addresses, *, telling: bool = False) -> Stages:
        """Collect what led to the events that wrote the grid's tensor, with their elements for each cell."""
        ends, events = dict[int, Array](), list[Event]()
        for event, positions, lanes in log.sources(where, grid.numbers, log.next()):
            if not is_unwritten(event):
                events.append(event)
                ends.setdefault(event.number, np.full(grid.size, -1))[positions] = lanes
        ancestry = Ancestry.of(log, events)
        found = expressions(ancestry.events, ancestry.cells(ends, grid.cells_of_inputs()))
        return cls(grid, grid.problem.evaluate(), last, found, tuple(ends), ancestry, telling)

    @cached_property
    def all(self) -> dict[str, Stage]:
        """The stages by name, in the reference's order."""
        found = {}
        for name, expected in self.trace.stages.items():
            own, tensor = expected.finished, self.grid.tensor
            index = self.grid.in_stage(tuple(own.shape))
            if name == self.last and tensor.is_floating_point():
                own = own.stored_as(tensor.dtype)
            if index is not None:
                found[name] = Stage(name, own, index)
            if name == self.last:
                break
        return found

    @property
    def held(self) -> str:
        """The other stage that the result is, by values and residues of different numbers; empty if it is none."""
        own, shape = self.result, tuple(self.trace.stages[self.last].shape)
        if own.residues is None or len(own.residues.p[own.known].unique()) < LEAST:
            return ""
        for name, expected in self.trace.stages.items():
            index = self.grid.in_stage(tuple(expected.shape))
            if name != self.last and tuple(expected.shape) == shape and index is not None:
                stage = Stage(name, expected.finished, index)
                equal = stage.residues is not None and bool(stage.residues.equal(own.residues)[own.known].all())
                if equal and not stage.outside(own).any():
                    return name
        return ""

    def taken_by(self, numbers: Iterable[int]) -> list[Event]:
        """List the events that take what some give, as it is or handed on."""
        holders, found = set(numbers), list[Event]()
        for number in sorted(self.ancestry.events):
            event = self.ancestry.events[number]
            if any(edge.event.number in holders for edge in self.ancestry.edges[number]):
                found.append(event)
                holders |= {number} if hands_on(event) else set()
        return found

    def right(self, matched: Mapping[str, Expression]) -> dict[str, Expression]:
        """Return the matches whose values the contract allows in every cell that was written."""
        found = ((name, e) for name, e in matched.items() if e.known[self.written].all())
        return {name: e for name, e in found if not self.all[name].outside(e).any()}

    @cached_property
    def result(self) -> Expression:
        """The kernel's result as an expression: its value and residue for each cell."""
        return self.result_after({})

    def result_after(self, changed: Mapping[int, Made], *, follows: bool = True) -> Expression:
        """Return the result if events, by their numbers, give something else; with residues if it `follows` them."""
        own = [(event, e.lanes[event.number]) for e in self.found for event in e.events if event.number in self.ends]
        made = {event.number: changed.get(event.number, event.made) for event, _ in own}
        values = self.grid.given_values.copy()
        for event, lanes in own:
            if event.number in changed:
                values[lanes >= 0] = made[event.number].values.reshape(-1)[lanes[lanes >= 0]].astype(np.float64)
        cells = {event.number: lanes for event, lanes in own}
        residues = residues_of_cells(made, cells, self.grid.size) if follows else None
        return Expression((), {}, values, self.written, residues)

    def match(self, name: str, e: Expression, *, leaves: bool = False) -> StageMatch:
        """Describe how an expression agrees with a stage, at the cell to explain."""
        stage, cell = self.all[name], self.grid.worst
        exact, value, lo, hi = stage.parts
        known = known_exactly(self.grid.problem.unrounded.trace.stages[name]).expand(stage.expected.shape).reshape(-1)
        fmt, values = stage.expected.format, torch.from_numpy(e.values[e.known])
        legal = torch.from_numpy(np.stack(stage.parts)[:, e.known])
        rounds, ways = name in self.grid.problem.contract.rounds, tuple[str, ...]()
        if isinstance(fmt, Format):
            ways = ways_of_all(values, legal, fmt, rounds=rounds, dtype=e.dtype)
        return StageMatch(
            name,
            exact=float(known[stage.index[cell]]),
            lo=float(lo[cell]),
            hi=float(hi[cell]),
            outside=int(stage.outside(e).sum()),
            of=int(e.known.sum()),
            leaves=leaves,
            expected=float(value[cell]),
            format=fmt.name,
            error=distance(e.values, exact, e.known),
            contract_error=distance(value, exact, e.known),
            ways=ways,
        )

    def onward(self, name: str, e: Expression) -> Stages:
        """Return these stages with the reference evaluated from one of them, with an expression's values in it."""
        stage, known = self.all[name], torch.from_numpy(e.known)
        at, values = torch.from_numpy(stage.index)[known], torch.from_numpy(e.values)[known]
        if isinstance(stage.expected, Numbers):
            own = stage.expected.enclosure
            parts = own.full.expand(4, *stage.expected.shape).clone()
            parts.view(4, -1)[:, at] = values
            algebra = None
            if e.residues is not None and own.algebra is not None:
                numbers = own.algebra.numbers.expand(4, *stage.expected.shape).clone()
                numbers.view(4, -1)[:, at] = e.residues.numbers[:, known]
                algebra = Residues(numbers)
            given: Tensor | Enclosure = Enclosure(parts, algebra=algebra)
        else:
            given = stage.expected.value.clone()
            given.view(-1)[at] = values.to(given.dtype)
        return replace(self, trace=self.grid.problem.evaluate({name: given}))

    def matched(self, given: Mapping[str, Expression]) -> dict[str, Expression]:
        """Map stages to the expressions that agree with them best; `given` ones are kept."""
        matched: dict[str, Expression] = {}
        for name, stage in self.all.items():
            best = given.get(name) or self._nearest(stage, list(matched.values()))
            if best is not None:
                matched[name] = best
        return matched

    def _nearest(self, stage: Stage, taken: Sequence[Expression]) -> Expression | None:
        """Find the expression that agrees with a stage best; None if none agrees. None that only passes an input on.

        Of several with the same values: the one with most cells; then one that is no other stage and comes after that
        of the stage before; then one in the stage's own format; then the first.
        """
        after, ranked = taken[-1].number if taken else -1, list[tuple[tuple[float, ...], Expression]]()
        is_last = stage.name == self.last
        for e in self.given if is_last else self.full:
            if is_last:
                how: tuple[float, float] | None = (float(not self._gives(e, worst=True)), 0.0)
            else:
                how = stage.agreement(e) if not self.is_input(e) and stage.takes(e) else None
            if how is not None:
                late, own = e.number < after, e.dtype == stage.expected.format.name
                rank = *how, -float(e.known.sum()), any(e is t for t in taken), late, not own, e.number
                ranked.append((rank, e))
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    @cached_property
    def given(self) -> list[Expression]:
        """The expressions that hold the kernel's result: the writes, and expressions whose values these pass on."""
        of_event = {event.number: e for e in self.found for event in e.events}
        found = [of_event[number] for number in self.ends]
        for e in found:
            if not hands_on(e.events[-1]):
                continue
            edges = [edge for event in e.events for edge in self.ancestry.edges[event.number] if edge.lanes is not None]
            before = (of_event[edge.event.number] for edge in edges)
            found += [b for b in before if b.events[0].places and self._gives(b) and b not in found]
        return sorted(set(found), key=lambda e: e.number)

    def _gives(self, e: Expression, *, worst: bool = False) -> bool:
        """Return whether an expression has the kernel's result in all its cells, the one to explain among them.

        Or that in the `worst` cell alone: a later write may have replaced others.
        """
        cells = self.grid.worst if worst else e.known
        same = np.array_equal(e.values[cells], self.grid.given_values[cells], equal_nan=True)
        return bool(e.known[self.grid.worst]) and same

    @cached_property
    def full(self) -> list[Expression]:
        """The computed expressions that have a value for at least half of the cells that were written.

        They stand in the text and follow from more than arguments.
        """
        computed = (e for e in self.found if e.events[0].places and e.events[-1].origin is Origin.MEMORY)
        return [e for e in computed if (e.known & self.written).sum() >= self.written.sum() / 2]

    @cached_property
    def written(self) -> Array:
        """Mask of the cells that recorded events wrote."""
        ends = set(self.ends)
        own = [e.known for e in self.found if any(event.number in ends for event in e.events)]
        return np.asarray(np.any(own, axis=0))

    def is_input(self, e: Expression) -> bool:
        """Return whether an expression only passes an input on."""
        return hands_on(e.events[-1]) and e.values.tobytes() in self._inputs

    @cached_property
    def _inputs(self) -> Collection[bytes]:
        return {e.values.tobytes() for e in self.found if not e.events[0].places}
