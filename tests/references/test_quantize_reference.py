"""Quantization: the reference against exact arithmetic, what contracts differ in, and the FP8 output of RMSNorm."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.numerics.formats import FP32, TARGETS, round_to
from lastbit.ops import Op
from lastbit.references._codes import LARGEST
from lastbit.references.quantize import quantize
from lastbit.references.rms_norm import SMALLEST_SCALE, rms_norm
from lastbit.references.rms_norm_quantize import rms_norm_quantize
from lastbit.result import Verdict

BF16 = torch.bfloat16


def normals(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem(x: Tensor, contract: str = "", op: Op = quantize, scale: Tensor | None = None, **params: Any) -> Problem:
    tensors = {"x": x} | ({} if scale is None else {"scale": scale})
    return Problem(op, op.contract(contract), tensors, params)


def values(found: Problem, stage: str) -> Tensor:
    """Compute what every kernel must give; there is no freedom."""
    enclosure = found.trace.enclosure(stage)
    assert torch.equal(enclosure.lo, enclosure.hi)
    return enclosure.value


def fp32(number: Fraction) -> Fraction:
    """Correctly rounded to fp32: no quotient or product of two fp32 numbers is rounded over a tie by fp64."""
    return Fraction(float(round_to(torch.tensor([float(number)], dtype=torch.float64), FP32)[0]))


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("contract", ["quotient", "reciprocal", "inverted"])
def test_codes_by_exact_fractions(dtype: str, contract: str) -> None:
    x = normals(3, 8)
    found = problem(x, contract, dtype=dtype, group_size=4)
    codes, scale = values(found, f"{dtype}_codes"), values(found, "scale")
    most = Fraction(LARGEST[dtype])
    for row, column in torch.cartesian_prod(torch.arange(3), torch.arange(8)).tolist():
        group = [Fraction(float(v)) for v in x[row, column // 4 * 4 : column // 4 * 4 + 4]]
        amax = max(map(abs, group))
        own = fp32(amax / most)
        assert float(own) == float(scale[row, column // 4])
        one = group[column % 4]
        scaled = {"quotient": one / own, "reciprocal": one * fp32(1 / own), "inverted": one * fp32(most / amax)}
        limited = min(max(fp32(scaled[contract]), -most), most)
        wanted = round_to(torch.tensor([float(limited)], dtype=torch.float64), TARGETS[dtype])
        assert float(wanted[0]) == float(codes[row, column])


def test_a_scale_in_ue8m0_is_the_power_of_two_from_amax_over_the_largest_on() -> None:
    x = torch.tensor([[448.0, 1.0], [448.5, 1.0], [1e-20, 0.0], [0.0, 0.0]])
    scale = values(problem(x, dtype="e4m3", ue8m0=True, least_amax=1e-4), "scale")
    assert scale.flatten().tolist() == [1.0, 2.0, 2.0**-22, 2.0**-22]  # 1e-4 / 448 is 0.94 · 2^-22


@pytest.mark.parametrize(
    ("contract", "other", "stage"),
    [
        ("quotient", "reciprocal", "scaled"),
        ("quotient", "inverted", "scaled"),
        ("quotient", "quotient+scaled_amax", "scale"),
        ("inverted", "inverted+reciprocal_scale", "scale"),
    ],
)
def test_contracts_differ_in_a_last_place(contract: str, other: str, stage: str) -> None:
    x = normals(64, 128)
    one, two = (values(problem(x, name, dtype="e4m3", group_size=32), stage) for name in (contract, other))
    assert bool((one != two).any()) and torch.allclose(one, two, rtol=2.0**-22)


def test_ways_to_round_to_int8_differ_in_ties_and_in_all() -> None:
    x, one = torch.tensor([[2.5, -2.5, 0.5, 3.75, -3.75]]), torch.ones(1)
    found = {
        name: values(problem(x, f"quotient+{name}".rstrip("+"), scale=one, dtype="int8"), "int8_codes").tolist()[0]
        for name in ("", "half_away", "truncated")
    }
    assert found == {"": [2, -2, 0, 4, -4], "half_away": [3, -3, 1, 4, -4], "truncated": [2, -2, 0, 3, -3]}


def test_what_is_not_a_number_or_beyond() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([[nan, 1.0, -2.0], [inf, 1.0, -inf], [nan, nan, nan], [0.0, -0.0, 0.0]])
    found = problem(x, "inverted", dtype="e4m3")
    assert values(found, "scale").flatten().tolist() == [float(torch.tensor(2.0) / 448), inf, 0.0, 0.0]
    codes = found.trace.enclosure("e4m3_codes").value
    assert codes[0, 1:].tolist() == [224.0, -448.0] and bool(codes[0, 0].isnan())
    assert bool(codes[1, 0].isnan() & codes[1, 2].isnan()) and codes[1, 1] == 0
    assert bool(codes[2].isnan().all()) and codes[3].tolist() == [0.0, 0.0, 0.0]
    assert bool(problem(x, "quotient", dtype="e4m3").trace.enclosure("e4m3_codes").value[3].isnan().all())  # 0 / 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dtype": "fp4"}, "dtype='fp4' is not one of 'e4m3', 'e5m2', 'int8'"),
        ({"dtype": "e4m3", "group_size": 3}, "group_size=3 does not divide 8"),
        ({"dtype": "e4m3", "ue8m0": True}, "a scale of zero is no power of two"),
        ({"dtype": "e4m3", "least_scale": -1.0}, "least_scale=-1.0 is no finite number"),
        ({"dtype": "e4m3", "scale": torch.ones(1), "ue8m0": True}, "but one is given"),
        ({"dtype": "e4m3", "scale": torch.ones(1), "group_size": 4}, "one for the whole tensor"),
        ({"dtype": "e4m3", "scale": torch.ones(2)}, "scale has shape"),
    ],
)
def test_arguments_without_a_meaning(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _ = problem(normals(2, 8), **params).trace


@pytest.mark.parametrize(
    ("quant", "codes", "params"),
    [("dynamic", "quotient", {"least_scale": SMALLEST_SCALE}), ("static", "reciprocal", {})],
)
def test_the_chain_has_the_codes_of_the_norm(quant: str, codes: str, params: dict[str, Any]) -> None:
    tensors = {"x": normals(9, 70), "weight": normals(70, seed=1), "residual": normals(9, 70, seed=2)}
    tensors |= {"scale": torch.tensor([0.003])} if quant == "static" else {}
    norm = Problem(rms_norm, rms_norm.contract("fp32_multiply"), tensors, {"eps": 1e-6, "quant": quant})
    contract = rms_norm_quantize.contract(f"per_token+fp32_multiply+rounded_sum+{codes}")
    both = Problem(rms_norm_quantize, contract, tensors, {"eps": 1e-6, "dtype": "e4m3", **params})
    one, two = norm.trace.enclosure("quantized"), both.trace.enclosure("e4m3_codes")
    assert torch.equal(one.full, two.full)


def test_codes_of_an_output_that_is_not_rounded_are_told_apart() -> None:
    tensors = {"x": normals(64, 256), "weight": normals(256, seed=1)}
    params = {"eps": 1e-6, "dtype": "e4m3", "least_scale": SMALLEST_SCALE}
    y = tensors["x"].float() * torch.rsqrt(tensors["x"].float().square().mean(-1, keepdim=True) + 1e-6)
    unrounded = y * tensors["weight"].float()
    scale = (unrounded.abs().amax(-1, keepdim=True) / 448).clamp(min=SMALLEST_SCALE)
    codes = (unrounded / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    actual = {"e4m3_codes": codes, "quantize_scale": scale}
    verdicts = [
        judge(Problem(rms_norm_quantize, rms_norm_quantize.contract(name), tensors, params), actual).verdict
        for name in ("per_token+fp32_multiply", "per_token+fp32_multiply+unrounded_output")
    ]
    assert verdicts == [Verdict.FAILED, Verdict.PASSED]
