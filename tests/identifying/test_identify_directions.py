"""Identification of a rounding that is not to nearest: cut off, ties away from zero, or stochastic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.case import parse_case
from lastbit.config import Config
from lastbit.identifying.kept_contracts import identify
from lastbit.kernel import Kernel
from lastbit.numerics.formats import DIRECTIONS, Direction
from lastbit.reports.identification import Candidate, Identification, answer, claim, name, remarks
from lastbit.verify.check import Subject
from lastbit.verify.project import open_project
from tests.directed import rounded

WORDS: dict[Direction, str] = {way: words for way, words in DIRECTIONS.items() if way != "nearest"}
NORM = (
    "rms_norm x=bf16[24,96] weight=bf16[96] eps=1e-06 seed=1",
    "rms_norm x=fp16[8,96] weight=fp16[96] eps=1e-06 seed=2",
)
SWIGLU = ("swiglu x=bf16[16,64] up=bf16[16,64] seed=1",)
SOFTMAX = ("softmax x=bf16[16,64] scale=0.3 seed=1",)


def rms_norm(direction: Direction, *, steps: Direction = "nearest") -> Callable[..., Tensor]:
    """Native multiply: both products are rounded, the second one in `direction`."""

    def kernel(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        normalized = rounded(x.float() * inverse, x.dtype, steps)
        return rounded(normalized.float() * weight.float(), x.dtype, direction)

    return kernel


def swiglu(direction: Direction) -> Callable[..., Tensor]:
    return lambda x, up: rounded(torch.nn.functional.silu(x.float()) * up.float(), x.dtype, direction)


def softmax(direction: Direction) -> Callable[..., Tensor]:
    return lambda x, *, scale: rounded(torch.softmax(x.float() * scale, -1), x.dtype, direction)


def identified(op: str, call: Callable[..., Any], *lines: str, contract: str = "", most: int = 1000) -> Identification:
    own = open_project(Config(folder="")).op(op)
    return identify(
        Subject(Kernel("mine", op, contract, call), own, torch.device("cpu")), map(parse_case, lines), most=most
    )


def names(candidates: Sequence[Candidate]) -> list[str]:
    return [name(candidate) for candidate in candidates]


def one_point(op: str, made: Callable[[Direction], Any], lines: Sequence[str], kept: str, direction: Direction) -> None:
    """Check that a kernel with one rounding in a direction is told so, and found to keep that where it claims it."""
    found = identified(op, made(direction), *lines)
    stage = kept.rpartition(", ")[2].split()[0]
    assert names(found.kept)[0] == kept
    declared = found.kept[0].contracts[0]
    assert declared.endswith(f"{stage}:{direction}")
    assert f"A kernel declares that as {declared}." in remarks(found)
    again = identified(op, made(direction), *lines, contract=declared)
    assert again.keeps_claim and claim(again).endswith(f"{stage}:{direction}") and not again.search.tried


@pytest.mark.parametrize(("direction", "words"), WORDS.items())
def test_a_norm(direction: Direction, words: str) -> None:
    one_point("rms_norm", rms_norm, NORM, f"native_multiply or input_multiply, product rounded {words}", direction)


@pytest.mark.parametrize("direction", ["zero", "either"])
def test_a_gate(direction: Direction) -> None:
    """The exponential may err, so that nobody can tell a tie."""
    one_point("swiglu", swiglu, SWIGLU, f"fp32_silu, output rounded {WORDS[direction]}", direction)


@pytest.mark.parametrize("direction", ["zero", "either"])
def test_a_softmax(direction: Direction) -> None:
    one_point("softmax", softmax, SOFTMAX, f"fp32_scores, output rounded {WORDS[direction]}", direction)


def test_all_roundings_of_a_kernel_are_cut_off() -> None:
    found = identified("rms_norm", rms_norm("zero", steps="zero"), *NORM)
    assert "normalized rounded toward zero, product rounded toward zero" in names(found.kept)[0]
    assert "normalized:zero+product:zero" in found.kept[0].contracts[0]


def test_other_directions_are_not_tried_where_something_to_nearest_fits() -> None:
    def unrounded_twice(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        variance = rounded(x.float().square().mean(-1, keepdim=True), x.dtype, "nearest").float()
        return (x.float() * torch.rsqrt(variance + eps) * weight.float()).to(x.dtype)

    found = identified("rms_norm", unrounded_twice, *NORM)
    assert names(found.kept)[0] == "fp32_multiply, variance rounded to x"
    assert not any(":" in contract for one in found.candidates for contract in one.contracts)


def test_a_claim_of_a_direction_that_a_kernel_does_not_keep() -> None:
    found = identified("swiglu", swiglu("nearest"), *SWIGLU, contract="fp32_silu+output:zero")
    assert names(found.kept)[0] == "fp32_silu" and not found.keeps_claim and not found.search.tried
    assert "The claim fp32_silu+output:zero is wrong: " in answer(found)


def test_nothing_explains_a_kernel_that_rounds_away_from_zero() -> None:
    def kernel(x: Tensor, up: Tensor) -> Tensor:
        y = torch.nn.functional.silu(x.float()) * up.float()
        return ((y.view(torch.int32) + 0xFFFF + 0x8000) >> 16 << 16).view(torch.float32).to(x.dtype)

    found = identified("swiglu", kernel, *SWIGLU)
    assert not found.kept and found.search.tried
