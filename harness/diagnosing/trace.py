"""Trace of a kernel's worst element, followed back through the operations that led to it."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType

import numpy as np
from torch import Tensor

from lastbit.calling.performing import CallRequest, results_of
from lastbit.calling.uses_compile import is_compiled
from lastbit.case import Case, parse_case
from lastbit.diagnosing.memory_findings import is_sure, steps_named, steps_of_findings
from lastbit.diagnosing.mends import LEAST, Mending
from lastbit.diagnosing.reading import SeenCall, reading
from lastbit.diagnosing.relaunches import mended_launches
from lastbit.diagnosing.steps import folded, step_at, steps_of, steps_of_all
from lastbit.inputs import Inputs, build, guarded_allocations
from lastbit.judging.formula import compare_formulas
from lastbit.judging.problem import Problem
from lastbit.numerics.residues import products_of
from lastbit.reports.encoding import encoded
from lastbit.reports.why import KernelTrace, Step
from lastbit.result import OF_FORMULA, OF_STAGES, CaseResult, Verdict, Worst
from lastbit.shadows.following import Followed, python_primitives
from lastbit.shadows.shadow_memory import ShadowMemory
from lastbit.tracing import Event, Log, Path, TraceLimit, follow, traced
from lastbit.tracing.events import Program
from lastbit.tracing.lanes import Addresses
from lastbit.tracing.log import LIMIT
from lastbit.tracing.of_torch import UNWRITTEN, addresses_of, array_of
from lastbit.verify.check import Subject, examine, first_line
from lastbit.verify.formula_check import by_formula, follows
from lastbit.verify.worker import Watch, Workplace, unwatched

# Arbitrary: each is kept with all of its operations.
MOST_PROGRAMS = 64
"""Programs of Triton kernels of which all operations are kept."""


def trace_kernel(place: Workplace, name: str, line: str, *, every: bool = False) -> KernelTrace:
    """Trace a kernel on a case line; see `trace_case`."""
    return trace_case(place.subjects[name], parse_case(line), every=every, watch=place.watch)


def stages_in_sight(subject: Subject, case: Case, *, watch: Watch = unwatched) -> KernelTrace | None:
    """Find the stages that a kernel computes on a case that it has passed; None where PyTorch compiles the kernel.

    An observer would see its text run then, and not the compiled code.
    """
    with watch(case):
        if is_compiled(subject.kernel.call) or ("torch._dynamo" in sys.modules and _enters_compiler(subject, case)):
            return None
    return stages_of_case(subject, case, watch=watch)


def stages_as_text(subject: Subject, case: Case) -> str:
    """Write what `stages_in_sight` finds as a line of JSON, empty if there are no stages."""
    found = stages_in_sight(subject, case)
    return json.dumps(encoded(found)) if found is not None and found.stages else ""


def _enters_compiler(subject: Subject, case: Case) -> bool:
    """Call the kernel once and return whether the call runs code of PyTorch's compiler, or what that has compiled."""
    seen, inputs = list[str](), build(case.gathered(), subject.device)

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            seen.append(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        subject.kernel.call(**inputs.hand_out(), **case.params)
    finally:
        sys.setprofile(None)
    return bool(seen)


def stages_of_case(subject: Subject, case: Case, *, limit: int = LIMIT, watch: Watch = unwatched) -> KernelTrace:
    """Find the expressions of a passing kernel that are stages of the reference; the trace has no steps.

    The kernel is called once to see which program wrote the first element of the last result that it must return, and
    once more for each launch that led there; nothing is judged.
    """
    found = _begun(subject, case, Verdict.PASSED)
    with watch(case):
        inputs = build(case.gathered(), subject.device)
        problem = subject.problem(inputs)
        stage = max(problem.required, key=problem.trace.results.index)
        try:
            seen = _Tracing(subject, inputs, problem, stage, None, limit).seen()
        except Exception as error:
            return replace(found, reason=f"the kernel raises when it is observed: {first_line(error)}")
        if seen.visit is None:
            return replace(found, reason=seen.why_nothing)
        return reading(replace(found, stage=stage), problem, seen, (0,) * seen.tensor.ndim, failing=False)[0]


def _begun(subject: Subject, case: Case, verdict: Verdict) -> KernelTrace:
    return KernelTrace(
        kernel=subject.kernel.name,
        op=case.op,
        contract=str(subject.contract),
        case=str(case),
        device=str(subject.device),
        verdict=verdict,
    )


def trace_case(
    subject: Subject, case: Case, *, every: bool = False, limit: int = LIMIT, watch: Watch = unwatched
) -> KernelTrace:
    """Judge a kernel on a case, run it again under observation, and follow its worst element back to the inputs.

    The worst element is that of the first stage that goes wrong. Where none does, it is the one that is farthest from
    the contract's value. The kernel is called once for each launch on the way and once more. `every` keeps all
    operations of the program that wrote the element.
    """
    with watch(case):
        judged = judged_to_explain(subject, case)
    return trace_result(judged, every=every, limit=limit, watch=watch)


def trace_result(judged: Judged, *, every: bool = False, limit: int = LIMIT, watch: Watch = unwatched) -> KernelTrace:
    """Trace a case that was already judged; see `trace_case`."""
    subject, case, result, target = judged.subject, judged.case, judged.result, judged.target
    found = replace(_begun(subject, case, result.verdict), idle=result.idle)
    if target is None:
        return replace(found, reason=result.reason or "it gave no element that could be compared")
    stage, worst = target
    beside = [finding for finding in result.findings if finding.kind not in OF_STAGES]
    found = replace(found, stage=stage, worst=worst, notes=tuple(finding.sentence for finding in beside))
    with watch(case):
        inputs = build(case.gathered(), subject.device)
        tracing = _Tracing(subject, inputs, subject.problem(inputs), stage, worst.index, limit)
        try:
            seen = tracing.seen()
        except TraceLimit as error:
            return replace(found, reason=str(error))
        except Exception as error:
            traceback.print_exc()
            return replace(found, reason=f"the kernel raises when it is observed: {first_line(error)}")
    of_findings = steps_of_findings(seen.log, beside, seen.tensors)
    named = next(iter(of_findings), None)
    found = replace(found, leaves=named, blamed=named if named is None or is_sure(seen.log, named) else None)
    if seen.visit is None:
        told = replace(found, reason=seen.why_nothing)
        launches = range(len(seen.log.launches)) if result.verdict is Verdict.FAILED else ()
        return _launched_wrongly(told, tracing, judged, launches, watch)
    told, mending = _told(found, tracing.problem, seen, judged.actual[stage], every)
    if mending is not None and mending.launches and (told.blamed is None or mending.of_elements):
        told = _launched_wrongly(told, tracing, judged, mending.launches, watch, mending)
    return _in_the_line_of(told, [step for step in steps_named(seen.log, beside) if is_sure(seen.log, step)])


def _launched_wrongly(
    told: KernelTrace,
    tracing: _Tracing,
    judged: Judged,
    launches: Collection[int],
    watch: Watch,
    mending: Mending | None = None,
) -> KernelTrace:
    """Blame the line that passes a launch something wrong, if one change there is the only one that makes all right.

    A load that reads wrong elements does as it is told then.
    """
    subject, inputs, worst, wrong = tracing.subject, tracing.inputs, told.worst, judged.result.failing_stage
    assert worst is not None
    few = wrong is None or max(wrong.isolated.outside, wrong.cumulative.outside) < LEAST
    with watch(inputs.case):
        sizes = mending is None or mending.complete
        told_of = tracing.request, tracing.stage, worst, launches
        found = mended_launches(subject, inputs, *told_of, sizes=sizes, few=few)
    if not found:
        return told
    steps = tuple(replace(step_at(place), mend=words) for words, (place, _) in found.items())
    others = mending is not None and not mending.of_elements and any(mend.sure for mend in mending.mends)
    told = replace(told, mended=(*steps, *told.mended), blamed=None)
    if others or len(found) > 1 or not all(sure for _, sure in found.values()):
        return told
    return replace(told, blamed=steps[0], leaves=steps[0], between=(), since=(), until="")


def _in_the_line_of(told: KernelTrace, named: Sequence[Step]) -> KernelTrace:
    """Blame the line that a finding names, unless another one is surely wrong."""
    if told.blamed is not None or not named:
        return told
    return replace(told, blamed=named[0], leaves=named[0], between=(), since=(), until="")


Target = tuple[str, Worst] | None
"""The element to explain and the stage that it is of."""


@dataclass(frozen=True, eq=False)
class Judged:
    """A kernel on a case, judged by values and by its formula.

    Attributes:
        actual: what it gave.
        target: the element to explain, the worst one or the first of another formula.
    """

    subject: Subject
    case: Case
    result: CaseResult
    actual: Mapping[str, Tensor]
    target: Target


def judged_to_explain(subject: Subject, case: Case) -> Judged:
    """Judge a kernel on a case, by its values and, where these decide nothing, by its formula."""
    result, actual = examine(subject, case)
    result, known = by_formula(subject, case, result)
    target = worst_of(result)
    of_formula = next((f.stage for f in result.findings if f.kind == OF_FORMULA), None)
    if known is not None and of_formula is not None:
        target = _of_formula(*known, of_formula, actual) or target
    return Judged(subject, case, result, actual, target)


def _of_formula(problem: Problem, followed: Followed, name: str, actual: Mapping[str, Tensor]) -> Target:
    """Return the first element of a result that follows from another formula; None if there is none."""
    compared = compare_formulas(problem, followed.results).get(name)
    if compared is None or not compared.differs:
        return None
    index, stage = compared.first, problem.trace.enclosure(name)
    exact, value, lo, hi = (float(part[index]) for part in stage.full.expand(4, *actual[name].shape))
    return name, Worst(index, float(actual[name][index]), value, exact, lo, hi, 0.0)


def worst_of(result: CaseResult) -> Target:
    """Return the element to explain and its stage; None if no element was compared."""
    failing = result.failing_stage
    if failing is not None:
        worst = failing.isolated.worst if failing.isolated.outside else failing.cumulative.worst
        return None if worst is None else (failing.name, worst)
    farthest = [(s.name, s.cumulative.worst) for s in result.stages if s.result and s.cumulative.worst is not None]
    return max(farthest, key=lambda pair: pair[1].ulp, default=None)


@dataclass(frozen=True)
class _Tracing:
    """Calls of a kernel under observation, for an element of a stage: the first one if `index` is None."""

    subject: Subject
    inputs: Inputs
    problem: Problem
    stage: str
    index: tuple[int, ...] | None
    limit: int

    def seen(self) -> SeenCall:
        """Call the kernel and keep the operations of every program on the element's way, up to `MOST_PROGRAMS`.

        Earlier calls show which programs these are: the one that wrote the element, those that wrote the memory it
        read, and so on; then programs on the way of elements written together with it. The last call is followed on
        residues. Of a single launch, the program that wrote it is enough, where it reads nothing of others.
        """
        wanted: set[Program] = set()
        seen = first = self.call()
        if len(first.log.launches) == 1 and first.write is not None and (program := first.write.program) is not None:
            alone = self.call({program}, followed=True, only=True)
            if alone.stands_alone_for(first):
                return alone
        while True:
            missing = [seen.write] if seen.write and not seen.write.event else seen.path.untraced or seen.beside
            found = dict.fromkeys(write.program for write in missing if write.program not in wanted)
            new = [program for program in found if program is not None][: MOST_PROGRAMS - len(wanted)]
            if not new:
                return self.call(wanted, followed=True)
            wanted.update(new)
            seen = self.call(wanted)

    @property
    def request(self) -> CallRequest:
        stages = self.subject.kernel.stages if self.stage in self.subject.kernel.stages else ()
        needed = tuple(dict.fromkeys([*self.problem.required, self.stage]))
        optional = tuple(name for name in self.problem.may_return if name != self.stage)
        return CallRequest(self.inputs.case.params, needed, optional, stages=stages)

    def call(self, wanted: Collection[Program] = (), *, followed: bool = False, only: bool = False) -> SeenCall:
        """Call the kernel and keep all operations of these programs; with `only`, run no others."""
        kernel, problem, asked = self.subject.kernel, self.problem, self.request
        handed = self.inputs.hand_out()
        followed = followed and follows(handed) and not python_primitives(kernel)  # what these do has other residues
        shadow = ShadowMemory() if followed else None
        watching = traced(handed, wanted, self.limit, only=only, shadow=shadow, primitives=kernel.primitives)
        with products_of(problem.constants), guarded_allocations(0), watching as log:
            results = results_of(kernel.call, asked, self.subject.device, handed)
        tensor = results[self.stage].detach()
        index = (0,) * tensor.ndim if self.index is None else self.index
        seen = _located(log, tensor, addresses_of(tensor), index)
        self.inputs.restore()
        return replace(seen, tensors={**handed, self.stage: tensor})


def _located(log: Log, tensor: Tensor, where: Addresses, index: tuple[int, ...]) -> SeenCall:
    """Find the write of an element of a tensor, and the path that led to it."""
    number = np.array([np.ravel_multi_index(index, tuple(tensor.shape)) if index else 0])
    seen = SeenCall(log, tensor.clone(), where)
    for write, _, lanes in log.last(seen.where.at(number), log.next()):
        return replace(seen, write=write, path=follow(log, write.event, lanes) if write.event else Path())
    return seen


def _told(
    found: KernelTrace, problem: Problem, seen: SeenCall, judged: Tensor, every: bool
) -> tuple[KernelTrace, Mending | None]:
    assert found.worst is not None
    same = array_of(seen.tensor[found.worst.index]).tobytes() == array_of(judged[found.worst.index]).tobytes()
    failing = found.verdict is Verdict.FAILED and same
    read, matches, mending = reading(found, problem, seen, found.worst.index, failing=failing)
    steps = tuple(folded(steps_of(seen.log, seen.path, matches)))
    whole = tuple(steps_of_all(seen.log, seen.path.visits[-1].event)) if every else ()
    other = "The element has other bits in the call that is shown here than in the one that was judged."
    notes = [*found.notes, *([] if same else [other]), *_notes(seen)]
    return replace(read, steps=steps, all=whole, notes=tuple(notes)), mending


def _notes(seen: SeenCall) -> list[str]:
    notes = []
    if left := len({write.program for write in seen.path.untraced if write.program is not None}):
        notes.append(
            f"{left:,} more programs wrote what was read on the way; all operations are kept of {MOST_PROGRAMS} only."
        )
    unwritten = [visit.event for visit in seen.path.visits if _is_unwritten(visit.event)]
    if unwritten:
        lines = ", ".join(sorted({f"{event.place.text} in line {event.place.line}" for event in unwritten}))
        notes.append(f"Memory was read into which nothing that can be seen wrote: {lines}.")
    if seen.path.unknown:
        notes.append(f"Elements read that nothing which can be seen wrote: {seen.path.unknown:,}.")
    return notes


def _is_unwritten(event: Event) -> bool:
    return event.name.rpartition(".")[2] in UNWRITTEN
