"""Where a kernel's error begins: the reference goes on from the kernel's own stages, from one after the other."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from harness.case import Case, parse_case
from harness.errors import UsageError
from harness.inputs import build
from harness.numerics import Format, using
from harness.numerics.formats import Integers
from harness.outcomes.stages import Handover, Kind, StageSearch
from harness.result import Comparison
from harness.verify.check import Subject, examine
from harness.verify.compare import compare, compare_integers, outside_mask
from harness.verify.evaluate import Expected, Tensors, Trace
from harness.verify.inprocess import Watch, Workplace, unwatched
from harness.verify.lanes import forgiven
from harness.verify.latent import ExplainedRows, explain_rows
from harness.verify.roundings import expectations
from harness.verify.suspects import Situation, suspects

OF_STAGES = ("outside", "special", "rows", "lanes")  # kinds of findings that are about values
_MOST = 1 << 22  # elements of the op's first input; everything is evaluated at once, some twenty fp64 numbers for each


def search_kernel(place: Workplace, name: str, line: str) -> StageSearch:
    """`search_stages` of a kernel on a case line."""
    return search_stages(place.subjects[name], parse_case(line), watch=place.watch)


def search_stages(subject: Subject, case: Case, *, watch: Watch = unwatched) -> StageSearch:
    """Run the kernel on `case` and find the first stage that matters.

    Raises:
        UsageError: the case is too large to be evaluated at once.
    """
    if (size := case.tensors[0].numel) > _MOST:
        raise UsageError(f"{case.tensors[0].name} has {size:,} elements; stages are searched in {_MOST:,} at most")
    with watch(case):
        result, actual = examine(subject, case)
    found = StageSearch(
        kernel=subject.kernel.name,
        op=case.op,
        contract=str(subject.contract),
        case=str(case),
        device=str(subject.device),
        verdict=result.verdict,
        reason=result.reason or result.verdict.lower(),
        beside=tuple(f.sentence for f in result.findings if f.kind not in OF_STAGES),
        notices=tuple(f.sentence for f in result.notices),
    )
    if not actual:
        return found
    tensors = build(case.gathered(), subject.device).tensors
    with using(subject.bounds):
        return _searched(found, Situation(subject.op, subject.contract, tensors, dict(case.params), actual))


def _searched(found: StageSearch, situation: Situation) -> StageSearch:
    explained = _rows(situation)
    handovers, rows = _handovers(situation, explained), None if explained is None else explained.check
    shown = next((h.stage for h in handovers if h.forward.outside), "")
    kind, at = _blamed(handovers, shown)
    found = replace(found, handovers=handovers, rows=rows, kind=kind, shown=shown)
    if kind in (Kind.LOCAL, Kind.UNSEEN) and at is not None:
        wrong, explaining = suspects(situation, at.stage, [h.stage for h in handovers[1 : handovers.index(at)]])
        return replace(found, stage=at.stage, wrong=(wrong, at.isolated.numel), suspects=explaining)
    if kind is Kind.CLEAN and rows is not None and rows.unexplained:
        return replace(found, kind=Kind.ROWS, stage=rows.stage)
    return replace(found, stage=shown)


def _handovers(situation: Situation, rows: ExplainedRows | None) -> tuple[Handover, ...]:
    """One for the inputs, then one per stage that the kernel gave; nothing is asked of it in rows that are split."""
    trace = situation.trace({})
    start = before = expectations(trace, situation.contract)
    given: dict[str, Tensor] = {}
    made = []
    for stage in ["", *(name for name in trace.formats if name in situation.actual)]:
        isolated = Comparison()
        if stage:
            isolated = _compared(situation.actual[stage], before[stage], trace.formats[stage])
            given[stage] = situation.actual[stage]
            before = expectations(_onward(situation, given, trace, rows), situation.contract)
        there = {name: given.get(name, _value(before[name])) for name in trace.results}
        forward = [_compared(t, start[name], trace.formats[name]) for name, t in there.items()]
        later = [name for name in trace.results if name not in given]
        made.append(
            Handover(
                stage=stage,
                dtype=trace.formats[stage].name if stage else "",
                result=stage in trace.results,
                isolated=isolated,
                forward=functools.reduce(operator.add, forward, Comparison()),
                error=max((seen.rel_l2 for seen in forward), default=0.0),
                backward=sum(int(outside_mask(situation.actual[name], before[name]).sum()) for name in later),
            )
        )
    return tuple(made)


def _blamed(handovers: Sequence[Handover], shown: str) -> tuple[Kind, Handover | None]:
    """What is wrong, and the first stage that is."""
    local = next((h for h in handovers if h.isolated.outside), None)
    visible = next((h for h in handovers if shown and h.stage == shown), None)
    if visible is None:
        return (Kind.UNSEEN, local) if local else (Kind.CLEAN, None)
    if local is None or handovers.index(local) > handovers.index(visible):
        return Kind.MISSING, visible
    return Kind.LOCAL, local


def _onward(situation: Situation, given: Tensors, trace: Trace, rows: ExplainedRows | None) -> Trace:
    """The reference that goes on from the stages given; in split rows, where these are of one half, from the inputs."""
    onward = situation.trace(given)
    if rows is None or not rows.check.split:
        return onward
    assert situation.op.latent is not None
    return forgiven(onward, trace, situation.op.latent, rows.split)


def _rows(situation: Situation) -> ExplainedRows | None:
    latent = situation.op.latent
    if latent is None or not any(situation.actual[s].numel() for s in latent.through if s in situation.actual):
        return None
    s, own = situation, situation.trace(situation.actual)
    return explain_rows(s.op, s.contract, s.tensors, s.params, s.actual, situation.trace({}), own)


def _compared(actual: Tensor, expected: Expected, fmt: Format | Integers) -> Comparison:
    if isinstance(expected, Tensor):
        return compare_integers(actual, expected)
    assert isinstance(fmt, Format)
    return compare(actual, expected, fmt)


def _value(expected: Expected) -> Tensor:
    return expected if isinstance(expected, Tensor) else expected.value
