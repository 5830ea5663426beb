"""Results in parameters: kernels in the style of vLLM's `rms_norm` and `fused_add_rms_norm`, without copies."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.kernel import Kernel, Out, declarations_of, kernel
from lastbit.result import CaseResult, Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.declarations import check_kernel
from lastbit.verify.project import open_project

CPU = torch.device("cpu")
RMS_NORM = open_project(Config(folder="")).op("rms_norm")
PLAIN = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1"
SUMMED = "rms_norm x=bf16[4,64] weight=bf16[64] residual=bf16[4,64] eps=1e-06 seed=1"
HELD = {"x": "output", "residual": "residual_sum"}


def declared(function: Callable[..., Any], **declaration: Any) -> Kernel:
    kernel("rms_norm", contract="fp32_multiply", **declaration)(function)
    made = declarations_of(function)[-1]
    check_kernel(made, RMS_NORM)
    return made


def result(function: Callable[..., Any], line: str = PLAIN, **declaration: Any) -> CaseResult:
    return verify_case(Subject(declared(function, **declaration), RMS_NORM, CPU), parse_case(line))


def sentences(found: CaseResult) -> str:
    return " ".join((found.reason, *(finding.sentence for finding in found.findings)))


def normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    value = x.float()
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


# Parameters that receive a result


def into(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(normalized(x, weight, eps))


def into_all_but_the_last(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out[..., :-1] = normalized(x, weight, eps)[..., :-1]


def into_and_beyond(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(normalized(x, weight, eps))
    out.as_strided((1,), (1,), out.storage_offset() + out.numel())[0] = 1.0


def into_with_its_own_allocation(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return normalized(x, weight, eps)


def returns_what_it_was_given(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return out.copy_(normalized(x, weight, eps))


@pytest.mark.parametrize("out", [{"out": "output"}, {"out": Out("output", like="x")}])
@pytest.mark.parametrize("function", [into, returns_what_it_was_given])
def test_a_result_in_a_parameter(function: Callable[..., Any], out: Mapping[str, str | Out]) -> None:
    assert result(function, out=out).verdict is Verdict.PASSED
    strided = PLAIN.replace("x=bf16[4,64]", "x=bf16[4,64]@200,3")
    assert result(function, strided, out=out).verdict is Verdict.PASSED


def test_the_signature_is_that_of_the_op_and_the_function_stays_as_written() -> None:
    mine = declared(into, out={"out": "output"})
    assert mine.accepts == {"x", "weight", "eps"}
    assert list(inspect.signature(into).parameters) == ["out", "x", "weight", "eps"]
    assert mine.held == {"out": "output"}


def test_elements_that_are_never_written() -> None:
    found = result(into_all_but_the_last, out={"out": "output"})
    assert found.verdict is Verdict.FAILED
    assert "4 of 256 elements of output were never written." in sentences(found)


def test_a_write_beside_the_result() -> None:
    found = result(into_and_beyond, out={"out": "output"})
    assert found.verdict is Verdict.FAILED
    assert "wrote_outside" in {finding.kind for finding in found.findings}


def test_something_returned_beside_the_parameter() -> None:
    found = result(into_with_its_own_allocation, out={"out": "output"})
    assert found.verdict is Verdict.ERRORED
    assert "returned a Tensor without a name, beside what is in its parameters (output)" in sentences(found)


def test_another_tensor_for_what_a_parameter_holds() -> None:
    def two(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
        return {"output": out.copy_(normalized(x, weight, eps)).clone()}

    assert "returned another tensor for 'output'" in sentences(result(two, out={"out": "output"}))


def test_a_result_that_is_like_no_input() -> None:
    def with_stage(out: Tensor, rstd: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        rstd.copy_(torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps))
        out.copy_((x.float() * rstd * weight.float()).to(x.dtype))

    def per_row(x: Tensor, **_: object) -> Tensor:
        return torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)

    outs = {"out": "output", "rstd": Out("inv_rms", like=per_row)}
    found = result(with_stage, out=outs)
    assert found.verdict is Verdict.PASSED
    assert "inv_rms" in {stage.name for stage in found.stages}


def rebinds(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.data = normalized(x, weight, eps)


def test_a_parameter_that_is_bound_to_other_memory() -> None:
    assert "the kernel rebound out" in sentences(result(rebinds, out={"out": "output"}))


def writes_what_is_not_zero(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    y = normalized(x, weight, eps)
    out[y != 0] = y[y != 0]


def test_what_a_function_leaves_in_the_memory_is_no_result() -> None:
    zeros = Out("output", like=lambda x, **_: torch.zeros_like(x))
    found = result(writes_what_is_not_zero, PLAIN.replace("x=bf16[4,64]", "x=bf16[4,64]:zeros"), out={"out": zeros})
    assert "256 of 256 elements of output were never written" in sentences(found)


@pytest.mark.parametrize(
    ("declaration", "said"),
    [
        ({"mutates": {"x": 3}}, "must map inputs to results"),
        ({"out": {"out": Out(None)}}, "must map parameters to results"),  # type: ignore[arg-type]
        ({"out": {"out": Out("output", like=None)}}, "name an input, or give a function"),  # type: ignore[arg-type]
    ],
)
def test_declarations_that_name_no_result(declaration: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        declared(into, **declaration)


# Inputs that are overwritten


def fused_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    total = (x.float() + residual.float()).to(x.dtype)
    residual.copy_(total)
    x.copy_(normalized(total, weight, eps))


def fused_add_returns_both(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    fused_add(x, residual, weight, eps)
    return x, residual


def forgets_a_row(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    last = residual[-1].clone()
    fused_add(x, residual, weight, eps)
    residual[-1] = last


@pytest.mark.parametrize("function", [fused_add, fused_add_returns_both])
def test_results_in_inputs(function: Callable[..., Any]) -> None:
    found = result(function, SUMMED, mutates=HELD)
    assert found.verdict is Verdict.PASSED, sentences(found)
    assert {stage.name for stage in found.stages} == {"output", "residual_sum"}
    padded = SUMMED.replace("residual=bf16[4,64]", "residual=bf16[4,64]@200,3+1")
    assert result(function, padded, mutates=HELD).verdict is Verdict.PASSED


def test_some_results_in_inputs_and_others_returned() -> None:
    def mixed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
        own = x.clone()
        fused_add(own, residual, weight, eps)
        return {"output": own}

    assert result(mixed, SUMMED, mutates={"residual": "residual_sum"}).verdict is Verdict.PASSED


def test_what_an_input_holds_is_judged() -> None:
    assert result(forgets_a_row, SUMMED, mutates=HELD).verdict is Verdict.FAILED


def test_an_input_that_is_not_declared_must_stay() -> None:
    found = result(fused_add, SUMMED, mutates={"x": "output"})
    assert found.verdict is not Verdict.PASSED


def test_an_input_without_a_result_may_still_be_overwritten() -> None:
    def scratch(x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
        output = normalized(x, weight, eps)
        x.zero_()
        return {"output": output}

    assert result(scratch, mutates=("x",)).verdict is Verdict.PASSED
    assert result(scratch, mutates={"x": ""}).verdict is Verdict.PASSED
    assert result(scratch).verdict is Verdict.FAILED


def test_a_result_cannot_be_in_an_input_whose_elements_share_memory() -> None:
    found = result(fused_add, SUMMED.replace("residual=bf16[4,64]", "residual=bf16[4,64]@0,1"), mutates=HELD)
    assert found.verdict is Verdict.UNSUPPORTED
    assert "leaves residual_sum in residual, of which some elements share memory" in found.reason


# Declarations


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        ({"out": {"uot": "output"}}, "unknown parameter in out of kernel 'into'"),
        ({"out": {"out": "outptu"}}, "unknown stage of rms_norm 'outptu', which 'out' of kernel 'into'"),
        ({"out": {"out": Out("output", like="y")}}, "unknown input that the result 'output' of kernel 'into'"),
        ({"out": ("out",)}, "must map parameters to results, such as {'out': 'output'}"),
        ({"out": {"out": "output", "x": "residual_sum"}}, "declares out of 'x', which rms_norm gives it"),
        ({"out": {"out": "output"}, "mutates": {"x": "output"}}, "the result 'output' to be in two parameters"),
        ({"mutates": {"x": "outptu"}}, "unknown stage of rms_norm 'outptu', which 'x' of kernel 'into'"),
        ({"mutates": {"y": "output"}, "out": {"out": "residual_sum"}}, "unknown input that kernel 'into'"),
        ({"mutates": "x"}, "mutates='x' of kernel 'into' must be a tuple of names"),
        ({}, "requires: 'out'"),
    ],
)
def test_wrong_declarations(declaration: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        declared(into, **declaration)
