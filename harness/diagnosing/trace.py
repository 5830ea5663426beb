"""Trace of a kernel's worst element, followed back through the operations that led to it.

A case is judged, the kernel is called again under observation, and the operations on the element's way are kept. Then
it is read which of the kernel's expressions are stages of the reference (`traced_stages.py`), and lines are mended to
find the one at fault (`mends.py`), or what a launch was passed (`relaunches.py`).
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FrameType

import numpy as np
from torch import Tensor

from lastbit.calling.performing import CallRequest, results_of
from lastbit.calling.uses_compile import is_compiled
from lastbit.case import Case
from lastbit.diagnosing.mends import LEAST, Mending, find_mends
from lastbit.diagnosing.relaunches import mended_launches
from lastbit.diagnosing.responsible import chain_of_address, lines_of
from lastbit.diagnosing.steps import folded, step_at, step_of, steps_of, steps_of_all
from lastbit.diagnosing.traced_stages import Stages, grid_of
from lastbit.diagnosing.worked import legal_of
from lastbit.inputs import Inputs, build, guarded_allocations
from lastbit.interpret.numpy_formats import Array
from lastbit.judging.formula import compare_formulas
from lastbit.judging.problem import Problem
from lastbit.numerics.algebraic import following_residues
from lastbit.numerics.residues import products_of
from lastbit.reports.encoding import encoded
from lastbit.reports.summary import grouped
from lastbit.reports.why import KernelTrace, StageMatch, Step, spans
from lastbit.result import OF_FORMULA, OF_STAGES, CaseResult, Finding, Verdict, Worst
from lastbit.shadows.following import python_primitives
from lastbit.shadows.shadow_memory import ShadowMemory
from lastbit.tracing import Log, Path, TraceLimit, follow, traced
from lastbit.tracing.ancestry import Expression, Visit
from lastbit.tracing.events import Program, Write
from lastbit.tracing.lanes import Addresses
from lastbit.tracing.of_torch import addresses_of, array_of, is_filled, is_unwritten
from lastbit.verify.check import Subject, examine, first_line
from lastbit.verify.formula_check import by_formula, follows
from lastbit.verify.worker import Watch, unwatched

# Arbitrary: each is kept with all of its operations.
MOST_PROGRAMS = 64
"""Programs of Triton kernels of which all operations are kept."""
# 8 MB of fp64 for each expression, of which a kernel has many.
LARGEST = 1 << 20
"""Elements of the op's first input up to which a call is read: every expression has a value for each cell."""

NORMAL = "normal"
"""The regime of numbers of which hardly two are equal, also after they were computed with."""
NOTHING = "it gave no element that could be compared"
Target = tuple[str, Worst] | None
"""The element to explain and the stage that it is of."""
Matches = Mapping[int, StageMatch | None]
"""Number of an event that is a stage, or with which the value leaves the contract → the stage that it agrees with."""


def stages_in_sight(subject: Subject, case: Case, *, watch: Watch = unwatched) -> KernelTrace | None:
    """Find the stages that a kernel computes on a case that it has passed; None where PyTorch compiles the kernel.

    An observer would see its text run then, and not the compiled code.
    """
    compiled = [subject.kernel.name] if is_compiled(subject.kernel.call) else []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            compiled.append(frame.f_code.co_name)

    with watch(case):
        if not compiled and "torch._dynamo" in sys.modules:  # whether a call runs the compiler, or what that has made
            inputs = build(case.gathered(), subject.device)
            sys.setprofile(profile)
            try:
                subject.kernel.call(**inputs.hand_out(), **case.params)
            finally:
                sys.setprofile(None)
    return None if compiled else stages_of_case(subject, case, watch=watch)


def stages_as_text(subject: Subject, case: Case) -> str:
    """Write what `stages_in_sight` finds as a line of JSON, empty if there are no stages."""
    found = stages_in_sight(subject, case)
    return json.dumps(encoded(found)) if found is not None and found.stages else ""


def stages_of_case(subject: Subject, case: Case, *, watch: Watch = unwatched) -> KernelTrace:
    """Find the expressions of a passing kernel that are stages of the reference; the trace has no steps.

    The kernel is called once to see which program wrote the first element of the last result that it must return, and
    once more for each launch that led there; nothing is judged.
    """
    found = begun(subject.outcome(Verdict.PASSED, str(case), case.dtypes))
    with watch(case):
        inputs = build(case.gathered(), subject.device)
        problem = subject.problem(inputs)
        stage = max(problem.required, key=problem.trace.results.index)
        seen = _Tracing(subject, inputs, stage).seen()
        if isinstance(seen, str) or seen.visit is None:
            return replace(found, reason=seen if isinstance(seen, str) else seen.why_nothing)
        return _reading(replace(found, stage=stage), problem, seen, (0,) * seen.tensor.ndim, failing=False)[0]


def begun(result: CaseResult) -> KernelTrace:
    """Return the trace of a judged case before anything was followed."""
    names = result.kernel, result.op, result.contract, result.case, result.device
    return KernelTrace(*names, result.verdict, idle=result.idle)


def trace_case(subject: Subject, case: Case, *, every: bool = False, watch: Watch = unwatched) -> KernelTrace:
    """Judge a kernel on a case, run it again under observation, and follow its worst element back to the inputs.

    The worst element is that of the first stage that goes wrong. Where none does, it is the one that is farthest from
    the contract's value. The kernel is called once for each launch on the way and once more. `every` keeps all
    operations of the program that wrote the element.
    """
    with watch(case):
        judged = judged_to_explain(subject, case)
    return trace_result(judged, every=every, watch=watch)


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
    name = next((f.stage for f in result.findings if f.kind == OF_FORMULA), None)
    if known is not None and name is not None:
        problem, followed = known
        compared = compare_formulas(problem, followed.results).get(name)
        if compared is not None and compared.differs:
            index = compared.first
            exact, value, lo, hi = legal_of(problem.trace.stages[name]).movedim(0, -1)[index].tolist()
            target = name, Worst(index, float(actual[name][index]), value, exact, lo, hi, 0.0)
    return Judged(subject, case, result, actual, target)


def worst_of(result: CaseResult) -> Target:
    """Return the element to explain and its stage; None if no element was compared."""
    failing = result.failing_stage
    if failing is not None:
        worst = failing.isolated.worst if failing.isolated.outside else failing.cumulative.worst
        return None if worst is None else (failing.name, worst)
    farthest = [(s.name, s.cumulative.worst) for s in result.stages if s.result and s.cumulative.worst is not None]
    return max(farthest, key=lambda pair: pair[1].ulp, default=None)


def trace_result(
    judged: Judged, *, every: bool = False, watch: Watch = unwatched, seconds: float = math.inf
) -> KernelTrace:
    """Trace a case that was already judged; see `trace_case`.

    Where that names no line, the same case with other numbers is traced, if it fails and `seconds` are left for as long
    again: normal ones, as what is small, whole or a power of two has the same numbers in several places.
    """
    begin = time.monotonic()
    found, case = _traced(judged, every=every, watch=watch), judged.case
    other = case.with_regime(NORMAL)
    other = replace(case, seed=case.seed + 1) if other == case else other
    in_vain = found.blamed is None and found.verdict is Verdict.FAILED and judged.target is not None
    if not in_vain or found.notes or 2 * (time.monotonic() - begin) > seconds:
        return found
    with watch(other):
        again = judged_to_explain(judged.subject, other)
    if again.result.verdict is not Verdict.FAILED or again.target is None:
        return found
    there = _traced(again, watch=watch)
    if there.blamed is None and (there.notes or not there.until or there.lines >= found.lines):
        return found
    if not all(any(spans(own, told) for own in found.between) for told in there.told if found.between):
        return found  # it may fail for another mistake
    told = replace(there, by=str(other))
    names = ("blamed", "leaves", "mended", "between", "since", "until", "held", "by")
    return replace(found, **{name: getattr(told, name) for name in names})


def _traced(judged: Judged, *, every: bool = False, watch: Watch = unwatched) -> KernelTrace:
    result, found = judged.result, begun(judged.result)
    if judged.target is None:
        return replace(found, reason=result.reason or NOTHING)
    stage, worst = judged.target
    beside = [finding for finding in result.findings if finding.kind not in OF_STAGES]
    found = replace(found, stage=stage, worst=worst, notes=tuple(finding.sentence for finding in beside))
    with watch(judged.case):
        inputs = build(judged.case.gathered(), judged.subject.device)
        tracing = _Tracing(judged.subject, inputs, stage, worst.index)
        seen = tracing.seen()
    if isinstance(seen, str):
        return replace(found, reason=seen)
    named = next(_steps_of_findings(seen, beside), None)
    found = replace(found, leaves=named, blamed=named if named is None or _is_sure(seen.log, named) else None)
    if seen.visit is None:
        found = replace(found, reason=seen.why_nothing)
        launches = range(len(seen.log.launches)) if result.verdict is Verdict.FAILED else ()
        return _launched_wrongly(found, tracing, judged, launches, watch)
    own, others = (array_of(t[worst.index]).tobytes() for t in (seen.tensor, judged.actual[stage]))
    failing = result.verdict is Verdict.FAILED and own == others
    telling = judged.case == judged.case.with_regime(NORMAL)
    found, matches, mended = _reading(found, tracing.problem, seen, worst.index, failing=failing, telling=telling)
    other = "The element has other bits in the call that is shown here than in the one that was judged."
    found = replace(
        found,
        steps=tuple(folded(steps_of(seen.log, seen.path, matches))),
        all=tuple(steps_of_all(seen.log, seen.path.visits[-1].event)) if every else (),
        notes=(*found.notes, *([] if own == others else [other]), *seen.notes),
    )
    if mended is not None and mended.launches and (found.blamed is None or mended.of_elements):
        found = _launched_wrongly(found, tracing, judged, mended.launches, watch, mended)
    sure = (step for step in _steps_named(seen.log, beside) if _is_sure(seen.log, step))
    return found if found.blamed is not None else _blaming(found, next(sure, None))


def _launched_wrongly(
    found: KernelTrace,
    tracing: _Tracing,
    judged: Judged,
    launches: Collection[int],
    watch: Watch,
    mended: Mending | None = None,
) -> KernelTrace:
    """Blame the line that passes a launch something wrong, if one change there is the only one that makes all right.

    A load that reads wrong elements does as it is told then.
    """
    worst, wrong = found.worst, judged.result.failing_stage
    assert worst is not None
    few = wrong is None or max(wrong.isolated.outside, wrong.cumulative.outside) < LEAST
    told_of = tracing.subject, tracing.inputs, tracing.asked, found.stage, worst, launches
    with watch(judged.case):
        mends = mended_launches(*told_of, sizes=mended is None or mended.complete, few=few)
    if not mends:
        return found
    steps = tuple(replace(step_at(place), mend=words) for words, (place, _) in mends.items())
    others = mended is not None and not mended.of_elements and any(mend.sure for mend in mended.mends)
    sure = len(mends) == 1 and not others and all(sure for _, sure in mends.values())
    return _blaming(replace(found, mended=(*steps, *found.mended), blamed=None), steps[0] if sure else None)


def _blaming(found: KernelTrace, step: Step | None) -> KernelTrace:
    """Blame a step, if there is one, in place of lines in which the mistake could be."""
    return found if step is None else replace(found, blamed=step, leaves=step, between=(), since=(), until="", held="")


# Observed calls.


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

    @cached_property
    def beside(self) -> Path:
        """The way of all elements that were written with the one to explain; empty where that was not recorded."""
        event = None if self.write is None else self.write.event
        return Path() if event is None else follow(self.log, event, range(event.values.size))

    def stands_alone_for(self, whole: SeenCall) -> bool:
        """Return whether one program, run alone, read nothing of other programs and gave what it gives among them."""
        if self.write is None or self.write.event is None or self.beside.unknown or self.beside.untraced:
            return False
        own = self.write.find(self.where(np.arange(self.tensor.numel()))) >= 0
        given, among = (array_of(tensor).reshape(-1)[own].tobytes() for tensor in (self.tensor, whole.tensor))
        return given == among

    @property
    def together(self) -> Array:
        """Mask of the elements of the tensor that were written with the one to explain; of integers, all recorded."""
        assert self.write is not None
        elements = np.arange(self.tensor.numel())
        found = self.write.find(self.where(elements)) >= 0
        others = () if self.tensor.is_floating_point() else self.log.sources(self.where, elements, self.log.next())
        for event, positions, _ in others:
            found[positions] |= not is_unwritten(event)
        return found

    @property
    def missing(self) -> list[Write]:
        """Writes by programs whose operations were not kept: of the element, on its way, or beside that."""
        if self.write is not None and self.write.event is None:
            return [self.write]
        return self.path.untraced or self.beside.untraced

    @property
    def visit(self) -> Visit | None:
        """The write of the element itself; None if that was only an allocation, and nothing was seen to write there."""
        last = self.path.visits[-1] if self.path.visits else None
        return None if last is None or is_unwritten(last.event) else last

    @property
    def why_nothing(self) -> str:
        made = self.path.visits[-1].event.place if self.path.visits else None
        memory = f" It is in the memory that {made.text} makes in line {made.line}." if made and made.line else ""
        said = "there is nothing to see inside: what wrote this element is neither an operation of PyTorch nor an"
        return f"{said} interpreted Triton kernel. It is compiled, or nothing wrote it.{memory}"

    @property
    def notes(self) -> Iterator[str]:
        """Say in sentences what could not be seen on the way to the element."""
        if left := len({write.program for write in self.path.untraced if write.program is not None}):
            kept = f"all operations are kept of {MOST_PROGRAMS} only."
            yield f"{left:,} more programs wrote what was read on the way; {kept}"
        unwritten = [visit.event for visit in self.path.visits if is_unwritten(visit.event)]
        if lines := sorted({f"{event.place.text} in line {event.place.line}" for event in unwritten}):
            yield f"Memory was read into which nothing that can be seen wrote: {', '.join(lines)}."
        if self.visit is not None and is_filled(self.visit.event):
            made = self.visit.event.place
            yield f"Nothing that can be seen wrote the element since {made.text} in line {made.line} filled it."
        if self.path.unknown:
            yield f"Elements read that nothing which can be seen wrote: {self.path.unknown:,}."


@dataclass(frozen=True, eq=False)
class _Tracing:
    """Calls of a kernel under observation, for an element of a stage: the first one if `index` is None."""

    subject: Subject
    inputs: Inputs
    stage: str
    index: tuple[int, ...] | None = None

    @cached_property
    def problem(self) -> Problem:
        return self.subject.problem(self.inputs)

    @property
    def asked(self) -> CallRequest:
        """The request for a call that gives the stage."""
        stages = self.subject.kernel.stages if self.stage in self.subject.kernel.stages else ()
        needed = tuple(dict.fromkeys([*self.problem.required, self.stage]))
        optional = tuple(name for name in self.problem.may_return if name != self.stage)
        return CallRequest(self.inputs.case.params, needed, optional, stages=stages)

    def seen(self) -> SeenCall | str:
        """Observe the operations of every program on the element's way, up to `MOST_PROGRAMS`; else say why not.

        Earlier calls show which programs these are: the one that wrote the element, those that wrote the memory it
        read, and so on; then programs on the way of elements written together with it. The last call is followed on
        residues. Of a single launch, the program that wrote it is enough, where it reads nothing of others. Of
        integers, which have no residues, programs of all elements are wanted: a row of a mask has but one border.
        """
        wanted: set[Program] = set()
        try:
            seen = first = self._call()
            program = None if first.write is None else first.write.program
            if program is not None and not first.tensor.is_floating_point():
                ends = first.log.last(first.where(np.arange(first.tensor.numel())), first.log.next())
                programs = dict.fromkeys([program, *(write.program for write, _, _ in ends)])
                wanted.update([own for own in programs if own is not None][:MOST_PROGRAMS])
                seen = self._call(wanted)
            elif len(first.log.launches) == 1 and program is not None:
                alone = self._call({program}, followed=True, only=True)
                if alone.stands_alone_for(first):
                    return alone
            elif program is not None and len(every := _programs(first.log)) <= MOST_PROGRAMS:
                return self._call(every, followed=True)
            while True:
                found = dict.fromkeys(write.program for write in seen.missing if write.program is not None)
                new = [program for program in found if program not in wanted][: MOST_PROGRAMS - len(wanted)]
                if not new:
                    return self._call(wanted, followed=True)
                wanted.update(new)
                seen = self._call(wanted)
        except TraceLimit as error:
            return str(error)
        except Exception as error:
            traceback.print_exc()
            return f"the kernel raises when it is observed: {first_line(error)}"

    def _call(self, wanted: Collection[Program] = (), *, followed: bool = False, only: bool = False) -> SeenCall:
        """Call the kernel, keep all operations of these programs, and find the write of the element and its path.

        With `only`, no other programs run.
        """
        kernel, handed = self.subject.kernel, self.inputs.hand_out()
        followed = followed and follows(handed) and not python_primitives(kernel)  # what these do has other residues
        shadow = ShadowMemory() if followed else None
        watching = traced(handed, wanted, only=only, shadow=shadow, primitives=kernel.primitives)
        with products_of(self.problem.constants), guarded_allocations(0), watching as log:
            tensor = results_of(kernel.call, self.asked, self.subject.device, handed)[self.stage].detach()
        shape = tuple(tensor.shape)
        number = np.array([np.ravel_multi_index(self.index or (0,) * len(shape), shape) if shape else 0])
        seen = SeenCall(log, tensor.clone(), addresses_of(tensor), tensors={**handed, self.stage: tensor})
        for write, _, lanes in log.last(seen.where(number), log.next()):  # of one element there is one
            seen = replace(seen, write=write, path=follow(log, write.event, lanes) if write.event else Path())
        self.inputs.restore()
        return seen


# Stages, and the line at fault.


def _reading(
    found: KernelTrace,
    problem: Problem,
    seen: SeenCall,
    index: tuple[int, ...],
    *,
    failing: bool,
    telling: bool = False,
) -> tuple[KernelTrace, Matches, Mending | None]:
    """Add the expressions that are stages of the reference to a trace, and the one at fault if it is `failing`.

    Returns the stages and the search for the wrong line beside it, if there was one. Nothing is added for a large case,
    and for a result that has no element for each cell or that no event wrote.
    """
    if seen.write is None or seen.write.event is None or problem.main.numel() > LARGEST:
        return found, {}, None
    grid = grid_of(problem, seen.tensor, seen.together, index)
    if grid is None:
        return found, {}, None
    with following_residues(), products_of(problem.constants):
        stages = Stages.of(grid, found.stage, seen.log, seen.where, telling=telling)
        matched, last = stages.matched({}), stages.all.get(found.stage)
        mended, first = None, None
        if failing and last is not None and last.name in matched and last.outside(stages.result).any():
            mended = find_mends(stages)
            of_mends = mended.stages
            if of_mends is stages:
                value, names = mended.value or matched[mended.stage], list(stages.all)
                before = {name: e for name, e in matched.items() if names.index(name) < names.index(mended.stage)}
                matched = stages.onward(mended.stage, value).matched({**before, mended.stage: value})
            else:
                value = mended.value or of_mends.matched({})[mended.stage]
            first = mended.blamed or value
        agreed = {name: stages.match(name, e, leaves=e is first) for name, e in matched.items()}
        if mended is not None and mended.stages is not stages:
            agreed[mended.stage] = mended.stages.match(mended.stage, value, leaves=True)
    worst = grid.worst if mended is None else mended.stages.grid.worst
    matches: dict[int, StageMatch | None] = {} if first is None else {first.event_of(worst).number: None}
    if mended is not None and mended.stages is not stages:
        matches[value.event_of(worst).number] = agreed[mended.stage]
    matches |= {e.event_of(grid.worst).number: agreed[name] for name, e in matched.items()}
    of_stage = {id(e): matches[e.event_of(grid.worst).number] for e in matched.values()}

    def step(e: Expression, worst: int, match: StageMatch | None = None, *, mend: str = "") -> Step:
        event = e.event_of(worst)
        own = step_of(seen.log, event, int(e.lanes[event.number][worst]))
        return replace(own, match=match or of_stage.get(id(e)), mend=mend)

    steps = tuple(step(e, grid.worst, agreed[name]) for name, e in matched.items())
    found = replace(found, stages=steps, unmatched=tuple(name for name in stages.all if name not in matched))
    if mended is None or first is None:
        return found, matches, None
    words = {id(mend.expression): mend.words for mend in mended.mends}
    mends = sorted(mended.mends, key=lambda mend: mend is not mended.only)
    blamed, lines = mended.blamed, grouped(mended.lines).items()
    found = replace(
        found,
        blamed=None if blamed is None else step(blamed, worst, mend=words.get(id(blamed), "")),
        leaves=step(first, worst, mend=words.get(id(first), "")),
        mended=tuple(step(mend.expression, worst, mend=mend.words) for mend in mends),
        between=tuple(f"{f}:{min(n)}" + (f" to {max(n)}" if max(n) > min(n) else "") for f, n in lines),
        since=mended.since,
        until=mended.stage,
        held=mended.held,
        wrong=mended.stage,
    )
    return found, matches, mended


# Findings about memory.


def _steps_of_findings(seen: SeenCall, findings: Iterable[Finding]) -> Iterator[Step]:
    """Yield the steps that findings name by place; for others, the writes to their tensor, the last one first."""
    for finding in findings:
        named, tensor = _steps_named(seen.log, [finding]), seen.tensors.get(finding.stage)
        yield from named
        if named or tensor is None or not tensor.numel():
            continue
        ends = addresses_of(tensor)(np.array([0, tensor.numel() - 1]))
        writes = [w for w in seen.log.writes if w.first <= ends.max() and w.last >= ends.min() and w.places]
        for write in reversed(writes):
            if write.event is None:
                yield step_at(write.places[0])
            elif not write.event.input and not is_unwritten(write.event):
                yield step_of(seen.log, write.event, -1)


def _programs(log: Log) -> set[Program]:
    """Return the programs that wrote anything."""
    return {write.program for write in log.writes if write.program is not None}


def _steps_named(log: Log, findings: Iterable[Finding]) -> tuple[Step, ...]:
    """Return the steps that findings name by place, such as a load of a gap."""
    recorded = (*(event.places for event in log.events), *(write.places for write in log.writes))
    known = {str(places[0]): places[0] for places in recorded if places}
    return tuple(step_at(place) for f in findings for text, place in known.items() if text in f.sentence)


def _is_sure(log: Log, step: Step) -> bool:
    """Return whether the addresses that a step reads or writes are computed in its own line, as far as was recorded."""
    at = step.file, step.line, step.column
    here = [e for e in log.events if e.places and (e.place.file, e.place.line, e.place.column) == at]
    return all(lines_of(chain_of_address(event, pointer=True)) <= {at[:2]} for event in here)
