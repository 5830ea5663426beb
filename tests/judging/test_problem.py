"""Problems that kernels share: what is found again, and what must not be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import OpError
from lastbit.inputs import Inputs, build
from lastbit.judging import problem as kept
from lastbit.judging.expected import Numbers, RowSum
from lastbit.judging.problem import Problem, Problems
from lastbit.numerics import Enclosure, Premises, sum_of_rows
from lastbit.numerics.formats import FP32
from lastbit.ops import Contract, StageRecorder, op
from lastbit.references.rms_norm import rms_norm
from lastbit.verify.project import open_project

NATIVE, FP32_MULTIPLY = rms_norm.contract("native_multiply"), rms_norm.contract("fp32_multiply")


def inputs(rows: int = 4, seed: int = 1) -> Inputs:
    return build(parse_case(f"rms_norm x=bf16[{rows},64] weight=bf16[64]:near_one eps=1e-06 seed={seed}"), "cpu")


def test_a_case_that_another_kernel_had_is_evaluated_once() -> None:
    problems = Problems()
    first = problems.of(rms_norm, NATIVE, inputs(), Premises())
    assert first.under(FP32_MULTIPLY).trace is problems.of(rms_norm, FP32_MULTIPLY, inputs(), Premises()).trace


@pytest.mark.parametrize(
    ("again", "premises"),
    [(inputs(seed=2), Premises()), (inputs(), Premises(depth=lambda terms: 3)), (inputs(), Premises(order=64))],
)
def test_other_values_or_premises_are_another_problem(again: Inputs, premises: Premises) -> None:
    problems = Problems()
    first = problems.of(rms_norm, NATIVE, inputs(), Premises())
    assert problems.of(rms_norm, NATIVE, again, premises).trace is not first.trace


def test_inputs_that_were_written_to_are_not_used_again() -> None:
    problems = Problems()
    first = problems.of(rms_norm, NATIVE, inputs(), Premises())
    before = first.trace.enclosure("output").value.clone()
    first.tensors["x"][0, 0] = 7.0
    again = problems.of(rms_norm, NATIVE, inputs(), Premises())
    assert torch.equal(again.trace.enclosure("output").value, before)
    assert again.tensors["x"][0, 0] != 7.0


def test_many_rows_are_not_kept() -> None:
    problems = Problems()
    first, again = (problems.of(rms_norm, NATIVE, inputs(rows=1025), Premises()) for _ in range(2))
    assert first is not again and first.siblings is None


def test_rows_that_lie_far_apart_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have few elements, and may take gigabytes of an accelerator that others need."""
    monkeypatch.setattr(kept, "_MOST_BYTES", 1 << 19)
    far = parse_case("rms_norm x=bf16[4,64]@100000,1 weight=bf16[64] eps=1e-06 seed=1")
    assert Problems().of(rms_norm, NATIVE, build(far, "cpu"), Premises()).siblings is None
    assert Problems().of(rms_norm, NATIVE, inputs(), Premises()).siblings is not None


def test_other_inputs_or_premises_have_siblings_of_their_own() -> None:
    problem = Problems().of(rms_norm, NATIVE, inputs(), Premises())
    assert problem.siblings is not None
    assert problem.on(problem.tensors).siblings is None and problem.with_more_range().siblings is None


def test_a_sum_over_rows_is_finished_before_it_is_held_beside_numbers() -> None:
    x = Enclosure.point(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    total = RowSum(sum_of_rows(x), FP32, False, Premises())
    same, other = (Numbers(Enclosure.point(torch.tensor(values)), FP32) for values in ([4.0, 6.0], [4.0, 7.0]))
    assert not same.apart(total) and not total.apart(same)
    assert other.apart(total) and total.apart(other)
    assert same.same(total) and total.same(same) and not other.same(total)


def test_a_problem_under_its_own_contract_is_itself() -> None:
    problem = Problems().of(rms_norm, NATIVE, inputs(), Premises())
    assert problem.under(NATIVE) is problem
    bare = Problem(rms_norm, NATIVE, problem.tensors, problem.params)
    assert replace(bare).under(NATIVE) is not bare


def test_both_problems_of_a_case_are_weighed_when_the_next_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The case's own is asked for before that of other values, and evaluated after it."""
    problems = Problems()
    own, other = (problems.of(rms_norm, NATIVE, inputs(seed=seed), Premises()) for seed in (1, 2))
    held = sum(t.untyped_storage().nbytes() for problem in (own, other) for t in problem.tensors.values())
    assert own.trace.nbytes > 0
    with monkeypatch.context() as patch:
        patch.setattr("lastbit.judging.problem._MOST_BYTES", held)
        problems.of(rms_norm, NATIVE, inputs(seed=3), Premises())
    assert problems.of(rms_norm, NATIVE, inputs(seed=1), Premises()) is not own


def powers(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", x**3, result=True)


def tensors(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", torch.tanh(x), result=True)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (powers, r"`stage\(.output., x\*\*3, result=True\)`: x \*\* 3 does not say how it is multiplied"),
        (tensors, r"torch\.tanh takes no enclosure; a reference uses the functions of lastbit\.numerics"),
    ],
)
def test_a_mistake_in_a_reference_is_told_with_its_line(reference: Callable[..., None], message: str) -> None:
    wrong = op(rows=("x",))(reference)
    line = reference.__code__.co_firstlineno + 1
    with pytest.raises(OpError, match=rf"the reference raised TypeError in {re.escape(__file__)}:{line}, .*{message}"):
        _ = Problem(wrong, wrong.contract(), {"x": torch.ones(2, 3)}, {}).trace


@pytest.mark.parametrize(
    "line",
    [
        "rms_norm x=bf16[2,3,64] weight=bf16[64]:near_one eps=1e-06 seed=1",
        "layer_norm_gated_backward x=fp32[12,8] dy=fp32[12,8] weight=fp32[8] rstd=fp32[12,1] bias=fp32[8] seed=4",
    ],
)
def test_the_first_row_says_which_shapes_all_stages_have(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums over rows too."""
    case = parse_case(line)
    asked = open_project(Config(folder="")).op(case.op)
    problem = Problem(asked, asked.contract(""), build(case, "cpu").tensors, dict(case.params))
    monkeypatch.setattr("lastbit.judging.problem._FEW", 0)
    assert problem.shapes == {name: tuple(stage.shape) for name, stage in problem.trace.stages.items()}
