"""Steps of a trace for a reader: one for each evaluation of an expression on the way to an element."""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import numpy as np

from lastbit.interpret.numpy_formats import Array, bits_of
from lastbit.interpret.places import Place
from lastbit.reports.why import Element, Source, StageMatch, Step
from lastbit.tracing import Event, Log, Path
from lastbit.tracing.ancestry import Visit, came_from, unique
from lastbit.tracing.of_triton import MOVERS

# What stands on one line beside the name of the operation.
FIRST = 4
"""Elements that are shown of many."""


def steps_of(log: Log, path: Path, matched: Mapping[int, StageMatch | None]) -> Iterator[Step]:
    """Yield the steps of a path, in order, without expressions that only move elements.

    An expression is one step, and one more for each operation within it that `matched` has, with its stage.
    """
    for _, group in groupby(path.visits, key=lambda visit: visit.event.occurrence):
        visits = list(group)
        *_, last = visits
        if last.event.input:
            for visit in visits:
                name = named_element(visit.event, int(visit.all[0])) if len(visit.direct) else visit.event.input
                yield replace(_of_visit(log, visit), text=name, operation="input")
        elif not last.event.program or any(visit.event.name not in MOVERS for visit in visits):
            ends = {visit.event.number: visit for visit in visits if visit.event.number in matched or visit is last}
            for number, end in ends.items():
                yield replace(_of_visit(log, end, ends), match=matched.get(number), part=end is not last)


def steps_of_all(log: Log, last: Event) -> Iterator[Step]:
    """Yield a step for every operation of an event's program; of all operations of PyTorch if it is of no program."""
    for event in log.events:
        if event.program == last.program and not event.input:
            size, first = event.values.size, elements(event.values.reshape(-1)[:FIRST])
            yield replace(_step(event), count=size, first=first, direct=size == 1)


def step_at(place: Place) -> Step:
    """Make a step of a place without recorded operation."""
    code = linecache.getline(place.file, place.line).strip()
    return Step(place.text, code=code, **vars(place))


def step_of(log: Log, event: Event, lane: int) -> Step:
    """Make the step that ends with an event, for one of its elements; for all of them if `lane` is -1."""
    direct = np.array([lane] if lane >= 0 else [], np.int64)
    return _of_visit(log, Visit(event, direct, direct if lane >= 0 else np.arange(event.values.size)))


def _of_visit(log: Log, visit: Visit, others: Collection[int] = ()) -> Step:
    """Make a step that ends with an event; `others` end steps of the same expression."""
    lanes = visit.direct if len(visit.direct) else visit.all
    sources = list(_sources(log, visit.event, lanes[:1], others))
    # Several constants in one expression are those of a function of the language, which its reader does not see.
    several = sum(is_constant for _, is_constant in sources) > 1
    shown = tuple(source for source, is_constant in sources if not (several and is_constant))
    first = elements(visit.event.at(visit.all[:FIRST]))
    direct = len(visit.direct) > 0
    return replace(_step(visit.event), count=len(visit.all), first=first, direct=direct, sources=shown)


def _step(event: Event) -> Step:
    launch = event.launch
    return replace(
        step_at(event.place),
        dtype=event.dtype,
        called=tuple(f"{caller.file}:{caller.line}:{caller.column + 1}" for caller in event.places[1:]),
        operation=event.name,
        shape=event.shape,
        launch="" if launch is None else launch.name,
        program=() if event.program is None else event.program[1],
    )


def named_element(event: Event, lane: int) -> str:
    """Return the name of an element of an input, such as `x[2, 17]`."""
    index = np.unravel_index(lane, event.shape) if event.shape else ()
    return f"{event.input}[{', '.join(str(int(i)) for i in index)}]"


def _sources(log: Log, event: Event, lanes: Array, others: Collection[int]) -> Iterator[tuple[Source, bool]]:
    """Yield the operands from outside of an expression that elements were computed from; whether each is constant."""
    for operand in event.operands if len(lanes) else ():
        parts = [part.reshape(-1) for part in came_from(operand, lanes)] if not operand.address else []
        found = unique(np.concatenate(parts)) if parts else lanes[:0]
        found = found[found >= 0]
        before, some, name = operand.event, found[:FIRST], operand.name
        if not len(found):
            continue
        if before is not None and before.occurrence == event.occurrence and before.number not in others:
            yield from _sources(log, before, found, others)
        elif before is not None:
            yield Source("", len(found), elements(before.at(some))), False
        else:
            known = () if operand.values is None else elements(operand.values.reshape(-1)[some])
            first: dict[int, Element] = dict(enumerate(known))
            for writer, positions, own in log.sources(operand.memory, some, event.number) if operand.memory else ():
                first |= zip(positions.tolist(), elements(writer.at(own)), strict=True)
                if writer.input and len(found) == 1:
                    name = named_element(writer, int(own[0]))
            shown = tuple(first[i] for i in sorted(first))
            yield Source(name, len(found), shown), not (operand.memory or operand.name)


def elements(values: Array) -> tuple[Element, ...]:
    """Format numbers for a reader."""
    flat = np.ascontiguousarray(values).reshape(-1)
    return tuple(map(element, flat))


def element(value: np.generic) -> Element:
    """Format a number with enough digits to tell it from its neighbours, and its bits."""
    dtype = value.dtype
    if dtype.kind in "iub":
        return Element(str(int(value)) if dtype.kind != "b" else str(bool(value)))
    if dtype.kind == "c":
        return Element(str(value))
    digits = 17 if dtype.itemsize == 8 else 9
    bits = int(bits_of(np.array([value], dtype))[0])
    return Element(f"{float(value):.{digits}g}", f"0x{bits:0{2 * dtype.itemsize}x}")


def folded(steps: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps, with one step in place of the rounds of a loop between its first and last."""

    def key_of(step: Step) -> tuple[object, ...]:
        at = step.file, step.line, step.column, step.end_line, step.end_column
        of = step.called, step.launch, step.program, step.operation * step.part
        return *at, *of, "" if step.line else step.text

    steps = list(steps)
    keys = [key_of(step) for step in steps]
    last = {key: number for number, key in enumerate(keys)}
    first = {key: number for number, key in reversed(list(enumerate(keys)))}
    middle = [first[key] < number < last[key] and bool(keys[number][1]) for number, key in enumerate(keys)]
    for left_out, group in groupby(range(len(steps)), key=lambda number: middle[number]):
        numbers = list(group)
        matches = [steps[number].match for number in numbers]
        rounds = max(Counter(keys[number] for number in numbers).values())
        if left_out and rounds > 1 and not any(match is not None and match.leaves for match in matches):
            lines = [steps[number].line for number in numbers]
            example = steps[numbers[0]]
            yield Step("", file=example.file, line=min(lines), end_line=max(lines), function=example.function,
                       called=example.called, launch=example.launch, program=example.program, again=rounds)  # fmt: skip
        else:
            yield from (steps[number] for number in numbers)
