"""Sentences about wrong elements: tensors with one mistake each, tensors without, and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.diagnosing.diagnoses import Unit, _held, _ordinal, in_common, pattern_of, places
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
        ([2, 30, 11, 13][:2], 60, "Only rows 2 and 30 of 60 are wrong"),
        ([7], 8, "Only row 7 of 8, the last, is wrong"),
        (range(1, 8), 8, "Only rows 1 to 7 are wrong: the last 7"),
        (range(8, 17), 17, "Only rows 8 to 16 are wrong: the last 9, from a multiple of 8 on"),
        (range(4), 10, "Only rows 0 to 3 are wrong: the first 4, up to a multiple of 4"),
        (range(3), 10, "Only rows 0 to 2 are wrong: the first 3"),
        (range(2), 10, "Only rows 0 to 1 are wrong: the first 2"),
        (range(2, 5), 10, "Only rows 2 to 4 are wrong: 3 of 10"),
        (range(12, 20), 64, "Only rows 12 to 19 are wrong: 8 of 64, from a multiple of 4 on"),
        # three quarters of a span are enough, and nine tenths of the axis the most
        ([4, 5, 7], 20, "Only rows 4 to 7 are wrong: 4 of 20, from a multiple of 4 on"),
        ([4, 6, 7, 9], 20, None),
        (range(1, 10), 10, "Only rows 1 to 9 are wrong: the last 9"),
        (range(1, 19), 19, None),
        # repeated: the shortest part of a period first, and of these the shortest period
        (range(0, 12, 2), 12, "Only rows 0, 2, 4 and so on, every 2nd, are wrong"),
        (range(1, 12, 3), 12, "Only rows 1, 4, 7 and so on, every 3rd, are wrong"),
        (range(3, 48, 12), 48, "Only rows 3, 15, 27 and so on, every 12th, are wrong"),
        (range(5, 90, 21), 90, "Only rows 5, 26, 47 and so on, every 21st, are wrong"),
        (range(5, 900, 111), 900, None),
        (range(5, 400, 64), 400, "Only rows 5, 69, 133 and so on, every 64th, are wrong"),
        (range(5, 640, 65), 640, None),
        (range(5, 900, 128), 900, "Only rows 5, 133, 261 and so on, every 128th, are wrong"),
        ([n for n in range(64) if n % 8 < 3], 64, "Only the first 3 of every 8 rows are wrong"),
        ([n for n in range(64) if 2 <= n % 8 < 5], 64, "Only 3 of every 8 rows, from its 3rd on, are wrong"),
        ([n for n in range(64) if 1 <= n % 16 < 3], 64, "Only 2 of every 16 rows, from its 2nd on, are wrong"),
        ([n for n in range(0, 32, 4) if n not in (8, 20)], 32, "Only rows 0, 4, 8 and so on, every 4th, are wrong"),
        ([n for n in range(0, 32, 4) if n not in (8, 16, 20)], 32, None),
        ([0, 4, 9], 10, "Only rows 0, 4 and 9 of 10 are wrong"),
        (range(0, 8, 4), 8, "Only rows 0 and 4 of 8 are wrong"),
    ],
)
def test_what_indices_have_in_common(at: list[int], size: int, words: str | None) -> None:
    found = pattern_of(list(at), size, Unit("row", "rows"))
    assert (found and found[0]) == words


def test_indices_of_a_dimension_of_three() -> None:
    unit = Unit("index", "indices", " of dimension 1")
    for at, words in (
        ([3], "Only index 3 of dimension 1 is wrong"),
        (range(4, 8), "Only indices 4 to 7 of dimension 1 are wrong: the last 4, from a multiple of 4 on"),
        ([0, 2, 4, 6], "Only indices 0, 2, 4 and so on of dimension 1, every 2nd, are wrong"),
        ([0, 1, 4, 5], "Only the first 2 of every 4 indices of dimension 1 are wrong"),
        ([1, 2, 5, 6], "Only 2 of every 4 indices of dimension 1, from its 2nd on, are wrong"),
        ([1, 4, 7], "Only indices 1, 4 and 7 of dimension 1 are wrong"),
    ):
        found = pattern_of(list(at), 8, unit)
        assert found is not None and found[0] == words


@pytest.mark.parametrize(
    ("n", "word"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"),
     (22, "22nd"), (23, "23rd"), (100, "100th"), (101, "101st"), (111, "111th"), (112, "112th"), (113, "113th")],
)  # fmt: skip
def test_ordinals(n: int, word: str) -> None:
    assert _ordinal(n) == word


def wrong(shape: tuple[int, ...], *at: object) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    for index in at:
        mask[index] = True
    return mask


@pytest.mark.parametrize(
    ("mask", "sentences"),
    [
        (wrong((4, 6), (1, slice(None))), ["Only row 1 of 4 is wrong, in all of 6 elements."]),
        (wrong((4, 6), (1, slice(5))), ["Only row 1 of 4 is wrong, in 5 of 6 elements."]),
        (wrong((4, 6), (1, slice(4))), []),
        (wrong((4, 40), (1, slice(5))), []),
        (wrong((4, 80), (1, slice(5))),
         ["Only columns 0 to 4 are wrong: the first 5, in 5 of 20 elements."]),
        (wrong((2, 3, 8), (slice(None), 2)),
         ["Only index 2 of dimension 1, the last, is wrong, in all of 16 elements."]),
        (wrong((2, 3, 8), (1,)), ["Only index 1 of dimension 0, the last, is wrong, in all of 24 elements."]),
        (wrong((2, 3, 8), (slice(None), slice(None), 2)), ["Only column 2 of 8 is wrong, in all of 6 elements."]),
        (wrong((9,), slice(2, 5)), ["Only elements 2 to 4 are wrong: 3 of 9, in all of 3 elements."]),
        (wrong((9,), slice(2, 4)), []),
        (wrong((1000, 1000), (slice(4), 0)),
         ["Only rows 0 to 3 are wrong: the first 4, up to a multiple of 4, in 4 of 4,000 elements.",
          "Only column 0 of 1000, the first, is wrong, in 4 of 1,000 elements."]),
        (wrong((3, 3)), []),
    ],
)  # fmt: skip
def test_places_that_are_no_chance(mask: Tensor, sentences: list[str]) -> None:
    """Three wrong elements at least, in three quarters of the pattern or where chance is below one in a thousand."""
    assert list(places(mask)) == sentences


@pytest.mark.parametrize(
    ("stored", "value", "sentence"),
    [
        ([NAN], [1.0], "The one wrong element is NaN."),
        ([NAN, NAN], [1.0, 2.0], "All 2 wrong elements are NaN."),
        ([1.0, torch.inf], [NAN, NAN], "All 2 wrong elements are finite or infinite, and must be NaN."),
        ([0.0, -0.0], [1.0, 2.0], "All 2 wrong elements are 0."),
        ([5.1, 5.1, 5.1], [1.0, 2.0, 3.0], "All 3 wrong elements are the same number, 5.0999999."),
        ([5.0, 5.0], [1.0, 2.0], ""),
        ([torch.inf, -torch.inf], [1.0, 2.0], "All 2 wrong elements are infinite."),
        ([torch.inf, torch.inf], [1.0, 2.0], "All 2 wrong elements are infinite."),
        ([0.0, 1.0], [1.0, 2.0], ""),
        ([torch.inf, 1.0], [1.0, 2.0], ""),
    ],
)
def test_what_all_are(stored: list[float], value: list[float], sentence: str) -> None:
    mask = torch.ones(len(stored), dtype=torch.bool)
    assert "".join(_held(torch.tensor(stored), torch.tensor(value), mask)) == sentence
