"""Problems that kernels share: what is found again, and what must not be."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import OpError, UsageError
from lastbit.inputs import Inputs, build
from lastbit.judging import problem as kept
from lastbit.judging.expected import Numbers, RowSum
from lastbit.judging.problem import Problem, Problems
from lastbit.numerics import Enclosure, Premises, sum_of_rows
from lastbit.numerics.formats import FP16, FP32, WIDE_FP32
from lastbit.numerics.premises import EXACT, REAL
from lastbit.ops import Contract, Op, StageRecorder, op
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


# Blocks of rows


@pytest.mark.parametrize(
    ("shape", "most", "blocks"),
    [((4, 64), 255, 2), ((4, 64), 256, 1), ((4, 64), 128, 2), ((4, 64), 64, 4), ((2, 3, 64), 192, 2), ((64,), 1, 1)],
)
def test_blocks_have_at_most_so_many_elements(shape: tuple[int, ...], most: int, blocks: int) -> None:
    x, weight = torch.arange(float(torch.Size(shape).numel())).reshape(shape), torch.ones(64)
    problem = Problem(rms_norm, NATIVE, {"x": x, "weight": weight}, {"eps": 1e-6})
    found = list(problem.blocks(most))
    assert (len(found), problem.in_one(most)) == (blocks, blocks == 1)
    if blocks == 1:
        assert found == [((), problem)]
        return
    assert torch.cat([part.main.reshape(-1, 64) for _, part in found]).equal(x.reshape(-1, 64))
    assert all(part.main.equal(x[index]) and part.tensors["weight"] is weight for index, part in found)
    assert all(part.main.numel() <= most and part.siblings is None for _, part in found)


def test_what_the_first_input_says() -> None:
    x, weight = torch.ones(2, 3, 64, dtype=torch.float16), torch.ones(64)
    problem = Problem(rms_norm, NATIVE, {"x": x, "weight": weight}, {"eps": 1e-6})
    assert problem.main is x and problem.leading == (2, 3) and problem.main_format is FP16
    whole = replace(problem, tensors={"x": torch.ones(4, 5, dtype=torch.int64), "weight": weight})
    assert whole.main_format is FP32
    assert problem.constants == [1e-6, 2.0, 3.0, 64.0]
    assert problem.results == problem.required == ["output"] and problem.may_return == []


def test_contracts_of_a_family_are_kept_by_what_they_say() -> None:
    problem = replace(Problem(rms_norm, NATIVE, inputs().tensors, {"eps": 1e-6}), siblings={})
    other = problem.under(FP32_MULTIPLY)
    assert problem.under(FP32_MULTIPLY) is other and other.contract is FP32_MULTIPLY
    assert problem.under(replace(FP32_MULTIPLY, rounds=dict(NATIVE.rounds))) is not other
    assert other.siblings is problem.siblings
    assert problem.in_real_arithmetic.premises is REAL and problem.in_real_arithmetic.siblings is None
    assert problem.unrounded.premises is EXACT and problem.unrounded.contract.rounds == {}
    wide = problem.with_more_range("normalized")
    assert (
        wide.premises == replace(problem.premises, arithmetic=WIDE_FP32, until="normalized") and wide.siblings is None
    )


# Stages


def two(x: Enclosure, w: Enclosure | None = None, *, contract: Contract, stage: StageRecorder) -> None:
    half = stage("half", x * 0.5)
    stage("output", half if w is None else half * w, result=True)


def own(**rounds: str) -> tuple[Op, Contract]:
    return op(rows=("x",))(two), Contract(frozenset(), rounds)


X = torch.tensor([[1.0 + 2.0**-7, 3.0], [5.0, -7.0]])


@pytest.mark.parametrize(
    ("target", "name", "direction"),
    [("bf16", "bf16", "nearest"), ("x", "bf16", "nearest"), ("fp16:zero", "fp16", "zero"),
     ("fp32:zero", "fp32", "nearest"),
     ("int8:either", "int8", "either"), ("w", "bf16", "nearest"), (None, "fp32", "nearest")],
)  # fmt: skip
def test_the_format_of_a_stage(target: str | None, name: str, direction: str) -> None:
    made, contract = own(**({} if target is None else {"half": target}))
    found = Problem(made, contract, {"x": X.bfloat16()}, {}).format("half")
    assert (found.name, found.direction) == (name, direction)


def test_the_reference_goes_on_from_what_is_given() -> None:
    made, contract = own(output="bf16")
    problem = Problem(made, contract, {"x": X, "w": torch.tensor([2.0, 4.0])}, {})
    assert torch.equal(problem.trace.enclosure("output").value, (X * torch.tensor([1.0, 2.0])).bfloat16().double())
    given = problem.evaluate({"half": torch.tensor([[1.0, 2.0], [3.0, torch.inf]])})
    assert given.enclosure("output").value.tolist() == [[2.0, 8.0], [6.0, torch.inf]]
    assert torch.equal(given.enclosure("half").value, X.double() / 2)
    assert (
        problem.evaluate({"half": Enclosure.point(torch.ones(2, 2))}).enclosure("output").value.tolist() == [[2, 4]] * 2
    )


def test_beyond_fp32_an_infinite_value_may_be_one_of_its_tensor_alone() -> None:
    """With more range the reference goes on from its own enclosure there, and from the kernel's values elsewhere."""
    made, contract = own()
    x = torch.tensor([[3e38, 3e38, 2.0]])
    wide = Problem(made, contract, {"x": x, "w": torch.tensor([[0.5] * 3])}, {}).with_more_range()
    twice = wide.evaluate({"half": torch.tensor([[torch.inf, 1.0, torch.inf]])})
    assert twice.enclosure("output").value.tolist() == [[torch.inf, 0.5, torch.inf]]
    large = replace(
        wide, tensors={"x": torch.tensor([[1.0, 1.0, 1.0]]).double() * 8e38, "w": torch.tensor([[0.5] * 3])}
    )
    output = large.evaluate({"half": torch.tensor([[torch.inf, 1.0, torch.nan]])}).enclosure("output")
    assert output.value.isfinite().tolist() == [[True, True, False]]


def test_any_numbers_lie_between_the_least_and_the_greatest() -> None:
    made, contract = own()
    x = torch.tensor([[3.0, -5.0], [torch.inf, 0.5]])
    problem = Problem(made, contract, {"x": x, "w": torch.tensor([0.25, 0.5])}, {}).with_any_numbers
    half = problem.trace.enclosure("half")
    inf = torch.inf
    assert (half.lo.tolist(), half.hi.tolist()) == ([[-2.5, -2.5], [-inf, -2.5]], [[1.5, 1.5], [inf, 1.5]])
    output = problem.trace.enclosure("output")  # of w, too: from -1 to 1
    assert (output.lo[0].tolist(), output.hi[0].tolist()) == ([-2.5, -2.5], [2.5, 2.5])


def test_what_a_trace_weighs() -> None:
    made, contract = own()
    problem = Problem(made, contract, {"x": X}, {})
    assert problem.nbytes == 0
    trace = problem.trace.nbytes
    assert problem.nbytes == trace > 0
    residues = sum(each.numbers.nbytes for each in problem.residues.values())
    assert problem.nbytes == trace + residues and residues > 0
    assert problem.with_any_numbers.trace.nbytes + trace + residues == problem.nbytes


def twice(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", stage("output", x, result=True), result=True)


def nothing(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", x)


def undefined(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    raise ValueError("no such size")


def asking(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", x + 1.0 if contract.has("fast") else x, result=True)


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        (twice, OpError, "the reference records the stage 'output' twice"),
        (nothing, OpError, "the reference records no stage with result=True here"),
        (undefined, UsageError, "undefined under .*: no such size"),
        (asking, OpError, "contract option that the reference of .* asks for: 'fast'"),
    ],
)
def test_references_that_cannot_be_run(reference: Callable[..., None], error: type[Exception], message: str) -> None:
    made = op(rows=("x",))(reference)
    with pytest.raises(error, match=message):
        _ = Problem(made, made.contract(), {"x": X}, {}).trace


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_integers_must_be_integers(dtype: torch.dtype) -> None:
    def counted(ids: torch.Tensor, *, contract: Contract, stage: StageRecorder) -> None:
        stage("output", ids + 1, result=True)

    made = op(integers=("ids",), rows=("ids",))(counted)
    with pytest.raises(UsageError, match=rf"ids of counted is {dtype}, but must be of integers or bool"):
        _ = Problem(made, made.contract(), {"ids": torch.zeros(2, 2, dtype=dtype)}, {}).trace
    found = Problem(made, made.contract(), {"ids": torch.zeros(2, 2, dtype=torch.int64)}, {})
    assert found.trace.stages["output"].shape == (2, 2) and found.residues == {}


# What is kept


@pytest.mark.parametrize(("rows", "kept_"), [(1024, True), (1025, False)])
def test_as_many_rows_as_are_kept(rows: int, kept_: bool) -> None:
    assert (Problems().of(rms_norm, NATIVE, inputs(rows=rows), Premises()).siblings is not None) == kept_


def test_what_was_seen_is_forgotten_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = Problems()
    first = problems.of(rms_norm, NATIVE, inputs(), Premises())
    assert problems.of(rms_norm, NATIVE, inputs(), Premises()) is first
    problems.forget()
    assert problems.of(rms_norm, NATIVE, inputs(), Premises()) is not first
    monkeypatch.setattr(kept, "_MOST_CASES", 2)
    made = [problems.of(rms_norm, NATIVE, inputs(seed=seed), Premises()) for seed in (1, 2, 1, 3, 4)]
    assert made[2] is made[0] and problems.of(rms_norm, NATIVE, inputs(seed=3), Premises()) is made[3]
    assert problems.of(rms_norm, NATIVE, inputs(seed=1), Premises()) is not made[0]


def test_rows_that_are_not_independent_stay_together() -> None:
    whole = Problem(op(rows=())(two), Contract(frozenset(), {}), {"x": torch.ones(4, 64)}, {})
    assert (
        whole.in_one(64)
        and list(whole.blocks(64)) == [((), whole)]
        and whole.shapes == {"half": (4, 64), "output": (4, 64)}
    )


def test_another_contract_that_asks_for_the_same_computation() -> None:
    problem = Problem(rms_norm, NATIVE, inputs().tensors, {"eps": 1e-6})
    assert problem.takes(problem.steps) and not problem.under(FP32_MULTIPLY).takes(problem.steps)
    assert problem.under(replace(NATIVE, rounds={**NATIVE.rounds, "nowhere": "fp16"})).takes(problem.steps)
    assert not problem.under(replace(NATIVE, rounds={**NATIVE.rounds, "output": "fp16"})).takes(problem.steps)


def scaled(x: Enclosure, scale: torch.Tensor, *, contract: Contract, stage: StageRecorder) -> None:
    stage("output", x * float(scale), result=True)


def test_plain_inputs_have_other_values_where_any_number_may_be() -> None:
    made = op(rows=("x",), plain=("scale",))(scaled)
    problem = Problem(made, Contract(frozenset(), {}), {"x": torch.zeros(1, 2), "scale": torch.tensor(3.0)}, {})
    output = problem.with_any_numbers.trace.enclosure("output")  # 3 · 1.5 + 1, of numbers from -1 to 1
    assert (output.lo.tolist(), output.hi.tolist()) == ([[-5.5] * 2], [[5.5] * 2])
