"""Search for the stage where an error begins: the reference continues from one of the kernel's stages after another."""

from __future__ import annotations

import functools
import operator
from dataclasses import replace

from torch import Tensor

from lastbit.case import Case
from lastbit.errors import UsageError
from lastbit.inputs import build
from lastbit.judging.latent import ExplainedRows, explain_rows, forgiven
from lastbit.judging.observation import Observation
from lastbit.reports.stages import Handover, StageKind, StageSearch
from lastbit.result import OF_STAGES, Comparison
from lastbit.verify.check import Subject, examine
from lastbit.verify.worker import Watch, unwatched

# Some twenty fp64 numbers for each element, 700 MB.
MOST = 1 << 22
"""Elements of the op's first input up to which the reference is evaluated at once."""


def search_stages(subject: Subject, case: Case, *, watch: Watch = unwatched) -> StageSearch:
    """Run the kernel on `case` and find the first stage that matters.

    Raises:
        UsageError: the case is too large to be evaluated at once.
    """
    if (size := case.tensors[0].numel) > MOST:
        raise UsageError(f"{case.tensors[0].name} has {size:,} elements; stages are searched in {MOST:,} at most")
    with watch(case):
        result, actual = examine(subject, case)
    names = subject.kernel.name, case.op, str(subject.contract), str(case), str(subject.device)
    found = StageSearch(
        *names,
        result.verdict,
        result.reason or result.verdict.lower(),
        beside=tuple(f.sentence for f in result.findings if f.kind not in OF_STAGES),
        notices=tuple(f.sentence for f in result.notices),
        idle=result.idle,
    )
    if not actual:
        return found
    seen = Observation.of(subject.problem(build(case.gathered(), subject.device)), actual)
    explained = explain_rows(seen, seen.problem.trace, seen.onward) if seen.has_latent else None
    handovers, rows = _handovers(seen, explained), None if explained is None else explained.check
    # The fault is local if a stage is wrong by itself at or before the first that shows, from which all is right.
    local = next((n for n, h in enumerate(handovers) if h.isolated.outside), len(handovers))
    visible = next((n for n, h in enumerate(handovers) if h.forward.outside), len(handovers))
    shown = handovers[visible].stage if visible < len(handovers) else ""
    found = replace(found, handovers=handovers, rows=rows, shown=shown)
    if local <= visible and local < len(handovers):
        own, kind = handovers[local], StageKind.LOCAL if shown else StageKind.UNSEEN
        return replace(found, kind=kind, stage=own.stage, wrong=(own.isolated.outside, own.isolated.numel))
    if not shown and rows is not None and rows.unexplained:
        return replace(found, kind=StageKind.ROWS, stage=rows.stage)
    return replace(found, kind=StageKind.MISSING if shown else StageKind.CLEAN, stage=shown)


def _handovers(seen: Observation, rows: ExplainedRows | None) -> tuple[Handover, ...]:
    """Evaluate the reference from the inputs, then from each stage that the kernel gave; split rows are excused.

    Rows split between two latent values are those from the inputs.
    """
    problem = seen.problem
    trace = before = problem.trace
    given: dict[str, Tensor] = {}
    results = [name for name in trace.results if name in seen.actual]
    made = []
    for stage in ["", *(name for name in trace.stages if name in seen.actual)]:
        isolated = Comparison()
        if stage:
            isolated = seen.expected(before)[stage].compare(seen.actual[stage])
            given[stage] = seen.actual[stage]
            before = problem.evaluate(given)
            if rows is not None and rows.check.split:
                assert problem.op.latent is not None
                before = forgiven(before, trace, problem.op.latent, rows.split)
        there = {name: given.get(name, before.stages[name].value) for name in results}
        forward = [trace.stages[name].compare(t) for name, t in there.items()]
        expected = seen.expected(before)
        later = [name for name in results if name not in given]
        made.append(
            Handover(
                stage=stage,
                dtype=trace.stages[stage].format.name if stage else "",
                result=stage in trace.results,
                isolated=isolated,
                forward=functools.reduce(operator.add, forward, Comparison()),
                error=max((comparison.rel_l2 for comparison in forward), default=0.0),
                backward=sum(int(expected[name].count_outside(seen.actual[name])) for name in later),
            )
        )
    return tuple(made)
