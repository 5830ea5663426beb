"""Results that a kernel may leave out: it is judged on what it returns, and nothing says that others were judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.diagnosing.handover import search_stages
from lastbit.errors import KernelError, OpError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.kernel import Kernel
from lastbit.numerics import Enclosure
from lastbit.ops import Contract, StageRecorder, op
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.declarations import check_op
from lastbit.verify.power import Separable

CPU = torch.device("cpu")
CASE = parse_case("squared x=bf16[4,40] seed=1")


@op(
    rows=("x",),
    axes={
        "square": {"fp32_square": {}, "rounded_square": {"square": "x"}},
        "twin": {"": {}, "twice": {"twin": "fp16"}},
    },
    rounds={"saved": "x", "output": "x", "twin": "x"},
    optional_results=("saved", "twin"),
)
def squared(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    square = stage("square", x * x)
    stage("saved", square, result=True)
    stage("twin", square, result=True)
    stage("output", square * 3.0, result=True)


def results(x: Tensor) -> dict[str, Tensor]:
    square = x.float() * x.float()
    return {"output": (square * 3).to(x.dtype), "saved": square.to(x.dtype), "twin": square.to(x.dtype)}


def only(*names: str) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda x: {name: results(x)[name] for name in names}


def verified(call: Callable[..., Any], **declared: Any) -> CaseResult:
    return verify_case(Subject(Kernel("mine", "squared", "", call, **declared), squared, CPU), CASE)


def judged(found: CaseResult) -> list[str]:
    return [stage.name for stage in found.stages]


def test_the_op_names_them() -> None:
    check_op(squared)
    assert squared.optional_results == {"saved", "twin"}
    wrong = op(rows=("x",), optional_results=("svaed",))(squared.reference)
    with pytest.raises(OpError, match="the stage 'svaed' of its optional results, is recorded nowhere"):
        check_op(wrong)
    unordered = op(rows=("x",), returns=("outptu",))(squared.reference)
    with pytest.raises(
        OpError, match="the stage 'outptu' of its `returns`, is recorded nowhere in the reference; did you"
    ):
        check_op(unordered)
    with pytest.raises(OpError, match="optional_results='saved' must be a tuple of names"):
        op(rows=("x",), optional_results="saved")(squared.reference)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("output",), ("output", "saved"), ("saved", "output", "twin")])
def test_a_kernel_is_judged_on_what_it_returns(names: tuple[str, ...]) -> None:
    found = verified(only(*names))
    assert found.verdict is Verdict.PASSED
    assert sorted(judged(found)) == sorted(names)
    assert [s.result for s in found.stages] == [True] * len(names)


def test_a_tensor_alone_is_the_result_that_must_be_there() -> None:
    assert judged(verified(lambda x: results(x)["output"])) == ["output"]


def test_one_that_is_returned_must_be_right() -> None:
    found = verified(lambda x: {**only("output")(x), "saved": x * 0})
    assert found.verdict is Verdict.FAILED and "saved" in {finding.stage for finding in found.findings}


def test_the_others_are_still_required() -> None:
    found = verified(only("saved", "twin"))
    assert found.verdict is Verdict.ERRORED and "lacks the result 'output'" in found.reason


def test_what_the_first_call_returned_later_ones_must_return() -> None:
    calls = count()

    def whimsical(x: Tensor) -> dict[str, Tensor]:
        return results(x) if next(calls) == 0 else only("output")(x)

    found = verified(whimsical)
    assert found.verdict is Verdict.ERRORED and "lacks the result 'saved'" in found.reason


def test_one_that_is_returned_when_asked_for_is_a_stage_like_others() -> None:
    def asked(x: Tensor, stages: tuple[str, ...] = ()) -> dict[str, Tensor]:
        return only("output", *stages)(x)

    found = verified(asked, stages=("saved",))
    assert found.verdict is Verdict.PASSED
    assert sorted(judged(found)) == ["output", "saved"]


def test_a_result_that_is_never_written_is_seen_in_those_that_are_returned() -> None:
    found = verified(lambda x: {**only("output")(x), "saved": torch.empty_like(x)})
    assert "never written" in " ".join(finding.sentence for finding in found.findings)


def problems() -> Iterator[Problem]:
    x = torch.arange(1, 9).reshape(2, 4).bfloat16() / 7
    yield Problem(squared, squared.contract(), {"x": x}, {})


def test_nothing_at_all_is_no_result() -> None:
    [problem] = problems()
    nothing = op(rows=("x",), optional_results=("saved", "twin", "output"))(squared.reference)
    with pytest.raises(KernelError, match="none of the results 'saved', 'twin', 'output'"):
        judge(Problem(nothing, nothing.contract(), problem.tensors, {}), {})


def test_contracts_are_told_apart_by_what_is_returned() -> None:
    separable = Separable()
    own, twice, rounded = (squared.contract(text) for text in ("", "twice", "rounded_square"))
    assert separable.probe(squared, own, twice, frozenset(), [CASE]) is not None
    assert separable.probe(squared, own, twice, frozenset({"twin"}), [CASE]) is None
    assert separable.probe(squared, own, rounded, frozenset({"twin", "saved"}), [CASE]) is not None


def test_a_run_does_not_miss_what_a_result_that_is_left_out_would_tell() -> None:
    found = verified(only("output"))
    assert not found.ruled_out["fp32_square+twice"], "nothing that it returned rules it out"
    assert verified(results).ruled_out["fp32_square+twice"]


def test_stages_are_searched_without_them() -> None:
    searched = search_stages(Subject(Kernel("mine", "squared", "", only("output")), squared, CPU), CASE)
    assert [handover.result for handover in searched.handovers] == [False, True]
