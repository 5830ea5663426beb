"""Sentences about errors: tensors made by formulas that have one mistake each, tensors without, and noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from harness.case import parse_case
from harness.diagnosing.patterns import diagnose
from harness.inputs import build
from harness.judging.judge import judge
from harness.judging.observation import Observation
from harness.judging.problem import Problem, Tensors
from harness.result import CaseResult, Verdict
from tests.faults import hunt

CPU = torch.device("cpu")


def problem_of(line: str, contract: str = "") -> Problem:
    case = parse_case(line)
    op = hunt.project().op(case.op)
    return Problem(op, op.contract(contract), build(case, CPU).tensors, case.params)


def said_of(problem: Problem, actual: Tensors) -> str:
    """All sentences about what a kernel gave."""
    judged = judge(problem, actual)
    blank = CaseResult(Verdict.FAILED, case="", op="", kernel="", contract="", device="cpu", dtypes="")
    return "\n".join(diagnose(Observation.of(problem, actual), blank.judged(judged)))


RMS = "rms_norm x=bf16[4,300] weight=bf16[300] eps=1e-06 seed=1"


def rms(x: Tensor, weight: Tensor, *, eps: float = 1e-6, n: float | None = None) -> Tensor:
    x = x.double()
    variance = x.square().sum(-1, keepdim=True) / (n or x.shape[-1])
    normalized = (x * torch.rsqrt(variance + eps)).to(weight.dtype)
    return (normalized.double() * weight.double()).to(weight.dtype)


def last_tile_zero(y: Tensor) -> Tensor:
    y[:, 256:] = 0
    return y


RMS_MISTAKES: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "tail not written": (
        lambda x, weight: last_tile_zero(rms(x, weight)),
        ["All 176 wrong elements are 0", "columns 256 to 299 are wrong: the last 44, from a multiple of 256 on"],
    ),
    "row of another": (lambda x, weight: rms(x, weight)[[0, 1, 1, 3]], ["row 2 is row 1", "row 2 of 4"]),
    "shifted": (lambda x, weight: rms(x, weight).roll(1, -1), ["shifted by 1 along dimension 1"]),
}


@pytest.mark.parametrize("name", RMS_MISTAKES)
def test_mistake_of_a_norm(name: str) -> None:
    made, words = RMS_MISTAKES[name]
    problem = problem_of(RMS, "native_multiply")
    said = said_of(problem, {"output": made(*problem.tensors.values())})
    for word in words:
        assert word in said, said
