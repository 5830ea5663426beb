"""One case of one kernel, end to end: build inputs, call under guards, judge."""

from __future__ import annotations

import inspect
import re
import sys
import time
import traceback
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lastbit.case import Case, Param, shortened
from lastbit.devices import machine, made_current
from lastbit.errors import UnsupportedCase, UsageError
from lastbit.inputs import Inputs, build, fingerprints
from lastbit.inputs.of_case import check_places
from lastbit.inputs.values import check_regime
from lastbit.interpret import races
from lastbit.isolation.answers import KernelProcessEnded, Raised
from lastbit.judging.problem import PROBLEMS, Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.numerics import Premises, remembering
from lastbit.ops import Contract, Op, check_arguments
from lastbit.result import CaseResult, Verdict
from lastbit.takes import beyond
from lastbit.verify.case_calls import ELSEWHERE, Caller, Here, make_calls
from lastbit.verify.device_memory import out_of_memory
from lastbit.verify.placed import placement_findings

if TYPE_CHECKING:
    from lastbit.isolation.isolated import Isolated
    from lastbit.verify.formula_check import Beside

_REST = "the other cases of its group did not run"
# 256 MiB of fp32, and what is evaluated of them in fp64 takes many times that.
_LARGE = 1 << 26  # elements of a case after which memory goes back to the device, which other processes share


@dataclass(frozen=True)
class Subject:
    """A kernel on a device, with the op and contract that it is held to and the premises of the device.

    Attributes:
        strict: notices fail a case.
        races: interpreted kernels are watched for races between programs.
        performer: where its calls are performed, if not in this process.
        beside: what follows it on the CPU, where its device is another one.
    """

    kernel: Kernel
    op: Op
    device: torch.device
    premises: Premises = field(default_factory=Premises)
    strict: bool = False
    races: bool = False
    performer: Here | Isolated | None = None
    beside: Beside | None = None

    @property
    def contract(self) -> Contract:
        return self.op.contract(self.kernel.contract)

    @property
    def bounds(self) -> Premises:
        """The premises for this kernel: height and order of its sums, and results whose atomic additions may flush.

        On NVIDIA GPUs, fp32 additions that are atomic in global memory flush subnormal numbers to zero, however the
        kernel was compiled (PTX ISA, atom and red).
        """
        kernel = self.kernel
        return replace(self.premises, depth=kernel.depth, order=kernel.order, atomic=frozenset(kernel.unordered))

    @property
    def takes_several(self) -> bool:
        """Return whether the kernel takes a tensor besides the op's first, whose device is the run's."""
        return not self.kernel.accepts.isdisjoint(self.op.inputs[1:])

    @property
    def is_lost(self) -> bool:
        """Return whether the process that performs its calls has ended."""
        return self.performer is not None and self.performer.over

    def problem(self, inputs: Inputs) -> Problem:
        """Return the problem that the kernel solves in a case."""
        return PROBLEMS.of(self.op, self.contract, inputs, self.bounds)

    def caller(self, problem: Problem) -> Caller:
        """Return what calls the kernel in a case, and knows the results that the problem asks for."""
        names = tuple(problem.required), tuple(problem.may_return)
        return Caller(self.kernel, self.device, *names, self.performer, problem.shapes)

    def outcome(self, verdict: Verdict, case: str, dtypes: str, *, reason: str = "", group: str = "") -> CaseResult:
        """Make a result without a judgement."""
        return CaseResult(
            verdict,
            case=case,
            op=self.kernel.op,
            kernel=self.kernel.name,
            contract=str(self.contract),
            device=str(self.device),
            dtypes=dtypes,
            reason=reason,
            group=group,
            source=self.kernel.source,
        )

    def __str__(self) -> str:
        return f"{self.kernel.name} on {self.device}"


def verify_case(
    subject: Subject,
    case: Case,
    *,
    repeat: bool = True,
    renumber: bool = True,
    settled: Collection[str] | None = (),
) -> CaseResult:
    """Call the kernel on `case` and judge it; nothing that the kernel does wrong raises.

    Two calls find their own allocations filled with different bits. The later one also stores the stages that the
    kernel declares, and an interpreted one runs its programs in descending order: results that differ were not written,
    or depend on something else. With `repeat`, calls between them see other values of the same shapes, no guards on
    allocations, and with `renumber` other numbers for the parameters. Alternative contracts that are `settled` are not
    ruled out again; None tries none at all, which changes no verdict.
    """
    result, actual, raised = _examined(subject, case, repeat, renumber, settled)
    del actual  # large, and nobody's any more
    print(raised, end="", file=sys.stderr)  # pytest keeps it in the log of the run
    if subject.device.type != "cpu" and case.numel > _LARGE:
        torch.accelerator.empty_cache()
    return result


def examine(subject: Subject, case: Case) -> tuple[CaseResult, dict[str, Tensor]]:
    """Verify a case as `verify_case` without `repeat`; also return copies of the judged tensors, by stage."""
    result, actual, _ = _examined(subject, case, repeat=False, renumber=False, settled=())
    return result, {name: tensor.clone() for name, tensor in actual.items()}


def _examined(
    subject: Subject, case: Case, repeat: bool, renumber: bool, settled: Collection[str] | None
) -> tuple[CaseResult, dict[str, Tensor], str]:
    """Return the result of a case, the tensors that were judged, and the traceback of the kernel's exception."""
    kernel, outcome = subject.kernel, subject.outcome(Verdict.UNSUPPORTED, str(case), case.dtypes)
    actual: dict[str, Tensor] = {}
    raised = ""
    start = time.perf_counter()
    try:
        check_arguments(subject.op, [t.name for t in case.tensors], case.params)
        if reason := unsupported(kernel, case):
            return replace(outcome, reason=reason), {}, ""
        with made_current(subject.device):  # where Triton launches
            outcome, actual = _judged(subject, case, outcome, repeat, renumber, settled)
    except UnsupportedCase as error:
        outcome = replace(outcome, reason=str(error), declined=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the kernel's own code runs here: whatever it raises is its outcome, SystemExit too
        outcome, raised = after_raising(subject, outcome, error)
    return replace(outcome, seconds=time.perf_counter() - start), actual, raised


def after_raising(subject: Subject, result: CaseResult, error: BaseException) -> tuple[CaseResult, str]:
    """Return the result and traceback for a case in which the kernel raised, or memory ran out."""
    raised = error.traceback if isinstance(error, Raised) else "".join(traceback.format_exception(error))
    PROBLEMS.forget()  # nobody knows what the kernel did before
    # In one line, with the call in which it was raised unless that is the first.
    rest = f"; {_REST}" if isinstance(error, Raised) and error.lost else ""
    notes = (note for note in getattr(error, "__notes__", ()) if note.startswith(ELSEWHERE))
    told = " ".join([f"{first_line(error)}{rest}", *notes])
    lacking = out_of_memory(error, subject.kernel, subject.device)
    verdict, reason = lacking or (Verdict.ERRORED, told)
    return replace(result, verdict=verdict, reason=reason), raised


def takes(subject: Subject, case: Case) -> bool:
    """Return whether the kernel's signature can take the case, and the op defines results for it."""
    if unsupported(subject.kernel, case):
        return False
    try:
        check_arguments(subject.op, [t.name for t in case.tensors], case.params)
        return bool(subject.problem(build(case.gathered(), subject.device)).results)
    except Exception:  # an op's reference may raise whatever it likes for shapes that do not fit
        return False


# Arbitrary: the time that a reader waits before anything runs; larger lines are checked when they run.
_MOST_ASKED = 1 << 16
"""Elements of a line's tensors up to which its op is asked whether it is defined for them."""


def check_line(op: Op, case: Case, contracts: Collection[Contract] = ()) -> None:
    """Raise a `UsageError` for a line that is no case of its op, whatever a kernel does.

    That is for names that the op does not have or that are missing, words in place of numbers, regimes, and strides.
    With `contracts`, of which none is defined for these tensors and parameters, as for options that need each other,
    too: the reference says so.
    """
    try:
        check_arguments(op, [t.name for t in case.tensors], case.params)
        _check_kinds(op, case.params)
        for tensor in case.tensors:
            check_regime(tensor)
        check_places(case)
        if contracts and case.numel <= _MOST_ASKED:
            _check_defined(op, contracts, case)
    except UsageError as error:
        raise UsageError(f"case line {shortened(str(case))!r}: {error}") from error


_NUMBERS = {"int", "float"}
_BESIDE_NUMBERS = {"bool", "None", "NoneType", "Optional", "Union", "typing", "class"}


def _check_kinds(op: Op, params: Mapping[str, Param]) -> None:
    """Raise `UsageError` for a word or a truth value where the reference is annotated with a number and no more.

    What a name of the reference's own may stand for, or a Literal hold, is not looked at.
    """
    kinds = inspect.get_annotations(op.reference)
    for name, value in params.items():
        words = set(re.findall(r"\w+", str(kinds.get(name, ""))))
        only_numbers = words & _NUMBERS and words <= _NUMBERS | _BESIDE_NUMBERS
        if isinstance(value, str | bool) and only_numbers and type(value).__name__ not in words:
            raise UsageError(f"{name}={value} of {op.name} must be a number")


def _check_defined(op: Op, contracts: Collection[Contract], case: Case) -> None:
    dense = (replace(t, strides=None, offset=0, memory="", device="") for t in case.tensors)  # gaps may be gigabytes
    tensors = build(replace(case, tensors=tuple(dense)), "cpu").tensors
    refusals = list[UsageError]()
    for contract in contracts:
        try:
            _ = Problem(op, contract, tensors, case.params).results
        except UsageError as error:
            refusals.append(error)
        except Exception:  # what a reference raises for its own mistakes is told when the case runs
            return
        else:
            return
    # The reference's own words: no contract has to do with it.
    raise UsageError(f"{op.name}: {refusals[0].__cause__ or refusals[0]}")


def unsupported(kernel: Kernel, case: Case) -> str:
    """Return why the kernel does not take the case, by its signature or by what it declares, or an empty string."""
    if extra := case.names - kernel.accepts:
        return f"the kernel takes no {', '.join(sorted(extra))}"
    if missing := kernel.requires - case.names:
        return f"the kernel needs {', '.join(sorted(missing))}"
    if shared := [t.name for t in case.tensors if t.name in kernel.held and t.repeats]:
        return f"the kernel leaves {kernel.held[shared[0]]} in {shared[0]}, of which some elements share memory here"
    outside = beyond(kernel.takes, case)
    return f"the kernel declares that it takes less: {outside}" if outside else ""


@remembering()
def _judged(
    subject: Subject, case: Case, outcome: CaseResult, repeat: bool, renumber: bool, settled: Collection[str] | None
) -> tuple[CaseResult, dict[str, Tensor]]:
    inputs = build(case.gathered(), subject.device)
    problem = subject.problem(inputs)
    caller = subject.caller(problem)
    with races() if subject.races else nullcontext():
        calls = make_calls(caller, inputs, subject.problem, repeat=repeat, renumber=renumber)
    del inputs  # before anything is judged, which takes memory itself
    # The first call is judged with the stages of the last, or the last if its results are worse.
    first, last = calls.first.actual, calls.last.actual
    candidates = [{**last, **{name: first[name] for name in calls.first.results}}]
    if not calls.apart.isdisjoint(calls.kernel.unordered):
        candidates.append(last)
    tried, done = settled is not None, settled or ()
    judged = ((judge(problem, actual, alternatives=tried, settled=done), actual) for actual in candidates)
    judgement, actual = max(judged, key=lambda pair: list(Verdict).index(pair[0].verdict))
    findings = [*calls.findings()]
    if case.displaced:  # with another device current than the kernel's, if there is one
        peers = machine().peers(str(subject.device))
        with made_current(peers[0] if peers else subject.device):
            displaced = build(case, subject.device)
            findings += placement_findings(subject.kernel, displaced, subject.device, caller.attempt)
    if judgement.verdict is not Verdict.FAILED:
        findings += [*(calls.other.forbidden if calls.other else ()), *calls.renumbered]
    if any(finding.kind == "wrote_outside" for finding in findings):
        PROBLEMS.forget()
    findings = list(dict.fromkeys(findings))
    verdict = Verdict.worst(judgement.verdict, *[Verdict.FAILED for _ in findings])
    whole = replace(judgement, verdict=verdict, findings=(*findings, *judgement.findings))
    result = replace(outcome.judged(whole), fingerprint=fingerprints(problem.tensors))
    return result.strict if subject.strict else result, actual


def first_line(error: BaseException) -> str:
    """Return type and first line of an exception; also the last line if the first ends in a colon, as a compiler's."""
    if isinstance(error, KernelProcessEnded):
        return f"{error}; {_REST}"
    kind = error.kind if isinstance(error, Raised) else type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    text = f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"{kind}: {text}".rstrip(": ")
