"""Explanation of a failure: the wrong line, the arithmetic of the worst element, and patterns in the errors."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from lastbit.case import Case
from lastbit.config import Config
from lastbit.devices import DevicePlan
from lastbit.diagnosing.diagnoses import branches_alone, in_common, wrong_product
from lastbit.diagnosing.handover import MOST
from lastbit.diagnosing.trace import NOTHING, begun, judged_to_explain, trace_result
from lastbit.diagnosing.worked import inputs_of, worked_arithmetic
from lastbit.inputs import build
from lastbit.judging.observation import Observation
from lastbit.reports.why import Explanation
from lastbit.result import BAD, OF_STAGES, Verdict, simplest, told
from lastbit.shrinking.pasted import is_interpreted, test_of
from lastbit.shrinking.smallest import smallest_of
from lastbit.verify.check import Subject
from lastbit.verify.notes import Planned
from lastbit.verify.worker import Watch, Worker, WorkerEnded, on_case, planned, unwatched

# Arbitrary: too low begins what does not end in time, too high leaves time unused; most take less.
TIMES_JUDGED = 4.0
"""How many times as long as judging a case it takes to follow its worst element, at most as a rule."""
# Arbitrary: the finding is there without them. smallest.md has medians: up to 2 s for norms, 20 s for experts.
SHRINKING = 2.0
"""Seconds that are spent on smaller tensors, if there are so many."""
# Arbitrary: forty calls of most kernels, interpreted, take one.
COMPARING = 2.0
"""Seconds in which the branches of a failing case are compared with those of cases that passed."""
# Arbitrary: less is over before tries tell anything.
LEAST = 1.0
"""Seconds below which smaller tensors are not looked for."""

KEEPS = (
    "on the CPU, interpreted, the kernel keeps its contract on this case: what differs is what {} does with the same "
    "text, such as fused multiplications and additions, approximate functions, or the order of sums"
)
FOLLOWED = "the element and its way are those of the same case on the CPU, interpreted"


def explain_case(subject: Subject, case: Case, *, watch: Watch = unwatched, seconds: float = math.inf) -> Explanation:
    """Judge a kernel on a case and say why it fails there; smaller tensors are not looked for.

    The element is followed through the kernel on the CPU only, and not if that would take longer than `seconds`.
    """
    start = time.monotonic()
    with watch(case):
        judged = judged_to_explain(subject, case)
    result, on_cpu = judged.result, subject.device.type == "cpu"
    stage, worst = judged.target or ("", None)
    found = Explanation(
        *(result.kernel, result.device, result.case, result.verdict, replace(begun(result), reason=result.reason)),
        explained_by=simplest(result.explained_by, result.contract),
        reason="" if worst else result.reason or NOTHING,
        findings=tuple(finding.sentence for finding in result.faults),
        stage=stage,
        worst=worst,
    )
    if worst is None:
        return found
    if on_cpu and time.monotonic() - start + TIMES_JUDGED * result.seconds > seconds:
        found = _noting(found, f"the way of the element is left out: it does not fit into {seconds:.3g} s")
    elif on_cpu:
        left = seconds - (time.monotonic() - start)
        found = replace(found, trace=trace_result(judged, watch=watch, seconds=left))
    if case.tensors[0].numel > MOST:
        found = _noting(found, f"the reference is evaluated at once for at most {MOST:,} elements of an input")
    else:
        problem = subject.problem(build(case.gathered(), subject.device))
        seen, whole = Observation.of(problem, judged.actual), tuple(judged.actual[stage].shape)
        found = replace(found, inputs=inputs_of(problem, worst.index, whole, found.trace.steps))
        own = () if found.elsewhere else found.trace.stages  # else they are stages of another element
        steps = {step.match.stage: step for step in own if step.match is not None}
        found = replace(
            found,
            arithmetic=worked_arithmetic(seen, stage, worst.index, steps),
            diagnoses=in_common(seen, result) if result.verdict is Verdict.FAILED else (),
        )
    if result.verdict is Verdict.FAILED and on_cpu and (wrong := wrong_product(subject, case)):
        found = replace(found, diagnoses=(wrong, *found.diagnoses))
    if any(finding.kind in OF_STAGES for finding in result.faults):
        return found
    # Findings that are not about values blame no stage; a line blamed for memory stays.
    arithmetic = tuple(replace(worked, did="") for worked in found.arithmetic)
    return replace(found, arithmetic=arithmetic, trace=replace(found.trace, wrong=""))


class Explainer(ExitStack):
    """Explains failures of kernels, in processes of its own.

    `config` names one device and holds the lines of the cases that are to be explained. Kernels on an accelerator are
    judged there; the element is followed on the CPU, where the same kernel is interpreted.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._config = config
        self._worker = self.enter_context(Worker(config))

    @cached_property
    def planned(self) -> tuple[Planned, ...]:
        """The kernels that can run the case lines."""
        return self._worker.do(planned)

    @cached_property
    def _on_cpu(self) -> Worker:
        """A worker process that runs the same kernels on the CPU."""
        return self.enter_context(Worker(replace(self._config, device_plan=DevicePlan())))

    def explain(self, kernel: str, line: str, *, seconds: float = math.inf, passed: Sequence[str] = ()) -> Explanation:
        """Explain why a kernel fails on a case line; if it ends its process, give that as the reason.

        Parts that do not fit into `seconds` are left out, and named in the reason. Where no line is sure, the branches
        are told that the kernel takes in this case, and hardly ever in those that `passed`.
        """
        deadline = time.monotonic() + seconds
        item = next(item for item in self.planned if item.kernel == kernel)
        found = _explained(self._worker, item, line, deadline - time.monotonic())
        if found.verdict not in BAD:
            return found
        if found.verdict is Verdict.FAILED and item.device != "cpu":
            found = self._followed(found, deadline - time.monotonic())
        if passed and found.culprit is None and (seconds := min(COMPARING, deadline - time.monotonic())) > 0:
            with suppress(WorkerEnded):
                alone = self._worker.do(branches_alone, kernel, line, passed, seconds=seconds)
                found = replace(found, diagnoses=(*alone, *found.diagnoses))
        return self._shrunk(item, found, min(SHRINKING, deadline - time.monotonic()))

    def _shrunk(self, item: Planned, found: Explanation, seconds: float) -> Explanation:
        """Add the smallest tensors found on which the kernel fails in the same way, and a test of them."""
        if seconds < LEAST:
            return _noting(found, "no time was left for smaller tensors")
        try:
            case = self._worker.do(smallest_of, found.kernel, found.case, seconds=seconds)
            on_cpu = case is not None and item.device == "cpu"
            interpreted = on_cpu and self._worker.do(is_interpreted, found.kernel, str(case))
        except WorkerEnded as ended:
            return _noting(found, f"smaller tensors were not found: {ended}")
        if case is None:
            return _noting(found, f"no smaller tensors that fail alike were found in {seconds:.0f} s")
        names = found.trace.op, told(found.trace.contract, found.trace.idle), case, found.kernel
        source = item.source.removeprefix(f"{Path.cwd()}/")  # a test is pasted elsewhere, and goes to others
        test = test_of(*names, source=source, device=item.device, interpreted=interpreted)
        return replace(found, smallest=str(case), test=test)

    def _followed(self, own: Explanation, seconds: float) -> Explanation:
        """Add the trace of the same case on the CPU to what was seen on an accelerator."""
        item = next((i for i in self._on_cpu.do(planned) if i.kernel == own.kernel), None)
        if item is None:
            return _noting(own, f"{own.kernel} does not run on the CPU, where its element would be followed")
        there = _explained(self._on_cpu, item, own.case, seconds)
        if there.verdict is Verdict.PASSED:
            return _noting(replace(own, trace=there.trace), KEEPS.format(own.device))
        if there.verdict is not Verdict.FAILED:
            return _noting(replace(own, trace=there.trace), f"on the CPU, interpreted: {there.reason or there.verdict}")
        there = replace(there, device=own.device, explained_by=own.explained_by)
        there = replace(there, findings=own.findings, diagnoses=own.diagnoses)
        return _noting(there, FOLLOWED)


def _explained(worker: Worker, item: Planned, line: str, seconds: float) -> Explanation:
    """Explain a case line in a worker; if the kernel ends its process, return that reason alone."""
    try:
        return worker.do(on_case, explain_case, item.kernel, line, seconds=seconds)
    except WorkerEnded as ended:
        names = item.kernel, item.op, item.contract, line, item.device
        return Explanation.of_nothing(*names, verdict=Verdict.ERRORED, reason=str(ended))


def _noting(found: Explanation, reason: str) -> Explanation:
    return replace(found, reason="; ".join(filter(None, [found.reason, reason])))
