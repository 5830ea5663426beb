"""Ops of integers: no rounding, every element equal, shape and dtype part of the contract."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lastbit.errors import KernelError, UsageError
from lastbit.judging.compare import begin_integers, finished
from lastbit.judging.problem import Problem
from lastbit.judging.torch_compare import outside_mask
from lastbit.judging.verdict import judge
from lastbit.ops import op
from lastbit.result import Judgement, Verdict

BIG = 2**62


@op(rows=("ids",), integers=("ids",), rounds={"scaled": "scale"})
def routing(ids, scale=None, *, contract, stage) -> None:
    """Compute the larger of each id and 3, and with a scale also their product."""
    chosen = stage("chosen", ids.clamp(min=3), result=True)
    stage("even", chosen % 2 == 0)
    if scale is not None:
        stage("scaled", scale * 2.0, result=True)


def judged(ids: Tensor, chosen: Tensor, **stages: Tensor) -> Judgement:
    return judge(Problem(routing, routing.contract(), {"ids": ids}, {}), {"chosen": chosen, **stages})


def ids(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([values], dtype=dtype)


def test_equal_integers_pass_and_name_their_dtype() -> None:
    judgement = judged(ids(1, 5, BIG), ids(3, 5, BIG), even=torch.tensor([[False, False, True]]))
    assert judgement.verdict is Verdict.PASSED
    assert [(s.name, s.dtype, s.cumulative.decided) for s in judgement.stages] == [
        ("chosen", "int64", 3),
        ("even", "bool", 3),
    ]


def test_integers_that_fp64_cannot_tell_apart_differ() -> None:
    judgement = judged(ids(BIG), ids(BIG + 1))
    assert judgement.verdict is Verdict.FAILED
    assert judgement.stages[0].cumulative.outside == 1


def test_the_first_wrong_stage_is_seen_from_the_kernels_own_earlier_one() -> None:
    judgement = judged(ids(1, 5), ids(4, 5), even=torch.tensor([[True, False]]))
    even = next(s for s in judgement.stages if s.name == "even")
    assert (even.cumulative.outside, even.isolated.outside) == (1, 0)
    assert [f.stage for f in judgement.findings] == ["chosen", "even"]


def test_a_stage_may_be_stored_in_any_dtype_a_result_may_not() -> None:
    assert judged(ids(1, 4), ids(3, 4), even=torch.tensor([[0, 1]], dtype=torch.int8)).verdict is Verdict.PASSED
    with pytest.raises(KernelError, match=r"torch\.int32"):
        judged(ids(1, 4), ids(3, 4, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_without_elements_shape_and_dtype_are_all_there_is(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape, dtype=torch.int64)
    assert judged(empty, empty).verdict is Verdict.PASSED
    with pytest.raises(KernelError, match="shape"):
        judged(empty, torch.zeros((*shape, 1), dtype=torch.int64))


def test_integers_and_numbers_in_one_op() -> None:
    tensors = {"ids": ids(1, 4), "scale": torch.tensor([[1.5]])}
    trace = Problem(routing, routing.contract(), tensors, {}).evaluate()
    assert trace.results == ["chosen", "scaled"]
    assert [fmt.name for fmt in trace.formats.values()] == ["int64", "bool", "fp32"]
    right = {"chosen": ids(3, 4), "scaled": torch.tensor([[3.0]])}
    assert judge(Problem(routing, routing.contract(), tensors, {}), right).verdict is Verdict.PASSED
    wrong = {**right, "scaled": torch.tensor([[3.5]])}
    assert judge(Problem(routing, routing.contract(), tensors, {}), wrong).verdict is Verdict.FAILED


def test_an_input_of_integers_takes_no_numbers() -> None:
    with pytest.raises(UsageError, match=r"ids of routing is torch\.float32, but must be of integers"):
        judged(torch.ones(1, 2), ids(3, 3))


def test_statistics_count_in_integers() -> None:
    [comparison] = finished([begin_integers(ids(3, 9, 4), ids(3, 4, 6))])
    assert (comparison.numel, comparison.decided, comparison.mismatched, comparison.outside) == (3, 3, 2, 2)
    assert (comparison.max_ulp, comparison.max_error) == (5.0, 5.0)
    assert comparison.ulp_histogram == (1, 0, 1, 0, 1, 0)
    assert comparison.worst is not None
    assert (comparison.worst.index, comparison.worst.actual, comparison.worst.lo) == ((0, 1), 9.0, 4.0)
    assert outside_mask(ids(3, 9), ids(3, 4)).tolist() == [[False, True]]
