"""Reading of a recorded call: which expressions are stages of the reference, and which of them is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from lastbit.diagnosing.grid import Grid, ends, grid_of
from lastbit.diagnosing.mends import Mending, mending
from lastbit.diagnosing.steps import step_of
from lastbit.diagnosing.traced_stages import Stages
from lastbit.judging.problem import Problem
from lastbit.numerics.algebraic import following_residues
from lastbit.numerics.residues import products_of
from lastbit.reports.summary import grouped
from lastbit.reports.why import KernelTrace, StageMatch, Step
from lastbit.tracing import Log, Path, follow
from lastbit.tracing.ancestry import Ancestry, Expression, Visit, expressions
from lastbit.tracing.lanes import Addresses
from lastbit.tracing.log import Write
from lastbit.tracing.of_torch import UNWRITTEN, array_of

# 8 MB of fp64 for each expression, of which a kernel has many.
LARGEST = 1 << 20
"""Elements of the op's first input up to which a call is read: every expression has a value for each cell."""

Matches = Mapping[int, StageMatch | None]
"""Number of an event that is a stage, or with which the value leaves the contract → the stage that it agrees with."""

Read = tuple[KernelTrace, Matches, Mending | None]
"""A trace with what was read, the stages, and the search for the wrong line, if there was one."""


@dataclass(frozen=True, eq=False)
class SeenCall:
    """An observed call of a kernel.

    Attributes:
        tensor, where: what the call gave for the stage, a copy of it; where its elements were.
        write: what wrote the element to explain; None where nothing did.
        path: what led to it, if it was recorded.
        tensors: those of the case as they were given, and the stage.
    """

    log: Log
    tensor: Tensor
    where: Addresses
    write: Write | None = None
    path: Path = field(default_factory=Path)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def beside(self) -> list[Write]:
        """Writes on the way of elements written with the one to explain, by programs whose operations were not kept."""
        event = None if self.write is None else self.write.event
        return [] if event is None else follow(self.log, event, range(event.values.size)).untraced

    def stands_alone_for(self, whole: SeenCall) -> bool:
        """Return whether one program, run alone, read nothing of other programs and gave what it gives among them."""
        event = None if self.write is None else self.write.event
        if self.write is None or event is None:
            return False
        path = follow(self.log, event, range(event.values.size))
        own = self.write.find(self.where.at(np.arange(self.tensor.numel()))) >= 0
        given, among = (array_of(tensor).reshape(-1)[own].tobytes() for tensor in (self.tensor, whole.tensor))
        return not path.unknown and not path.untraced and given == among

    @property
    def visit(self) -> Visit | None:
        """The write of the element itself; None if that was only an allocation, and nothing was seen to write there."""
        last = self.path.visits[-1] if self.path.visits else None
        return None if last is None or last.event.name.rpartition(".")[2] in UNWRITTEN else last

    @property
    def why_nothing(self) -> str:
        made = self.path.visits[-1].event.place if self.path.visits else None
        memory = f" It is in the memory that {made.text} makes in line {made.line}." if made and made.line else ""
        return (
            "there is nothing to see inside: what wrote this element is neither an operation of PyTorch nor an "
            f"interpreted Triton kernel. It is compiled, or nothing wrote it.{memory}"
        )


def reading(found: KernelTrace, problem: Problem, seen: SeenCall, index: tuple[int, ...], *, failing: bool) -> Read:
    """Add the expressions that are stages of the reference to a trace, and the one at fault if it is `failing`.

    Nothing is added for a large case, and for a result that has no element for each cell or that no event wrote.
    """
    if seen.write is None or seen.write.event is None or problem.main.numel() > LARGEST:
        return found, {}, None
    grid = grid_of(problem, seen.tensor, seen.where, seen.write, index)
    if grid is None:
        return found, {}, None
    with following_residues(), products_of(problem.constants):
        return _read(found, seen.log, seen.where, grid, failing)


def _read(found: KernelTrace, log: Log, where: Addresses, grid: Grid, failing: bool) -> Read:
    written = ends(log, grid, where)
    ancestry = Ancestry.of(log, [event for event, _ in written.values()])
    cells = ancestry.cells({number: own for number, (_, own) in written.items()}, grid.cells_of_inputs())
    own = expressions(ancestry.events, cells)
    stages = Stages(grid, grid.problem.evaluate(), found.stage, own, tuple(written), ancestry)
    matched, last = stages.matched({}), stages.all.get(found.stage)
    if not failing or last is None or last.name not in matched or not last.outside(stages.result).any():
        return *_told(found, log, stages, matched, None), None
    mended = mending(stages, matched)
    stage, value = stages.all[mended.stage], mended.value or matched[mended.stage]
    onward, names = stages.onward(stages.from_kernel(stage, value)), list(stages.all)
    before = {name: e for name, e in matched.items() if names.index(name) < names.index(stage.name)}
    matched, first = onward.matched({**before, stage.name: value}), mended.blamed or value
    found, matches = _told(found, log, stages, matched, first)
    words = {id(mend.expression): mend.words for mend in mended.mends}
    of_stage = {id(e): matches[e.event_of(grid.worst).number] for e in matched.values()}

    def step(e: Expression) -> Step:
        return replace(_step(log, e, grid.worst, of_stage.get(id(e))), mend=words.get(id(e), ""))

    found = replace(
        found,
        blamed=None if mended.blamed is None else step(mended.blamed),
        leaves=step(first),
        mended=tuple(step(m.expression) for m in sorted(mended.mends, key=lambda mend: mend is not mended.only)),
        between=tuple(_lines(mended)),
        since=mended.since,
        until=mended.stage,
        wrong=mended.stage,
    )
    return found, matches, mended


def _told(
    found: KernelTrace, log: Log, stages: Stages, matched: Mapping[str, Expression], first: Expression | None
) -> tuple[KernelTrace, Matches]:
    """Add a step for each stage that is matched; the value leaves the contract with the `first` expression."""
    worst = stages.grid.worst
    matches: dict[int, StageMatch | None] = {} if first is None else {first.event_of(worst).number: None}
    steps = []
    for name, e in matched.items():
        match = matches[e.event_of(worst).number] = stages.match(name, e, leaves=e is first)
        steps.append(_step(log, e, worst, match))
    unmatched = tuple(name for name in stages.all if name not in matched)
    return replace(found, stages=tuple(steps), unmatched=unmatched), matches


def _lines(mended: Mending) -> Iterator[str]:
    """Yield the range of lines between right stages and the wrong one, for each file."""
    places = (e.events[0].place for e in mended.span)
    for file, lines in grouped((place.file, place.line) for place in places).items():
        yield f"{file}:{min(lines)}" + (f" to {max(lines)}" if max(lines) > min(lines) else "")


def _step(log: Log, e: Expression, cell: int, match: StageMatch | None) -> Step:
    event = e.event_of(cell)
    return replace(step_of(log, event, int(e.lanes[event.number][cell])), match=match)
