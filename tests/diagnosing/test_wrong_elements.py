"""Sentences about wrong elements: tensors with one mistake each, tensors without, and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.diagnosing.wrong_elements import Unit, in_common, pattern_of
from lastbit.inputs import build
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem, Tensors
from lastbit.judging.verdict import judge
from lastbit.result import CaseResult, Verdict
from tests.faults import hunt

CPU, BF16 = torch.device("cpu"), torch.bfloat16
RMS = "rms_norm x=bf16[4,300] weight=bf16[300] eps=1e-06 seed=1"
NAN = float("nan")


@cache
def problem_of(line: str, contract: str = "native_multiply") -> Problem:
    case = parse_case(line)
    op = hunt.project().op(case.op)
    return Problem(op, op.contract(contract), build(case, CPU).tensors, case.params)


def said_of(problem: Problem, actual: Tensors) -> str:
    """All sentences about what a kernel gave."""
    judged = judge(problem, actual)
    blank = CaseResult(Verdict.FAILED, case="", op="", kernel="", contract="", device="cpu", dtypes="")
    return "\n".join(in_common(Observation.of(problem, actual), blank.judged(judged)))


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    made = tensor.clone()
    change(made)
    return made


def rms(x: Tensor, weight: Tensor) -> Tensor:
    root = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    return ((x.double() * root).to(BF16).double() * weight.double()).to(BF16)


MISTAKES: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "tail zero": (
        lambda y: y[:, 256:].zero_(),
        ["All 176 wrong elements are 0", "columns 256 to 299 are wrong: the last 44, from a multiple of 256 on"],
    ),
    "every fourth column": (lambda y: y[:, 1::4].mul_(1.5), ["columns 1, 5, 9 and so on, every 4th, are wrong"]),
    "column of zeros": (
        lambda y: y[:, 40].zero_(),
        ["All 4 wrong elements are 0", "Only column 40 of 300 is wrong, in all of 4 elements"],
    ),
    "row of NaN": (
        lambda y: y[3].fill_(NAN),
        ["All 300 wrong elements are NaN", "Only row 3 of 4, the last, is wrong"],
    ),
    "infinite": (lambda y: y[1, :5].fill_(torch.inf).neg_(), ["All 5 wrong elements are the same number, -inf"]),
    "not written": (
        lambda y: y.view(torch.int16)[:, 256:].fill_(0x7FC0 + 43),
        ["All 176 wrong elements are what memory was filled with"],
    ),
    "row of another": (lambda y: y[2].copy_(y[1].clone()), ["Only row 2 of 4 is wrong"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_wrong_elements_have_in_common(name: str) -> None:
    change, words = MISTAKES[name]
    problem = problem_of(RMS)
    said = said_of(problem, {"output": changed(rms(*problem.tensors.values()), change)})
    for word in words:
        assert word in said, said


def test_nothing_is_said_of_right_values_or_of_noise() -> None:
    problem = problem_of(RMS)
    x, weight = problem.tensors["x"], problem.tensors["weight"]
    assert said_of(problem, {"output": rms(x, weight)}) == ""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    assert said_of(problem, {"output": noise.to(BF16)}) == ""
    assert said_of(problem, {"output": (rms(x, weight).double() * (1 + noise / 100)).to(BF16)}) == ""


def test_problems_of_one_dimension_and_without_rows() -> None:
    problem = problem_of(RMS.replace("4,300", "300"))
    right = rms(problem.tensors["x"], problem.tensors["weight"])
    assert "Only elements 256 to 299 are wrong" in said_of(
        problem, {"output": changed(right, lambda y: y[256:].zero_())}
    )
    problem = problem_of(
        "layer_norm_gated_backward x=fp32[0,8] dy=fp32[0,8] weight=fp32[8] rstd=fp32[0,1] bias=fp32[8] seed=4", ""
    )
    zeros = {name: problem.trace.stages[name].finished.value.float() for name in problem.results}
    assert "8 wrong elements are the same number" in said_of(problem, {**zeros, "dw": torch.ones(8)})


@pytest.mark.parametrize(
    ("at", "size", "words"),
    [
        ([3], 8, "Only row 3 of 8 is wrong"),
        ([0], 8, "Only row 0 of 8, the first, is wrong"),
        (range(4, 8), 8, "Only rows 4 to 7 are wrong: the last 4, from a multiple of 4 on"),
        (range(5), 9, "Only rows 0 to 4 are wrong: the first 5"),
        (range(8, 16), 64, "Only rows 8 to 15 are wrong: 8 of 64, from a multiple of 8 on"),
        (range(2, 30, 7), 30, "Only rows 2, 9, 16 and so on, every 7th, are wrong"),
        ([n for n in range(64) if n % 16 >= 12], 64, "Only the last 4 of every 16 rows are wrong"),
        ([2, 11, 25], 60, "Only rows 2, 11 and 25 of 60 are wrong"),
        ([2, 11, 13, 25, 40], 60, None),
    ],
)
def test_what_indices_have_in_common(at: list[int], size: int, words: str | None) -> None:
    found = pattern_of(list(at), size, Unit("row", "rows"))
    assert (found and found[0]) == words
