"""Events: the recorded operations of a kernel as data, their log in order, and the places in its text where they stand.

The log also knows which write an address was last part of.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from lastbit.errors import LastbitError
from lastbit.interpret.numpy_formats import Array, is_float
from lastbit.interpret.places import Place, place_of
from lastbit.numerics.residues import Residues, constant
from lastbit.tracing.lanes import Addresses, Shape, Source

# 2 GB beside the tensors: what a laptop has to spare. A kernel on the smallest case that fails takes some MB.
LIMIT = 2 << 30
"""Bytes of values beyond which no more are kept, and `Log.check` raises."""
INPUT = "input "
"""What the name of an event begins with that stands for a tensor of the case."""
NOWHERE = Place("", 0, 0, 0, 0, "")
Places = tuple[Place, ...]


class Origin(IntEnum):
    """Origin of a value: constants, arguments or memory, the highest among what it was computed from."""

    CONSTANTS = 0
    ARGUMENTS = 1
    """Scalar arguments, indices of programs, ranges."""
    MEMORY = 2


@dataclass(frozen=True)
class TracedLaunch:
    """A launch of a Triton kernel.

    Attributes:
        number: counted from 0, in the order in which the kernel under test launches.
        name: of the Triton kernel.
        numbers: those among its arguments.
    """

    number: int
    name: str
    numbers: frozenset[float] = frozenset()


Program = tuple[int, tuple[int, int, int]]
"""Number of a launch, and the index of one of its programs."""


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand of an event: the result of another event, memory, a constant or an argument.

    Attributes:
        source: elements of the event's result → elements of the operand.
        event: whose result it is, if that was recorded.
        memory: where the elements were read, if they were.
        values: what all of its elements were: constants, arguments, small tensors in memory.
        name: of a scalar argument; `round` for the number of a loop's round.
        address: it says where something is, or whether it is taken, and not what it is: a pointer, index or mask.
        size: elements of the tensor of PyTorch's that it is; 0 for all others.
    """

    source: Source
    event: Event | None = None
    memory: Addresses | None = None
    values: Array | None = None
    name: str = ""
    address: bool = False
    size: int = 0

    @property
    def origin(self) -> Origin:
        """Return what it was made of at last: memory, arguments or constants."""
        if self.event is not None:
            return self.event.origin
        return Origin.MEMORY if self.memory else Origin.ARGUMENTS if self.name else Origin.CONSTANTS

    @property
    def matters(self) -> bool:
        """Return whether it is more than an address, a constant, or an integer that follows from arguments."""
        event = self.event
        counts = event is None or event.origin is Origin.MEMORY or (event.origin is Origin.ARGUMENTS and event.is_float)
        return counts and not self.address


class Made(NamedTuple):
    """Result of an operation.

    Attributes:
        values: as arrays hold them.
        residues: those of the values; None where the kernel is not followed on residues, and of integers.
    """

    values: Array
    residues: Residues | None = None

    @classmethod
    def full(cls, value: float, shape: Shape, dtype: Any = np.float64) -> Made:
        """Fill a shape with a number, whose residues are those of the constant that it stands for."""
        residues = constant(value).moved(lambda n: n.reshape(4, *[1] * len(shape)).expand(4, *shape))
        return cls(np.full(shape, value, dtype), residues)

    @property
    def followed(self) -> bool:
        """Return whether residues can be computed from it: it has its own, or is of integers, which need none."""
        return self.residues is not None or self.values.dtype.kind in "iub"

    def shaped(self, shape: Shape) -> Made:
        """Return the same numbers in another shape."""
        residues = None if self.residues is None else self.residues.moved(lambda n: n.reshape(4, *shape))
        return Made(self.values.reshape(shape), residues)

    def taken(self, elements: Array) -> Made:
        """Return the elements at flat indices, in the shape of these."""
        at = torch.from_numpy(elements.astype(np.int64))
        residues = None if self.residues is None else self.residues.moved(lambda n: n.reshape(4, -1)[:, at])
        return Made(self.values.reshape(-1)[elements], residues)

    def put(self, at: Array, own: Made) -> Made:
        """Return a copy with other numbers at flat indices; without residues where one of both has none."""
        values = self.values.reshape(-1).copy()
        values[at] = own.values.reshape(-1)
        numbers = None
        if self.residues is not None and own.residues is not None:
            numbers = self.residues.numbers.reshape(4, -1).clone()
            numbers[:, torch.from_numpy(at.astype(np.int64))] = own.residues.numbers.reshape(4, -1)
        return Made(values, None if numbers is None else Residues(numbers)).shaped(self.values.shape)

    def cast(self, dtype: Any) -> Made:
        """Return the numbers in another dtype that holds them, with the same residues."""
        return Made(self.values.astype(dtype), self.residues)


Again = Callable[[Sequence[Made | None]], Made]
"""Of an event's operands, in their order, what they are now, None for those that are as they were → what it gives."""


@dataclass(frozen=True, eq=False)
class Event:
    """One operation on tensors.

    Attributes:
        number: rises with time, also over writes that are not events.
        name: of the operation: the method of Triton's builder without `create_`, `reduce`, `aten.mul`, `input`.
        places: where it stands: the innermost first, then the calls of functions around it.
        occurrence: the same for operations that one evaluation of one expression makes.
        program, launch: which program of which launch did it; None for what is done in PyTorch.
        dtype: of its values, in Triton's words.
        values: the result, or what was stored.
        operands: what it was computed from.
        origin: what it was made of at last.
        again: does the operation once more, without telling anybody; None where it only hands on what it is given.
        residues: of the values, where the kernel is followed on residues.
    """

    number: int
    name: str
    places: Places
    occurrence: int
    dtype: str
    values: Array = field(repr=False)
    operands: tuple[Operand, ...] = field(default=(), repr=False)
    program: Program | None = None
    launch: TracedLaunch | None = None
    origin: Origin = Origin.MEMORY
    again: Again | None = field(default=None, repr=False)
    residues: Residues | None = field(default=None, repr=False)

    @property
    def place(self) -> Place:
        """The innermost place."""
        return self.places[0] if self.places else NOWHERE

    @property
    def input(self) -> str:
        """The tensor of the case that it stands for, if it stands for one."""
        return self.name.removeprefix(INPUT) if self.name.startswith(INPUT) else ""

    @property
    def made(self) -> Made:
        """The result."""
        return Made(self.values, self.residues)

    @property
    def shape(self) -> Shape:
        return self.values.shape

    @property
    def is_float(self) -> bool:
        return is_float(self.values.dtype)

    def at(self, lanes: Array) -> Array:
        """Return the values of elements by flat index."""
        return np.asarray(self.values.reshape(-1)[lanes])


DTYPES = {
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bool": "int1",
}
"""Names of numpy's and torch's dtypes in Triton's words, where these differ."""


class TraceLimit(LastbitError):
    """The values of a trace would fill the memory."""


@dataclass(frozen=True, eq=False)
class Write:
    """A write of one or more elements to memory.

    Attributes:
        number: when; see `Event.number`.
        first, last: the lowest and the highest address.
        find: addresses → flat indices of the elements there, -1 for none.
        event: what wrote it, if that was recorded.
        program, places: who wrote it and where; the program is None for PyTorch.
        adds: it changed what was there before, atomically.
    """

    number: int
    first: int
    last: int
    find: Callable[[Array], Array]
    event: Event | None = None
    program: Program | None = None
    places: Places = ()
    adds: bool = False


def _finder(addresses: Array, lanes: Array | None, width: int) -> Callable[[Array], Array]:
    """Make `Write.find` of elements at `addresses` [n] with flat indices `lanes`, None for 0 to n-1.

    Addresses that are evenly spaced, as nearly always, are not kept: sorted, they take twice the memory of the write.
    """
    start, count, steps = int(addresses[0]), len(addresses), np.diff(addresses)
    step, numbers, ordered = int(steps[0]) if len(steps) else 0, lanes, None
    if step < width or (steps != step).any():
        numbers = np.argsort(addresses, kind="stable")
        ordered, numbers = addresses[numbers], numbers if lanes is None else lanes[numbers]

    def find(wanted: Array) -> Array:
        if ordered is None:
            place, rest = np.divmod(wanted - start, step)
        else:
            place = np.searchsorted(ordered, wanted, side="right") - 1
            rest = wanted - ordered[place]
        inside = (place >= 0) & (place < count) & (rest < width)
        return np.where(inside, place if numbers is None else numbers[np.clip(place, 0, count - 1)], -1)

    return find


@dataclass
class Log:
    """The record of a call of a kernel.

    Attributes:
        wanted: programs of launches all of whose operations are kept; of others only where they write.
        only: the others do not run.
        events, launches: what happened.
        writes: who wrote where, wanted or not.
        handed: number of an event → the function that was handed its value and handed it on, and where that was called.
        interpreting: a program of Triton runs, so that what torch does meanwhile is not the kernel's.
    """

    wanted: Collection[Program] = ()
    only: bool = False
    events: list[Event] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    launches: list[TracedLaunch] = field(default_factory=list)
    handed: dict[int, Places] = field(default_factory=dict)
    interpreting: bool = False
    bytes: int = 0
    _number: int = 0
    _occurrence: int = 0
    _last: Places = ()
    _bounds: Array = field(default_factory=lambda: np.zeros((3, 0), np.int64))

    def next(self) -> int:
        """Return the next number in time."""
        self._number += 1
        return self._number

    def turn(self) -> None:
        """Begin the next round of a loop, so that the same expression counts as another occurrence."""
        self._last = ()

    def begin(self, name: str, numbers: frozenset[float]) -> TracedLaunch:
        """Record the launch of a Triton kernel with these numbers among its arguments."""
        self.launches.append(TracedLaunch(len(self.launches), name, numbers))
        return self.launches[-1]

    def add(
        self,
        name: str,
        at: Places,
        values: Array,
        dtype: Any,
        operands: tuple[Operand, ...] = (),
        *,
        program: Program | None = None,
        origin: Origin = Origin.MEMORY,
        again: Again | None = None,
        residues: Residues | None = None,
    ) -> Event:
        """Record an operation that computed or stored `values`."""
        if at != self._last:
            self._occurrence, self._last = self._occurrence + 1, at
        launch = None if program is None else self.launches[program[0]]
        if 0 not in values.strides:  # broadcast, and no memory of its own
            self.bytes += values.nbytes
        kept = values if self.bytes <= LIMIT else np.zeros((), values.dtype)
        word = str(dtype).removeprefix("torch.")
        own = self.next(), name, at, self._occurrence, DTYPES.get(word, word), kept
        self.events.append(Event(*own, operands, program, launch, origin, again, residues))
        return self.events[-1]

    def check(self) -> None:
        """Raise `TraceLimit` if the values exceeded the limit; only after the kernel's end, since it could catch it."""
        if self.bytes > LIMIT:
            raise TraceLimit(
                f"the values of this trace take {self.bytes >> 20:,} MiB, and {LIMIT >> 20:,} MiB are the limit; "
                "trace a case with fewer rows or columns"
            )

    def written(
        self,
        event: Event | None,
        addresses: Array,
        lanes: Array | None,
        width: int,
        *,
        program: Program | None = None,
        at: Places = (),
        adds: bool = False,
    ) -> None:
        """Record a write to `addresses` [n] of the elements with flat indices `lanes`, None for 0 to n-1."""
        if not addresses.size:
            return
        number = self.next() if event is None else event.number
        where = np.asarray(addresses, np.int64)
        self.bytes += where.nbytes
        bounds = int(where.min()), int(where.max()) + width - 1
        self.writes.append(Write(number, *bounds, _finder(where, lanes, width), event, program, at, adds))

    def last(self, addresses: Array, before: int) -> Iterator[tuple[Write, Array, Array]]:
        """Yield the last writes to these addresses before a time.

        Each comes with the positions in `addresses` that it wrote to, and the flat indices of its elements there.
        """
        left = np.arange(len(addresses))
        if not len(left):
            return
        if self._bounds.shape[1] != len(self.writes):
            self._bounds = np.array([(w.number, w.first, w.last) for w in self.writes], np.int64).reshape(-1, 3).T
        number, first, last = self._bounds
        near = (number < before) & (first <= addresses.max()) & (last >= addresses.min())
        for i in np.nonzero(near)[0][::-1]:
            found = self.writes[i].find(addresses[left])
            if (hit := found >= 0).any():
                yield self.writes[i], left[hit], found[hit]
                left = left[~hit]
            if not len(left):
                return

    def sources(self, memory: Addresses, lanes: Array, before: int) -> Iterator[tuple[Event, Array, Array]]:
        """Yield the events that last wrote the elements at `lanes`, -1 for none: each with positions and elements."""
        known = np.nonzero(lanes >= 0)[0]
        for write, positions, elements in self.last(memory(lanes[known]), before):
            if write.event is not None:
                yield write.event, known[positions], elements


# Places in the text of a kernel.

_HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OWN = os.path.join(os.path.dirname(os.path.dirname(_HERE)), "")
_PYTHON = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})


def places(frame: FrameType | None, upto: FrameType | None = None) -> Places:
    """Return the places in kernels at which a frame and its callers are, the innermost first.

    Frames of Python, torch, Triton, numpy and lastbit are left out, and all from `upto` on.
    """
    found: list[Place] = []
    delayed = None
    while frame is not None and frame is not upto:
        code = frame.f_code
        if is_of_a_kernel(code.co_filename):
            if delayed != code.co_filename:
                found.append(place_of(code, frame.f_lasti))
            delayed = code.co_filename if code.co_name == "<lambda>" else None
        frame = frame.f_back
    return tuple(found)


def is_lastbits_own(frame: FrameType | None) -> bool:
    """Return whether a frame is in lastbit itself, called by a kernel, as where lastbit guards its allocations."""
    while frame is not None and not is_of_a_kernel(file := frame.f_code.co_filename):
        if file.startswith(_OWN) and not file.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


@cache
def is_of_a_kernel(file: str) -> bool:
    """Return whether a file is none of Python's, torch's, Triton's, numpy's and lastbit's."""
    loaded = (getattr(sys.modules.get(name), "__file__", None) for name in ("torch", "triton", "numpy"))
    others = (_OWN, *(os.path.join(os.path.dirname(module), "") for module in loaded if module))
    if file.startswith(("<", *others)):
        return False
    return "site-packages" in file or not file.startswith(_PYTHON)
