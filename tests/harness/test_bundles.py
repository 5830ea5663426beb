"""Bundles: dataclasses of tensors in the signature of a reference or a kernel stand for inputs by their own names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.bundles import flat
from lastbit.case import parse_case
from lastbit.errors import OpError, UsageError
from lastbit.kernel import declarations_of, kernel
from lastbit.numerics import Enclosure
from lastbit.ops import Contract, Op, StageRecorder, op
from lastbit.result import Verdict
from lastbit.verify.check import Subject, verify_case
from lastbit.verify.declarations import check_kernel, check_op

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Factors:
    """What the op multiplies and adds."""

    factor: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Enclosed:
    """The same as enclosures."""

    factor: Enclosure
    bias: Enclosure | None = None


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Settings:
    """No tensor: a parameter of a kernel's own."""

    block: int = 4


@dataclass(frozen=True)
class Mixed:
    factor: Tensor
    scaling: float


@op(rows=("x",), rounds={"y": "x"})
def scaled(x: Enclosure, factors: Enclosed, *, contract: Contract, stage: StageRecorder) -> None:
    """y = x · factor + bias, the product in fp32."""
    product = stage("product", x * factors.factor)
    stage("y", product if factors.bias is None else product + factors.bias, result=True)


@kernel("scaled")
def right(x: Tensor, factors: Factors, *, settings: Settings = Settings()) -> Tensor:
    product = x.float() * factors.factor.float()
    return (product if factors.bias is None else product + factors.bias.float()).to(x.dtype)


@kernel("scaled")
def forgetful(x: Tensor, factors: Factors) -> Tensor:
    return (x.float() * factors.factor.float()).to(x.dtype)


def subject(function: Callable[..., Any], of: Op = scaled) -> Subject:
    [declared] = declarations_of(function)
    check_kernel(declared, of)
    return Subject(declared, of, CPU)


def verdict(function: Callable[..., Any], tensors: str) -> Verdict:
    return verify_case(subject(function), parse_case(f"scaled x=bf16[4,8] {tensors} seed=1")).verdict


def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    return flat(function, "f", error=UsageError)


# Ops


def test_the_fields_are_inputs_of_the_op_in_their_place() -> None:
    assert scaled.inputs == ("x", "factor", "bias")
    assert scaled.optional == {"bias"}
    check_op(scaled)


def test_a_place_is_that_of_the_function_as_written() -> None:
    assert scaled.where.startswith("op scaled (") and __file__ in scaled.where
    assert __file__ in subject(right).kernel.source


# Kernels


def test_a_kernel_takes_the_fields_by_name_and_is_itself_as_written() -> None:
    mine = subject(right).kernel
    assert mine.accepts == {"x", "factor", "bias", "settings"}
    assert mine.requires == {"x", "factor"}
    assert list(inspect.signature(right).parameters) == ["x", "factors", "settings"]
    x, factor = torch.ones(2, 3), torch.full((3,), 2.0)
    assert torch.equal(mine.call(x=x, factor=factor), right(x, Factors(factor)))
    assert torch.equal(mine.call(x=x, factor=factor, bias=factor), right(x, Factors(factor, factor)))


@pytest.mark.parametrize("tensors", ["factor=bf16[8]", "factor=bf16[8] bias=bf16[8]"])
def test_a_right_kernel_passes(tensors: str) -> None:
    assert verdict(right, tensors) is Verdict.PASSED


def test_a_field_that_a_kernel_does_not_read_is_seen() -> None:
    assert verdict(forgetful, "factor=bf16[8]") is Verdict.PASSED
    assert verdict(forgetful, "factor=bf16[8] bias=bf16[8]") is Verdict.FAILED


def test_a_case_without_a_field_that_the_kernel_needs() -> None:
    result = verify_case(subject(right), parse_case("scaled x=bf16[4,8] seed=1"))
    assert result.verdict is Verdict.ERRORED and "scaled was not given factor" in result.reason


# What is flattened


def test_a_function_without_bundles_is_itself() -> None:
    def plain(x: Tensor, settings: Settings, *, eps: float) -> None: ...

    assert flattened(plain) is plain
    assert flattened(len) is len


def test_tensors_that_are_needed_come_first() -> None:
    def mine(factors: Factors, x: Tensor, *, eps: float) -> None: ...

    assert list(inspect.signature(flattened(mine)).parameters) == ["factor", "x", "bias", "eps"]


def test_partial_functions_and_objects() -> None:
    class Mine:
        def __call__(self, x: Tensor, factors: Factors) -> Tensor:
            return x * factors.factor

    def mine(x: Tensor, factors: Factors, *, eps: float) -> Tensor:
        return x * factors.factor + eps

    two = torch.full((2,), 2.0)
    assert torch.equal(flattened(Mine())(x=two, factor=two), torch.full((2,), 4.0))
    assert torch.equal(flattened(partial(mine, eps=1.0))(x=two, factor=two), torch.full((2,), 5.0))
    assert torch.equal(flattened(mine)(two, two, eps=1.0), torch.full((2,), 5.0)), "by position, too"
    with pytest.raises(TypeError):
        flattened(mine)(two, two, two, two, eps=1.0)


def test_a_parameter_with_a_default_is_there_as_a_whole_or_not_at_all() -> None:
    def mine(x: Tensor, old: Pair | None = None) -> Pair | None:
        return old

    call, one = flattened(mine), torch.ones(1)
    assert all(p.default is None for n, p in inspect.signature(call).parameters.items() if n != "x")
    assert call(x=one) is None and call(x=one, first=None, second=None) is None
    assert call(x=one, first=one, second=one) == Pair(one, one)
    with pytest.raises(ValueError, match="second given, but not first; give all of them or none"):
        call(x=one, second=one)


def test_an_annotation_that_means_nothing_is_left_alone() -> None:
    def mine(x: Unknown, *, eps: float) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert flattened(mine) is mine


def test_a_dataclass_with_tensors_and_something_else() -> None:
    message = "its parameter 'mixed' is a Mixed, which has tensors and 'scaling: float'"
    with pytest.raises(UsageError, match=message):

        @kernel("scaled")
        def mine(x: Tensor, mixed: Mixed) -> None: ...

    with pytest.raises(OpError, match=message):

        @op(rows=("x",))
        def wrong(x: Enclosure, mixed: Mixed, *, contract: Contract, stage: StageRecorder) -> None: ...


def test_a_name_that_two_parameters_have() -> None:
    with pytest.raises(UsageError, match="takes 'factor' twice"):

        @kernel("scaled")
        def mine(x: Tensor, factor: Tensor, factors: Factors) -> None: ...
