"""Mends: changes of one line of a kernel that would make its result right, tried by replaying recorded operations.

An operation is changed in one deed (a rounding more or less, another constant, the other operation, another operand),
all that follows from it is done again, and every element is compared. A line is named where no other one has such a
mend, or where it alone computes anything between what is right and what is wrong.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from lastbit.diagnosing.inner_stages import first_wrong, layouts_of, right_elsewhere
from lastbit.diagnosing.responsible import (
    MOVING,
    alias,
    chain_of_address,
    constant,
    constant_of,
    deciding,
    definition,
    is_argument,
    is_given,
    lines_of,
)
from lastbit.diagnosing.traced_stages import Grid, Stage, Stages, distance, hands_on
from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.places import Place
from lastbit.numerics import FORMATS, Format, round_to
from lastbit.numerics.algebraic import FORMULAS, noting
from lastbit.numerics.formats import FP32
from lastbit.numerics.residues import Residues
from lastbit.shadows.programs import FORMATS as OF_ARRAYS
from lastbit.tracing import Event, Operand
from lastbit.tracing.ancestry import Ancestry, Expression, expressions, residues_of_cells
from lastbit.tracing.events import Made, Origin, Places
from lastbit.tracing.of_torch import is_filled
from lastbit.tracing.of_triton import MOVERS, OF_PROGRAM, ROUND
from lastbit.tracing.redo import Change, Redo, Unrepeatable, Values

# Arbitrary: docs/measurements/culprits.md has the seconds of whole traces, of which mends are a part.
SECONDS = 3.0
"""Of the processor, for which mends are tried; where that is not enough for all of them, no line is named."""
# Arbitrary: nearer values are tried first, farther ones as well.
LIKE = 0.5
"""Relative L2 error up to which another value of a stage is tried first."""
COARSEST = 2.0**-4
"""Error of that where the kernel has a right value, too, that is rounded once more: that of e4m3."""
# Arbitrary: each is tried by doing the rest of the kernel again. Longer kernels repeat values in a loop.
MOST_STAGES = 40
"""Values of the kernel's that are tried as stages."""
# Arbitrary: a stage in another layout is mostly the first of all.
DEEPEST = 4
"""Wrong stages in other layouts, one behind the other, that are looked for."""
# Arbitrary: of more, a loop in Python launches them, and a wrong line is wrong in all.
MOST_LAUNCHES = 8
"""Launches of one kernel that are mended one by one."""
# Arbitrary: a rounding to e4m3 is nearer, other constants of a formula are farther.
NEARLY = 2.0**-4
"""Relative error of a constant that stands for another one; if it is larger, the line took the wrong constant."""
LEAST = 8
"""Wrong elements that must become right where residues are none of them wrong: of fewer, much mends all by chance."""
SEVERAL = 2
"""Wrong integers that must become right, where many right ones of several numbers have to stay right."""

NOT_ROUNDED, OF_OPERAND, KEEPING_NAN = "not rounded", "of its operand", "NaN where an operand is NaN"
OTHER, LIMITED = "another value of the reference's", "at most its second value"

Line = tuple[str, int]


class MendKind(IntEnum):
    """The kind of a change, the simplest first."""

    ROUNDING = 0
    NUMBER = 1
    OPERATION = 2
    PLACE = 3
    """A number in where something is read, or whether it is."""
    ELEMENTS = 4
    OPERAND = 5
    """Another value for an operand: an input, a stage, another value of the reference's."""
    ADDITION = 6
    """An operation more."""
    COMPUTED = 7
    """Another value for an operand that is computed: what computes that can be wrong as well."""


@dataclass(frozen=True, eq=False)
class Mend:
    """A change of an expression.

    Attributes:
        words: completes "with the result of this line ...".
        change: for each of its events.
        kind: what is changed: mends of a later kind are tried where no line has one of an earlier.
        sure: nothing but the line decides on it: no argument of the launch, no flag, no other line.
        known: it counts only if the result is a value of the reference's.
        of_param: the number is a parameter.
    """

    expression: Expression
    words: str
    change: Change
    kind: MendKind
    sure: bool = True
    known: bool = False
    of_param: bool = False

    @property
    def changes(self) -> dict[int, Change]:
        return {event.number: self.change for event in self.expression.events}

    def standing(self, places: Places) -> Mend:
        """Return it as one of what is written elsewhere."""
        return replace(self, expression=_standing(self.expression, places))

    @property
    def of_arguments(self) -> bool:
        """Return whether the expression follows from the launch's arguments; lines that compute with it tell more."""
        return self.expression.events[-1].origin is not Origin.MEMORY

    @property
    def line(self) -> Line:
        return self.expression.line


@dataclass(frozen=True, eq=False)
class Mending:
    """Result of the search for mends in the lines between right stages and the wrong one.

    Attributes:
        stages: of the search, up to the kernel's result or to a wrong stage in another layout.
        stage: what is wrong.
        value: what the kernel has for it, where that is not the last of the stages.
        held: another stage, if that is what the kernel has there.
        span: the expressions that lead to it, which compute something.
        since: the stages that are right, on which they rest.
        computes: the last of the span is no value of the reference's.
        lines: those that lead from values of the reference's to what is wrong; with these, and with constants.
        launches: numbers of the launches that lead from what is right to what is wrong, or take what is held.
        mends: those with which every element is right, one for each line that has one, of the first kind of which any
            line has one.
        complete: the time was enough for all that could be tried.
    """

    stages: Stages
    stage: str
    value: Expression | None = None
    held: str = ""
    span: tuple[Expression, ...] = ()
    since: tuple[str, ...] = ()
    computes: bool = True
    lines: tuple[Line, ...] = ()
    launches: frozenset[int] = frozenset()
    mends: tuple[Mend, ...] = ()
    complete: bool = True

    @property
    def of_elements(self) -> bool:
        """Return whether a line is named because of what it takes or lacks; what it was passed may be wrong."""
        return self.only is not None and self.only.kind >= MendKind.ELEMENTS

    @property
    def only(self) -> Mend | None:
        """The mend of the only line that has one, or of the only one that computes with arguments alone, if sure."""
        # What other lines compute with a wrong argument is wrong for that.
        found = [mend for mend in self.mends if mend.of_arguments] or self.mends
        return found[0] if len(found) == 1 and found[0].sure else None

    @property
    def blamed(self) -> Expression | None:
        """The expression that is surely wrong, if any: the only one with a mend, or the only line that computes.

        None where bits are computed with, since that could be the mistake and has no mend. A line that only loads is
        named by a mend alone, and one that fills a tensor is waiting for what should be written there.
        """
        events = [event for e in self.span for event in e.events]
        if self.only is not None:
            return self.only.expression
        if any(event.name == "bitcast" or not event.is_float for event in events):
            return None
        idle = all(event.name == "load" or is_filled(event) for event in events)
        if len({e.line for e in self.span}) > 1 or self.mends or idle or not self.computes:
            return None
        last = self.span[-1]
        passing = _passing(last.events[-1]) if hands_on(last.events[-1]) else ()
        return _standing(last, passing) if passing else last  # a function that only stores is given what is wrong


def find_mends(stages: Stages) -> Mending:
    """Find the first wrong stage that led to a wrong result, in whatever layout, and mends of what led there."""
    first, deeper = stages, DEEPEST
    while True:
        search, layouts = MendSearch(stages, stages.right(stages.matched({}))), layouts_of(stages)
        inner = first_wrong(stages, layouts, search.passes) if deeper else None
        if inner is None:
            break
        stages, deeper = inner, deeper - 1
    if held := stages.held:
        own = {event.program[0] for n in stages.ends if (event := first.ancestry.events[n]).program is not None}
        takes = first.taken_by(stages.ends)
        launches = frozenset(event.program[0] for event in takes if event.program is not None) - own
        return Mending(stages, stages.last, held=held, since=(held,), launches=launches)
    return replace(search, elsewhere=right_elsewhere(stages, layouts)).found()


@dataclass(frozen=True, eq=False)
class MendSearch:
    """The search for mends of what led to the stage that is wrong.

    Attributes:
        right: stages, and the expressions with which every element is right.
        elsewhere: numbers of events, and the right stages that they hold in another layout.
    """

    stages: Stages
    right: Mapping[str, Expression]
    elsewhere: Mapping[int, str] = field(default_factory=dict)

    @property
    def grid(self) -> Grid:
        return self.stages.grid

    @cached_property
    def redo(self) -> Redo:
        known = self.stages.ancestry
        return Redo(Ancestry.of(known.log, [known.events[n] for n in self.stages.ends], addresses=True))

    @cached_property
    def followed(self) -> Redo:
        return replace(self.redo, follows=True)

    def found(self) -> Mending:
        until, mends = time.process_time() + SECONDS, dict[Line, Mend]()
        last = self.stages.all[self.stages.last]
        for stage, value in chain(self._wrong_stages(), ((last, None),)):  # noqa: B007
            span, since, border = self._span(self.stages.ends if value is None else [ev.number for ev in value.events])
            if span or border:
                break
        wrong = tuple(e for e in span if not self._is_right(e))
        launches = frozenset(event.program[0] for e in wrong for event in e.events if event.program is not None)
        own, since = value or self.stages.result, tuple(name for name in since if name != stage.name)
        several = len(np.unique(own.values[own.known])) >= LEAST
        held = since[0] if len(since) == 1 and not span and several else ""
        computes = bool(wrong) and not self._is_known(wrong[-1])
        told = Mending(
            self.stages, stage.name, value, held, wrong, since, computes, self._lines(wrong, border), launches
        )
        single = [mend for e in reversed(span) for own in _by_launch(e) for mend in self._mends_of(own)]
        edge = [mend for e in border for mend in self._mends_of(e)]
        adds = not span and last.outside(self.stages.result).sum() >= LEAST
        single += [m for m in edge if adds and m.kind is MendKind.ADDITION and not m.known]
        single += [replace(m, sure=False) for m in edge if m.words == NOT_ROUNDED]
        possible = [*single, *self._places(span), *self._passed(span)]
        possible.sort(key=lambda m: (m.kind, m.expression.events[-1].origin))  # those of arguments are few
        for mend in possible:
            known, latest = mends.get(mend.line), max((m.kind for m in mends.values()), default=MendKind.COMPUTED)
            given = latest is MendKind.NUMBER and not any(m.sure for m in mends.values())
            if mend.kind > (MendKind.OPERATION if given else latest):
                break
            if time.process_time() > until:
                return replace(told, complete=False)
            first = known is None or not known.sure or known.of_arguments > mend.of_arguments
            if not first or (given and mend.kind is MendKind.OPERATION and known is None):
                continue  # what computes with a given number may do another operation with it
            if mend.known and not self._is_of_reference(mend):
                continue
            if self.passes(mend.changes) and self._is_specific(mend):
                mend = self._decided(mend if self._rests_on_right(mend) else replace(mend, sure=False))
                if mend.line not in mends or mend.sure:
                    mends[mend.line] = mend
        found = [mend for mend in mends.values() if not self._rounded_by_cast(mend, mends.values())]
        return replace(told, mends=tuple(found) if self._tells() else ())

    def _lines(self, span: Sequence[Expression], border: Sequence[Expression]) -> tuple[Line, ...]:
        """Return the lines that lead to the last of a span from right stages, or from values of the reference's.

        The lines of these values are among them, since what is missing may stand behind them, and those of constants: a
        sum may begin with a wrong one. Such values are known by residues, which say nothing of rounding.
        """
        known = (e for e in span if self._is_of_another_formula and self._is_known(e))
        right = {event.number for e in known for event in e.events}
        stages = {event.number for e in border for event in e.events}
        ancestry, own = self.redo.ancestry, {event.number for e in span for event in e.events}
        led = ancestry.before(edge.event.number for number in own for edge in ancestry.edges[number])
        ahead, seen, found = sorted(own - led), set[int](), list[Line]()  # a result may be written in several parts
        while ahead:
            number = ahead.pop()
            if number in seen or number in stages:
                continue
            seen.add(number)
            event = ancestry.events[number]
            found += [(event.place.file, event.place.line)] if event.places else []
            if number not in right:
                ahead += (edge.event.number for edge in ancestry.edges[number])
                given = (o.event for o in event.operands if o.event is not None and not o.address)
                ahead += (own.number for own in given if own.origin is not Origin.MEMORY)
        return tuple(dict.fromkeys(found))

    @cached_property
    def _is_of_another_formula(self) -> bool:
        """Return whether the result is wrong by its residues."""
        own, last = self.stages.result.residues, self.stages.all[self.stages.last].residues
        return own is not None and last is not None and bool(last.differs(own).any())

    def _rounded_by_cast(self, mend: Mend, mends: Iterable[Mend]) -> bool:
        """Return whether all that takes a value are casts that the same rounding mends: these round in another way."""
        own = {event.number for event in mend.expression.events}
        alike = [m.expression for m in mends if m.words == mend.words and m is not mend]
        casts = {event.number for e in alike for event in e.events}
        takes = [n for n, edges in self.redo.ancestry.edges.items() if any(edge.event.number in own for edge in edges)]
        events = self.redo.ancestry.events
        return mend.kind is MendKind.ROUNDING and bool(takes) and all(n in casts and hands_on(events[n]) for n in takes)

    def _tells(self) -> bool:
        """Return whether the wrong elements are enough to tell a mend from a change that is right by chance.

        Where only zeros are wanted, or one number everywhere, much that computes nothing any more gives them.
        """
        last, own = self.stages.all[self.stages.last], self.stages.result
        wanted, wrong = last.parts[1], last.outside(own)
        if not self.grid.tensor.is_floating_point():  # many right ones of each number have to stay right
            _, counts = np.unique(wanted, return_counts=True)
            return bool(wrong.sum() >= SEVERAL and LEAST <= counts.max() <= wanted.size - LEAST)
        if (wanted.size > 1 and (wanted == wanted[0]).all()) or not wanted[wrong].any():
            return False
        return self._is_of_another_formula or bool(wrong.sum() >= LEAST)

    def _is_specific(self, mend: Mend) -> bool:
        """Return whether a result needs the value that a mend gives: others fail, and it is not one for all elements.

        A softmax is right with any shift, so that whatever keeps a maximum from moving makes up for a sum that is not
        rescaled; and what is multiplied by zero has no mistakes.
        """
        events, changed = mend.expression.events, self.redo.run(mend.changes)
        made = [changed.get(event.number, event).values for event in events]
        before = [event.values for event in events]
        pairs = list(zip(made, before, strict=True))
        if all(new.dtype == np.bool_ and old.any() and not (new & old).any() for new, old in pairs):
            return False  # a mask that keeps nothing that was kept

        def different(parts: Iterable[Array]) -> int:
            values = np.concatenate([part.reshape(-1) for part in parts])
            return len(np.unique(np.abs(values[np.isfinite(values)])))

        if different(made) < 2 <= different(before):
            return False

        def otherwise(redo: Redo, event: Event, given: Values) -> Made:
            made = mend.change(redo, event, given)
            if not event.is_float:
                return Made(~made.values if made.values.dtype == np.bool_ else made.values + 1)
            return _kept(lambda x: _ADD(_MUL(x, Made.full(1.25, x.values.shape)), Made.full(0.5, x.values.shape)), made)

        return not self.passes(dict.fromkeys(mend.changes, otherwise))

    def _wrong_stages(self) -> Iterator[tuple[Stage, Expression]]:
        """Yield earlier stages with a wrong expression for each: with the contract's value instead, all is right.

        It is no input and no result, and led to no right stage.
        """
        led = self.stages.ancestry.before(event.number for e in self.right.values() for event in e.events)
        others = [e for e in self.stages.full if not self.stages.is_input(e) and e.number not in led]
        others = [e for e in others if e not in self.stages.given]
        seen = set[tuple[str, bytes]]()
        for nearest, farthest in ((0.0, LIKE), (LIKE, np.inf)):
            for name, stage in self.stages.all.items():
                most = COARSEST if name in self.right else farthest
                for e in others if name != self.stages.last else ():
                    key, like = (name, e.values.tobytes()), distance(e.values, stage.parts[1], e.known)
                    if key in seen or len(seen) == MOST_STAGES or not nearest <= like <= most:
                        continue
                    if stage.outside(e).any() and stage.takes(e):
                        seen.add(key)
                        change = partial(self._at_cells, e, Made(stage.parts[1], stage.residues))
                        if self.passes({event.number: change for event in e.events}):
                            yield stage, e

    def _is_right(self, e: Expression) -> bool:
        """Return whether an expression passes its operand on bit by bit, or loads the right elements of an input."""
        if e.events[-1].name != "load":
            return all(event.name == "store" or self._is_exact(event) for event in e.events)
        own = (values.values[e.known] for values in self._inputs.values())
        return bool(e.known.any()) and any(np.array_equal(e.values[e.known], v, equal_nan=True) for v in own)

    def _is_exact(self, event: Event) -> bool:
        """Return whether an event is a cast that changes no number."""
        before = self._pointwise(event) if hands_on(event) else []
        return bool(before) and np.array_equal(before[0].values, event.values.astype(np.float64), equal_nan=True)

    def passes(self, changes: Mapping[int, Change]) -> bool:
        """Return whether changes make every element of the result right, and at least one other than before.

        Values are compared first, since they are fast to compute; where residues are followed, they decide whether
        anything changed: another formula may round alike.
        """
        last, result = self.stages.all[self.stages.last], self.stages.result
        for redo in (self.redo,) if result.residues is None else (self.redo, self.followed):
            try:
                changed = redo.run(changes)
            except Unrepeatable:
                return False
            after = self.stages.result_after(changed, follows=redo.follows)
            if last.outside(after).any():
                return False
            if redo.follows == (result.residues is not None) and not changed.keys() & set(self.stages.ends):
                return False
            if redo.follows and result.residues is not None:
                if after.residues is None or last.residues is None:
                    return False
                wrong, equal = last.residues.differs(result.residues), last.residues.equal(after.residues)
                if 2 * int((wrong & equal).sum()) < int(wrong.sum()):  # others may be open
                    return False
        return True

    def _span(self, ends: Iterable[int]) -> tuple[tuple[Expression, ...], tuple[str, ...], tuple[Expression, ...]]:
        """Collect expressions that led to events, back to right stages and inputs; also those stages and theirs."""
        placed = [e for e in self.stages.found if e.events[0].places]
        of_event, varied = dict[int, str](), set[int]()
        for name, right in self.right.items():
            values, stage = right.values.tobytes(), self.stages.all[name]
            alike: Iterable[Expression] = (e for e in placed if e.values.tobytes() == values and stage.takes(e))
            if right.residues is None and len(np.unique(right.values)) == 1:
                alike = [right]  # much else has one number
            for e in alike:
                if e.residues is None or right.residues is None or not e.residues.differs(right.residues).any():
                    of_event |= {event.number: name for event in e.events}
                    varied |= {event.number for event in e.events if len(np.unique(event.values)) > 1}
        of_event |= self.elsewhere
        ahead, seen, since, border = list(ends), set[int](), set[str](), set[int]()
        while ahead:
            number = ahead.pop()
            event = self.stages.ancestry.events[number]
            before = [edge.event.number for edge in self.stages.ancestry.edges[number]]
            if number in of_event and number not in border:
                since.add(of_event[number])
                border.add(number)
                same = [n for n in before if of_event.get(n) == of_event[number] and n in varied]
                if any(self.stages.ancestry.events[n].places != event.places for n in same):
                    ahead += (n for n in before if n not in of_event)  # it has changed nothing, such as the sum with 0
                if hands_on(event):
                    ahead += (n for n in before if n in of_event)
            elif number not in of_event and number not in seen:
                seen.add(number)
                ahead += before
        span, edge = (tuple(e for e in placed if any(ev.number in own for ev in e.events)) for own in (seen, border))
        return span, tuple(name for name in self.stages.trace.stages if name in since), edge

    def _decided(self, mend: Mend) -> Mend:
        """Return a mend with the call that decides on it in place of its line, unless the launch of the kernel does.

        A number in a function that is right if it is passed something else is not sure.
        """
        e, event = mend.expression, mend.expression.events[-1]
        handed, in_helper = self.stages.ancestry.log.handed.get(event.number, ()), len(event.places) > 1
        if mend.words.startswith(OF_OPERAND) and (places := _passing(event)):
            return mend.standing(places)
        match mend.kind:
            case MendKind.OPERATION if not event.name.endswith(("select", "where")) and mend.words != KEEPING_NAN:
                if self._is_known(e) or self._holds_reference(e) or all(map(self._has_one_number, e.events)):
                    return replace(mend, sure=False)  # it is right; or its operand may be wrong
            case MendKind.NUMBER if mend.sure and in_helper and not mend.of_param:
                passed = self._passed([e for e in self.stages.found if e.events[0].places], event.places[1:])
                added = (self.passes(other.changes) for other in passed if other.kind is MendKind.ADDITION)
                return replace(mend, sure=not any(added))
            case MendKind.PLACE if in_helper and any(map(is_argument, event.operands)):
                same = (ev.places for ev in self.redo.ancestry.events.values() if ev.places[:1] == event.places[:1])
                if any(places[1:] != event.places[1:] for places in same):
                    return mend.standing(event.places[1:])  # others call the function with what is right
            case MendKind.OPERAND if (place := self._alias(mend)) is not None:
                return mend.standing((place,))
            case MendKind.ADDITION if event.program is not None and in_helper and self._is_known(e):
                return mend.standing(handed[1:]) if handed[1:] else replace(mend, sure=False)  # what takes it lacks it
            case MendKind.ROUNDING:
                own, known = {event.number for event in e.events}, self.redo.ancestry.events
                stores = [ev for n, ev in known.items() if ev.name == "store" and n not in self.stages.ends]
                if any(o.event is not None and o.event.number in own for ev in stores for o in ev.operands[:1]):
                    return replace(mend, sure=False)  # it is read again later, and the host has chosen the format
                left_out = mend.words != NOT_ROUNDED
                places = (left_out and handed) or event.places
                level = deciding(places, left_out=left_out)
                if level:
                    return replace(mend.standing(places[level:]), sure=True)
                return replace(mend, sure=mend.sure and level is not None)
        return mend

    def _rests_on_right(self, mend: Mend) -> bool:
        """Return whether what a mended comparison or choice of integers takes is right, and a loop is not in question.

        `columns <= end` is right for an end that another line has made too small, and so is `columns < end + 1`. That
        line need not have a mend: it may do something more.
        """
        event, here = mend.expression.events[-1], mend.line
        operands = [operand for own in mend.expression.events for operand in own.operands]
        if mend.kind is MendKind.PLACE and any(_is_round(operand) for operand in operands):
            return False
        if self.grid.tensor.is_floating_point():
            return True
        if event.name == "select" and mend.words != LIMITED:
            operands = [own.operands[0] for own in mend.expression.events]
        elif "cmp" not in event.name:
            return True
        ahead, seen = [operand.event for operand in operands], set[int]()
        while ahead:
            before = ahead.pop()
            if before is None or before.number in seen or before.number in self._placing:
                continue
            seen.add(before.number)
            if before.name in ("load", *OF_PROGRAM):
                continue
            if (before.place.file, before.place.line) == here or before.name in MOVERS or before.name == "select":
                ahead += [operand.event for operand in before.operands[before.name == "select" :]]
            elif before.name in MOVING and not _is_cut(before):
                ahead += [operand.event for operand in before.operands]
            else:
                return False
        return True

    @cached_property
    def _placing(self) -> set[int]:
        """Numbers of the events that say where something is read or written, or that are right stages."""
        found = {event.number for e in self.right.values() for event in e.events}
        for event in self.redo.ancestry.events.values():
            if event.name in ("load", "store"):
                found |= chain_of_address(event, pointer=True).keys()
        return found

    def _alias(self, mend: Mend) -> Place | None:
        """Return where the operand that a mend replaces was assigned its name, if computed in another line; or None."""
        event = mend.expression.events[-1]
        side = "left" if mend.words.endswith("first operand") else "right"
        operands = [o for o in event.operands if not o.address]
        before = operands[side == "right"].event if len(operands) == 2 else None
        if before is None or not event.places:
            return None
        return alias(event.place, side, [p.line for p in before.places if p.file == event.place.file])

    def _is_known(self, e: Expression) -> bool:
        """Return whether an expression is a value of the reference, by its residues."""
        return (
            bool(e.known.any())
            and e.residues is not None
            and any(
                made.residues is not None and torch.equal(made.residues.p[e.known], e.residues.p[e.known])
                for made in self._reference
            )
        )

    def _holds_reference(self, e: Expression) -> bool:
        """Return whether all residues of an expression are among those of the reference, wherever these belong."""
        known = [event.residues.p.reshape(-1) for event in e.events if event.residues is not None]
        own = torch.cat(known).unique() if known else torch.zeros(0)
        return len(own) >= LEAST and bool(torch.isin(own[own != 0], self._numbers_of_reference).all())

    def _has_one_number(self, event: Event) -> bool:
        """Return whether an operand that another line computes is one number: then operations are not told apart."""
        before = [o.event for o in event.operands if not o.address and o.event is not None]
        others = (x for x in before if x.values.size > 1 and x.place.line != event.place.line and not is_given(x))
        return any(len(np.unique(x.values)) == 1 for x in others)

    def _is_of_reference(self, mend: Mend) -> bool:
        """Return whether a mended expression is a value of the reference, by residues."""
        e, event = mend.expression, mend.expression.events[-1]
        try:
            with np.errstate(all="ignore"):
                made = mend.change(self.followed, event, [None] * len(event.operands))
        except Unrepeatable:
            return False
        known = e.lanes[event.number] >= 0
        residues = residues_of_cells({event.number: made}, e.lanes, self.grid.size)
        return bool(known.any()) and self._is_known(replace(e, known=known, residues=residues))

    # What may be changed.

    def _mends_of(self, e: Expression) -> Iterator[Mend]:
        """Yield the changes of what an expression does; none of what fills a result that nothing has written since."""
        event, dtype = e.events[-1], e.events[-1].values.dtype
        if event.name in MOVERS or event.name == "store" or (is_filled(event) and event.number in self.stages.ends):
            return
        if not event.is_float:
            yield from self._whole(e) if event.origin is Origin.MEMORY else ()
            return
        if event.origin is not Origin.MEMORY:  # computed from arguments, such as `n - 1`
            flat, given = event.values.reshape(-1), is_given(event)
            if event.operands and len(flat) and (flat == flat[0]).all():
                for value in self._numbers(now := float(flat[0]), given=given):
                    words = f"{value:.9g} in place of {now:.9g}"
                    yield self._given(Mend(e, words, partial(_number, value), MendKind.NUMBER), value, now, given)
        elif event.name == "load":
            lanes = e.lanes[event.number]
            reads = next(o for o in event.operands if o.memory).source(lanes[lanes >= 0])
            computed = chain_of_address(event, pointer=bool((reads >= 0).all()))
            sure = lines_of(computed) <= {(event.place.file, event.place.line)}
            for name, values in self._inputs.items():
                words = f"with the elements of {name} that belong there"
                yield Mend(e, words, partial(self._at_cells, e, values), MendKind.ELEMENTS, sure)
        elif event.name == "select" or event.name.endswith(".where"):
            yield from self._constants(e)
            yield from _sides(e)
            yield from self._limited(e)
        elif event.name == "bitcast":
            for source in _whose_bits(event):
                for fmt in self._formats:
                    change = partial(_with_bits, source, partial(_rounded, fmt))
                    yield Mend(e, f"its operand rounded to {fmt.name}", change, MendKind.ROUNDING)
        elif hands_on(event):
            if not self._is_exact(event):
                yield Mend(e, NOT_ROUNDED, partial(self._computed, _SAME, True), MendKind.ROUNDING)
                for fmt in self._formats:
                    change = partial(self._computed, partial(_rounded, fmt), True)
                    yield Mend(e, f"rounded to {fmt.name}", change, MendKind.ROUNDING)
                yield from self._and_more(e)
        else:
            for fmt in self._formats:
                yield Mend(e, f"rounded to {fmt.name}", partial(_after, partial(_rounded, fmt)), MendKind.ROUNDING)
            if dtype.itemsize < 4:
                change = partial(_with_operands, lambda made: made.cast(np.float32), {})
                yield Mend(e, "computed in fp32", change, MendKind.ROUNDING)
            yield from self._constants(e)
            operands = self._pointwise(event)
            for words, function in {1: _OF_ONE, 2: _OF_TWO}.get(len(operands), {}).items():
                yield Mend(e, words, partial(self._computed, function, False), MendKind.OPERATION)
            if any(np.isnan(own.values).any() for own in operands):
                yield Mend(e, KEEPING_NAN, self._keeping_nan, MendKind.OPERATION)
            yield from self._operands(e)
            yield from self._and_more(e)

    def _whole(self, e: Expression) -> Iterator[Mend]:
        """Yield the changes of an operation on integers or a comparison, of whose results values decide alone."""
        event = e.events[-1]
        if event.name == "select":
            yield from _sides(e)
            yield Mend(e, LIMITED, partial(_side, 3), MendKind.OPERATION)
        elif event.name in _OF_INTEGERS:
            for words, function in _WHOLE.items():
                yield Mend(e, words, partial(_compared, function), MendKind.OPERATION)
        yield from _comparisons(e)
        yield from self._constants(e, whole=True)

    def _limited(self, e: Expression) -> Iterator[Mend]:
        """Yield mends that limit a result to a parameter, or to its negative."""
        for name, value in self._params.items():
            for words, function, bound in (("at most", _SMALLER, value), ("at least minus", _LARGER, -value)):
                further = partial(_kept, partial(_second, function, bound))
                yield Mend(e, f"and then {words} {name}", partial(_after, further), MendKind.ADDITION)

    def _constants(self, e: Expression, *, whole: bool = False) -> Iterator[Mend]:
        """Yield mends with another number for an operand that is one; a `whole` one says where something is."""
        for place, operand in enumerate(e.events[-1].operands):
            if (now := constant_of(operand)) is not None:
                given, digits = is_argument(operand), ".0f" if whole else ".9g"
                if whole:
                    numbers = iter(sorted(n for n in self._sizes | {now + 1, now - 1, 0.0} if n != now))
                else:
                    numbers = self._numbers(now, given=given)
                for value in numbers:
                    kind = MendKind.PLACE if whole else MendKind.NUMBER if np.isfinite(value) else MendKind.OPERATION
                    change, words = (
                        partial(_with_number, place, value),
                        f"with {value:{digits}} in place of {now:{digits}}",
                    )
                    yield self._given(Mend(e, words, change, kind), value, now, given)

    def _numbers(self, now: float, *, given: bool) -> Iterator[float]:
        """Yield candidates for a constant; not its negative or inverse if it is `given`: operations make those."""
        params = {float(v) for v in self.grid.problem.params.values() if isinstance(v, int | float)}
        sizes = {float(size) for tensor in self.grid.whole.tensors.values() for size in tensor.shape if size > 1}
        near = {2 * now, now / 2, now + 1, now - 1, 0.0, 1.0, -1.0, -np.inf, np.inf}
        near |= set() if given else {-now, *((1 / now,) if now else ())}
        own = params | sizes | {1 / size for size in sizes} | near | {np.e, np.log2(np.e), -np.log2(np.e), np.log(2.0)}
        yield from sorted(value for value in own if value != now)

    def _given(self, mend: Mend, value: float, now: float, given: bool) -> Mend:
        """Return a mend of a number: at the line that defines it, and unsure where the launch was not given the other.

        `given` says that what it replaces is an argument of the launch: if the right one is an argument as well, the
        line has taken the wrong one, and else the launch may have been given it.
        """
        launch, params = mend.expression.events[-1].launch, self.grid.problem.params.values()
        mend = replace(mend, of_param=any(value == own for own in params if isinstance(own, int | float)))
        if mend.kind is MendKind.NUMBER and 0 < abs(value - now) < NEARLY * abs(value):
            place = constant(mend.expression.events[-1].place)
            mend = mend if place is None else mend.standing((place,))
        if not given or launch is None:
            return mend
        if value not in launch.numbers:
            return replace(mend, sure=False)
        place = definition(mend.expression.events[-1].place)
        return mend if place is None else mend.standing((place,))

    def _places(self, span: Sequence[Expression]) -> Iterator[Mend]:
        """Yield mends with another number or comparison in an address or a mask."""
        found = dict[int, Event]()
        for event in (event for e in span for event in e.events if event.name in ("load", "select", "masked_load")):
            found |= chain_of_address(event)
        own = {event.number for e in span for event in e.events if not event.is_float}
        found = {number: event for number, event in found.items() if number not in own}  # of these there are all mends
        none = np.full(self.grid.size, -1)
        for e in expressions(found, dict.fromkeys(found, none)) if found else ():
            yield from _comparisons(e)
            yield from self._constants(e, whole=True) if e.events[-1].name not in MOVING else ()

    def _operands(self, e: Expression) -> Iterator[Mend]:
        """Yield mends with an input, or an earlier stage that is right, in place of an operand."""
        event = e.events[-1]
        operation = _BY_NAME.get(event.name.rpartition(".")[2])
        if operation is None or len(self._pointwise(event)) != 2:
            return
        for name, values in self._further:
            has = name in self._inputs or name in self.right
            for place, side in enumerate(_NTH):
                change = partial(self._exchanged, e, values, operation, place)
                mend = Mend(e, f"with {name} for its {side} operand", change, MendKind.OPERAND, known=name == OTHER)
                plain = (has and self._alias(mend) is not None) or self._plain(event, place, of_stage=has)
                kind = MendKind.COMPUTED if plain is None else MendKind.OPERAND
                yield replace(mend, kind=kind, sure=bool(plain) or (plain is False and has))

    def _plain(self, event: Event, place: int, *, of_stage: bool) -> bool | None:
        """Return whether an operand is a constant or is loaded in the line of an event; None where it is computed.

        It is plain as well if it is a value of the reference, but not the one that belongs there, where that is known:
        an input or one `of_stage`.
        """
        operand = [o for o in event.operands if not o.address][place]
        before, here, lines = operand.event, (event.place.file, event.place.line), set[Line]()
        while before is not None:
            handed = self.stages.ancestry.log.handed.get(before.number, ())
            lines |= {(p.file, p.line) for p in (*before.places, *handed)}
            if before.name == "load" or not (hands_on(before) or before.name in MOVERS):
                break
            before = before.operands[0].event
        # What is in memory is a tensor of PyTorch's.
        if operand.memory is None and (before is None or before.origin is not Origin.MEMORY):
            return not operand.name
        if before is not None and before.name == "load":
            return here in lines
        made = operand.event
        while made is not None and made.name in MOVERS:
            made = made.operands[0].event
        known = (e for e in self.stages.found if made is not None and made in e.events) if of_stage else ()
        found = next(iter(known), None)
        return True if found is not None and found.values[found.known].any() and self._is_known(found) else None

    def _and_more(self, e: Expression) -> Iterator[Mend]:
        """Yield mends that add one operation to the result: with a parameter, a size, an input or a stage.

        Where there is an only operand, also mends that add one operation with a parameter to that.
        """
        for words, function in _OF_ONE.items():
            yield Mend(e, f"and then {words}", partial(_after, partial(_kept, function)), MendKind.ADDITION)
        yield from self._limited(e)
        numbers = {f"{n:g}": float(n) for t in self.grid.whole.tensors.values() for n in t.shape[-1:] if n > 1}
        of_one, known = len(self._pointwise(e.events[-1])) == 1, self.stages.result.residues is not None
        for words, function in _MORE.items():
            for name, number in (self._params | numbers).items():
                further = partial(_kept, partial(_second, function, number))
                yield Mend(e, words.format(name), partial(_after, further), MendKind.ADDITION)
                if of_one and name in self._params:
                    change = partial(_with_operands, further, {})
                    yield Mend(e, f"{OF_OPERAND} {words.format(name)}", change, MendKind.ADDITION)
            for name, values in self._further:
                change = partial(self._then_cells, e, function, values)
                yield Mend(e, words.format(name), change, MendKind.ADDITION, known=known)

    def _passed(self, span: Iterable[Expression], calls: Places = ()) -> Iterator[Mend]:
        """Yield mends of an argument of a call: rounded, or with a parameter added or multiplied.

        Only arguments that several operations of the function take, since else the mend of that operation is the same
        change; or only arguments of `calls`.
        """
        users = dict[tuple[Places, int], dict[int, tuple[Event, int]]]()
        own = {event.number: e for e in self.stages.found for event in e.events}
        for event in (event for e in span for event in e.events):
            for place, operand in enumerate(event.operands):
                before = None if operand.address else operand.event
                if before is None or before.number not in own or not before.is_float:
                    continue
                for level in range(1, len(event.places)):
                    if event.places[level] not in before.places:
                        key = event.places[level:], own[before.number].number
                        users.setdefault(key, {})[event.number] = event, place
        for (places, number), found in users.items():
            if places[0] not in calls if calls else len({event.places for event, _ in found.values()}) < 2:
                continue
            e = _standing(own[next(iter(found))], places, [event for event, _ in found.values()])
            at = {n: place for n, (_, place) in found.items()}
            for fmt in self._formats:
                change = partial(_with_operands, partial(_rounded, fmt), at)
                yield Mend(e, f"with what is passed rounded to {fmt.name}", change, MendKind.ROUNDING)
            for words, function in _MORE.items() if own[number].events[0].is_float else ():
                for name, value in self._params.items():
                    further = partial(_kept, partial(_second, function, value))
                    text = f"with what is passed {words.format(name)}"
                    yield Mend(e, text, partial(_with_operands, further, at), MendKind.ADDITION)

    # Changes of a line that need what the case has.

    def _at_cells(self, e: Expression, own: Made, redo: Redo, event: Event, given: Values) -> Made:
        """Return an event's result with the cells' elements replaced by these values."""
        lanes = e.lanes[event.number]
        cells = np.nonzero(lanes >= 0)[0]
        return redo.again(event, given).cast(_wide(event)).put(lanes[cells], own.taken(cells))

    def _computed(self, function: Function, wide: bool, redo: Redo, event: Event, given: Values) -> Made:
        made = function(*self._pointwise(event, given, redo))
        return _stored(made, np.dtype(np.float32) if wide else event.values.dtype)

    def _keeping_nan(self, redo: Redo, event: Event, given: Values) -> Made:
        made = redo.again(event, given)
        for own in self._pointwise(event, given, redo):
            made = _where(np.isnan(own.values), own.cast(made.values.dtype), made)
        return made

    def _exchanged(
        self, e: Expression, own: Made, operation: Function, place: int, redo: Redo, event: Event, given: Values
    ) -> Made:
        sides = self._pointwise(event, given, redo)
        sides[place] = sides[place].put(*self._of_lanes(e, event, own))
        return _stored(operation(*sides), event.values.dtype)

    def _then_cells(
        self, e: Expression, function: Function, own: Made, redo: Redo, event: Event, given: Values
    ) -> Made:
        made, (at, other) = redo.again(event, given), self._of_lanes(e, event, own)
        return made.put(at, _kept(lambda wide: function(wide, other), made.taken(at)))

    def _of_lanes(self, e: Expression, event: Event, own: Made) -> tuple[Array, Made]:
        """Return the elements of an event that belong to cells, and the values of these cells.

        Raises:
            Unrepeatable: an element belongs to cells of different values.
        """
        lanes = e.lanes[event.number]
        cells = np.nonzero(lanes >= 0)[0]
        at, values, alone = lanes[cells], own.taken(cells), np.zeros(event.values.size)
        alone[at] = values.values
        if not len(cells) or not np.array_equal(alone[at], values.values, equal_nan=True):
            raise Unrepeatable("one element belongs to several cells")
        return at, values

    def _pointwise(self, event: Event, given: Values = (), redo: Redo | None = None) -> list[Made]:
        """Return the operands as fp64 in the shape of the result; an empty list if the operation is not elementwise."""
        lanes, found = np.arange(event.values.size), []
        for place, operand in enumerate(event.operands):
            if not operand.address:
                own = (redo or self.redo).operand(event, place, given[place] if given else None)
                source = operand.source(lanes)
                if own is None or source.shape[1] > 1 or (source < 0).any():
                    return []
                found.append(own.taken(source[:, 0]).cast(np.float64).shaped(event.shape))
        return found

    # What there is to compute with.

    @cached_property
    def _formats(self) -> list[Format]:
        own = {fmt.name for fmt in self.stages.trace.formats.values() if isinstance(fmt, Format)}
        own |= {self.grid.problem.main_format.name}
        return [fmt for name, fmt in FORMATS.items() if name in own and fmt.precision < FP32.precision]

    @cached_property
    def _sizes(self) -> set[float]:
        """Sizes and strides of the case, and whole parameters."""
        own = {float(n) for t in self.grid.whole.tensors.values() for n in (*t.shape, *t.stride())}
        return own | {float(v) for v in self.grid.problem.params.values() if isinstance(v, int)}

    @cached_property
    def _params(self) -> dict[str, float]:
        """Map the parameters that are numbers to these, without those that are zero."""
        return {name: float(v) for name, v in self.grid.problem.params.items() if isinstance(v, int | float) and v}

    @cached_property
    def _inputs(self) -> dict[str, Made]:
        """Map each input to its element for each cell."""
        found = {}
        for name, tensor in self.grid.whole.tensors.items():
            elements = self.grid.in_case(tuple(tensor.shape))
            if elements is None:
                elements = self.grid.in_column(tuple(tensor.shape))
            if elements is not None and tensor.is_floating_point():
                own = tensor.reshape(-1)[torch.from_numpy(elements)]
                found[name] = Made(own.to(torch.float64).numpy(), Residues.of(own))
        return found

    @cached_property
    def _noted(self) -> list[Any]:
        with noting() as noted:
            self.grid.problem.evaluate()
        return noted

    @cached_property
    def _numbers_of_reference(self) -> torch.Tensor:
        own = [one.algebra.numbers[0].reshape(-1) for one in self._noted if one.algebra is not None]
        return torch.cat(own).unique() if own else torch.zeros(0)

    @cached_property
    def _reference(self) -> list[Made]:
        """Distinct values that the reference computes with or computes, for each cell; if `telling` in other shapes."""
        found = dict[bytes, Made]()
        for one in self._noted:
            if one.algebra is None:
                continue
            index = self.grid.in_stage(tuple(one.shape))
            if index is None and self.stages.telling and math.prod(one.shape) == math.prod(self.grid.own_shape):
                index = np.ravel_multi_index(self.grid.own_index, self.grid.own_shape)
            if index is not None:
                at = torch.from_numpy(index)
                numbers = one.algebra.numbers.expand(4, *one.shape).reshape(4, -1)[:, at]
                made = Made(one.value.expand(one.shape).reshape(-1)[at].numpy(), Residues(numbers))
                found.setdefault(numbers[0].numpy().tobytes(), made)
        return list(found.values())

    @cached_property
    def _further(self) -> list[tuple[str, Made]]:
        """Values for each cell with their names: inputs, stages, as the kernel has them if right, and others."""
        stages = ((n, stage) for n, stage in self.stages.all.items() if n != self.stages.last)
        right = ((n, e) for n, e in self.right.items() if n != self.stages.last and e.events and e.known.all())
        named = self._inputs | {n: Made(stage.parts[1], stage.residues) for n, stage in stages}
        named |= {name: Made(e.values, e.residues) for name, e in right}
        known = {made.residues.p.numpy().tobytes() for made in named.values() if made.residues is not None}
        found = list(named.items())
        for made in self._reference:
            if made.residues is not None and made.residues.p.numpy().tobytes() not in known:
                found.append((OTHER, made))
        return found


Function = Callable[..., Made]
"""Of operands in fp64 and their residues."""


def _by_launch(e: Expression) -> Iterator[Expression]:
    """Yield an expression, and its part in each launch: it can be right in one and wrong in another."""
    yield e
    launches = dict.fromkeys(None if event.program is None else event.program[0] for event in e.events)
    for launch in launches if 1 < len(launches) <= MOST_LAUNCHES else ():
        yield replace(e, events=tuple(ev for ev in e.events if ev.program is not None and ev.program[0] == launch))


def _whose_bits(event: Event) -> list[Event]:
    """List the numbers of whose bits an event makes another number, in its own line alone."""
    found, ahead = list[Event](), [event]
    while ahead:
        for before in (o.event for o in ahead.pop().operands if o.event is not None):
            if before.is_float or before.place.line == event.place.line:
                (found if before.is_float else ahead).append(before)
    return list(dict.fromkeys(found))


def _passing(event: Event) -> Places:
    """Return the outermost call that contains an operation but not its operand, which is passed there; or ()."""
    before = next((o.event for o in event.operands if not o.address), None)
    for level in range(len(event.places) - 1, 0, -1):
        call = event.places[level:]
        if before is not None and before.places and before.places[-len(call) :] != call:
            return call
    return ()


def _standing(e: Expression, places: Places, events: Iterable[Event] = ()) -> Expression:
    """Return an expression, or other events, as if written elsewhere: where a function is called or a name assigned."""
    found = tuple(replace(event, places=places) for event in events or e.events)
    none = np.full(len(e.values), -1)
    return replace(e, events=found, lanes={event.number: e.lanes.get(event.number, none) for event in found})


# Changes of an event: a `Change` each, behind what it is made of.


def _after(function: Function, redo: Redo, event: Event, given: Values) -> Made:
    """Return a function of an event's result."""
    return function(redo.again(event, given))


def _with_bits(source: Event, function: Function, redo: Redo, event: Event, given: Values) -> Made:
    return function(redo.made(source)).shaped(event.shape)


def _number(value: float, redo: Redo, event: Event, given: Values) -> Made:
    made = Made.full(value, event.shape, event.values.dtype)
    return made if redo.follows else Made(made.values)


def _with_operands(function: Function, at: Mapping[int, int], redo: Redo, event: Event, given: Values) -> Made:
    """Return an event's result for a function of its operands; of one alone, where `at` has its place."""
    operands = [redo.operand(event, place, own) for place, own in enumerate(given)]
    for place, (own, operand) in enumerate(zip(operands, event.operands, strict=True)):
        if own is not None and not operand.address and at.get(event.number, place) == place:
            operands[place] = function(own)
    return redo.again(event, operands)


def _with_number(place: int, value: float, redo: Redo, event: Event, given: Values) -> Made:
    """Return an event's result for another number in place of an operand."""
    old, others = redo.operand(event, place, given[place]), [*given]
    assert old is not None
    whole, shape = old.values.dtype.kind in "iub", old.values.shape
    others[place] = Made(np.full(shape, value, old.values.dtype)) if whole else Made.full(value, shape, _wide(event))
    return redo.again(event, others)


def _compared(function: Callable[..., Array], redo: Redo, event: Event, given: Values) -> Made:
    return Made(np.asarray(function(*(redo.spread(event, place, own).values for place, own in enumerate(given)))))


def _side(side: int, redo: Redo, event: Event, given: Values) -> Made:
    """Return the first or second value of a choice, for 0 and 1; for 2 the one not taken, for 3 at most the second."""
    taken, first, second = (redo.spread(event, place, own) for place, own in enumerate(given[:3]))
    limited = _where((taken.values != 0) & (first.values < second.values), first, second)
    made = (first, second, _where(taken.values != 0, second, first), limited)[side]
    return made.cast(event.values.dtype)


def _sides(e: Expression) -> Iterator[Mend]:
    """Yield mends of a choice by its sides."""
    sides = (*(f"always its {nth} value" for nth in _NTH), "with the condition the other way round")
    for side, words in enumerate(sides):
        yield Mend(e, words, partial(_side, side), MendKind.OPERATION)


def _comparisons(e: Expression) -> Iterator[Mend]:
    """Yield mends of a comparison: another one, or of integers that were not cut before."""
    event = e.events[-1]
    own = event.name.lower()[-2:] if "cmp" in event.name and len(event.operands) == 2 else ""
    for sign, (said, function) in _COMPARED.items() if own in _COMPARED else ():
        if sign != own:
            words = f"compared by {said}, not {_COMPARED[own][0]}"
            yield Mend(e, words, partial(_compared, function), MendKind.PLACE)
        elif any(_is_cut(operand.event) for event in e.events for operand in event.operands):
            yield Mend(e, "of integers that are not cut", partial(_compared_whole, function), MendKind.OPERATION)


def _is_round(operand: Operand) -> bool:
    """Return whether an operand is the number of a loop's round, unchanged."""
    while operand.event is not None and operand.event.name in MOVING and operand.event.operands:
        operand = operand.event.operands[0]
    return operand.event is None and operand.name == ROUND


def _uncut(event: Event) -> Event:
    """Return the integers that an event hands on, before they were spread or cast."""
    while event.name in (*MOVERS, "int_cast") and event.operands[0].event is not None:
        event = event.operands[0].event
    return event


def _is_cut(event: Event | None) -> bool:
    """Return whether integers are others than those that they were cast from."""
    return event is not None and not set(np.unique(event.values)) <= set(np.unique(_uncut(event).values))


def _compared_whole(function: Callable[..., Array], redo: Redo, event: Event, given: Values) -> Made:
    sides = [
        redo.spread(event, n, own).values if o.event is None else _uncut(o.event).values
        for n, (o, own) in enumerate(zip(event.operands, given, strict=True))
    ]
    return Made(np.ascontiguousarray(np.broadcast_to(function(*sides), event.shape)))


# Functions of numbers.


def _where(mask: Array, a: Made, b: Made) -> Made:
    residues = None
    if a.residues is not None and b.residues is not None:
        residues = Residues.where(torch.from_numpy(np.ascontiguousarray(mask)), a.residues, b.residues)
    return Made(np.where(mask, a.values, b.values), residues)


def _kept(function: Function, made: Made) -> Made:
    """Return a function of numbers, computed in fp64, in their own dtype."""
    return _stored(function(made.cast(np.float64)), made.values.dtype)


def _second(function: Function, number: float, x: Made) -> Made:
    return function(x, Made.full(number, x.values.shape))


def _wide(event: Event) -> np.dtype[np.generic]:
    """Return the dtype for an unrounded result of an event: its own, or fp32 if that is narrower."""
    return event.values.dtype if event.values.dtype.itemsize >= 4 else np.dtype(np.float32)


def _stored(made: Made, dtype: np.dtype[np.generic]) -> Made:
    """Round fp64 numbers and their residues to a dtype."""
    values, residues = made.values.astype(dtype), made.residues
    if residues is not None and dtype.itemsize < 4:
        residues = residues.rounded(OF_ARRAYS[dtype], torch.from_numpy(made.values))
    return Made(values, None if residues is None else residues.seen(torch.from_numpy(values.astype(np.float64))))


def _rounded(fmt: Format, made: Made) -> Made:
    before = torch.from_numpy(made.values.astype(np.float64))
    values = round_to(before, fmt).numpy()
    residues = None if made.residues is None else made.residues.rounded(fmt, before)
    return Made(values.astype(np.float32 if made.values.dtype.itemsize < 4 else made.values.dtype), residues)


def _function(values: Callable[..., Array], residues: Callable[..., Residues]) -> Function:
    """Make a function that computes values and their residues together."""

    def made(*operands: Made) -> Made:
        with np.errstate(all="ignore"):
            found = np.asarray(values(*(x.values for x in operands)))
        known = [x.residues for x in operands if x.residues is not None]
        return Made(found, residues(*known) if len(known) == len(operands) else None)

    return made


def _choice(values: Callable[..., Array]) -> Function:
    """Make a function that chooses one of two numbers, and its residue with it."""

    def made(a: Made, b: Made) -> Made:
        found = np.asarray(values(a.values, b.values))
        return Made(found, _where(found == a.values, a, b).residues)

    return made


def _magnitude(x: Made) -> Made:
    negative = _function(np.negative, operator.neg)(x)
    return _where(x.values < 0, negative, x)


_NTH = ("first", "second")
_SAME = _function(lambda a: a, lambda a: a)
_LARGER, _SMALLER = _choice(np.maximum), _choice(np.minimum)
_ADD, _SUB = _function(np.add, operator.add), _function(np.subtract, operator.sub)
_MUL, _DIV = _function(np.multiply, operator.mul), _function(np.divide, operator.truediv)
_OF_ONE: dict[str, Function] = {
    "of the other sign": _function(np.negative, operator.neg),
    "its magnitude": _magnitude,
    "squared": _function(np.square, lambda x: x * x),
    "its root": _function(np.sqrt, Residues.sqrt),
    "inverted": _function(lambda x: 1 / x, Residues.reciprocal),
    "its inverse root": _function(lambda x: 1 / np.sqrt(x), FORMULAS["rsqrt"]),
    "exp of it": _function(np.exp, FORMULAS["exp"]),
    "exp2 of it": _function(np.exp2, FORMULAS["exp2"]),
}
_OF_TWO: dict[str, Function] = {
    "added": _ADD,
    "subtracted": _SUB,
    "multiplied": _MUL,
    "divided": _DIV,
    "its first operand": lambda a, b: a,
    "its second operand": lambda a, b: b,
    "subtracted the other way round": lambda a, b: _SUB(b, a),
    "divided the other way round": lambda a, b: _DIV(b, a),
    "the larger of the two": _LARGER,
    "the smaller of the two": _SMALLER,
}
_COMPARED: dict[str, tuple[str, Callable[..., Array]]] = {
    "lt": ("<", np.less),
    "le": ("<=", np.less_equal),
    "gt": (">", np.greater),
    "ge": (">=", np.greater_equal),
    "eq": ("==", np.equal),
    "ne": ("!=", np.not_equal),
}
_OF_INTEGERS = ("and", "or", "minsi", "maxsi")
_WHOLE: dict[str, Callable[..., Array]] = {
    "its first operand": lambda a, b: a,
    "its second operand": lambda a, b: b,
    "the larger of the two": np.maximum,
    "the smaller of the two": np.minimum,
}
_MORE: dict[str, Function] = {"plus {}": _ADD, "minus {}": _SUB, "times {}": _MUL, "divided by {}": _DIV}
_BY_NAME: dict[str, Function] = {"add": _ADD, "sub": _SUB, "mul": _MUL, "div": _DIV}
_BY_NAME |= {f"f{name}": function for name, function in _BY_NAME.items()}
