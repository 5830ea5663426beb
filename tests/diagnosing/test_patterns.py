"""Sentences about errors: tensors made by formulas that have one mistake each, tensors without, and noise."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.diagnosing.patterns import Unit, diagnose, pattern_of
from lastbit.inputs import build
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem, Tensors
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.numerics import FORMATS, round_to
from lastbit.numerics.formats import cast
from lastbit.ops import op
from lastbit.result import CaseResult, Verdict
from lastbit.shadows.following import Followed, follow
from tests.faults import hunt
from tests.layer_norm_gated_formula import forward
from tests.moe_lora_formula import formula

CPU, BF16 = torch.device("cpu"), torch.bfloat16
RMS = "rms_norm x=bf16[4,300] weight=bf16[300] eps=1e-06 seed=1"
LAYER = "layer_norm_gated x=bf16[5,96] weight=bf16[96] bias=bf16[96] eps=1e-05 seed=1"
GATED = "layer_norm_gated x=bf16[5,64] weight=bf16[64] z=bf16[5,64] eps=1e-05 group_size=16 is_rms_norm=True seed=2"
MOE = (
    "moe_lora x=bf16[6,24] expert_ids=int64[6,2]:experts_3 routing_weights=fp32[6,2]:uniform "
    "gate_proj=bf16[3,40,24]:fan_in up_proj=bf16[3,40,24]:fan_in down_proj=bf16[3,24,40]:fan_in "
    "gate_lora_a=bf16[3,4,24]:fan_in "
    "gate_lora_b=bf16[3,40,4]:fan_in up_lora_a=bf16[3,4,24]:fan_in up_lora_b=bf16[3,40,4]:fan_in "
    "down_lora_a=bf16[3,4,40]:fan_in down_lora_b=bf16[3,24,4]:fan_in scaling=0.3 seed=3"
)
NAN = float("nan")


@cache
def problem_of(line: str, contract: str = "") -> Problem:
    case = parse_case(line)
    op = hunt.project().op(case.op)
    return Problem(op, op.contract(contract), build(case, CPU).tensors, case.params)


def said_of(problem: Problem, actual: Tensors, *, seconds: float = 60.0, followed: Followed | None = None) -> str:
    """All sentences about what a kernel gave, with so many seconds for guesses, whatever else the machine does."""
    judged = judge(problem, actual)
    blank = CaseResult(Verdict.FAILED, case="", op="", kernel="", contract="", device="cpu", dtypes="")
    with patch("lastbit.diagnosing.patterns.SECONDS", seconds):
        return "\n".join(diagnose(Observation.of(problem, actual), blank.judged(judged), lambda: followed))


def changed(tensor: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    made = tensor.clone()
    change(made)
    return made


def rms(
    x: Tensor,
    weight: Tensor,
    *,
    inverse: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The norm, with another inverse root if one is given."""
    return (rms_normalized(x, inverse) * weight.double()).to(BF16)


def rms_normalized(x: Tensor, inverse: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    variance = x.double().square().mean(-1, keepdim=True)
    root = torch.rsqrt(variance + 1e-6) if inverse is None else inverse(variance)
    return (x.double() * root).to(BF16).double()


Made = tuple[Callable[..., Tensor], list[str]]
RMS_MISTAKES: dict[str, Made] = {
    "another eps": (lambda x, w: rms(x, w, inverse=lambda v: (v + 1e-3).rsqrt()), ["eps were 0.001, not 1e-06"]),
    "no weight": (
        lambda x, w: rms(x, torch.ones_like(w)),
        ["weight were left out: that allows all that"],
    ),
    "weight shifted": (lambda x, w: rms(x, w.roll(1)), ["weight were read one element too early"]),
    "sign": (lambda x, w: -rms(x, w), ["the sign of x were the other one"]),
    "rows shifted": (lambda x, w: rms(x, w).roll(1, 0), ["x were read one index of dimension 0 too early"]),
    "reversed": (lambda x, w: rms(x, w).flip(-1), []),
    "tail zero": (
        lambda x, w: changed(rms(x, w), lambda y: y[:, 256:].zero_()),
        ["All 176 wrong elements are 0", "columns 256 to 299 are wrong: the last 44, from a multiple of 256 on"],
    ),
    "every fourth column": (
        lambda x, w: changed(rms(x, w), lambda y: y[:, 1::4].mul_(1.5)),
        ["columns 1, 5, 9 and so on, every 4th, are wrong"],
    ),
    "column of zeros": (
        lambda x, w: changed(rms(x, w), lambda y: y[:, 40].zero_()),
        ["All 4 wrong elements are 0", "Only column 40 of 300 is wrong"],
    ),
    "row of NaN": (
        lambda x, w: changed(rms(x, w), lambda y: y[3].fill_(NAN)),
        ["All 300 wrong elements are NaN, although every input is finite", "Only row 3 of 4, the last, is wrong"],
    ),
    "not written": (
        lambda x, w: changed(rms(x, w), lambda y: y.view(torch.int16)[:, 256:].fill_(0x7FC0 + 43)),
        ["All 176 wrong elements hold what memory was filled with"],
    ),
    "row of another": (lambda x, w: rms(x, w)[[0, 1, 1, 3]], ["Only row 2 of 4 is wrong"]),
    "cut off": (
        lambda x, w: round_to(rms_normalized(x) * w.double(), FORMATS["bf16"].toward("zero")).to(BF16),
        ["wrong elements are off by 1 ulp toward zero."],
    ),
}


@pytest.mark.parametrize("name", RMS_MISTAKES)
def test_mistake_of_a_norm(name: str) -> None:
    made, words = RMS_MISTAKES[name]
    problem = problem_of(RMS, "native_multiply")
    said = said_of(problem, {"output": made(problem.tensors["x"], problem.tensors["weight"])})
    for word in words:
        assert word in said, said


def layer(problem: Problem, change: Callable[[dict[str, Any]], Any]) -> Tensor:
    """The output of the formula with some of its arguments changed."""
    arguments = {**problem.tensors, **problem.params}
    change(arguments)
    return forward(**arguments)["output"].to(BF16)


@pytest.mark.parametrize(
    ("line", "change", "words"),
    [
        (LAYER, lambda a: a.update(bias=None), ["bias were left out"]),
        (
            LAYER,
            lambda a: a.update(bias=changed(a["bias"], lambda b: b[64:].zero_())),
            [
                "bias were zero from element 64 on, in the last 32 of 96",
                "columns 64 to 95 are wrong: the last 32, from a multiple of 64 on",
            ],
        ),
        (LAYER, lambda a: a.update(bias=2 * a["bias"]), ["bias were added to itself"]),
        (LAYER, lambda a: a.update(is_rms_norm=True), ["is_rms_norm were True, not False"]),
        (GATED, lambda a: a.update(z=None), ["z were left out"]),
        (GATED, lambda a: a.update(norm_before_gate=False), ["norm_before_gate were False, not True"]),
        (GATED, lambda a: a.pop("group_size"), ["group_size were left out, not 16"]),
    ],
)
def test_mistake_of_a_gated_norm(line: str, change: Callable[[dict[str, Any]], Any], words: list[str]) -> None:
    problem = problem_of(line)
    said = said_of(problem, {"output": layer(problem, change)})
    for word in words:
        assert word in said, said


def moe(problem: Problem, change: Callable[[dict[str, Any]], Any]) -> dict[str, Tensor]:
    arguments = {**problem.tensors, **problem.params}
    change(arguments)
    made = formula("fused", **arguments, fp32=lambda x: x.float().double())
    return {name: cast(made[name], BF16) for name in ("saved_gate", "saved_up", "intermediate", "output")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(scaling=1.0), ["scaling were 1, not 0.3"]),
        (lambda a: a.update(gate_proj=a["up_proj"]), ["up_proj were read in place of gate_proj"]),
        (
            lambda a: a.update(gate_lora_b=0 * a["gate_lora_b"]),
            ["gate_lora_a were all zeros"],
        ),
    ],
)
def test_mistake_of_experts(change: Callable[[dict[str, Any]], Any], words: list[str]) -> None:
    problem = problem_of(MOE, "fused")
    said = said_of(problem, moe(problem, change))
    for word in words:
        assert word in said, said


def test_a_token_left_out() -> None:
    problem = problem_of(MOE, "fused")
    actual = {name: changed(t, lambda y: y[5].zero_()) for name, t in moe(problem, lambda _: None).items()}
    said = said_of(problem, actual, seconds=0.0)
    assert "All 80 wrong elements are 0" in said
    assert "Only index 5 of dimension 0, the last, is wrong, in all of 80 elements" in said


def test_nothing_is_said_of_right_values_or_of_noise() -> None:
    problem = problem_of(RMS, "native_multiply")
    x, weight = problem.tensors["x"], problem.tensors["weight"]
    assert said_of(problem, {"output": rms(x, weight)}) == ""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    assert said_of(problem, {"output": noise.to(BF16)}, seconds=2.0) == ""
    assert said_of(problem, {"output": (rms(x, weight).double() * (1 + noise / 100)).to(BF16)}, seconds=2.0) == ""
    experts = problem_of(MOE, "fused")
    assert said_of(experts, moe(experts, lambda _: None)) == ""


def test_problems_of_one_dimension_and_without_rows() -> None:
    problem = problem_of(RMS.replace("4,300", "300"), "native_multiply")
    assert problem.main.ndim == 1
    right = rms(problem.tensors["x"], problem.tensors["weight"])
    assert "the sign of x were" in said_of(problem, {"output": -right})
    problem = problem_of(
        "layer_norm_gated_backward x=fp32[0,8] dy=fp32[0,8] weight=fp32[8] rstd=fp32[0,1] bias=fp32[8] seed=4"
    )
    zeros = {name: problem.trace.stages[name].finished.value.float() for name in problem.results}
    assert "8 wrong elements are the same number" in said_of(problem, {**zeros, "dw": torch.ones(8)})


def test_a_reference_may_raise_anything_for_a_guess() -> None:
    @op(rows=("x",))
    def halved(x: Any, *, parts: int, contract: Any, stage: Any) -> None:
        stage("output", x * (8 // parts), result=True)

    problem = Problem(halved, halved.contract(""), {"x": torch.arange(32.0).reshape(4, 8)}, {"parts": 1})
    assert "parts were 2, not 1" in said_of(problem, {"output": 4 * problem.main})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x.abs() >= 1, "where |x| is 1 or more"),
        (lambda x: x <= -1, "where x is -1 or less"),
        (lambda x: x > 0, "where x is positive"),
        (lambda x: x >= 0, "where x is not negative"),
        (lambda x: x <= 0, "where x is not positive"),
    ],
)
def test_what_is_wrong_beyond_a_size(wrong: Callable[[Tensor], Tensor], words: str) -> None:
    x = torch.linspace(-2, 2, 81).round(decimals=2)[torch.randperm(81, generator=torch.Generator().manual_seed(0))]
    problem = problem_of("rms_norm x=fp32[9,9] eps=1e-06 seed=1", "native_multiply").on({"x": (x := x.reshape(9, 9))})
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(1))
    right = problem.trace.stages["output"].value.float()
    actual = torch.where(wrong(x), right + 1 + noise, right)
    found = said_of(problem, {"output": actual}, seconds=0.0)
    assert f"It is wrong exactly {words}" in found


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


def test_the_search_ends_in_time() -> None:
    """A search without time says what needs none."""
    problem = problem_of(RMS, "native_multiply")
    actual = {"output": rms(problem.tensors["x"], problem.tensors["weight"].roll(1))}
    assert said_of(problem, actual, seconds=-1.0) == ""


def followed_on(problem: Problem, formula: Callable[..., Tensor]) -> tuple[Tensors, Followed]:
    """What a function gives for a problem, and its residues."""
    kernel = Kernel("mine", "rms_norm", "", formula)
    followed = follow(kernel, problem.tensors, problem.params, ["output"], problem.constants)
    return {"output": formula(**problem.tensors, **problem.params)}, followed


def test_a_guess_about_a_kernel_that_is_followed_is_held_to_its_residues() -> None:
    """In fp32, sums of 300 leave room for 1 / 300 of eps; residues do not."""
    problem = problem_of(RMS.replace("bf16", "fp32").replace("eps=1e-06", "eps=0.001"))
    for eps, words in ((1e-3, ""), (1e-5, "eps were 1e-05, not 0.001: that gives all"), (1.01e-5, "")):

        def norm(x: Tensor, weight: Tensor, *, eps: float, own: float = eps) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + own) * weight

        actual, followed = followed_on(problem, norm)
        judged = said_of(problem, actual, followed=followed)
        assert (words in judged) if words else ("eps" not in judged), judged
        assert words or eps == 1e-3 or "that allows all" in said_of(problem, actual)
