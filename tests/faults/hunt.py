"""Hunting for faults with the cases that `lastbit verify` generates."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from torch import Tensor

from harness.case import Case
from harness.config import Config
from harness.inputs import build, guarded_allocations
from harness.kernel import Kernel, load_kernels
from harness.numerics import Premises
from harness.result import CaseResult, Comparison, Verdict
from harness.verify.check import Subject, verify_case
from harness.verify.project import Project, open_project
from tests.faults.plant import FOLDER, Fault, kernel_of

OP = "rms_norm"

GROUPS = {
    "plain": {"bf16": "bf16-N65to128", "fp16": "fp16-N513to1024", "fp32": "fp32-N8193to16384"},
    "residual": {
        "bf16": "bf16-residual-N1025to2048",
        "fp16": "fp16-residual-N2049to4096",
        "fp32": "fp32-residual-N1025to2048",
    },
    "static": {"bf16": "bf16-residual-static-N1025to2048", "fp16": "fp16-residual-static-N33to64"},
    "dynamic": {"bf16": "bf16-weight_fp32-dynamic-N129to256", "fp16": "fp16-residual-dynamic-N1025to2048"},
    "real shapes": {"bf16": "real-shapes"},
}
"""Options of a fault → dtype of x → the group of cases that it is hunted with."""

_BAD = (Verdict.FAILED, Verdict.ERRORED)
_STAGE_KINDS = ("outside", "special")


@functools.cache
def project() -> Project:
    return open_project(Config(folder=""))


@functools.cache
def clean_kernels() -> tuple[Kernel, ...]:
    return load_kernels(FOLDER)


def clean(fault: Fault, family: str = "triton") -> Kernel:
    """The kernel that the fault was planted in, or another one of its contract."""
    return kernel_of(clean_kernels(), fault.contract, family)


def cases_for(fault: Fault, dtype: str, count: int, seed_: int = 0) -> tuple[Case, ...]:
    """The cases that the fault is hunted with; those of a table of shapes are the same for every seed."""
    cases = cases_of(fault.contract, GROUPS[fault.options][dtype], count, seed_)
    chosen = tuple(case for case in cases if case["x"].dtype == dtype)
    assert chosen, f"no case for {fault.name!r} has an x of {dtype}"
    return chosen


@functools.cache
def cases_of(contract: str, group_name: str, count: int, seed_: int = 0) -> tuple[Case, ...]:
    """The distinct cases among the first `count` that a run with this seed generates for a kernel of `contract`.

    Cut to the size for a CPU on every device, so that all devices see the same bits.
    """
    kernel = kernel_of(clean_kernels(), contract)
    group = next(g for g in project().groups(OP, kernel.accepts, small=True) if g.name == group_name)
    if group.strategy is None:
        return group.examples
    found: dict[str, Case] = {}

    @seed(seed_)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(group.strategy)
    def collect(case: Case) -> None:
        found[str(case)] = case

    collect()
    return tuple(found.values())


def subject_of(kernel: Kernel, device: torch.device) -> Subject:
    return Subject(kernel, project().op(kernel.op), device, Premises(depth=kernel.depth))


def without_stages(kernel: Kernel) -> Kernel:
    """The kernel as one that returns its results only."""
    return replace(kernel, stages=())


@dataclass(frozen=True)
class Sighting:
    """How a kernel was caught.

    Attributes:
        cases: generated cases up to the one that failed, that one included.
        result: of the case that failed.
    """

    cases: int
    result: CaseResult

    @property
    def named(self) -> str:
        """The stage, or the kind of finding, that a report leads with."""
        kinds = [f.kind for f in self.result.findings if f.kind not in _STAGE_KINDS]
        if kinds and kinds != ["rows"]:
            return kinds[0]
        stage = self.result.failing_stage
        if stage is not None:
            return stage.name
        return self.result.findings[0].stage if kinds else self.result.verdict.lower()

    @property
    def comparison(self) -> Comparison:
        """Statistics of the first result with an element outside, or else of the op's first result."""
        results = [s.cumulative for s in self.result.stages if s.result]
        return next((c for c in results if c.outside), results[-1] if results else Comparison())


def hunt(kernel: Kernel, cases: Iterable[Case], device: torch.device) -> Sighting | None:
    """The first of `cases` that the kernel fails, None if there is none."""
    subject = subject_of(kernel, device)
    for number, case in enumerate(cases, 1):
        result = verify_case(subject, case)
        if result.verdict in _BAD:
            return Sighting(number, result)
    return None


@dataclass(frozen=True)
class Effects:
    """What a fault does to the results of some cases.

    Attributes:
        cases: how many.
        elements: of all results.
        changed: elements whose bits are not those of the kernel without the fault.
        alarms: cases in which assert_close sets the kernel apart from the reference.
        false_alarms: the same for the kernel without the fault.
        caught: cases in which assert_close alarms on the kernel with the fault only.
    """

    cases: int = 0
    elements: int = 0
    changed: int = 0
    alarms: int = 0
    false_alarms: int = 0
    caught: int = 0


def effects(kernel: Kernel, without: Kernel, reference: Kernel, cases: Iterable[Case], device: torch.device) -> Effects:
    """Compare a kernel with the one it was copied from, and both with a reference by torch.testing.assert_close.

    The defaults of assert_close apply, but NaN equals NaN.
    """
    total = Effects()
    for case in cases:
        tensors = build(case, device).tensors
        wanted, right, actual = (_results(k, tensors, case) for k in (reference, without, kernel))
        alarm, false_alarm = _apart(actual, wanted), _apart(right, wanted)
        total = Effects(
            total.cases + 1,
            total.elements + sum(t.numel() for t in right.values()),
            total.changed + sum(int((_bits(actual[name]) != _bits(t)).sum()) for name, t in right.items()),
            total.alarms + alarm,
            total.false_alarms + false_alarm,
            total.caught + (alarm and not false_alarm),
        )
    return total


def _apart(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    try:
        for name, tensor in wanted.items():
            torch.testing.assert_close(actual[name], tensor, equal_nan=True)
    except AssertionError:
        return True
    return False


def _results(kernel: Kernel, tensors: dict[str, Tensor], case: Case) -> dict[str, Tensor]:
    with guarded_allocations(0):  # a fault may write past what it allocates
        returned: Any = kernel.call(**tensors, **case.params)
    return returned if isinstance(returned, dict) else {"output": returned}


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])
