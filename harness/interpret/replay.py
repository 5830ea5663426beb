"""Programs of a launch run from a tape: one alone, or many together.

Together, every step runs once for all programs: what depends on the program has an axis of programs in front. Where
Python asks for a value that differs between programs, they part, and each group goes on by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lastbit.interpret.memory import LaunchMemory
from lastbit.interpret.numpy_formats import Array
from lastbit.interpret.speculation import Conflict
from lastbit.interpret.tape import Segment, Tape, TapeStep, Trust


@dataclass(frozen=True)
class Diverged:
    """A program left the tape: at a value not seen before, or where a step raised an error.

    Attributes:
        path: the segments it went through; none on a new tape.
        registers: what they held for this program.
        done: how many steps of the last one it did.
        failed: a step raised an error.
    """

    path: list[Segment]
    registers: list[Any]
    done: int
    failed: bool = False


Explore = Callable[[Diverged], None]
"""Runs a program by Python from where it left the tape, and adds its way to the tape."""


@dataclass
class _Group:
    """Programs of a batch that have gone the same way.

    Attributes:
        programs: their places in the batch.
        segment: where they go next; None if nobody has been there.
        registers: what they hold.
        path: the segments they went through.
        ranks: register → axes that it has for one program, of those that depend on the program.
        left: register → the step that writes it, as soon as somebody reads it.
        parted: register → the rows that are theirs, of an array that still has those of more programs.
    """

    programs: Array
    segment: Segment | None
    registers: list[Any]
    path: list[Segment] = field(default_factory=list)
    ranks: dict[int, Any] = field(default_factory=dict)
    left: dict[int, TapeStep] = field(default_factory=dict)
    parted: dict[int, Array] = field(default_factory=dict)

    def part(self, rows: Array, segment: Segment | None) -> _Group:
        """Split off the programs at `rows` as a group of their own."""
        parted = {i: self.parted[i][rows] if i in self.parted else rows for i in self.ranks}
        registers, path, ranks, left = list(self.registers), list(self.path), dict(self.ranks), dict(self.left)
        return _Group(self.programs[rows], segment, registers, path, ranks, left, parted)

    def settle(self, registers: Sequence[int]) -> None:
        """Let these registers hold what they are to hold, of this group only."""
        for i in registers:
            if (step := self.left.pop(i, None)) is not None:
                self.settle(step.inputs)
                self.registers[i] = step.run(*[self.registers[j] for j in step.inputs])
                if step.spread:
                    self.ranks[i] = step.rank
            if (rows := self.parted.pop(i, None)) is not None:
                self.registers[i] = _rows(self.registers[i], rows, self.ranks[i])


def _rows(value: Any, rows: Any, rank: Any) -> Any:
    """Select the rows of some programs; an array common to all programs has no axis of programs, and stays whole."""
    if isinstance(value, tuple):
        return tuple(_rows(part, rows, r) for part, r in zip(value, rank, strict=True))
    return value[rows] if value.ndim > rank else value


class Replay:
    """Runs programs of one launch from a tape.

    Attributes:
        registers: what they hold: what is common to the launch, and of the latest program that ran alone.
    """

    def __init__(self, tape: Tape, arguments: Sequence[Array], memory: LaunchMemory) -> None:
        self.tape, self.memory = tape, memory
        self.registers: list[Any] = list(arguments)
        self._prepared: set[int] = set()

    def _prepare(self, segment: Segment) -> None:
        """Run what a launch has to run only once."""
        if id(segment) in self._prepared:
            return
        registers = self.registers
        registers += self.tape.registers[len(registers) :]
        for run, inputs, output in segment.common:
            registers[output] = run(*[registers[i] for i in inputs])
        self._prepared.add(id(segment))

    def alone(self, explore: Explore) -> None:
        """Run one program."""
        segment, path, registers = self.tape.root, list[Segment](), self.registers
        while segment is not None:
            path.append(segment)
            done = 0
            try:
                self._prepare(segment)
                for run, inputs, output in segment.own:
                    registers[output] = run(*[registers[i] for i in inputs])
                    done += 1
            except Exception:  # raised once more, where the kernel asks for it, when Python runs the program
                own = [i for i, step in enumerate(segment.steps) if step.varies]
                self.tape.trust = Trust.NEVER
                return explore(Diverged(path, registers, own[done] if id(segment) in self._prepared else 0, True))
            if segment.guard is None:
                return None
            segment = segment.branches.get(segment.guard.values(registers)[0])
        return explore(Diverged(path, registers, len(path[-1].steps) if path else 0))

    def begin(self) -> Segment | None:
        """Return the steps with which all programs of the launch begin, as one segment; None while unknown."""
        segment, path = self.tape.root, list[Segment]()
        while segment is not None:
            path.append(segment)
            self._prepare(segment)
            if segment.guard is None or segment.guard.varies:
                return self.tape.joined(path)
            segment = segment.branches.get(segment.guard.values(self.registers)[0])
        return None

    def together(self, first: Segment, grid_indices: Array, explore: Explore) -> None:
        """Run several programs, of which each row has the indices; raises `Conflict`, or what a step raises."""
        groups = [_Group(np.arange(len(grid_indices)), first, list(self.registers))]
        while groups:
            group = groups.pop()
            while group.segment is not None:
                self.memory.ids = tuple(grid_indices[group.programs][:, axis : axis + 1] for axis in range(3))
                if self.memory.speculation is not None:
                    self.memory.speculation.now = group.programs
                segment = group.segment
                group.path.append(segment)
                group.ranks.update(segment.together.spread)
                group.left.update(segment.together.left)
                group.settle(segment.together.reads)
                registers = group.registers
                if not segment.parts:
                    self._prepare(segment)
                    registers += self.registers[len(registers) :]
                    for _, _, output in segment.common:
                        registers[output] = self.registers[output]
                for run, inputs, output, done in segment.together.steps:
                    registers[output] = run(*[registers[i] for i in inputs])
                    for i in done:
                        registers[i] = None
                del registers  # of a group that has ended they would live on beside the next one's
                if (guard := group.segment.guard) is None:
                    break
                values = guard.values(group.registers)
                if len(set(values)) == 1:
                    group.segment = group.segment.branches.get(values[0])
                    continue
                parts = {value: np.flatnonzero([v == value for v in values]) for value in values}
                group, *others = [group.part(rows, group.segment.branches.get(v)) for v, rows in parts.items()]
                groups += reversed(others)
            else:
                groups += self._explored(group, grid_indices, explore)

    def _explored(self, group: _Group, grid_indices: Array, explore: Explore) -> list[_Group]:
        """Let Python run the first program of a group where no program has been; the others can follow then."""
        one, rest = group.part(np.arange(1), None), np.arange(1, len(group.programs))
        one.settle([*one.parted, *one.left])
        for i, rank in one.ranks.items():
            one.registers[i] = _rows(one.registers[i], 0, rank)
        last = one.path[-1]
        guard = last.guard
        assert guard is not None
        self.memory.ids = tuple(np.array([n], np.int32) for n in grid_indices[one.programs[0]])
        if self.memory.speculation is not None:
            self.memory.speculation.now = one.programs
        path = [part for segment in one.path for part in segment.parts or [segment]]
        explore(Diverged(path, one.registers, len(last.steps)))
        if self.tape.refused:
            raise Conflict
        if not len(rest):
            return []
        return [group.part(rest, last.branches[guard.values(one.registers)[0]])]
