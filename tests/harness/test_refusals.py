"""Refusals: an error of a package before any launch makes a case UNSUPPORTED, every other one stays ERRORED."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.errors import UsageError
from lastbit.kernel import Kernel, declarations_of, kernel
from lastbit.result import CaseResult, Verdict
from lastbit.run import Run
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.project import open_project

NORM = open_project(Config(folder="")).op("rms_norm")
REFUSES = (RuntimeError, AssertionError)
LINE = "rms_norm x=bf16[4,64] weight=bf16[64] eps=1e-06 seed=1"


@triton.jit
def doubled(out, x, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, 2 * tl.load(x + at))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)


def declared(function: Callable[..., Any], **declaration: Any) -> Kernel:
    kernel("rms_norm", contract="fp32_multiply", **declaration)(function)
    return declarations_of(function)[-1]


def result(function: Callable[..., Any], line: str = LINE, **declaration: Any) -> CaseResult:
    made = declared(function, **{"refuses": REFUSES, **declaration})
    return verify_case(Subject(made, NORM, torch.device("cpu")), parse_case(line), repeat=False)


def says_so(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    raise NotImplementedError("feature dim 64 is not supported\nuse a wider one")


def asserts_after_memory(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    rows, _ = x.view(-1, x.shape[-1]).t().contiguous(), torch.empty_like(weight).fill_(1)
    torch.empty_like(x, dtype=torch.bool)
    if rows.shape[0] % 128:
        raise AssertionError
    return norm(x, weight, eps)


def has_no_backend(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    heads = x[None, None]
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(heads, heads, heads)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (says_so, "NotImplementedError: feature dim 64 is not supported"),
        (asserts_after_memory, "AssertionError: raise AssertionError"),
        (
            has_no_backend,
            "RuntimeError: No viable backend for scaled_dot_product_attention was found. This is likely due to turning "
            "off both the math kernel and the fused kernels.",
        ),
    ],
)
def test_an_error_before_any_launch_is_a_refusal(function: Callable[..., Any], reason: str) -> None:
    found = result(function)
    assert (found.verdict, found.reason, found.declined) == (Verdict.UNSUPPORTED, reason, True)
    assert result(function, refuses=()).verdict is Verdict.ERRORED


def after_an_operation(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return norm(x, weight, eps) @ x  # of shapes that do not fit


def after_a_write(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    weight.fill_(1)
    raise RuntimeError("not supported")


def after_a_change_of_an_input(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    weight.resize_(0)
    raise RuntimeError("not supported")


def after_a_write_through_a_view(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    torch.ops.aten._unsafe_view(x, [x.numel()])[3:4].zero_()
    raise RuntimeError("not supported")


def after_a_launch(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    doubled[(1,)](torch.empty(64), torch.ones(64), 64)
    raise RuntimeError("not supported")


def of_another_type(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    raise ValueError("not supported")


def without_end(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return without_end(x, weight, eps=eps)


def too_much(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return torch.empty(1 << 60)


@pytest.mark.parametrize(
    "function",
    [
        *(after_an_operation, after_a_write, after_a_change_of_an_input, after_a_write_through_a_view, after_a_launch),
        *(of_another_type, without_end, too_much),
    ],
)
def test_any_other_error_stays_one(function: Callable[..., Any]) -> None:
    found = result(function)
    assert (found.verdict, found.declined) == (Verdict.ERRORED, False)
    assert found.reason == result(function, refuses=()).reason


def test_an_error_that_does_not_come_again_stays_one() -> None:
    calls = []

    def once(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        calls.append(x)
        if len(calls) == 1:
            raise RuntimeError("out of luck")
        return norm(x, weight, eps)

    found = result(once)
    assert (found.verdict, found.reason, len(calls)) == (Verdict.ERRORED, "RuntimeError: out of luck", 2)


def test_a_kernel_that_took_a_case_does_not_refuse_it_later() -> None:
    calls = []

    def tires(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("not supported")
        return norm(x, weight, eps)

    found = result(tires)
    assert (found.verdict, found.reason[:70]) == (
        Verdict.ERRORED,
        "KernelError: the kernel took the case and declined it in a later call:"[:70],
    )


def test_a_kernel_that_refuses_every_case_has_not_passed() -> None:
    run = Run(tuple(result(says_so, LINE.replace("seed=1", f"seed={seed}")) for seed in range(3)))
    assert run.verdict("says_so", "cpu") is Verdict.UNSUPPORTED
    assert run.unverified == (("says_so", "cpu"),)
    assert run.exit_code == 3


def test_a_call_that_is_taken_is_made_once_and_keeps_its_results() -> None:
    calls = []

    def narrow(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        calls.append(x)
        assert x.shape[-1] <= 64, "too wide"
        return norm(x, weight, eps)

    found = result(narrow)
    plain = len(calls)
    calls.clear()
    assert found.verdict is Verdict.PASSED
    assert result(narrow, refuses=()).verdict is Verdict.PASSED
    assert len(calls) == plain


@pytest.mark.parametrize("given", [RuntimeError, (Exception,), (BaseException,), (UsageError,), ("RuntimeError",), []])
def test_a_declaration_of_something_else_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"refuses=.* of kernel 'norm' .* must be a tuple of types of errors"):
        declared(norm, refuses=given)
