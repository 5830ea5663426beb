"""Programs run again without Triton's language layer, from what that layer asked the builder for the first time.

Triton's language layer sees types and constants, never values: with the compiler, values do not exist yet. So the
operations that a kernel asks for follow from its constants, the types of its arguments, and the few values that Python
itself asks for: conditions, bounds of loops, indices. A `Tape` notes both, in a tree: a `Segment` of steps up to the
next value that Python sees, and for every value seen there the segment that follows it. A program that comes to a value
not seen before is run by Python once more, along the steps that it has done, and its branch is added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.interpret.formats import Array

LARGEST = 64 << 20
"""Bytes beyond which a tape is given up: a kernel whose programs see ever new values has no use for one."""
BYTES_OF_STEP = 500


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        name: the builder's method that was asked for.
        run: the operation on what the registers hold: arrays, or objects such as descriptors.
        inputs, output: numbers of registers.
        varies: it has to run in every program; otherwise once per launch.
    """

    name: str
    run: Callable[..., Any]
    inputs: tuple[int, ...]
    output: int
    varies: bool


@dataclass(frozen=True)
class Guard:
    """A value that Python asks for: the only element of the array in a register, read by `bool` or `int`."""

    register: int
    read: Callable[[Any], Any]

    def value(self, registers: list[Any]) -> Any:
        return self.read(registers[self.register].item())


@dataclass
class Segment:
    """Steps without a decision between them.

    Attributes:
        guard: the value that Python asks for after the steps; None at the end of a program.
        branches: that value → what follows.
    """

    steps: list[Step] = field(default_factory=list)
    guard: Guard | None = None
    branches: dict[Any, Segment] = field(default_factory=dict)

    def close(self, guard: Guard | None) -> None:
        """No more steps will come."""
        self.guard = guard
        self.all = [(s.run, s.inputs, s.output) for s in self.steps]
        self.varying = [(s.run, s.inputs, s.output) for s in self.steps if s.varies]


@dataclass
class Tape:
    """All that is known of a kernel with certain constants and types of arguments.

    Attributes:
        registers: what they hold before a program runs: constants, and None. The first are the launch's arguments.
        dtypes: of every register, Triton's type of the elements; None for objects.
        root: where every program begins; None before the first one.
        functions: the functions that ran, each with all that its global names meant then.
        refused: no tape can tell what this kernel does.
        bytes: about how much memory it takes.
    """

    registers: list[Any]
    dtypes: list[Any]
    root: Segment | None = None
    functions: dict[Any, tuple[Any, ...]] = field(default_factory=dict)
    refused: bool = False
    bytes: int = 0

    def register(self, value: Any, dtype: Any) -> int:
        """The number of a new register."""
        self.registers.append(value)
        self.dtypes.append(dtype)
        self.bytes += BYTES_OF_STEP + getattr(value, "nbytes", 0)
        return len(self.registers) - 1

    def add(self, segment: Segment, after: Segment | None, seen: Any) -> None:
        """Programs begin with `segment`, or go on with it where they have seen the value `seen` after another one."""
        if self.bytes > LARGEST:
            self.refuse()
        elif after is None:
            self.root = segment
        else:
            after.branches[seen] = segment

    def refuse(self) -> None:
        """Keep nothing, now and later: Python runs every program."""
        self.refused, self.root, self.registers, self.dtypes, self.bytes = True, None, [], [], 0

    def valid(self) -> bool:
        """No global name that the functions use has another meaning now."""
        return all(
            then is now
            for function, meanings in self.functions.items()
            for then, now in zip(meanings, function.__globals__.meanings(), strict=True)
        )


class Tapes:
    """The tapes of this process, those used last, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tapes: OrderedDict[Any, Tape] = OrderedDict()

    def find(self, key: Any, dtypes: Sequence[Any]) -> Tape:
        """The tape of `key`, a new one for arguments of these types if there is none that holds."""
        found = self._tapes.get(key)
        if found is None or not found.valid():
            found = self._tapes[key] = Tape([None] * len(dtypes), list(dtypes))
        self._tapes.move_to_end(key)
        while len(self._tapes) > 1 and sum(tape.bytes for tape in self._tapes.values()) > self._limit:
            self._tapes.popitem(last=False)
        return found


@dataclass(frozen=True)
class Diverged:
    """A program left the tape: at a value not seen before, or where a step raised an error.

    Attributes:
        path: the segments it went through; none on a new tape.
        done: how many steps of the last one it did.
        failed: a step raised an error.
    """

    path: list[Segment]
    done: int
    failed: bool


class Replay:
    """Runs programs of one launch from a tape; `registers` are those of the latest program."""

    def __init__(self, tape: Tape, arguments: Sequence[Array]) -> None:
        self.tape = tape
        self.registers: list[Any] = list(arguments)
        self._visited: set[int] = set()

    def run(self) -> Diverged | None:
        """Run one program; says where it left the tape."""
        registers, segment = self.registers, self.tape.root
        path: list[Segment] = []
        registers += self.tape.registers[len(registers) :]
        while segment is not None:
            path.append(segment)
            if (done := self._run_steps(segment)) < len(segment.steps):
                return Diverged(path, done, failed=True)
            if segment.guard is None:
                return None
            segment = segment.branches.get(segment.guard.value(registers))
        return Diverged(path, len(path[-1].steps) if path else 0, failed=False)

    def _run_steps(self, segment: Segment) -> int:
        """How many steps could be done; all of them unless one raises an error."""
        registers, done = self.registers, 0
        again = id(segment) in self._visited
        try:
            for run, inputs, output in segment.varying if again else segment.all:
                registers[output] = run(*[registers[i] for i in inputs])
                done += 1
        except Exception:  # raised once more, where the kernel asks for it, when Python runs the program
            return [i for i, step in enumerate(segment.steps) if step.varies][done] if again else done
        self._visited.add(id(segment))
        return len(segment.steps)
