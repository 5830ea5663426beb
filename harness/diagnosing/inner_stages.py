"""Stages that a kernel holds in another layout than its result, such as rows that are sorted by experts.

An element of a stage is known by its residue, wherever a kernel keeps it. What is computed element by element has the
elements of what it is computed from, and of what is computed from it, so that a wrong stage has places as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lastbit.diagnosing.traced_stages import LEAST, MOST, Grid, Shape, Stage, Stages, distance
from lastbit.interpret.numpy_formats import Array
from lastbit.judging.expected import Numbers
from lastbit.numerics import FORMATS, Enclosure
from lastbit.numerics.residues import Residues
from lastbit.tracing import Event, follow
from lastbit.tracing.ancestry import Ancestry, Expression, expressions
from lastbit.tracing.events import Made, Origin
from lastbit.tracing.redo import Change, Redo, Values

# Numbers of 16 bits are few: of unrelated ones some are equal by chance, but hardly nine of ten.
SHARE = 0.9
"""Of an event's numbers, those that must be elements of a stage for the event to hold that."""
# Arbitrary: 128 KiB of places for each event.
LARGEST = 1 << 14
"""Elements of a stage beyond which it is not looked for."""
# Arbitrary: what follows from each is done again.
MOST_VALUES = 4
"""Values of the kernel's that are tried as a stage, the nearest first."""

Places = Mapping[int, Array]
"""Number of an event → the element of a shape that each of its own is, flat, -1 for none."""
Mends = Callable[[Mapping[int, Change]], bool]
"""Whether changes make every element of the result right."""


@dataclass(frozen=True, eq=False)
class StageLayout:
    """The stages of one shape, before the last one, and what a kernel computes that has elements of it.

    `places` has the element that each of an event's is.
    """

    stages: Stages
    shape: Shape
    all: Mapping[str, Stage]
    places: Places

    @classmethod
    def of(cls, stages: Stages, shape: Shape) -> StageLayout:
        own, every = dict[str, Stage](), np.arange(math.prod(shape))
        for name, expected in stages.trace.stages.items():
            if name == stages.last:
                break
            if tuple(expected.shape) == shape:
                own[name] = Stage(name, expected.finished, every)
        return cls(stages, shape, own, _places(stages, shape, own))

    @cached_property
    def found(self) -> list[Expression]:
        """What is computed in floating point, each element once."""
        found, events = list[Expression](), self.stages.ancestry.events
        for part in _in_parts({n: events[n] for n in sorted(self.places) if _is_computed(events[n])}, self.places):
            lanes = {number: np.full(math.prod(self.shape), -1) for number in part}
            for number, own in lanes.items():
                has = np.nonzero(self.places[number] >= 0)[0]
                own[self.places[number][has]] = has
            found += expressions(part, lanes)
        return found

    @cached_property
    def right(self) -> dict[str, list[Expression]]:
        """The stages that the kernel has right, with the expressions of which nearly every number is an element."""
        whole = [e for e in self.found if all(_is_whole(event, self.places[event.number]) for event in e.events)]
        found = {n: [e for e in whole if s.takes(e) and not s.outside(e).any()] for n, s in self.all.items()}
        return {name: own for name, own in found.items() if own}

    def wrong(self, name: str) -> list[Expression]:
        """List what may stand for a stage and is wrong, the nearest first; nothing that leads to a right stage."""
        holders = {event.number for own in self.right.values() for e in own for event in e.events}
        led = self.stages.ancestry.before(holders) - holders
        stage, found = self.all[name], dict[bytes, Expression]()
        for e in self.found:
            if not led & {event.number for event in e.events} and stage.takes(e) and stage.outside(e).any():
                found.setdefault(e.values.tobytes(), e)
        expected = stage.parts[1]
        return sorted(found.values(), key=lambda e: distance(e.values, expected, e.known))[:MOST_VALUES]

    def changes(self, name: str, e: Expression) -> dict[int, Change]:
        """Return the change that puts a stage's elements in place of an expression's."""
        stage = self.all[name]
        expected = Made(stage.parts[1], stage.residues)

        def change(redo: Redo, event: Event, given: Values) -> Made:
            at = self.places[event.number]
            has = np.nonzero(at >= 0)[0]
            wide = np.result_type(event.values.dtype, np.float32)
            return redo.again(event, given).cast(wide).put(has, expected.taken(at[has]))

        return dict.fromkeys((event.number for event in e.events), change)

    def ending(self, name: str, e: Expression) -> Stages:
        """Return stages of which an expression, as one of them, is the result; the first cell is a wrong one."""
        stage, whole, fmt = self.all[name], self.stages.grid.whole, FORMATS.get(e.dtype)
        known, wrong = np.nonzero(e.known)[0], np.nonzero(stage.outside(e))[0]
        chosen = np.concatenate([wrong[:1], known[known != wrong[0]][:: max(1, -(-len(known) // MOST))]])
        tensor = torch.from_numpy(np.where(e.known, e.values, stage.parts[1]).reshape(self.shape))
        tensor = tensor.to(torch.float32 if fmt is None or fmt.dtype is None else fmt.dtype)
        index = tuple(np.unravel_index(chosen, self.shape))
        grid = Grid(whole, whole, tensor, self.shape, index, self.shape, index)
        ends = {event.number: e.lanes[event.number][chosen] for event in e.events}
        ancestry = Ancestry.of(self.stages.ancestry.log, e.events)
        found = expressions(ancestry.events, ancestry.cells(ends, grid.cells_of_inputs()))
        return replace(self.stages, grid=grid, last=name, found=found, ends=tuple(ends), ancestry=ancestry)


def layouts_of(stages: Stages) -> list[StageLayout]:
    """Return the layouts in which a kernel may hold stages beside that of its result."""
    if stages.grid.rows or not stages.telling:
        return []
    shapes = dict.fromkeys(tuple(expected.shape) for expected in stages.trace.stages.values())
    others = (s for s in shapes if stages.grid.in_stage(s) is None and LEAST <= math.prod(s) <= LARGEST)
    return [StageLayout.of(stages, shape) for shape in others]


def first_wrong(stages: Stages, layouts: list[StageLayout], mends: Mends) -> Stages | None:
    """Find the first wrong stage in another layout: with the right one, the result is right.

    Returns the stages up to that one, with the kernel's elements of it as result; None if there is no such stage.
    """
    of_name = {name: layout for layout in layouts for name in layout.all if name not in layout.right}
    for name in (name for name in stages.trace.stages if name in of_name):
        layout = of_name[name]
        for e in layout.wrong(name):
            if mends(layout.changes(name, e)):
                return layout.ending(name, e)
    return None


def right_elsewhere(stages: Stages, layouts: list[StageLayout]) -> dict[int, str]:
    """Map events, by number, to the right stage in another layout that they hold.

    Only of stages that lead with all elements that matter to the cell to explain: else the wrong ones may be taken.
    """
    worst, log = stages.grid.worst, stages.ancestry.log
    wrote = (e for e in stages.found if any(event.number in stages.ends for event in e.events) and e.known[worst])
    if (last := next(wrote, None)) is None:
        return {}
    end = last.event_of(worst)
    lanes = last.lanes[end.number][[worst]]
    visited, found = {visit.event.number: visit.all for visit in follow(log, end, lanes).visits}, dict[int, str]()
    for layout in layouts:
        for name, own in layout.right.items():
            events = [event.number for e in own for event in e.events if event.number in visited]
            taken = [layout.places[number][visited[number]] for number in events]
            if taken and _suffice(stages, name, np.unique(np.concatenate(taken))):
                found |= dict.fromkeys(events, name)
    return found


def _suffice(stages: Stages, name: str, elements: Array) -> bool:
    """Return whether the cell to explain depends on no other elements of a stage: with others it is the same."""
    expected = stages.trace.stages[name]
    own = expected.enclosure if isinstance(expected, Numbers) else None
    if own is None or own.algebra is None:
        return False
    others = torch.ones(own.value.numel(), dtype=torch.bool)
    others[torch.from_numpy(elements[elements >= 0])] = False
    others &= own.algebra.p.reshape(-1) != 0  # of pairs that are left out
    drawn = Residues.of(torch.arange(1.0, len(others) + 1).double() * math.pi)
    drawn = drawn.moved(lambda numbers: numbers.reshape(4, *expected.shape))
    algebra = Residues.where(others.reshape(expected.shape), drawn, own.algebra)
    trace = stages.grid.problem.evaluate({name: Enclosure(own.full, algebra=algebra)})
    before, after = (replace(stages, trace=t).all[stages.last].residues for t in (stages.trace, trace))
    if before is None or after is None:
        return False
    worst = stages.grid.worst
    return bool(before.equal(after)[worst] & ~after.open[worst])


def _is_computed(event: Event) -> bool:
    return event.is_float and bool(event.places) and event.origin is Origin.MEMORY


def _is_whole(event: Event, places: Array) -> bool:
    """Return whether nearly all numbers of an event have a place, but for zeros."""
    some = event.values.reshape(-1) != 0
    return bool((places[some] >= 0).sum() >= SHARE * some.sum())


def _in_parts(events: Mapping[int, Event], places: Places) -> list[dict[int, Event]]:
    """Group events of one text by launches that compute other elements: another tensor has elements of these, too."""
    parts = dict[object, list[tuple[set[int], set[object], dict[int, Event]]]]()
    for number, event in events.items():
        launch = None if event.program is None else event.program[0]
        own = set(places[number].tolist()) - {-1}
        known = parts.setdefault((event.places, event.name), [])
        fitting = (one for one in known if launch in one[1] or not one[0] & own)
        elements, launches, part = next(fitting, (set[int](), set[object](), dict[int, Event]()))
        if not part:
            known.append((elements, launches, part))
        elements |= own
        launches.add(launch)
        part[number] = event
    return [part for known in parts.values() for _, _, part in known]


# Places of elements.


def _places(stages: Stages, shape: Shape, named: Mapping[str, Stage]) -> dict[int, Array]:
    """Map events, by number, to the element of a shape that each of theirs is, -1 for none; those that have any."""
    ancestry, found = stages.ancestry, dict[int, Array]()
    given = {n for n, t in stages.grid.whole.tensors.items() if tuple(t.shape) == shape and t.is_floating_point()}
    numbers = (stage.residues for stage in named.values())
    tables = [table for own in numbers if own is not None and (table := _table(own.p)) is not None]
    for number, event in ancestry.events.items():
        if event.input in given:
            found[number] = np.arange(event.values.size)
        elif event.residues is not None and event.values.size >= LEAST:
            own = next((own for table in tables if (own := _held(event, table)) is not None), None)
            if own is not None:
                found[number] = own
    order = sorted(ancestry.events)
    for _ in range(2):
        for number in order:
            for edge in ancestry.edges[number]:
                if edge.lanes is not None and edge.event.number in found:
                    own = found[edge.event.number]
                    _add(found, number, np.where(edge.lanes >= 0, own[edge.lanes], -1))
        for number in reversed(order):
            for edge in ancestry.edges[number] if number in found else ():
                if edge.lanes is not None:
                    _add(found, edge.event.number, _taken(found[number], edge.lanes, edge.event.values.size))
    return found


def _add(found: dict[int, Array], number: int, own: Array) -> None:
    """Add the places of elements that have none yet."""
    if (own >= 0).any():
        before = found.get(number)
        found[number] = own if before is None else np.where(before >= 0, before, own)


def _taken(places: Array, lanes: Array, size: int) -> Array:
    """Return the places of what was taken from, [size], where all that took one of its elements has one place."""
    found, has = np.full(size, -1), (lanes >= 0) & (places >= 0)
    found[lanes[has]] = places[has]
    several = has & (found[np.maximum(lanes, 0)] != places)
    found[lanes[several]] = -1
    return found


def _table(numbers: Tensor) -> tuple[Array, Array] | None:
    """Return the residues in order, but for 0, and the element of each; None if they are too few.

    Residues of several elements are left out, unless there are hardly others: two pairs may be of one token and expert.
    """
    own, first, counts = np.unique(numbers.numpy(), return_index=True, return_counts=True)
    chosen = (own != 0) & ((counts == 1) | (2 * (counts == 1).sum() < len(own)))
    return (own[chosen], first[chosen]) if chosen.sum() >= LEAST else None


def _held(event: Event, table: tuple[Array, Array]) -> Array | None:
    """Return which element of a stage each of an event's numbers is, -1 where that is not known; None if few are."""
    assert event.residues is not None
    (numbers, elements), own = table, event.residues.p.reshape(-1).numpy()
    at = np.minimum(np.searchsorted(numbers, own), len(numbers) - 1)
    held = numbers[at] == own
    if held.sum() < SHARE * (own != 0).sum():
        return None
    found = np.where(held, elements[at], -1)
    return found if len(np.unique(found)) > LEAST else None
