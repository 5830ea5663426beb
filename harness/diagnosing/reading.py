"""Reading of a recorded call: which expressions are stages of the reference, and which of them is at fault."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from lastbit.diagnosing.culprits import CulpritSearch
from lastbit.diagnosing.grid import Grid, ends, grid_of
from lastbit.diagnosing.mends import Mending, mending
from lastbit.diagnosing.steps import step_of
from lastbit.diagnosing.traced_stages import Stages
from lastbit.judging.problem import Problem
from lastbit.numerics.algebraic import following_residues
from lastbit.numerics.residues import products_of
from lastbit.reports.why import StageMatch, Step
from lastbit.tracing import Log
from lastbit.tracing.cells import Ancestry, Expression, expressions
from lastbit.tracing.writes import Addresses, Write

LARGEST = 1 << 20  # elements of the op's first input


@dataclass(frozen=True, eq=False)
class Reading:
    """Stages found among the expressions of a kernel, and the line at fault.

    Attributes:
        stages, leaves, blamed, mended, between, since, until, unmatched, wrong: see `KernelTrace`.
        matches: number of an event that is one, or with which the value leaves the contract → the stage that it agrees
            with, if it does.
    """

    stages: tuple[Step, ...] = ()
    leaves: Step | None = None
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
) -> Reading:
    """Match expressions of a recorded call with stages of the reference, and find the one at fault if `failing`.

    The reading is empty for a large case, and for a result that has no element for each cell.
    """
    grid = grid_of(problem, tensor, where, write, index) if problem.main.numel() <= LARGEST else None
    if grid is None:
        return Reading()
    with following_residues(), products_of(problem.constants):
        return _read(log, stage, where, grid, failing)


def _read(log: Log, last: str, where: Addresses, grid: Grid, failing: bool) -> Reading:
    written = ends(log, grid, where)
    ancestry = Ancestry.of(log, [event for event, _ in written.values()])
    cells_of_ends = {number: own for number, (_, own) in written.items()}
    cells = ancestry.cells(cells_of_ends, grid.cells_of_inputs())
    found = expressions(ancestry.events, cells)
    stages = Stages(grid, grid.problem.evaluate(), last, found, tuple(written), ancestry)
    matched = stages.matched({})
    search = CulpritSearch(stages, matched)
    fault = search.fault() if failing else None
    if fault is None:
        return _told(log, grid, stages, matched, None, None)
    mended = mending(search)
    stage, value = fault if mended.value is None else (stages.all[mended.stage], mended.value)
    onward, names = stages.onward(stages.from_kernel(stage, value)), list(stages.all)
    before = {name: e for name, e in matched.items() if names.index(name) < names.index(stage.name)}
    return _told(log, grid, stages, onward.matched({**before, stage.name: value}), mended.blamed or value, mended)


def _told(
    log: Log,
    grid: Grid,
    stages: Stages,
    matched: Mapping[str, Expression],
    first: Expression | None,
    mended: Mending | None,
) -> Reading:
    matches = {name: stages.match(name, e, leaves=e is first) for name, e in matched.items()}
    steps = {name: _step(log, e, grid.worst, matches[name]) for name, e in matched.items()}
    of_expression = {id(e): matches[name] for name, e in matched.items()}

    def step(e: Expression) -> Step:
        return _step(log, e, grid.worst, of_expression.get(id(e)))

    told = Reading()
    if mended is not None:
        words = {id(mend.expression): mend.words for mend in mended.mends}
        mends = sorted(mended.mends, key=lambda mend: mend is not mended.only)
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
        leaves=told.blamed or (None if first is None else step(first)),
        unmatched=tuple(name for name in stages.all if name not in matched),
        wrong=mended.stage if mended else "",
        matches={
            e.event_of(grid.worst).number: of_expression.get(id(e)) for e in (*filter(None, [first]), *matched.values())
        },
    )


def _lines(mended: Mending) -> Iterator[str]:
    """Yield the range of lines between right stages and the wrong one, for each file."""
    found: dict[str, list[int]] = {}
    for e in mended.span:
        found.setdefault(e.events[0].place.file, []).append(e.events[0].place.line)
    for file, lines in found.items():
        yield f"{file}:{min(lines)}" + (f" to {max(lines)}" if max(lines) > min(lines) else "")


def _step(log: Log, e: Expression, cell: int, match: StageMatch | None) -> Step:
    event = e.event_of(cell)
    return replace(step_of(log, event, int(e.lanes[event.number][cell])), match=match)
