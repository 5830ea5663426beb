"""One case of one kernel, end to end: build inputs, call under guards, judge."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from harness.case import Case
from harness.devices import current, machine
from harness.errors import KernelError, UnsupportedCase
from harness.inputs import Inputs, Poisoned, build, guarded_allocations, overlaps, unwritten
from harness.kernel import Kernel
from harness.numerics import Premises
from harness.op import Contract, Op
from harness.result import CaseResult, Finding, Verdict
from harness.verify.evaluate import check_arguments, evaluate
from harness.verify.judge import judge
from harness.verify.placed import placement_findings

_LARGE = 1 << 26  # elements of a case after which memory goes back to the device, which other processes share


@dataclass(frozen=True)
class Subject:
    """A kernel on a device, with the op and contract that it is held to and the premises of the device."""

    kernel: Kernel
    op: Op
    device: torch.device
    premises: Premises = field(default_factory=Premises)

    @property
    def contract(self) -> Contract:
        return self.op.contract(self.kernel.contract)

    @property
    def bounds(self) -> Premises:
        """The premises as they hold for the kernel: the height of its sums, and what atomic additions flush.

        On NVIDIA GPUs, fp32 additions that are atomic in global memory flush subnormal numbers to zero, however the
        kernel was compiled (PTX ISA, atom and red).
        """
        return replace(self.premises, depth=self.kernel.depth, atomic=frozenset(self.kernel.unordered))

    def __str__(self) -> str:
        return f"{self.kernel.name} on {self.device}"


@dataclass(frozen=True)
class _Call:
    """What one call of the kernel returned, and what the guards saw: `poisoned` is by result."""

    actual: dict[str, Tensor]
    findings: tuple[Finding, ...]
    poisoned: Mapping[str, Poisoned]


def verify_case(subject: Subject, case: Case) -> CaseResult:
    """Run the kernel twice on `case` and judge it; nothing that the kernel does wrong raises.

    The two calls find their own allocations filled with different bits, and the second also stores the stages that
    the kernel declares: results that differ between the calls were not written, or depend on something else.
    """
    examined = _examined(subject, case)
    print(examined.traceback, end="", file=sys.stderr)  # pytest keeps it in the log of the run
    result = examined.result
    del examined  # and the tensors with it
    if subject.device.type != "cpu" and sum(t.numel for t in case.tensors) > _LARGE:
        torch.accelerator.empty_cache()
    return result


def examine(subject: Subject, case: Case) -> tuple[CaseResult, dict[str, Tensor]]:
    """Like `verify_case`; also the tensors that were judged, by stage: none if nothing was."""
    examined = _examined(subject, case)
    return examined.result, examined.actual


@dataclass(frozen=True)
class _Examined:
    """A case that was judged, the tensors that it was judged by, and the traceback of what the kernel raised."""

    result: CaseResult
    actual: dict[str, Tensor] = field(default_factory=dict)
    traceback: str = ""


def _examined(subject: Subject, case: Case) -> _Examined:
    kernel = subject.kernel
    outcome = CaseResult(
        case=str(case),
        op=case.op,
        kernel=kernel.name,
        contract=str(subject.contract),
        device=str(subject.device),
        dtypes=case.dtypes,
        verdict=Verdict.UNSUPPORTED,
        source=kernel.source,
    )
    actual: dict[str, Tensor] = {}
    raised = ""
    start = time.perf_counter()
    try:
        check_arguments(subject.op, [t.name for t in case.tensors], case.params)
        if reason := unsupported(kernel, case):
            return _Examined(replace(outcome, reason=reason))
        with current(subject.device):  # where Triton launches
            outcome, actual = _judged(subject, case, outcome)
    except UnsupportedCase as error:
        outcome = replace(outcome, reason=str(error))
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # the kernel's own code runs here: whatever it raises, SystemExit too, is its outcome
        raised = traceback.format_exc()
        outcome = replace(outcome, verdict=Verdict.ERRORED, reason=first_line(error))
    return _Examined(replace(outcome, seconds=time.perf_counter() - start), actual, raised)


def unsupported(kernel: Kernel, case: Case) -> str:
    """Why the kernel's signature cannot take the case, or an empty string."""
    if extra := case.names - kernel.accepts:
        return f"the kernel takes no {', '.join(sorted(extra))}"
    if missing := kernel.requires - case.names:
        return f"the kernel needs {', '.join(sorted(missing))}"
    return ""


def _judged(subject: Subject, case: Case, outcome: CaseResult) -> tuple[CaseResult, dict[str, Tensor]]:
    params = dict(case.params)
    inputs = build(case.gathered(), subject.device)
    results = tuple(_results(subject, inputs.tensors, params))
    first = _call(subject, inputs, params, results, poison=0)
    second = _call(subject, inputs, params, results, poison=1)
    guards = dict.fromkeys([*first.findings, *second.findings])
    differences = _differences(first, second, results, subject.kernel.unordered)
    findings = (*guards, *differences, *_placement(subject, case, results))
    kept = {**second.actual, **{name: first.actual[name] for name in results}}
    judged = [kept, second.actual] if _differ(first.actual, second.actual, subject.kernel.unordered) else [kept]
    judgements = [judge(subject.op, subject.contract, inputs.tensors, params, a, subject.bounds) for a in judged]
    judgement, actual = max(zip(judgements, judged, strict=True), key=lambda j: list(Verdict).index(j[0].verdict))
    judged_outcome = replace(
        outcome,
        verdict=Verdict.worst(judgement.verdict, *[Verdict.FAILED for _ in findings]),
        stages=judgement.stages,
        findings=(*findings, *judgement.findings),
        rows=judgement.rows,
        ruled_out=judgement.ruled_out,
        explained_by=judgement.explained_by,
        reason=judgement.reason,
        fingerprint=inputs.fingerprint,
    )
    return judged_outcome, actual


def _results(subject: Subject, tensors: Mapping[str, Tensor], params: Mapping[str, Any]) -> list[str]:
    """Names of the results that this problem has: the reference says, on its first row."""
    rows = {n: t[tuple(slice(0, 1) for _ in t.shape[:-1])] if n in subject.op.rows else t for n, t in tensors.items()}
    return evaluate(subject.op, subject.contract, rows, params).results


def _placement(subject: Subject, case: Case, results: tuple[str, ...]) -> tuple[Finding, ...]:
    """What the kernel does wrong with tensors on another device, while another device is current where there is one."""
    if not case.displaced:
        return ()

    def call(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        returned = subject.kernel.call(**tensors, **case.params)
        if subject.device.type != "cpu":
            torch.accelerator.synchronize(subject.device)
        actual = _named(returned, results)
        return {name: actual[name] for name in results}

    peers = machine().peers(str(subject.device))
    with current(peers[0] if peers else subject.device):
        return placement_findings(subject.kernel, build(case, subject.device), subject.device, call)


def _call(
    subject: Subject, inputs: Inputs, params: Mapping[str, Any], results: tuple[str, ...], *, poison: int
) -> _Call:
    kernel = subject.kernel
    asked = {"stages": kernel.stages} if poison and kernel.stages else {}
    with guarded_allocations(poison) as allocations:
        returned = kernel.call(**inputs.tensors, **params, **asked)
        if subject.device.type != "cpu":
            torch.accelerator.synchronize(subject.device)
    actual = _named(returned, results)
    poisoned = {name: allocations.poisoned(actual[name]) for name in results}
    mutates = [name for name in kernel.mutates if name in inputs.tensors]
    violations = [*inputs.violations(mutates), *allocations.violations(actual)]
    findings = [Finding(v.kind, v.tensor, v.sentence) for v in violations]
    findings += _shared_memory(actual, inputs, kernel, results)
    if violations or mutates:
        actual = {name: tensor.clone() for name, tensor in actual.items()}
        inputs.restore()
    return _Call(actual, tuple(findings), poisoned)


def _named(returned: object, results: tuple[str, ...]) -> dict[str, Tensor]:
    """The kernel's return value as a mapping from stages to tensors."""
    if isinstance(returned, Tensor) and len(results) == 1:
        return {results[0]: returned}
    if not isinstance(returned, Mapping):
        expected = f"a tensor or {{{results[0]!r}: tensor}}" if len(results) == 1 else f"a mapping with {list(results)}"
        raise KernelError(f"the kernel returned {type(returned).__name__}, but must return {expected}")
    for name, value in returned.items():
        if not isinstance(value, Tensor):
            raise KernelError(f"the kernel returned {type(value).__name__} for {name!r}, but must return a tensor")
    missing = [name for name in results if name not in returned]
    if missing:
        raise KernelError(f"the kernel returned {sorted(returned)}, which lacks the result {missing[0]!r}")
    return dict(returned)


def _shared_memory(
    actual: Mapping[str, Tensor], inputs: Inputs, kernel: Kernel, results: tuple[str, ...]
) -> Iterator[Finding]:
    kept = {f"input {n}": t for n, t in inputs.tensors.items() if n not in kernel.mutates}
    for a, b in overlaps({**{n: actual[n] for n in results}, **kept}):
        if not (a in kept and b in kept):
            yield Finding("overlap", a, f"result {a} shares memory with {b}; writing to one changes the other.")


def _differ(first: Mapping[str, Tensor], second: Mapping[str, Tensor], names: tuple[str, ...]) -> bool:
    """Whether any bit of the named results differs, so that both calls have to be judged."""
    return any(not torch.equal(_bytes(first[n]), _bytes(second[n])) for n in names if n in first and n in second)


def _differences(
    first: _Call, second: _Call, results: tuple[str, ...], unordered: tuple[str, ...]
) -> Iterator[Finding]:
    """Findings for results whose bits differ between two calls on the same input, unless they are `unordered`."""
    for name in results:
        a, b = first.actual[name], second.actual[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield Finding("nondeterministic", name, f"{name} has another shape or dtype in a second call.")
            continue
        poison = unwritten(first.poisoned[name], second.poisoned[name])
        blank, stale = int(poison.own.sum()), int(poison.other.sum())
        if blank:
            yield Finding("unwritten", name, f"{blank:,} of {a.numel():,} elements of {name} were never written.")
        if stale:
            sentence = (
                f"{stale:,} of {a.numel():,} elements of {name} were computed from memory that was never written."
            )
            yield Finding("uninitialised", name, sentence)
        changed = 0 if name in unordered else int((_bytes(a) != _bytes(b)).any(-1).sum()) - blank - stale
        if changed > 0:
            sentence = (
                f"{changed:,} of {a.numel():,} elements of {name} differ between two calls on the same input; the "
                "second stored the declared stages and found other bits in uninitialised memory."
            )
            yield Finding("nondeterministic", name, sentence)


def _bytes(x: Tensor) -> Tensor:
    """The bytes of each element, [numel, itemsize]."""
    copy = x.clone(memory_format=torch.contiguous_format)  # one element is contiguous with any stride, but has no view
    return copy.reshape(-1).view(torch.uint8).reshape(x.numel(), x.element_size())


def first_line(error: BaseException) -> str:
    """Type and first line of an exception, and the last one where the first announces it, as a compiler's does."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{lines[0]} {lines[-1].strip()}" if lines[0].endswith(":") and len(lines) > 1 else lines[0]
    return f"{type(error).__name__}: {text}".rstrip(": ")
