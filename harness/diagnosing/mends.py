"""What one line of a kernel could do otherwise so that what it gave would be right, tried on what was recorded.

An operation is changed in one deed (a rounding more or less, another constant, the other operation, another operand),
all that follows from it is done again, and every element is compared. A line is named where no other one has such a
mend, or where it alone computes anything between what is right and what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch

from lastbit.diagnosing.culprits import Fault, Search
from lastbit.diagnosing.grid import Grid
from lastbit.diagnosing.ranking import constant_of
from lastbit.diagnosing.traced_stages import Stages, hands_on
from lastbit.interpret.formats import Array
from lastbit.numerics import FORMATS, Format, round_to
from lastbit.numerics.formats import FP32
from lastbit.tracing import Event
from lastbit.tracing.cells import Expression
from lastbit.tracing.events import Origin
from lastbit.tracing.redo import Change, Redo, Unrepeatable, Values
from lastbit.tracing.triton_lanes import MOVERS

SECONDS = 3.0
"""For which mends are tried; where that is not enough for all of them, no line is named."""
LEAST = 8
"""Wrong elements that must become right: of fewer, another rounding of any line mends all by chance."""

Line = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Mend:
    """A change of an expression.

    Attributes:
        words: completes "with the result of this line ...".
        change: for each of its events.
        adds: it adds an operation or takes another value in, where others change what is there.
    """

    expression: Expression
    words: str
    change: Change
    adds: bool = False


@dataclass(frozen=True, eq=False)
class Mending:
    """What was found out about the lines between what is right and what is wrong.

    Attributes:
        stage: what is wrong.
        span: the expressions that lead to it, which compute something.
        since: the stages that are right, on which they rest.
        mends: those with which every element is right, one for each line that has one.
        tried: how many were tried; 0 where there was no time for all of them.
    """

    stage: str
    span: tuple[Expression, ...] = ()
    since: tuple[str, ...] = ()
    mends: tuple[Mend, ...] = ()
    tried: int = 0

    @property
    def only(self) -> Mend | None:
        """That of the only line that has one; of the only one that needs nothing new, where others add something."""
        plain = [mend for mend in self.mends if not mend.adds] or self.mends
        return plain[0] if len(plain) == 1 else None

    @property
    def blamed(self) -> Expression | None:
        """What is wrong for sure, if anything is: the only one that can be mended, or the only line that computes."""
        if self.only is not None:
            return self.only.expression
        lines = {(e.events[0].place.file, e.events[0].place.line) for e in self.span}
        return self.span[-1] if len(lines) == 1 and not self.mends else None


def mending(search: Search, fault: Fault) -> Mending:
    """Try mends of what led to a stage that is wrong."""
    return _Mending(search, fault).found()


@dataclass(frozen=True, eq=False)
class _Mending:
    search: Search
    fault: Fault

    @property
    def stages(self) -> Stages:
        return self.search.stages

    @property
    def grid(self) -> Grid:
        return self.stages.grid

    @cached_property
    def redo(self) -> Redo:
        return Redo(self.stages.ancestry, self.stages.ends)

    @cached_property
    def result(self) -> Expression:
        return self.search.result

    def found(self) -> Mending:
        last = self.stages.all[self.stages.last]
        of_stage = self.fault.stage is not last and self._passes(self._as_it_must_be())
        stage = self.fault.stage.name if of_stage else last.name
        span, since = self._span([e.number for e in self.fault.value.events] if of_stage else self.stages.ends)
        told = stage, tuple(e for e in span if not self._is_right(e)), since
        until, mends, tried = time.monotonic() + SECONDS, dict[Line, Mend](), 0
        for e in reversed(span):
            for mend in self._mends_of(e):
                if time.monotonic() > until:
                    return Mending(*told)
                tried += 1
                if self._passes({event.number: mend.change for event in e.events}):
                    line = e.events[0].place.file, e.events[0].place.line
                    known = mends.get(line)
                    mends[line] = mend if known is None or known.adds else known
                    break
        few = last.outside(self.result).sum() < LEAST
        return Mending(*told, () if few else tuple(mends.values()), tried)

    def _is_right(self, e: Expression) -> bool:
        """Whether it hands on what it was given, bit by bit, or reads the elements of an input that belong there."""
        if e.events[-1].name == "load":
            values = e.values[e.known]
            return any(np.array_equal(values, own[e.known], equal_nan=True) for own in self._inputs.values())
        return all(event.name == "store" or self._is_exact(event) for event in e.events)

    def _is_exact(self, event: Event) -> bool:
        """Whether it is a cast that changes no number."""
        before = self._pointwise(event, [None] * len(event.operands)) if hands_on(event) else []
        return bool(before) and np.array_equal(before[0], event.values.astype(np.float64), equal_nan=True)

    def _as_it_must_be(self) -> dict[int, Change]:
        """The stage as the contract has it, in place of what the kernel has."""
        value = self.fault.stage.parts[1]
        return {event.number: partial(self._at_cells, self.fault.value, value) for event in self.fault.value.events}

    def _at_cells(self, e: Expression, values: Array, event: Event, given: Values) -> Array:
        """What an event gives, with these values for the cells."""
        made = self.redo.again(event, given).astype(_wide(event))
        lanes = e.lanes[event.number]
        there = lanes >= 0
        made.reshape(-1)[lanes[there]] = values[there]
        return made

    def _passes(self, changes: Mapping[int, Change]) -> bool:
        """Whether every element that the kernel gave is right then, and some of it is other than it was."""
        try:
            changed = self.redo.run(changes)
        except Unrepeatable:
            return False
        values, known = self.result.values.copy(), False
        for e in self.stages.found:
            for event in e.events:
                if event.number in self.stages.ends and event.number in changed:
                    lanes = e.lanes[event.number]
                    values[lanes >= 0] = changed[event.number].reshape(-1)[lanes[lanes >= 0]].astype(np.float64)
                    known = True
        made = Expression((), {}, values, self.result.known)
        return known and not self.stages.all[self.stages.last].outside(made).any()

    def _span(self, ends: Iterable[int]) -> tuple[tuple[Expression, ...], tuple[str, ...]]:
        """What led to some events, back to the stages that are right and to the inputs; and these stages."""
        names = list(self.stages.all)
        of_event = {event.number: name for name in names for event in self._right(name)}
        ahead, seen, since = list(ends), set[int](), set[str]()
        while ahead:
            number = ahead.pop()
            if number in seen:
                continue
            if number in of_event:
                since.add(of_event[number])
                continue
            seen.add(number)
            ahead += (edge.event.number for edge in self.stages.ancestry.edges[number])
        span = (e for e in self.stages.found if e.events[0].places and any(ev.number in seen for ev in e.events))
        return tuple(span), tuple(name for name in names if name in since)

    def _right(self, name: str) -> Iterator[Event]:
        """The events that are a stage, rightly."""
        right = self.search.right.get(name)
        if right is None or right is self.fault.value:
            return
        stage, values = self.stages.all[name], right.values.tobytes()
        for e in self.stages.found:
            if e.values.tobytes() == values and stage.takes(e) and e.events[0].places:
                yield from e.events

    # What may be changed.

    def _mends_of(self, e: Expression) -> Iterator[Mend]:
        event = e.events[-1]
        if not event.is_float or event.origin is not Origin.MEMORY or event.name in MOVERS or event.name == "store":
            return
        if event.name == "load":
            yield from self._elements(e)
        elif event.name == "select" or event.name.endswith(".where"):
            yield from self._constants(e)
            yield from self._sides(e)
        elif hands_on(event):
            if not self._is_exact(event):
                yield from self._casts(e)
                yield from self._and_more(e)
        else:
            yield from self._roundings(e)
            yield from self._constants(e)
            yield from self._operations(e)
            yield from self._operands(e)
            yield from self._and_more(e)

    def _formats(self) -> Iterator[Format]:
        own = {fmt.name for fmt in self.stages.trace.formats.values() if isinstance(fmt, Format)}
        own |= {self.grid.problem.main_format.name}
        yield from (fmt for name, fmt in FORMATS.items() if name in own and fmt.precision < FP32.precision)

    def _roundings(self, e: Expression) -> Iterator[Mend]:
        """The result rounded."""
        for fmt in self._formats():
            yield Mend(e, f"rounded to {fmt.name}", partial(self._rounded, fmt))
        if e.events[-1].values.dtype.itemsize < 4:
            yield Mend(e, "computed in fp32", self._wider)

    def _rounded(self, fmt: Format, event: Event, given: Values) -> Array:
        return _round(self.redo.again(event, given), fmt)

    def _wider(self, event: Event, given: Values) -> Array:
        values = [self._operand(event, place, own) for place, own in enumerate(given)]
        if event.program is None:  # PyTorch's operations choose the format by their operands: twice as much is none
            raise Unrepeatable("PyTorch computes in the format of the operands")
        return self.redo.again(event, [_float32(own) for own in values])

    def _casts(self, e: Expression) -> Iterator[Mend]:
        """A cast that changes something left out, or to another format, or to nearest."""
        yield Mend(e, "not rounded", partial(self._computed, lambda a: a, True))
        for fmt in self._formats():
            yield Mend(e, f"rounded to {fmt.name}", partial(self._recast, fmt))

    def _recast(self, fmt: Format, event: Event, given: Values) -> Array:
        [before, *_] = self._pointwise(event, given)
        return _round(before.astype(np.float32), fmt)

    def _constants(self, e: Expression) -> Iterator[Mend]:
        for place, operand in enumerate(e.events[-1].operands):
            if (now := constant_of(operand)) is not None:
                for value in self._numbers(now):
                    change = partial(self._with_operand, place, value)
                    yield Mend(e, f"with {value:.9g} in place of {now:.9g}", change)

    def _numbers(self, now: float) -> Iterator[float]:
        """What a constant could be."""
        params = {float(v) for v in self.grid.problem.params.values() if isinstance(v, int | float)}
        sizes = {float(size) for tensor in self.grid.whole.tensors.values() for size in tensor.shape if size > 1}
        near = {2 * now, now / 2, -now, now + 1, now - 1, 0.0, 1.0, -1.0, -np.inf, np.inf, *((1 / now,) if now else ())}
        own = params | sizes | {1 / size for size in sizes} | near | {np.e, np.log2(np.e), np.log(2.0)}
        yield from sorted(value for value in own if value != now)

    def _with_operand(self, place: int, value: float, event: Event, given: Values) -> Array:
        operand = event.operands[place]
        old = given[place]
        like = old if old is not None else operand.values if operand.event is None else operand.event.values
        assert like is not None
        others = [*given]
        others[place] = np.full(like.shape, value, _wide(event) if like.dtype.kind != "i" else like.dtype)
        return self.redo.again(event, others)

    def _operations(self, e: Expression) -> Iterator[Mend]:
        """Another operation on the same operands."""
        event = e.events[-1]
        count = len(self._pointwise(event, [None] * len(event.operands)))
        for words, function in {1: _OF_ONE, 2: _OF_TWO}.get(count, {}).items():
            yield Mend(e, words, partial(self._computed, function, False))

    def _computed(self, function: Callable[..., Array], wide: bool, event: Event, given: Values) -> Array:
        made = function(*self._pointwise(event, given))
        return made.astype(np.float32 if wide else event.values.dtype)

    def _operands(self, e: Expression) -> Iterator[Mend]:
        """An input, or an earlier stage that is right, in place of an operand."""
        event = e.events[-1]
        operation = _BY_NAME.get(event.name.rpartition(".")[2])
        if operation is None or len(self._pointwise(event, [None] * len(event.operands))) != 2:
            return
        for name, values in self._values.items():
            for place, side in enumerate(("first", "second")):
                change = partial(self._exchanged, e, values, operation, place)
                yield Mend(e, f"with {name} for its {side} operand", change, adds=True)

    def _exchanged(
        self, e: Expression, values: Array, operation: Callable[..., Array], place: int, event: Event, given: Values
    ) -> Array:
        sides = self._pointwise(event, given)
        sides[place] = self._of_lanes(e, event, values, sides[place])
        return operation(*sides).astype(event.values.dtype)

    def _and_more(self, e: Expression) -> Iterator[Mend]:
        """The result and one operation more: with a parameter, the size of a dimension, an input, a stage."""
        for words, function in _OF_ONE.items():
            yield Mend(e, f"and then {words}", partial(self._then, function), adds=True)
        numbers = {name: v for name, v in self.grid.problem.params.items() if isinstance(v, int | float) and v}
        numbers |= {f"{n:g}": n for t in self.grid.whole.tensors.values() for n in t.shape[-1:] if n > 1}
        for words, function in _MORE.items():
            for name, number in numbers.items():
                change = partial(self._then, partial(_second, function, float(number)))
                yield Mend(e, words.format(name), change, adds=True)
            for name, values in self._values.items():
                yield Mend(e, words.format(name), partial(self._then_cells, e, function, values), adds=True)

    def _then(self, function: Callable[..., Array], event: Event, given: Values) -> Array:
        made = self.redo.again(event, given)
        return function(made.astype(np.float64)).astype(made.dtype)

    def _then_cells(
        self, e: Expression, function: Callable[..., Array], values: Array, event: Event, given: Values
    ) -> Array:
        made = self.redo.again(event, given)
        wide = made.astype(np.float64)
        neutral = np.full(wide.shape, np.nan)
        other = self._of_lanes(e, event, values, neutral)
        return np.where(np.isnan(other), wide, function(wide, other)).astype(made.dtype)

    def _elements(self, e: Expression) -> Iterator[Mend]:
        """Other elements read from memory: those of an input that belong to the cells."""
        for name, values in self._inputs.items():
            yield Mend(e, f"with the elements of {name} that belong there", partial(self._at_cells, e, values))

    def _sides(self, e: Expression) -> Iterator[Mend]:
        """One side of a selection, whatever the condition."""
        for side, words in ((1, "always its first value"), (2, "always its second value")):
            yield Mend(e, words, partial(self._side, side))
        yield Mend(e, "with the condition the other way round", partial(self._side, 0))

    def _side(self, side: int, event: Event, given: Values) -> Array:
        _, first, second = (self._operand(event, place, own) for place, own in enumerate(given[:3]))
        if first is None or second is None:
            raise Unrepeatable("an operand is not known")
        shape = event.values.shape
        a, b = (np.broadcast_to(x.reshape(-1) if x.size == 1 else x.reshape(shape), shape) for x in (first, second))
        if side:
            return np.array((a, b)[side - 1]).astype(event.values.dtype)
        taken = self._operand(event, 0, given[0])
        assert taken is not None
        return np.where(np.broadcast_to(taken.reshape(shape), shape), b, a).astype(event.values.dtype)

    # What there is to compute with.

    @cached_property
    def _inputs(self) -> dict[str, Array]:
        """Input → its element for each cell."""
        found = {}
        for name, tensor in self.grid.whole.tensors.items():
            elements = self.grid.in_case(tuple(tensor.shape))
            if elements is None:
                elements = self.grid.in_column(tuple(tensor.shape))
            if elements is not None and tensor.is_floating_point():
                found[name] = tensor.reshape(-1)[torch.from_numpy(elements)].to(torch.float64).numpy()
        return found

    @cached_property
    def _values(self) -> dict[str, Array]:
        """Inputs and right stages, by cell."""
        stages = {name: e.values for name, e in self.search.right.items() if e.events and e.known.all()}
        return self._inputs | {n: v for n, v in stages.items() if n != self.stages.last}

    def _of_lanes(self, e: Expression, event: Event, values: Array, others: Array) -> Array:
        """Values of cells where an event has them.

        Raises:
            Unrepeatable: an element belongs to cells of different values.
        """
        lanes = e.lanes[event.number]
        there = lanes >= 0
        made = others.copy().reshape(-1)
        made[lanes[there]] = values[there]
        if not there.any() or not np.array_equal(made[lanes[there]], values[there], equal_nan=True):
            raise Unrepeatable("one element belongs to several cells")
        return made.reshape(others.shape)

    def _pointwise(self, event: Event, given: Values) -> list[Array]:
        """The operands as fp64 in the shape of the result; none where it is more than element by element."""
        lanes, found = np.arange(event.values.size), []
        for place, operand in enumerate(event.operands):
            if operand.address:
                continue
            values = self._operand(event, place, given[place])
            source = operand.source(lanes)
            if values is None or source.shape[1] > 1 or (source < 0).any():
                return []
            found.append(values.reshape(-1)[source[:, 0]].astype(np.float64).reshape(event.values.shape))
        return found

    def _operand(self, event: Event, place: int, own: Array | None) -> Array | None:
        """The values of an operand; None where they are not known."""
        operand = event.operands[place]
        if own is not None:
            return own
        if operand.event is not None:
            return operand.event.values
        if operand.size:
            try:
                return self.redo.whole(event, operand)
            except Unrepeatable:
                return None
        return operand.values


def _second(function: Callable[..., Array], number: float, x: Array) -> Array:
    return function(x, number)


def _wide(event: Event) -> np.dtype[np.generic]:
    """The format in which an event gives what it may not round: fp32 at least."""
    return event.values.dtype if event.values.dtype.itemsize >= 4 else np.dtype(np.float32)


def _float32(values: Array | None) -> Array | None:
    return None if values is None else values.astype(np.float32)


def _round(values: Array, fmt: Format) -> Array:
    made = round_to(torch.from_numpy(values.astype(np.float64)), fmt).numpy()
    return made.astype(np.float32 if values.dtype.itemsize < 4 else values.dtype)


def _safely(function: Callable[..., Array]) -> Callable[..., Array]:
    def quiet(*values: Array) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*values))

    return quiet


_OF_ONE: dict[str, Callable[..., Array]] = {
    "of the other sign": np.negative,
    "its magnitude": np.abs,
    "squared": np.square,
    "its root": _safely(np.sqrt),
    "inverted": _safely(lambda x: 1 / x),
    "its inverse root": _safely(lambda x: 1 / np.sqrt(x)),
    "exp of it": _safely(np.exp),
    "exp2 of it": _safely(np.exp2),
}
_OF_TWO: dict[str, Callable[..., Array]] = {
    "added": np.add,
    "subtracted": np.subtract,
    "multiplied": np.multiply,
    "divided": _safely(np.divide),
    "its first operand": lambda a, b: a,
    "its second operand": lambda a, b: b,
    "subtracted the other way round": lambda a, b: b - a,
    "divided the other way round": _safely(lambda a, b: b / a),
    "the larger of the two": np.maximum,
    "the smaller of the two": np.minimum,
}
_MORE: dict[str, Callable[..., Array]] = {
    "plus {}": np.add,
    "minus {}": np.subtract,
    "times {}": np.multiply,
    "divided by {}": _safely(np.divide),
}
_BY_NAME: dict[str, Callable[..., Array]] = {
    "fadd": np.add,
    "fsub": np.subtract,
    "fmul": np.multiply,
    "fdiv": _safely(np.divide),
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _safely(np.divide),
}
