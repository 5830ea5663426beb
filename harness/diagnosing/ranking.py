"""Which of the expressions that led to a wrong stage is the likeliest to be at fault."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from lastbit.diagnosing.culprits import Fault, Search
from lastbit.diagnosing.footprint import Footprint
from lastbit.diagnosing.traced_stages import hands_on
from lastbit.interpret.formats import Array
from lastbit.judging.expected import Numbers
from lastbit.numerics import round_to
from lastbit.tracing import Event, Operand
from lastbit.tracing.cells import Expression
from lastbit.tracing.events import Origin
from lastbit.tracing.triton_lanes import MOVERS

MOST = 5
"""Expressions that are named."""
_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8e4nv": 8, "fp8e5": 8}


@dataclass(frozen=True, eq=False)
class Ranking:
    """The expressions of the span of a fault, the likeliest first."""

    search: Search
    fault: Fault

    def first(self) -> list[Expression]:
        """Up to `MOST`, each of another line."""
        known, takers = self._one_of_each_line(self._known()), list(self._takers(self.fault.value))
        likely = self._one_of_each_line([*known, *self._by_place()])
        most = max(1, min(2, sum(not _reads(e.events[-1]) or e in known for e in likely)))
        return self._one_of_each_line([*likely[:most], *takers[:1], *likely[most:]])[:MOST]

    def _one_of_each_line(self, found: Iterable[Expression]) -> list[Expression]:
        """The first expression of each line; the value that is wrong in its own."""
        first: dict[tuple[str, int], Expression] = {}
        for e in found:
            first.setdefault(_line(e), e)
        if _line(self.fault.value) in first:
            first[_line(self.fault.value)] = self.fault.value
        return list(first.values())

    def _known(self) -> Iterator[Expression]:
        """By what is known of them; some more than once."""
        footprint = Footprint(self.search.stages, self.fault)
        yield from footprint.misplaced()
        yield from footprint.foreign()
        yield from self._passed_by()
        yield from self._unrounded()
        yield from self._narrowed()
        yield from footprint.left_out()
        yield from self._miscounted()
        yield from self._chosen()

    def _passed_by(self) -> Iterator[Expression]:
        """What goes on from an input in place of the stage, or from another value than the kernel has for it."""
        right = self.search.right.get(self.fault.stage.name)
        if _reads(self.fault.value.events[-1]):
            yield from self._takers(self.fault.value)
        if right is None:
            return
        numbers = {event.number for event in right.events}
        before = self.search.stages.ancestry.before(event.number for event in self.fault.value.events)
        if not numbers & before:
            yield from self._takers(self.fault.value)

    def _takers(self, e: Expression) -> Iterator[Expression]:
        """Expressions that compute from another one, and that did not only lead to what is right."""
        numbers = {event.number for event in e.events}
        right = self.search.led_to_right(self.search.stages.upto(self.fault.stage.name))
        for taker in self.search.stages.found:
            for event in taker.events:
                edges = self.search.stages.ancestry.edges[event.number]
                if event.number not in right and any(edge.event.number in numbers for edge in edges):
                    if event.name in MOVERS:
                        yield from self._takers(taker)
                    else:
                        yield taker
                    break

    def _unrounded(self) -> Iterator[Expression]:
        """The value, and what takes it, if it is right but for a rounding that the contract has there."""
        stage, e = self.fault.stage, self.fault.value
        if not isinstance(stage.expected, Numbers):
            return
        _, _, lo, hi = stage.parts
        rounded = round_to(torch.from_numpy(e.values[e.known]), stage.expected.format).numpy()
        inside = (rounded >= lo[e.known]) & (rounded <= hi[e.known]) | np.isnan(rounded) & np.isnan(lo[e.known])
        if inside.all():
            yield e
            yield from self._takers(e)

    def _narrowed(self) -> Iterator[Expression]:
        """Casts to a narrower format that change something and that the contract does not have there."""
        for e in self.fault.span:
            stage = self.fault.stage
            formats = {stage.expected.format.name, e.dtype if stage.name == self.search.stages.last else ""}
            own = e is self.fault.value and e.dtype in formats
            if not own and any(map(_narrows, e.events)):
                yield e

    def _miscounted(self) -> Iterator[Expression]:
        """A division by a count, or a product with its inverse, that would be right with another count."""
        e, cell = self.fault.value, self.search.stages.grid.worst
        exact, value = self.fault.stage.parts[0][cell], e.values[cell]
        if not e.known[cell] or not exact or not np.isfinite(value / exact):
            return
        for operand in e.events[-1].operands:
            count = constant_of(operand)
            if count:
                right = abs(count * value / exact) if count >= 1 else abs(value / exact / count)
                whole = round(right)
                if whole and abs(right - whole) < min(0.01, 1e-5 * whole) and abs(whole - max(count, 1 / count)) > 0.5:
                    yield e

    def _chosen(self) -> Iterator[Expression]:
        """Selections that take a constant in every wrong cell."""
        wrong = self.fault.stage.outside(self.fault.value)
        for e in self.fault.span:
            lanes = e.lanes[e.events[-1].number]
            if takes_constant(e.events[-1], lanes[wrong & (lanes >= 0)]):
                yield e

    def _by_place(self) -> Iterator[Expression]:
        """Before a sum and in it: in order. Otherwise operations with arguments or constants, the
        last first; from the beginning where stages before are not known.
        """
        span = [e for e in self.fault.span if not _reads(e.events[-1])]
        computing = [e for e in span if _computes(e.events[-1])]
        if any(reduces(event) for e in computing for event in e.events):
            yield from computing[:1]
            yield self.fault.value
            yield from computing
        elif self._is_blind:
            yield from computing
        else:
            yield from (e for e in reversed(span) if any(constant_of(o) is not None for o in e.events[-1].operands))
        yield from reversed(span)
        yield from reversed(self.fault.span)

    @property
    def _is_blind(self) -> bool:
        """Whether there are stages between the last right one and the wrong one."""
        names = list(self.search.stages.all)
        before = names[: names.index(self.fault.stage.name)]
        return bool(before) and before[-1] not in self.search.right


def _line(e: Expression) -> tuple[str, int]:
    return e.events[0].place.file, e.events[0].place.line


def _reads(event: Event) -> bool:
    return event.name == "load" or not event.places


def _computes(event: Event) -> bool:
    return event.origin is Origin.MEMORY and not hands_on(event)


def _narrows(event: Event) -> bool:
    for operand in event.operands:
        before = operand.event
        if before is None or _BITS.get(event.dtype, 99) >= _BITS.get(before.dtype, 0) or event.shape != before.shape:
            continue
        lanes = operand.source(np.arange(event.values.size))[:, 0]
        own, old = (values.astype(np.float64) for values in (event.at(np.arange(len(lanes))), before.at(lanes)))
        if not np.array_equal(own, old, equal_nan=True):
            return True
    return False


def constant_of(operand: Operand) -> float | None:
    """The number that an operand is everywhere, if it follows from constants and arguments alone."""
    if operand.address or operand.memory is not None:
        return None
    if operand.event is not None and operand.event.origin is Origin.MEMORY:
        return None
    values = operand.values if operand.event is None else operand.event.values
    flat = np.asarray(values).reshape(-1)
    return float(flat[0]) if len(flat) and (flat == flat[0]).all() else None


def takes_constant(event: Event, lanes: Array, *, some: bool = False) -> bool:
    """Whether it is a selection that takes a constant for all of these elements, at least one; or for some of them."""
    sides = (o for o in event.operands[1:] if constant_of(o) is not None or _is_one_element(o, event.values.size))
    selects = event.name in ("select", "aten.where")
    which = np.any if some else np.all
    return selects and len(lanes) > 0 and any(bool(which(operand.source(lanes) >= 0)) for operand in sides)


def _is_one_element(operand: Operand, size: int) -> bool:
    """Whether it is one number of PyTorch's for all of a result of this size."""
    if operand.memory is None or operand.address or size < 2:
        return False
    lanes = operand.source(np.arange(size))
    return bool((operand.memory.at(lanes[lanes >= 0]) == operand.memory.at(lanes[lanes >= 0][:1])).all())


def reduces(event: Event) -> bool:
    """Whether elements of its result were computed from many each."""
    return bool(event.values.size) and any(
        not o.address and o.source(np.zeros(1, np.int64)).shape[1] > 1 for o in event.operands
    )
