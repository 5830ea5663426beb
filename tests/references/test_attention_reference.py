"""The reference of attention: what its contracts allow, tell apart, and leave open."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.inputs import build
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import Premises
from lastbit.result import Verdict
from lastbit.verify.project import open_project
from tests.attention_formula import attention as formula

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "correct_kernels"))
from attention_ways import Way, attention, ways

OP = open_project(Config(folder="")).op("attention")
PREMISES = Premises(tensor_cores=None)
LINES = (
    "attention q=bf16[2,7,4,24] k=bf16[2,40,2,24] v=bf16[2,40,2,16] scale=0.1875 causal=True seed=1",
    "attention q=fp16[1,5,4,16] k=fp16[1,33,1,16] v=fp16[1,33,1,16] sinks=fp16[4] scale=0.25 seed=2",
    "attention q=bf16[1,9,2,16] k=bf16[1,5,2,16] v=bf16[1,5,2,16] scale=0.3125 causal=True cap=2.0 seed=3",
    "attention q=fp32[1,5,2,16]:outlier k=fp32[1,70,2,16] v=fp32[1,70,2,16] sinks=fp32[2] scale=0.125 seed=4",
)
PLAIN = Way(16, False, False, False, False, False, "scaled_scores", False, "")


def problem(contract: str, tensors: dict[str, Tensor], params: Any) -> Problem:
    return Problem(OP, OP.contract(contract), tensors, dict(params), PREMISES)


def verdict(contract: str, line: str, results: dict[str, Tensor]) -> Verdict:
    case = parse_case(line)
    return judge(problem(contract, build(case, "cpu").tensors, case.params), results, alternatives=False).verdict


@pytest.mark.parametrize("line", LINES)
def test_the_exact_part_is_the_formula(line: str) -> None:
    case = parse_case(line)
    tensors = build(case, "cpu").tensors
    trace = problem("flash+tiles_16", tensors, case.params).evaluate()
    for name, wanted in formula(**tensors, **case.params).items():
        torch.testing.assert_close(trace.stages[name].enclosure.exact, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("line", LINES)
def test_correct_ways_are_allowed(line: str) -> None:
    case = parse_case(line)
    tensors = build(case, "cpu").tensors
    for way in itertools.islice(ways(7), 25):
        result = attention(way, **tensors, **case.params)
        assert verdict(way.contract, line, result) in (Verdict.PASSED, Verdict.INCONCLUSIVE), way


APART = ("flash", "flash+tiles_32", "flash+tiles_16+backwards", "flash+tiles_16+rounded_sum", "math", "eager")


@pytest.mark.parametrize("contract", [*APART, "flash+rounded_probabilities+tiles_16", "flash+scaled_query+tiles_16"])
def test_another_contract_excludes_what_flash_attention_gives(contract: str) -> None:
    """In one case with two tiles of 16 and a half."""
    case = parse_case(LINES[0])
    result = attention(PLAIN, **build(case, "cpu").tensors, **case.params)
    assert verdict("flash+tiles_16", LINES[0], result) is Verdict.PASSED
    assert verdict(contract, LINES[0], result) is Verdict.FAILED


def test_where_the_sink_counts_decides_about_bits() -> None:
    case = parse_case(LINES[1])
    tensors = build(case, "cpu").tensors
    tensors["sinks"] += 5  # above all scores
    late = Way(128, False, False, False, True, False, "scaled_scores", False, "")
    result = attention(late, **tensors, **case.params)
    for contract, wanted in (("flash+late_sink", Verdict.PASSED), ("flash", Verdict.FAILED)):
        assert judge(problem(contract, tensors, case.params), result, alternatives=False).verdict is wanted


def test_a_query_without_keys_gives_zero() -> None:
    case = parse_case(LINES[2])
    for contract in ("flash", "flash+tiles_16", "eager", "math"):
        trace = problem(contract, build(case, "cpu").tensors, case.params).evaluate()
        output, lse = trace.stages["output"].enclosure, trace.stages["lse"].enclosure
        assert not output.lo[:, :4].any() and not output.hi[:, :4].any() and output.hi[:, 4:].any()
        assert (lse.hi[..., :4] == -math.inf).all()


def test_what_is_masked_and_not_finite_leaves_its_rows_open() -> None:
    case = parse_case(LINES[0])
    tensors = build(case, "cpu").tensors
    tensors["v"][0, 39, 0, 3] = math.nan
    output = problem("flash", tensors, case.params).evaluate().stages["output"].enclosure
    open_ = (output.lo == -math.inf) & (output.hi == math.inf)
    assert open_.sum() == 6 * 2 and open_[0, :6, :2, 3].all()
    assert output.lo[0, 6, :2, 3].isnan().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(1, 2, 8)}, r"q has shape \(1, 2, 8\); it must be \[batch, tokens, heads, numbers\]"),
        ({"k": torch.zeros(1, 3, 3, 8)}, "k 3 keys of 3 heads; the heads of k must divide those of q"),
        (
            {"v": torch.zeros(1, 4, 2, 8)},
            r"v has shape \(1, 4, 2, 8\); with the other tensors it",
        ),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
        ({"scale": 0.0}, "scale=0.0 must be positive and finite"),
        ({"cap": -1.0}, "cap=-1.0 must be positive and finite"),
    ],
)
def test_arguments_without_a_meaning_are_refused(change: dict[str, Any], message: str) -> None:
    keys = torch.zeros(1, 3, 2, 8)
    given: dict[str, Any] = {"q": torch.zeros(1, 2, 4, 8), "k": keys, "v": keys, "scale": 1.0} | change
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with pytest.raises(UsageError, match=message):
        problem("flash", tensors, {n: value for n, value in given.items() if n not in tensors}).evaluate()
