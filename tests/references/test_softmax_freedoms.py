"""What the contracts of softmax leave free, and what not: shifts, orders, fused products, rows that keep nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.references.softmax import softmax
from lastbit.result import Verdict

SCALE = 0.08838834764831845
Formula = Callable[[Tensor, Tensor], Tensor]


def scores(columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(16, columns, generator=torch.Generator().manual_seed(columns)) * 8).to(dtype)


def verdict(output: Tensor, contract: str = "", *, fp32_output: bool = False, **inputs: object) -> Verdict:
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    params = {"scale": inputs.get("scale", 1.0), "fp32_output": fp32_output}
    name = "probabilities" if fp32_output else "output"
    problem = Problem(softmax, softmax.contract(contract), tensors, params)
    return judge(problem, {name: output}).verdict


def of(terms: Tensor) -> Tensor:
    return terms / terms.sum(-1, keepdim=True)


def naive(x: Tensor, shift: Tensor) -> Tensor:
    return of(torch.exp(x - shift))


def by_exp2(x: Tensor, shift: Tensor) -> Tensor:
    return of(torch.exp2((x - shift) * math.log2(math.e)))


def by_inverse(x: Tensor, shift: Tensor) -> Tensor:
    terms = torch.exp(x - shift)
    return terms * (1 / terms.sum(-1, keepdim=True))


def reversed_sum(x: Tensor, shift: Tensor) -> Tensor:
    terms = torch.exp(x - shift)
    return terms / terms.flip(-1).cumsum(-1)[..., -1:]


def online(x: Tensor, shift: Tensor) -> Tensor:
    """In blocks of 16, rescaled before each."""
    largest, total = torch.full_like(shift, -math.inf), torch.zeros_like(shift)
    for block in x.split(16, dim=-1):
        larger = torch.maximum(largest, block.amax(-1, keepdim=True))
        total = total * torch.exp(largest - larger) + torch.exp(block - larger).sum(-1, keepdim=True)
        largest = larger
    return torch.exp(x - largest) / total


@pytest.mark.parametrize("formula", [naive, by_exp2, by_inverse, reversed_sum, online])
@pytest.mark.parametrize("columns", [1, 7, 64, 500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_way_to_compute_it_is_allowed(formula: Formula, columns: int, dtype: torch.dtype) -> None:
    x = scores(columns, dtype)
    y = formula(x.float(), x.float().amax(-1, keepdim=True))
    assert verdict(y, x=x, fp32_output=True) in (Verdict.PASSED, Verdict.INCONCLUSIVE)
    assert verdict(y.to(dtype), x=x) in (Verdict.PASSED, Verdict.INCONCLUSIVE)


@pytest.mark.parametrize("columns", [64, 500])
def test_what_loses_more_is_not(columns: int) -> None:
    x = scores(columns, torch.float32)
    shift = x.amax(-1, keepdim=True)
    terms = torch.exp(x - shift)
    wrong = {
        "rounded terms": of(terms.bfloat16().float()),
        "one element missing": terms / terms[..., 1:].sum(-1, keepdim=True),
        "one element more": terms / (terms.sum(-1, keepdim=True) + 1),
        "eps": terms / (terms.sum(-1, keepdim=True) + 1e-4),
        "cubic exp": of((1 + (x - shift) / 1024) ** 1024),
    }
    for name, y in wrong.items():
        assert verdict(y, x=x, fp32_output=True) is Verdict.FAILED, name


def test_a_scale_may_be_fused_with_the_shift() -> None:
    x = scores(100, torch.float32) * 10
    scaled = x * SCALE
    difference = (x.double() * SCALE_FP32 - scaled.amax(-1, keepdim=True).double()).float()
    for exponent in (difference, scaled - scaled.amax(-1, keepdim=True)):
        assert verdict(of(torch.exp(exponent)), x=x, scale=SCALE, fp32_output=True) is not Verdict.FAILED


SCALE_FP32 = float(torch.tensor(SCALE))


ROUNDED_AS: dict[str, Formula] = {
    "fp32_scores": lambda x, mask: x.float() * SCALE + mask.float(),
    "rounded_scores": lambda x, mask: (x * SCALE + mask).float(),
}
"""Option of the axis `scores` → how its scores follow from x and a mask."""


@pytest.mark.parametrize("option", ROUNDED_AS)
def test_of_the_options_of_the_scores_one_is_kept(option: str) -> None:
    x, mask = scores(256), scores(256)
    output = torch.softmax(ROUNDED_AS[option](x, mask), -1).bfloat16()
    assert [o for o in ROUNDED_AS if verdict(output, o, x=x, mask=mask, scale=SCALE) is Verdict.PASSED] == [option]


def test_folding_large_scores_is_a_contract_of_its_own() -> None:
    x = scores(64, torch.float32) + 5000
    folded = x * math.log2(math.e)
    y = of(torch.exp2(folded - folded.amax(-1, keepdim=True)))
    assert verdict(y, x=x, fp32_output=True) is Verdict.FAILED
    assert verdict(y, "fp32_scores+base2", x=x, fp32_output=True) is not Verdict.FAILED


@pytest.mark.parametrize(("contract", "legal"), [("", math.nan), ("fp32_scores+zero_rows", 0.0)])
def test_a_row_that_keeps_nothing(contract: str, legal: float) -> None:
    x, keep = scores(32), torch.ones(16, 32, dtype=torch.bool)
    keep[3] = False
    y = torch.softmax(x.float(), -1)
    for value in (math.nan, 0.0, 1 / 32):
        y[3] = value
        allowed = value == legal or (math.isnan(value) and math.isnan(legal))
        found = verdict(y.bfloat16(), contract, x=x, keep=keep)
        assert found is (Verdict.PASSED if allowed else Verdict.FAILED)


def test_what_is_not_kept_is_exactly_zero() -> None:
    x, keep = scores(32), torch.arange(32) % 2 == 0
    keep = keep.expand(16, 32)
    y = torch.softmax(x.float().masked_fill(~keep, -math.inf), -1).bfloat16()
    assert verdict(y, x=x, keep=keep) is Verdict.PASSED
    y[5, 1] = 1e-38
    assert verdict(y, x=x, keep=keep) is Verdict.FAILED


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_infinity_spoil_a_row(value: float) -> None:
    x = scores(32)
    x[2, 7] = value
    y = torch.softmax(x.float(), -1).bfloat16()
    assert y[2].isnan().all()
    assert verdict(y, x=x) is Verdict.PASSED
    y[2, 0] = 0.0
    assert verdict(y, x=x) is Verdict.FAILED


@pytest.mark.parametrize(
    ("shape", "extra", "message"),
    [
        ((4, 0), {}, "a row must have at least one column"),
        ((4, 8), {"mask": torch.zeros(4, 1)}, r"mask has shape \(4, 1\)"),
        ((4, 8), {"keep": torch.ones(4, 1, dtype=torch.bool)}, r"keep has shape \(4, 1\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shape: tuple[int, ...], extra: dict[str, Tensor], message: str) -> None:
    x = torch.zeros(shape)
    with pytest.raises(UsageError, match=message):
        verdict(x, x=x, **extra)
