"""The formula of a kernel in a case: the kernel is followed on residues, beside the calls that are judged."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from lastbit.calibrate import load_premises
from lastbit.case import Case, Group, TensorSpec, parse_case
from lastbit.config import Config
from lastbit.devices import DevicePlan, made_current
from lastbit.errors import LastbitError
from lastbit.inputs import Inputs, build, fingerprints
from lastbit.inputs.guards import extent
from lastbit.judging.formula import compare_formulas, describe_formula, explaining, kept_apart
from lastbit.judging.problem import Problem
from lastbit.result import OF_FORMULA, CaseResult, Judgement, StageResult, Verdict
from lastbit.shadows.following import Followed, follow
from lastbit.shadows.performed import PerformedSteps, performed
from lastbit.timing import FORMULAS, timed
from lastbit.verify.case_calls import Here
from lastbit.verify.check import Subject, after_raising, first_line
from lastbit.verify.device_memory import available_bytes
from lastbit.verify.plan import Item, Plan
from lastbit.verify.project import open_project
from lastbit.verify.worker import Tick, Watch, Worker, Workplace, prepare

J = TypeVar("J", bound=Judgement)

_LARGEST = 1 << 17
"""Elements of all tensors of a case that is followed: an operation on residues takes some 100 ns an element."""

_LARGEST_BESIDE = 1 << 23
"""Elements of a case on another device that nothing decides otherwise, memory between its rows included.

Of 8.2 million, a cross entropy in PyTorch takes some 70 s, while other processes of the run share the cores.
"""

# Of 0.7, each of three attentions over 1,000 keys in 300 queries was followed for 71 s, and the 31 s left of 102 s were
# too few for their reference, on busy cores. A hundredth of the programs decides a result (`_is_scarce`).
_SHARE_OF_ONE, _SHARE_OF_SEVERAL = 0.1, 0.6
"""Of the time for such a case, what goes into following programs; the rest is for the reference.

The first is of kernels whose last step is their only launch: of others, later steps need what every program writes.
"""

# Arbitrary: attention over 1,000 keys took all of its 102 s for each of four contracts of one function.
_LONG = 0.5
"""Of the time for such a case: if that much decided nothing, the same function is not followed in it again."""

_BYTES = 3000
"""Memory for each element of such a case: what the gradient of a cross entropy in PyTorch took for 2.3 million."""

_TOLD = "; its own process says that every element follows from the formula of the contract"

_BESIDE = "It was followed on the CPU, where it performs the same operations and programs."

# Arbitrary: below a millisecond for each operation, at the 100 ns above.
SMALL = 1 << 13
"""Elements of a case that is followed for its kind alone."""


def is_small(case: Case, most: int = SMALL) -> bool:
    """Return whether a case is small enough to follow a kernel in at little cost: it has at most so many elements."""
    return case.numel <= most


def follows(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a kernel can be followed on tensors: numbers on the CPU, and not too many."""
    given = tensors.values()
    here = any(t.is_floating_point() for t in given) and all(t.device.type == "cpu" for t in given)
    return here and sum(t.numel() for t in given) < _LARGEST


def judged_by_formula(judgement: J, problem: Problem, followed: Followed, *, alternatives: bool = True) -> J:
    """Return a judgement that broke no contract with what the formula of the kernel says of the results.

    A result whose residues are all those of the contract is decided, whatever the order of its sums left open; one of
    another formula fails. Where the kernel's own process told them, nothing is decided: it could have told the
    reference's, but none would tell those of another formula to pass. Other contracts are tried only with
    `alternatives`; the verdict is the same without.
    """
    compared = compare_formulas(problem, followed.results)
    judgement = replace(judgement, opaque=followed.opaque)
    if not followed.told:
        stages = [
            replace(s, equal=compared[s.name].equal, differing=compared[s.name].differs) if s.name in compared else s
            for s in judgement.stages
        ]
        judgement = replace(judgement, stages=tuple(stages))
    if wrong := {name: c for name, c in compared.items() if c.differs}:
        explained = explaining(problem, followed.results) if alternatives and not followed.told else ()
        findings = tuple(describe_formula(problem, name, c, explained) for name, c in wrong.items())
        findings = (*findings, *judgement.findings)
        return replace(judgement, verdict=Verdict.FAILED, reason="", findings=findings, explained_by=explained)
    if followed.told:
        equal = compared and all(c.equal == c.numel for c in compared.values())
        said = _TOLD if equal and judgement.verdict is Verdict.INCONCLUSIVE else ""
        return replace(judgement, reason=f"{judgement.reason}{said}")
    # Small cases tell contracts apart; of a large one, evaluating each other contract takes as long as its own.
    is_large = sum(t.numel() for t in problem.tensors.values()) >= _LARGEST
    others = problem.op.alternatives(problem.contract) if alternatives and not is_large else ()
    unknown = [c for c in others if judgement.ruled_out.get(str(c)) == 0]
    ruled_out = {**judgement.ruled_out, **kept_apart(problem, followed.results, unknown)}
    decided = judgement.verdict is Verdict.INCONCLUSIVE and any(s.decided for s in judgement.stages if s.result)
    verdict, reason = (Verdict.PASSED, "") if decided else (judgement.verdict, judgement.reason)
    return replace(judgement, verdict=verdict, reason=reason, ruled_out=ruled_out)


@timed(FORMULAS)
def followed_in(subject: Subject, case: Case, inputs: Inputs, results: Collection[str]) -> Followed | None:
    """Follow a kernel in one more call for a case; return None if it cannot be followed here.

    Raises:
        LastbitError: the process of the kernel has ended.
    """
    if case.displaced or not follows(inputs.tensors):
        return None
    problem, performer = subject.problem(inputs), subject.performer or Here(subject.kernel, subject.device)
    shapes = {name: problem.shapes[name] for name in problem.op.in_order(results)}
    return performer.follow(inputs, case.params, shapes, problem.constants)


def followed_anew(subject: Subject, case: Case, results: Collection[str]) -> tuple[Problem, Followed] | None:
    """Rebuild a case and follow its kernel; return the problem and the residues seen, None if it cannot be followed.

    Not on an accelerator: `with_formula` has the kernel followed on the CPU.

    Raises:
        LastbitError: the process of the kernel has ended.
    """
    if subject.device.type != "cpu":
        return None
    inputs = build(case.gathered(), subject.device)
    followed = followed_in(subject, case, inputs, results)
    return None if followed is None else (subject.problem(inputs), followed)


def with_formula(
    subject: Subject, case: Case, result: CaseResult, begins: Callable[[], None] = lambda: None
) -> CaseResult:
    """Return the result of a case of a run with what the formula of the kernel says, where it can be followed.

    That of a kernel on another device is followed on the CPU; `begins` starts the clock of the case anew.
    """
    return by_formula(subject, case, result, begins)[0]


@timed(FORMULAS)
def by_formula(
    subject: Subject,
    case: Case,
    result: CaseResult,
    begins: Callable[[], None] = lambda: None,
    *,
    alternatives: bool = True,
) -> tuple[CaseResult, tuple[Problem, Followed] | None]:
    """Judge as `with_formula`; also return the problem and the residues if the kernel was followed here.

    Other contracts are tried only with `alternatives`, and on another device always; the verdict is the same without.
    """
    start, found = time.perf_counter(), None
    if result.verdict not in (Verdict.PASSED, Verdict.INCONCLUSIVE):
        return result, None
    if subject.device.type != "cpu":
        judged = _with_formula_beside(subject, case, result, begins)
    else:
        try:
            found = followed_anew(subject, case, result.results)
        except LastbitError as error:
            return after_raising(subject, result, error)[0], None
        judged = result if found is None else judged_by_formula(result, *found, alternatives=alternatives)
    if judged is not result:
        judged = replace(judged, seconds=result.seconds + time.perf_counter() - start)
    return judged, found


def _with_formula_beside(subject: Subject, case: Case, result: CaseResult, begins: Callable[[], None]) -> CaseResult:
    """Return the result of a case on another device with what the formula of the kernel says on the CPU.

    It says something of this device if the kernel performs the same here, on the same bits.
    """
    if subject.beside is None or subject.performer is not None:
        return result
    size = sum(map(_span, case.tensors))
    if size >= _LARGEST_BESIDE or size * _BYTES > available_bytes():
        return _undecided(result, "the case is too large for that")
    key = subject.kernel.source or subject.kernel.name, str(case)
    if key in subject.beside.given_up:
        return _undecided(result, "the same function took too long there")
    start = time.monotonic()
    try:
        with made_current(subject.device):
            given = build(case.gathered(), subject.device).hand_out()
            seen = performed(subject.kernel, given, case.params, subject.device.type)
    except Exception as why:
        return _undecided(result, f"called once more here, the kernel raised {first_line(why)}")
    try:
        begins()
        subject.beside.open()
        begins()
        compiled = "torch._dynamo" in sys.modules
        judged = subject.beside.worker.do(follow_beside, subject.kernel.name, result, seen, compiled=compiled)
    except LastbitError as why:
        why_not = str(why).partition(f", in {case.op} ")[0]  # without the case, where the process ended in it
        judged = _undecided(result, why_not)
    if judged.verdict is Verdict.INCONCLUSIVE and time.monotonic() - start > _LONG * subject.beside.limit:
        subject.beside.given_up.add(key)
    return judged


def _span(tensor: TensorSpec) -> int:
    """Return the number of elements in a tensor's memory span; its own number if some of them share memory."""
    held = tensor.numel if tensor.strides is None else extent(tensor.shape, tensor.strides)
    return max(held + tensor.offset, tensor.numel)


def _undecided(result: CaseResult, why: str) -> CaseResult:
    if result.verdict is not Verdict.INCONCLUSIVE:
        return result
    return replace(result, reason=f"{result.reason}; residues, on the CPU, say nothing: {why}")


class Beside:
    """Process on the CPU that follows the kernels of a configuration; it is started when needed.

    Attributes:
        limit: seconds in which it follows a kernel in a case.
        given_up: where a function is written, and a case in which following it took too long and decided nothing.
    """

    def __init__(self, config: Config) -> None:
        # Less than the time of a case, so that the clock of the case that waits does not end its process.
        self.limit = 0.85 * config.timeout
        self.given_up = set[tuple[str, str]]()
        self._config = replace(config, device_plan=DevicePlan(), timeout=self.limit, lines=(), folder="")
        self._refused: LastbitError | None = None

    def open(self) -> None:
        """Start the process, unless it runs.

        Raises:
            LastbitError: the kernels cannot be loaded there, as was found now or before.
        """
        if self._refused is not None:
            raise self._refused
        try:
            self.worker.open()
        except LastbitError as error:
            self._refused = error
            raise

    @cached_property
    def worker(self) -> Worker:
        """The process on the CPU that follows kernels on residues while this one has the GPU."""
        return Worker(self._config, opening=open_to_follow)


def open_to_follow(config: Config, watch: Watch, tick: Tick) -> Workplace:
    """Make this process one that follows kernels on the CPU, whichever device they are declared for; plan no case.

    Raises:
        LastbitError: Triton was imported before, or the kernels cannot be loaded.
    """
    device = torch.device("cpu")
    prepare(device)
    project = open_project(config)
    kernels = (*project.kernels({}), *project.kernels_of_revisions()[0])
    subjects = (Subject(kernel, project.op(kernel.op), device, load_premises(device)) for kernel in kernels)
    return Workplace(config, project, Plan(tuple(Item(one, Group("")) for one in subjects), (), 0), watch, tick)


def follow_beside(
    place: Workplace, kernel: str, result: CaseResult, elsewhere: PerformedSteps, *, compiled: bool
) -> CaseResult:
    """Return the result of a case on another device with what the formula of the kernel says here.

    Args:
        place, kernel: where it is followed, and its name.
        result: of the case on the other device.
        elsewhere: what the kernel performed there.
        compiled: torch's compiler was at work there, and is not to be here.
    """
    if compiled:
        importlib.import_module("torch._dynamo")  # once it is there, functions run as they are written
    device_type = torch.device(result.device).type
    subject, case = place.subjects[kernel], parse_case(result.case).gathered()
    with place.watch(case):
        inputs = build(case, subject.device)
        if fingerprints(inputs.tensors) != result.fingerprint:
            return _undecided(result, "its inputs have other bits there")
        try:
            for _ in range(2):  # the first call may fill a cache, which was full elsewhere
                own = performed(subject.kernel, inputs.hand_out(), inputs.case.params, device_type)
                inputs.restore()
                if not (why := elsewhere.apart(own)):
                    break
            if why:  # it may compute something else here
                return _undecided(result, why)
        except Exception as error:
            return _undecided(result, f"the kernel raised {first_line(error)}")
        problem = subject.problem(inputs)
        names = tuple(problem.op.in_order(result.results))
        given = inputs.hand_out(), case.params, names, problem.constants
        share = _SHARE_OF_ONE if own.end_with_the_only_launch else _SHARE_OF_SEVERAL
        seconds = share * place.config.timeout
        followed = follow(subject.kernel, *given, device_type=device_type, seconds=seconds)
        judged = judged_by_formula(result, problem, followed)
    if followed.cut and judged.verdict is Verdict.PASSED and any(_is_scarce(s) for s in judged.stages if s.result):
        return _undecided(result, "the time was enough for too few of its programs")
    findings = tuple(
        replace(f, sentence=f"{f.sentence} {_BESIDE}") if f.kind == OF_FORMULA and f not in result.findings else f
        for f in judged.findings
    )
    judged = replace(judged, findings=findings)
    return _undecided(judged, followed.opaque[0]) if followed.opaque else judged


def _is_scarce(stage: StageResult) -> bool:
    """Return whether less than 1 % of a result was decided."""
    return 100 * stage.decided < stage.cumulative.numel - stage.constant
