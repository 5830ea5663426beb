"""What the expressions of a kernel say: which of them are stages of the reference, and which is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from lastbit.diagnosing.beside import beside
from lastbit.diagnosing.culprits import Fault, Search
from lastbit.diagnosing.grid import Grid, ends, grid_of
from lastbit.diagnosing.memory_ranking import Memory, MemoryRanking
from lastbit.diagnosing.mends import Mending, mending
from lastbit.diagnosing.ranking import Ranking
from lastbit.diagnosing.steps import step_of
from lastbit.diagnosing.traced_stages import Stages
from lastbit.judging.problem import Problem
from lastbit.outcomes.trace import StageMatch, Step
from lastbit.tracing import Log
from lastbit.tracing.cells import Ancestry, Expression, expressions
from lastbit.tracing.memory import Addresses, Write

LARGEST = 1 << 20  # elements of the op's first input


@dataclass(frozen=True, eq=False)
class Reading:
    """What was found.

    Attributes:
        stages, culprits, blamed, mended, between, since, until, unmatched, wrong: see `KernelTrace`.
        matches: number of an event that is one or the first culprit → the stage that it agrees with, if it does.
    """

    stages: tuple[Step, ...] = ()
    culprits: tuple[Step, ...] = ()
    blamed: Step | None = None
    mended: tuple[Step, ...] = ()
    between: tuple[str, ...] = ()
    since: tuple[str, ...] = ()
    until: str = ""
    unmatched: tuple[str, ...] = ()
    wrong: str = ""
    matches: Mapping[int, StageMatch | None] = field(default_factory=dict)


def reading(
    problem: Problem,
    log: Log,
    stage: str,
    tensor: Tensor,
    where: Addresses,
    write: Write,
    index: tuple[int, ...],
    *,
    failing: bool,
    memory: Memory | None = None,
) -> Reading:
    """Read a recorded call of a kernel, from what it gave for a stage to the inputs.

    Nothing where the case is large, or where what it gave has no element for each cell. `memory` is what the launch
    found that wrote it, where other launches come before that.
    """
    grid = grid_of(problem, tensor, where, write, index) if problem.main.numel() <= LARGEST else None
    if grid is None:
        return Reading()
    written = ends(log, grid, where)
    ancestry = Ancestry.of(log, [event for event, _ in written.values()])
    cells_of_ends = {number: own for number, (_, own) in written.items()}
    cells = ancestry.cells(cells_of_ends, grid.cells_of_inputs())
    found = expressions(ancestry.events, cells)
    stages = Stages(grid, grid.problem.evaluate(), stage, found, tuple(written), ancestry)
    matched = stages.matched({})
    known = memory.unconcerned(stages) if memory and failing else ()
    search = Search(stages, matched, known, beside(problem, log, grid, cells_of_ends) if failing else None)
    fault = search.fault() if failing else None
    if fault is not None:
        onward = stages.onward(stages.from_kernel(fault.stage, fault.value))
        matched = onward.matched({fault.stage.name: fault.value} | _upto(matched, stages, fault))
    ranking = partial(MemoryRanking, memory=memory) if memory else Ranking
    ranked = ranking(search, fault).first() if fault else []
    mended = mending(search, fault) if fault else None
    if mended is not None and mended.blamed is not None:
        ranked = [mended.blamed, *(e for e in ranked if e.events[0].place != mended.blamed.events[0].place)]
    return _told(log, grid, stages, matched, fault, ranked, mended)


def _upto(matched: Mapping[str, Expression], stages: Stages, fault: Fault) -> dict[str, Expression]:
    """What was matched before the stage that is wrong."""
    names = list(stages.all)
    return {name: e for name, e in matched.items() if names.index(name) < names.index(fault.stage.name)}


def _told(
    log: Log,
    grid: Grid,
    stages: Stages,
    matched: Mapping[str, Expression],
    fault: Fault | None,
    ranked: list[Expression],
    mended: Mending | None,
) -> Reading:
    first = ranked[0] if ranked else None
    matches = {name: stages.match(name, e, leaves=e is first) for name, e in matched.items()}
    steps = {name: _step(log, e, grid.worst, matches[name]) for name, e in matched.items()}
    of_expression = {id(e): matches[name] for name, e in matched.items()}

    def step(e: Expression) -> Step:
        return _step(log, e, grid.worst, of_expression.get(id(e)))

    told = Reading()
    if mended is not None:
        words = {id(mend.expression): mend.words for mend in mended.mends}
        mends = sorted(mended.mends, key=lambda mend: (mend is not mended.only, mend.adds))
        told = Reading(
            blamed=None if (e := mended.blamed) is None else replace(step(e), mend=words.get(id(e), "")),
            mended=tuple(replace(step(mend.expression), mend=mend.words) for mend in mends),
            between=tuple(_lines(mended)),
            since=mended.since,
            until=mended.stage,
        )
    return replace(
        told,
        stages=tuple(steps.values()),
        culprits=tuple(map(step, ranked)),
        unmatched=tuple(name for name in stages.all if name not in matched),
        wrong=fault.stage.name if fault else "",
        matches={e.event_of(grid.worst).number: of_expression.get(id(e)) for e in (*ranked[:1], *matched.values())},
    )


def _lines(mended: Mending) -> Iterator[str]:
    """The lines between what is right and what is wrong, a range for each file."""
    found: dict[str, list[int]] = {}
    for e in mended.span:
        found.setdefault(e.events[0].place.file, []).append(e.events[0].place.line)
    for file, lines in found.items():
        yield f"{file}:{min(lines)}" + (f" to {max(lines)}" if max(lines) > min(lines) else "")


def _step(log: Log, e: Expression, cell: int, match: StageMatch | None) -> Step:
    event = e.event_of(cell)
    return replace(step_of(log, event, int(e.lanes[event.number][cell])), match=match)
