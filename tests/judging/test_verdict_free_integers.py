"""Verdicts on integers with freedom, on choices among equals, and on what follows from sums over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import KernelError
from lastbit.judging import verdict as judging
from lastbit.judging.observation import Observation
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics import (
    Enclosure,
    amax,
    argmax,
    clamp,
    divide,
    divide_rn,
    exp2,
    gather,
    sum_of_rows,
    total,
)
from lastbit.ops import Contract, StageRecorder, op
from lastbit.result import Judgement, Verdict


@op(rows=("x",), axes={"format": {"int8": {"codes": "int8"}, "int4": {"codes": "int4"}, "uint8": {"codes": "uint8"}}})
def codes_of(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """codes = x / (max|x| / limit), where the reciprocal of the scale may be multiplied."""
    limit = 127.0 if contract.has("int8") else 7.0 if contract.has("int4") else 255.0
    scale = stage("scale", divide_rn(amax(abs(x)), limit), result=True)
    shifted = abs(x) if contract.has("uint8") else x
    stage("codes", clamp(divide(shifted, scale), -limit - 1, limit), result=True)


@op(rows=("x", "y"))
def chosen(x: Enclosure, y: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """Take from y what is where 2**x is largest."""
    index = stage("index", argmax(exp2(x)), result=True)
    stage("output", gather(y, index), result=True)


@op(rows=("x", "kept"))
def masked_mean(x: Enclosure, kept: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """Mean over all rows of x where `kept` is 1."""
    total, count = sum_of_rows(x * kept), sum_of_rows(kept)
    stage("mean", total.then(divide_rn, count), result=True)


@op(rows=("x",), rounds={"loss": "x"})
def mean_of_all(x: Enclosure, *, contract: Contract, stage: StageRecorder) -> None:
    """Compute the mean of all elements, without a dimension."""
    sums = sum_of_rows(total(x))
    count = sum_of_rows(Enclosure.point(torch.full_like(x.value, 1.0)[..., :1] * x.shape[-1]))
    stage("loss", sums.then(lambda s, n: divide_rn(s, n).reshape(), count), result=True)


def judged(of: Any, actual: dict[str, Tensor], contract: str = "", **tensors: Tensor) -> Judgement:
    return judge(Problem(of, of.contract(contract), tensors, {}), actual)


def normals(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(x: Tensor, limit: float, dtype: torch.dtype, *, reciprocal: bool = False) -> dict[str, Tensor]:
    scale = x.abs().amax(-1, keepdim=True) / limit
    x = x.abs() if dtype is torch.uint8 else x
    scaled = x * (1 / scale) if reciprocal else x / scale
    return {"scale": scale, "codes": scaled.round().clamp(-limit - 1, limit).to(dtype)}


@pytest.mark.parametrize("reciprocal", [False, True])
@pytest.mark.parametrize(
    ("name", "limit", "dtype"), [("int8", 127, torch.int8), ("int4", 7, torch.int8), ("uint8", 255, torch.uint8)]
)
def test_codes_of_integers_are_judged_as_numbers(name: str, limit: int, dtype: torch.dtype, reciprocal: bool) -> None:
    x = normals(8, 512)
    found = judged(codes_of, quantized(x, limit, dtype, reciprocal=reciprocal), name, x=x)
    codes = next(s for s in found.stages if s.name == "codes")
    assert found.verdict is Verdict.PASSED
    assert codes.dtype == name
    assert codes.decided > 0.99 * x.numel()


@pytest.mark.parametrize("change", [1, -1])
def test_a_code_that_is_one_off_is_found(change: int) -> None:
    x = normals(8, 512)
    actual = quantized(x, 127, torch.int8)
    actual["codes"][3, 77] += change
    found = judged(codes_of, actual, "int8", x=x)
    codes = next(s for s in found.stages if s.name == "codes")
    assert found.verdict is Verdict.FAILED
    assert (codes.cumulative.outside, codes.cumulative.max_ulp) == (1, 1.0)
    assert codes.cumulative.worst is not None and codes.cumulative.worst.index == (3, 77)


def test_codes_of_another_dtype_are_refused() -> None:
    x = normals(2, 8)
    actual = quantized(x, 127, torch.int8)
    with pytest.raises(KernelError, match="dtype"):
        judged(codes_of, {**actual, "codes": actual["codes"].int()}, "int8", x=x)


def test_argmax_allows_every_one_of_equals() -> None:
    x, y = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).repeat(3, 1), normals(3, 4)
    index = torch.tensor([[1], [2], [1]])
    assert judged(chosen, {"index": index, "output": y.gather(1, index)}, x=x, y=y).verdict is Verdict.PASSED
    other = judged(chosen, {"index": index, "output": y.gather(1, 3 - index)}, x=x, y=y)
    assert [s.name for s in other.stages if s.isolated.outside] == ["output"]
    assert not any(s.cumulative.outside for s in other.stages)  # seen from x, either is right
    index = torch.tensor([[1], [3], [-1]])
    wrong = judged(chosen, {"index": index, "output": y.gather(1, index.clamp(min=0))}, x=x, y=y)
    assert wrong.stages[0].cumulative.outside == 2


def test_argmax_is_decided_where_one_element_is_the_largest() -> None:
    x, y = normals(16, 64), normals(16, 64, seed=1)
    index = x.argmax(-1, keepdim=True)
    found = judged(chosen, {"index": index, "output": y.gather(1, index)}, x=x, y=y)
    assert found.verdict is Verdict.PASSED
    assert found.stages[0].decided == 16


@pytest.mark.parametrize("most", [1 << 17, 64])
def test_what_follows_from_sums_is_judged_when_all_rows_were_seen(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(judging._BLOCK, "cpu", most)
    x = normals(64, 16)
    kept = (normals(64, 16, seed=1) > 0).float()
    kept[:, 0] = 1
    mean = (x * kept).double().sum(0) / kept.double().sum(0)
    assert judged(masked_mean, {"mean": mean.float()}, x=x, kept=kept).verdict in (Verdict.PASSED, Verdict.INCONCLUSIVE)
    of_blocks = judged(masked_mean, {"mean": (x * kept).mean(0)}, x=x, kept=kept)
    assert of_blocks.verdict is Verdict.FAILED


@pytest.mark.parametrize("most", [1 << 17, 64])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.PASSED), (1.01, Verdict.FAILED)])
def test_a_number_without_dimension_is_judged(
    most: int, factor: float, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(judging._BLOCK, "cpu", most)
    x = (normals(4, 16, 16).abs() + 0.25).bfloat16()
    found = judged(mean_of_all, {"loss": (x.double().mean() * factor).bfloat16()}, x=x)
    assert found.verdict is verdict
    assert found.stages[0].decided == (1 if verdict is Verdict.PASSED else found.stages[0].decided)


def test_identify_tells_contracts_of_integers_apart() -> None:
    x = normals(8, 512)
    actual = quantized(x, 7, torch.int8)
    fits = []
    for contract in codes_of.contracts():
        seen = Observation.of(Problem(codes_of, contract, {"x": x}, {}), {"codes": actual["codes"]})
        if not int(seen.count_outside(seen.problem.trace)):
            fits.append(str(contract))
    assert fits == ["int4"]
