"""Match between a kernel's expressions and the reference's stages, by nearest values."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from lastbit.diagnosing.deeds import ways_of_all
from lastbit.diagnosing.grid import Grid
from lastbit.interpret.numpy_formats import Array
from lastbit.judging.expected import Expected, Numbers, Trace, known_exactly
from lastbit.judging.problem import Given
from lastbit.numerics import Enclosure, Format
from lastbit.numerics.residues import Residues
from lastbit.reports.why import StageMatch
from lastbit.tracing import Event
from lastbit.tracing.ancestry import Ancestry, Expression, residues_of_cells
from lastbit.tracing.events import Made, Origin
from lastbit.tracing.of_triton import MOVERS

NEAR = 2.0**-6
"""Relative L2 error up to which an expression agrees with a stage: the coarsest rounding that a stage may have here."""
HANDING = (
    *MOVERS,
    "load",
    "store",
    "fp_ext",
    "fp_trunc",
    "fp_to_fp",
    "bitcast",
    "_to_copy",
    "copy_",
    "clone",
    "int_cast",
)
"""Operations that hand on what they are given, in another place or format."""


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
        allowed = self.expected.allowed
        shape = self.expected.shape
        own = allowed.full if isinstance(allowed, Enclosure) else allowed.to(torch.float64).expand(4, *shape)
        exact, value, lo, hi = own.expand(4, *shape).reshape(4, -1)[:, torch.from_numpy(self.index)].numpy()
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

    @property
    def _kind(self) -> str | bool:
        """The kind of numbers: `int1` for truth values, else whether they are floating-point."""
        return "int1" if self.expected.format.name == "bool" else isinstance(self.expected, Numbers)

    def takes(self, e: Expression) -> bool:
        """Return whether an expression has the stage's kind of numbers, and one value per element of the stage."""
        if not e.known.any() or self._kind != ("int1" if e.dtype == "int1" else e.events[-1].is_float):
            return False
        index, values = self.index[e.known], e.values[e.known]
        first = np.zeros(int(self.index.max()) + 1, np.int64)
        first[index[::-1]] = np.arange(len(index))[::-1]
        return bool(np.array_equal(values, values[first[index]], equal_nan=True))


def _is_computed(e: Expression) -> bool:
    """Return whether an expression stands in the text and follows from more than arguments."""
    return bool(e.events[0].places) and e.events[-1].origin is Origin.MEMORY


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
    """

    grid: Grid
    trace: Trace
    last: str
    found: Sequence[Expression]
    ends: Collection[int]
    ancestry: Ancestry

    @cached_property
    def all(self) -> dict[str, Stage]:
        """The stages by name, in the reference's order."""
        return {stage.name: stage for stage in self._stages()}

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
        known = known_exactly(self._unrounded.stages[name]).expand(stage.expected.shape).reshape(-1)
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

    @cached_property
    def _unrounded(self) -> Trace:
        return self.grid.problem.unrounded.evaluate()

    def _stages(self) -> Iterator[Stage]:
        for name, expected in self.trace.stages.items():
            own, tensor = expected.finished, self.grid.tensor
            index = self.grid.in_stage(tuple(own.shape))
            if name == self.last and tensor.is_floating_point():
                own = own.stored_as(tensor.dtype)
            if index is not None:
                yield Stage(name, own, index)
            if name == self.last:
                return

    def upto(self, name: str) -> list[str]:
        """List the stages of the reference up to one, including those without an element per cell."""
        names = list(self.trace.stages)
        return names[: names.index(name) + 1]

    def onward(self, given: Given) -> Stages:
        """Return these stages with the reference evaluated from given ones."""
        return replace(self, trace=self.grid.problem.evaluate(given))

    def from_kernel(self, stage: Stage, e: Expression) -> Given:
        """Return the stage to continue the reference from, with an expression's values in its elements."""
        known = torch.from_numpy(e.known)
        at, values = torch.from_numpy(stage.index)[known], torch.from_numpy(e.values)[known]
        if isinstance(stage.expected, Numbers):
            own = stage.expected.enclosure
            parts = own.full.expand(4, *stage.expected.shape).clone()
            parts.view(4, -1)[:, at] = values
            if e.residues is None or own.algebra is None:
                return {stage.name: Enclosure(parts)}
            numbers = own.algebra.numbers.expand(4, *stage.expected.shape).clone()
            numbers.view(4, -1)[:, at] = e.residues.numbers[:, known]
            return {stage.name: Enclosure(parts, algebra=Residues(numbers))}
        whole = stage.expected.value.clone()
        whole.view(-1)[at] = values.to(whole.dtype)
        return {stage.name: whole}

    def matched(self, given: Mapping[str, Expression]) -> dict[str, Expression]:
        """Map stages to the expressions that agree with them best; `given` ones are kept."""
        matched: dict[str, Expression] = {}
        for name, stage in self.all.items():
            best = given.get(name) or self._nearest(stage, list(matched.values()))
            if best is not None:
                matched[name] = best
        return matched

    def _nearest(self, stage: Stage, taken: Sequence[Expression]) -> Expression | None:
        """Find the expression that agrees with a stage best; None if none agrees.

        Of several with the same values: the one with most cells; then one that is no other stage and comes after that
        of the stage before; then one in the stage's own format; then the first.
        """
        after = taken[-1].number if taken else -1

        def rank(e: Expression) -> tuple[float, ...] | None:
            how = (float(not self._gives_worst(e)), 0.0) if stage.name == self.last else agreement(stage, e)
            if how is None:
                return None
            late, own = e.number < after, e.dtype == stage.expected.format.name
            return *how, -float(e.known.sum()), any(e is t for t in taken), late, not own, e.number

        ranked = [(key, e) for e in self._candidates(stage) if (key := rank(e)) is not None]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def _candidates(self, stage: Stage) -> list[Expression]:
        """List the expressions that may be a stage: none that only passes an input on."""
        if stage.name == self.last:
            return self.given
        return [e for e in self.full if not self.is_input(e) and stage.takes(e)]

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
            found += [b for b in before if b.events[0].places and self.is_given(b) and b not in found]
        return sorted(set(found), key=lambda e: e.number)

    def is_given(self, e: Expression) -> bool:
        """Return whether an expression has the kernel's result in all its cells, the one to explain among them."""
        values = self.grid.given_values[e.known]
        return bool(e.known[self.grid.worst]) and np.array_equal(e.values[e.known], values, equal_nan=True)

    def _gives_worst(self, e: Expression) -> bool:
        """Return whether an expression has the value of the element to explain; a later write may have replaced it."""
        worst = self.grid.worst
        return bool(e.known[worst]) and np.array_equal(e.values[worst], self.grid.given_values[worst], equal_nan=True)

    @cached_property
    def full(self) -> list[Expression]:
        """The computed expressions that have a value for at least half of the cells that were written."""
        least = self.written.sum() / 2
        return [e for e in self.found if _is_computed(e) and (e.known & self.written).sum() >= least]

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


def agreement(stage: Stage, e: Expression) -> tuple[float, float] | None:
    """Return the share of cells outside, and the error against the contract's value; None if that is too large."""
    exact, value, _, _ = stage.parts
    outside = float(stage.outside(e).sum() / e.known.sum())
    if isinstance(stage.expected, Numbers):
        error = distance(e.values, value, e.known)
        nearer = min(error, distance(e.values, exact, e.known))
        agrees = nearer <= NEAR if np.isfinite(nearer) else not outside
        return (outside, min(error, 1.0)) if agrees else None
    return None if outside else (0.0, 0.0)
