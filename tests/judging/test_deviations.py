"""Options that shipped kernels keep: what keeps one passes, and what keeps its neighbour fails."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lastbit.errors import UsageError
from lastbit.judging.problem import Problem
from lastbit.judging.verdict import judge
from lastbit.ops import Op
from lastbit.references.layer_norm_gated import layer_norm_gated
from lastbit.references.layer_norm_gated_backward import layer_norm_gated_backward
from lastbit.references.rms_norm import rms_norm
from lastbit.result import Verdict

BF16, FP16, FLOAT = torch.bfloat16, torch.float16, torch.float32
EPS = 1e-6


def normals(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def verdict(op: Op, contract: str, tensors: dict[str, Tensor], actual: dict[str, Tensor], **params: object) -> Verdict:
    return judge(Problem(op, op.contract(contract), tensors, params), actual).verdict


# RMSNorm


def inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def native(x: Tensor, weight: Tensor) -> Tensor:
    return ((x.float() * inverse_rms(x)).to(weight.dtype) * weight).to(x.dtype)


def in_input_format(x: Tensor, weight: Tensor) -> Tensor:
    return ((x.float() * inverse_rms(x)).to(x.dtype).float() * weight.float()).to(x.dtype)


def in_fp32(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse_rms(x) * weight.float()).to(x.dtype)


def rounded_inverse(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() * inverse_rms(x).to(x.dtype).float() * weight.float()).to(x.dtype)


def rms(x: Tensor) -> Tensor:
    return torch.sqrt(x.float().square().mean(-1, keepdim=True) + EPS)


def of_rms(contract: str, kernel: Callable[[Tensor, Tensor], Tensor], x: torch.dtype, weight: torch.dtype) -> Verdict:
    tensors = {"x": normals(16, 300, dtype=x), "weight": normals(300, dtype=weight, seed=1)}
    return verdict(rms_norm, contract, tensors, {"output": kernel(**tensors)}, eps=EPS)


RULES = {
    "native_multiply": native,
    "input_multiply": in_input_format,
    "fp32_multiply": in_fp32,
    "fp32_multiply+rounded_inverse": rounded_inverse,
}


@pytest.mark.parametrize("x", [BF16, FP16], ids=str)
@pytest.mark.parametrize("claimed", RULES)
def test_of_the_rules_of_the_weight_and_the_inverse_one_is_kept(claimed: str, x: torch.dtype) -> None:
    """With weights in fp32, where `native_multiply` rounds nothing before the output."""
    kept = {name for name, kernel in RULES.items() if of_rms(claimed, kernel, x, FLOAT) is Verdict.PASSED}
    alike = {"native_multiply", "fp32_multiply"}
    assert kept == (alike if claimed == "fp32_multiply" else kept & alike if claimed in alike else {claimed})
    assert claimed in kept


@pytest.mark.parametrize("dtype", [BF16, FP16, FLOAT], ids=str)
def test_a_weight_of_the_dtype_of_x_makes_two_rules_one(dtype: torch.dtype) -> None:
    for claimed in ("native_multiply", "input_multiply"):
        assert of_rms(claimed, native, dtype, dtype) is Verdict.PASSED


@pytest.mark.parametrize(
    "kernel",
    [
        lambda x, weight: x / rms(x) * weight,
        lambda x, weight: x * weight / rms(x),
        lambda x, weight: x * (weight / rms(x)),
    ],
)
def test_a_division_by_the_root_in_any_order(kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert of_rms("fp32_multiply+divided", kernel, FLOAT, FLOAT) is Verdict.PASSED
    assert of_rms("native_multiply", kernel, FLOAT, FLOAT) is Verdict.FAILED, "no inverse explains a row"


def test_a_product_with_the_weight_before_the_division_is_not_native() -> None:
    assert (
        of_rms("native_multiply+divided", lambda x, weight: (x * weight / rms(x)).to(x.dtype), FP16, FP16)
        is Verdict.FAILED
    )


def test_the_root_is_the_latent_value_of_a_division() -> None:
    x = normals(8, 64)
    tensors = {"x": x}
    rows = judge(Problem(rms_norm, rms_norm.contract("divided"), tensors, {"eps": EPS}), {"output": x / rms(x)}).rows
    assert rows is not None and (rows.stage, rows.rows, rows.explained) == ("rms", 8, 8)
    halves = torch.where(torch.arange(64) < 32, rms(x) * (1 + 2e-6), rms(x) * (1 - 2e-6))
    assert verdict(rms_norm, "divided", tensors, {"output": x / halves}, eps=EPS) is Verdict.FAILED


def test_with_an_offset_the_weight_is_multiplied_in_fp32() -> None:
    tensors = {"x": normals(2, 8, dtype=BF16), "weight": normals(8, dtype=BF16)}
    with pytest.raises(UsageError, match="under fp32_multiply only"):
        verdict(rms_norm, "input_multiply", tensors, {"output": tensors["x"]}, eps=EPS, weight_offset=1.0)


# LayerNorm


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, outside: bool = False, correction: int = 0, columns: int = 0
) -> dict[str, Tensor]:
    """Compute with torch's Welford moments; or with eps outside the root, over n - 1, without some columns."""
    seen = x.float()[..., : x.shape[-1] - columns]
    _, mean, rstd = torch.native_layer_norm(seen, seen.shape[-1:], None, None, 0.0 if outside else EPS)
    if outside:
        rstd = 1 / (1 / rstd + EPS)
    if correction:
        rstd = torch.rsqrt((rstd**-2 - EPS) * (seen.shape[-1] / (seen.shape[-1] - correction)) + EPS)
    y = (x.float() - mean) * rstd * weight.float()
    return {"output": (y if bias is None else y + bias.float()).to(x.dtype)}


def of_layer_norm(contract: str, actual: dict[str, Tensor], tensors: dict[str, Tensor]) -> Verdict:
    return verdict(layer_norm_gated, contract, tensors, actual, eps=EPS)


def problem(dtype: torch.dtype, size: int, *, scale: float = 1.0, offset: float = 0.0) -> dict[str, Tensor]:
    x = (normals(16, size) * scale + offset).to(dtype)
    return {"x": x, "weight": normals(size, dtype=dtype, seed=1), "bias": normals(size, dtype=dtype, seed=2)}


@pytest.mark.parametrize("size", [1, 15, 64, 300, 1024])
@pytest.mark.parametrize("offset", [0.0, 10.0])
@pytest.mark.parametrize("dtype", [BF16, FP16, FLOAT], ids=str)
def test_what_torch_computes_is_kept(dtype: torch.dtype, offset: float, size: int) -> None:
    tensors = problem(dtype, size, offset=offset)
    output = F.layer_norm(tensors["x"], (size,), tensors["weight"], tensors["bias"], EPS)
    contract = "welford" if dtype is FLOAT else "welford+distributed"
    assert of_layer_norm(contract, {"output": output}, tensors) in (Verdict.PASSED, Verdict.INCONCLUSIVE)


FAULTS: dict[str, dict[str, int | bool]] = {
    "eps outside the root": {"outside": True},
    "mean over n - 1": {"correction": 1},
    "last column dropped": {"columns": 1},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("contract", ["welford", "welford+distributed"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FLOAT], ids=str)
def test_a_contract_in_one_pass_is_no_vacuous_one(dtype: torch.dtype, contract: str, fault: str) -> None:
    tensors = problem(dtype, 96, scale=1e-3)
    assert of_layer_norm(contract, layer_norm(**tensors), tensors) is Verdict.PASSED
    assert of_layer_norm(contract, layer_norm(**tensors, **FAULTS[fault]), tensors) is Verdict.FAILED  # type: ignore[arg-type]


def test_two_passes_are_another_contract() -> None:
    """Far from zero, moments in one pass err more than the mean of (x - mean)² may, given the mean."""
    tensors = problem(FLOAT, 32, offset=1e5)
    x = tensors["x"]
    mean, m2 = torch.zeros(16, 1), torch.zeros(16, 1)
    for n, column in enumerate(x.split(1, dim=-1), 1):
        delta = column - mean
        mean = mean + delta / n
        m2 = m2 + delta * (column - mean)
    rstd = torch.rsqrt(m2 / 32 + EPS)
    output = (x - mean) * rstd * tensors["weight"] + tensors["bias"]
    shown = {"output": output, "mean": mean, "rstd": rstd}
    assert of_layer_norm("welford", shown, tensors) is Verdict.PASSED
    assert of_layer_norm("", shown, tensors) is Verdict.FAILED


def test_where_the_statistics_are_seen_the_way_to_center_is_one() -> None:
    x, weight, bias = normals(16, 300, dtype=FP16) + 100, normals(300, seed=1), normals(300, seed=2)
    tensors = {"x": x, "weight": weight, "bias": bias}
    output, mean, rstd = torch.native_layer_norm(x, (300,), weight, bias, EPS)
    halves = {"output": output, "mean": mean, "rstd": rstd}
    centered = ((x.float() - mean) * rstd * weight + bias).half()
    assert of_layer_norm("welford+distributed", halves, tensors) is Verdict.PASSED
    assert of_layer_norm("welford", halves, tensors) is Verdict.FAILED
    assert of_layer_norm("welford", {**halves, "output": centered}, tensors) is Verdict.PASSED


# Gradients of RMSNorm


def gradient(x: Tensor, dy: Tensor, rstd: Tensor, *, scaled: bool) -> dict[str, Tensor]:
    """dx as Unsloth computes it, or from the mean of normalized · dy, with 1 / n rounded; the weight is 1."""
    n, normalized = x.shape[-1], x * rstd
    total = (normalized * dy).sum(-1, keepdim=True)
    if scaled:
        dx = rstd / n * (n * dy - normalized * total)
    else:
        dx = (dy - normalized * (total * (torch.ones(()) / n))) * rstd
    return {"dx": dx, "dw": (dy * normalized).sum(0)}


def test_a_gradient_from_scaled_sums() -> None:
    """Integers, so that n · d - normalized · s is exact: 0 where d is normalized · s / n, which 1 / 41 misses."""
    x, dy = torch.zeros(4, 41), torch.zeros(4, 41)
    x[:, 0], x[:, 1:3], dy[:, 0], dy[:, 1] = 41.0, 1.0, 1.0, -40.0
    tensors = {"x": x, "dy": dy, "weight": torch.ones(41), "rstd": torch.ones(4, 1)}
    op = layer_norm_gated_backward
    made = {scaled: gradient(x, dy, tensors["rstd"], scaled=scaled) for scaled in (True, False)}
    assert verdict(op, "scaled_sums", tensors, made[True]) is Verdict.PASSED
    assert verdict(op, "", tensors, made[False]) is Verdict.PASSED
    assert verdict(op, "scaled_sums", tensors, made[False]) is Verdict.FAILED


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=str)
def test_a_gradient_from_scaled_sums_of_random_rows(dtype: torch.dtype) -> None:
    x, dy = (normals(16, 77, dtype=dtype, seed=seed) for seed in (1, 2))
    rstd = inverse_rms(x)
    made = gradient(x.float(), dy.float(), rstd, scaled=True)
    made = {"dx": made["dx"].to(dtype), "dw": made["dw"].to(dtype)}
    tensors = {"x": x, "dy": dy, "weight": torch.ones(77, dtype=dtype), "rstd": rstd}
    assert verdict(layer_norm_gated_backward, "scaled_sums", tensors, made) is not Verdict.FAILED
