"""Programs run again without Triton's language layer, from a record of the operations it asked the builder for.

Triton's language layer sees types and constants, never values: with the compiler, values do not exist yet. So the
operations that a kernel asks for follow from its constants, the types of its arguments, and the few values that Python
itself asks for: conditions, bounds of loops, indices. A `Tape` notes both, in a tree: a `Segment` of steps up to the
next value that Python sees, and for every value seen there the segment that follows it. A program that comes to a value
not seen before is run by Python once more, along the steps that it has done, and its branch is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

from lastbit.interpret.decisions import Decision
from lastbit.interpret.rewrite import Meaning

# Arbitrary: as that of recorder.py.
LARGEST = 64 << 20
"""Bytes beyond which a tape is given up: a kernel whose programs see ever new values has no use for one."""
# A guess of what a step, its tuple of operands and its entries take in CPython.
BYTES_OF_STEP = 500


class TapeStep(NamedTuple):
    """One operation.

    Attributes:
        name: the builder's method that was asked for.
        run: the operation on what the registers hold: arrays, or objects such as descriptors.
        inputs, output: numbers of registers.
        pure: it changes nothing, so that nobody misses it who does not read its result.
        varies: it has to run in every program, or every batch of them; otherwise once per launch.
        spread: its result depends on which program runs; of several, it has an axis of programs in front.
        rank: axes of its result for one program; a tuple of them for a tuple.
        bytes: of its result.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[int, ...]
    output: int
    pure: bool
    varies: bool
    spread: bool
    rank: Any = 0
    bytes: int = 0


@dataclass(frozen=True)
class Guard:
    """A value that Python asks for: the only element of the array in a register, read by `bool` or `int`.

    Attributes:
        varies: it may be another one in another program of a launch.
    """

    register: int
    read: Callable[[Any], Any]
    varies: bool

    def values(self, registers: list[Any]) -> list[Any]:
        """Return the value in every program; a single one if it is common to all."""
        return list(map(self.read, registers[self.register].reshape(-1).tolist()))


@dataclass
class Segment:
    """Steps without a decision between them.

    Attributes:
        guard: the value that Python asks for after the steps; None at the end of a program.
        common, own: what the steps run that run once in a launch, and in each program.
        branches: that value → what follows.
        parts: the segments that it joins; empty if it was recorded as it is.
    """

    steps: list[TapeStep] = field(default_factory=list)
    guard: Guard | None = None
    branches: dict[Any, Segment] = field(default_factory=dict)
    parts: Sequence[Segment] = ()

    def close(self, guard: Guard | None) -> None:
        """End the segment: no more steps follow."""
        self.guard = guard
        self.common = [(s.run, s.inputs, s.output) for s in self.steps if not s.varies]
        self.own = [(s.run, s.inputs, s.output) for s in self.steps if s.varies]

    @cached_property
    def together(self) -> Together:
        """The steps of this segment as programs run them together."""
        return Together.of([step for step in self.steps if step.varies], self.guard)


@dataclass(frozen=True)
class Together:
    """The steps of a segment as programs run them together.

    Attributes:
        steps: what each runs, the registers that it reads and writes, and those that nobody reads after it.
        reads: registers that earlier segments wrote.
        spread: registers that are written and depend on the program, and the ranks of what they hold.
        left: register → the step that writes it, of steps whose results nobody reads here; perhaps somebody does later.
        bytes: about how much memory these take for each program.
    """

    steps: list[tuple[Callable[..., Any], tuple[int, ...], int, tuple[int, ...]]]
    reads: list[int]
    spread: dict[int, Any]
    left: dict[int, TapeStep]
    bytes: int

    @staticmethod
    def of(steps: Sequence[TapeStep], guard: Guard | None) -> Together:
        """Make the steps before `guard` ready for programs that run together, without those that run once in a launch.

        Where a program ends, and no other way can begin, nobody asks again for what was computed: registers are emptied
        after their last use.
        """
        asked = {guard.register} if guard else set()
        sums = {step.output: step for step in steps if step.name == "create_addptr"}

        def advancing(step: TapeStep) -> TapeStep:
            """Let an access add up its addresses by itself, if it has a faster way."""
            advanced = getattr(step.run, "advanced", None)
            if advanced is None or step.inputs[0] not in sums:
                return step
            return step._replace(run=advanced, inputs=sums[step.inputs[0]].inputs + step.inputs[1:])

        read, kept = set(asked), list[TapeStep]()
        for step in reversed([*map(advancing, steps)]):  # what has an effect, or whose result is read or asked for
            if not step.pure or step.output in read:
                read.update(step.inputs)
                kept.append(step)
        kept.reverse()
        written = {step.output for step in kept}
        left_out = {step.output: step for step in steps if guard and step.output not in written}
        spread = {step.output: step.rank for step in kept if step.spread}
        sizes = {step.output: step.bytes for step in kept if step.spread}
        runnable, left = [], set(written) if guard else set[int]()
        for step in reversed(kept):
            done = {*step.inputs, step.output} & written - left
            left |= done
            runnable.append((step.run, step.inputs, step.output, tuple(done)))
        runnable.reverse()
        reads = asked.union(*(step.inputs for step in kept)) - written
        held = most = 0
        for _, _, output, last in runnable:
            held += sizes.get(output, 0)
            most = max(most, held)
            held -= sum(sizes.get(i, 0) for i in last)
        return Together(runnable, sorted(reads), spread, left_out, most)


class Trust(IntEnum):
    """The ways to establish that programs run together give what they give one after the other; tried in this order."""

    RANGES = 0
    BYTES = 1
    NEVER = 2


@dataclass
class Tape:
    """The record of a kernel with certain constants and types of arguments.

    Attributes:
        registers: what they hold before a program runs: constants, and None. The first are the launch's arguments.
        dtypes: of every register, Triton's type of the elements; None for objects.
        root: where every program begins; None before the first one.
        attributes: of handles, by their register.
        functions: the functions that ran.
        taken: what Python decided while it ran programs of this kind.
        refused: no tape can tell what this kernel does.
        trust: how it is known what programs that run together do.
        stored: names of the parameters whose tensors programs store to.
        later_bytes: about how much memory a program takes for what comes after the first value that is its own.
        bytes: about how much memory it takes.
    """

    registers: list[Any]
    dtypes: list[Any]
    root: Segment | None = None
    attributes: dict[int, dict[str, Any]] = field(default_factory=dict)
    functions: set[Any] = field(default_factory=set)
    taken: set[Decision] = field(default_factory=set)
    refused: bool = False
    trust: Trust = Trust.RANGES
    stored: set[str] = field(default_factory=set)
    later_bytes: int = 0
    bytes: int = 0
    _joined: dict[tuple[int, ...], Segment] = field(default_factory=dict)
    _meanings: dict[tuple[int, str, int], Meaning] = field(default_factory=dict)

    def register(self, value: Any, dtype: Any) -> int:
        """Add a register, and return its number."""
        self.registers.append(value)
        self.dtypes.append(dtype)
        self.bytes += BYTES_OF_STEP + getattr(value, "nbytes", 0)
        return len(self.registers) - 1

    def add(self, path: Sequence[Segment], known: int, seen: Any) -> None:
        """Add the path of a program: its first `known` segments are old, and the next one follows the value `seen`."""
        if self.bytes > LARGEST:
            self.refuse()
        elif not known:
            self.root = path[0]
        else:
            path[known - 1].branches[seen] = path[known]
        later = path[_first_own(path) + 1 :]
        self.later_bytes = max(self.later_bytes, sum(segment.together.bytes for segment in later))

    def joined(self, path: Sequence[Segment]) -> Segment:
        """Join the segments of `path` up to the first value that may differ between programs of a launch."""
        parts = path[: _first_own(path) + 1]
        key = tuple(map(id, parts))
        if key not in self._joined:
            joined = Segment([step for s in parts for step in s.steps], branches=parts[-1].branches, parts=parts)
            joined.close(parts[-1].guard)
            self._joined[key] = joined
        return self._joined[key]

    def refuse(self) -> None:
        """Keep nothing, now and later: Python runs every program."""
        self.refused, self.root, self.registers, self.dtypes, self.bytes = True, None, [], [], 0

    def note(self, meanings: Iterable[Meaning]) -> None:
        """Add names to those whose meaning must not change if the tape is to stay valid."""
        self._meanings |= {(id(x.owner), x.name, id(x.value)): x for x in meanings}

    def valid(self) -> bool:
        """Return whether no global name that the functions use has another meaning now."""
        return all(owner.get(name) is value for owner, name, value in self._meanings.values())


def _first_own(path: Sequence[Segment]) -> int:
    """Return the index of the segment before the first value that may differ between programs, or of the last one."""
    return next(i for i, s in enumerate(path) if s.guard is None or s.guard.varies)


class Tapes:
    """The tapes of this process, most recently used last, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tapes: OrderedDict[Any, Tape] = OrderedDict()
        self._counted: dict[Any, int] = {}
        self._bytes = 0

    def find(self, key: Any, dtypes: Sequence[Any]) -> Tape:
        """Return the tape of `key`; a new one for arguments of these types if there is none that is valid."""
        if self._tapes:
            self._count(next(reversed(self._tapes)))  # nothing else has grown since it was found
        found = self._tapes.get(key)
        if found is None or not found.valid():
            found = self._tapes[key] = Tape([None] * len(dtypes), list(dtypes))
        self._count(key)
        self._tapes.move_to_end(key)
        while len(self._tapes) > 1 and self._bytes > self._limit:
            oldest, _ = self._tapes.popitem(last=False)
            self._bytes -= self._counted.pop(oldest)
        return found

    def _count(self, key: Any) -> None:
        size = self._tapes[key].bytes
        self._bytes += size - self._counted.get(key, 0)
        self._counted[key] = size
